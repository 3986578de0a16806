"""What a folder, or the hub, holds of SQuAD: both splits read through, counted and compared with what was published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullrank.data.squad import SquadSplit, read_squad


def squad_overview(version: str, where: str | Path | None) -> dict[str, Any]:
    """Counts and files of both splits; raises what `read_squad` raises."""
    parts = [read_squad(where, split, version) for split in ("train", "dev")]
    slice_ = any(part.is_slice for part in parts)
    return {
        "label": f"SQuAD {version}" + (" (slice)" if slice_ else ""),
        "version": version,
        "is_slice": slice_,
        "splits": {part.split: _of_split(part) for part in parts},
    }


def _of_split(part: SquadSplit) -> dict[str, Any]:
    questions = part.questions
    return {
        "questions": len(questions), "published": part.published, "is_slice": part.is_slice,
        "contexts": len({question.context for question in questions}),
        "answers": sum(len(question.answers) for question in questions),
        "impossible": sum(question.impossible for question in questions),
        "source": part.source, "sha256": part.sha256,
    }  # fmt: skip


def squad_lines(found: Mapping[str, Any]) -> list[str]:
    """`squad_overview` for people."""
    lines = [f"{found['label']}: answers as spans of a context"]
    for split, content in found["splits"].items():
        count = "as published" if not content["is_slice"] else f"published {content['published']:,}"
        without = f", {content['impossible']:,} without an answer" if content["impossible"] else ""
        lines.append(
            f"  {split:<5} {content['questions']:>8,} questions ({count}) on {content['contexts']:,} contexts, "
            f"{content['answers']:,} answers{without}   {content['source']}"
        )
    return lines
