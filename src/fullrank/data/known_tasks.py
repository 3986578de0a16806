"""What is known of every corpus, with those to fine-tune on: the tasks of GLUE, and SQuAD."""

from __future__ import annotations

from collections.abc import Mapping

from fullrank.config.glue import GLUE, HUB, GlueTask
from fullrank.data.known import CORPORA, CorpusInfo

_ENCODER = "those of the model"  # that is fine-tuned


def _glue(task: GlueTask) -> CorpusInfo:
    splits = ("train", "dev", "test")
    others = [split for split in task.splits if split not in splits]
    text = f"; further splits: {', '.join(others)}" if others else ""
    return CorpusInfo(
        name=f"glue/{task.name}",
        tokens=_ENCODER,
        licence=task.licence,
        source=f"GLUE, {task.title} ({', '.join(task.metrics)}): a local folder, or the Hugging Face hub through `datasets`"
        + text,
        unit="rows",
        published=task.sizes,
        files={split: (name,) for split, name in task.files.items()},
        hub=f"{HUB}, {task.name}",
    )


def _squad(name: str, version: str, hub: str, published: Mapping[str, int]) -> CorpusInfo:
    return CorpusInfo(
        name=name,
        tokens=_ENCODER,
        licence="CC BY-SA 4.0",
        source=f"SQuAD {version}, answers as spans of a paragraph (exact match, F1): a local folder, or the Hugging Face hub",
        unit="questions",
        published=published,
        files={split: (f"{split}-v{version}.json",) for split in ("train", "dev")},
        hub=hub,
    )


TASKS: Mapping[str, CorpusInfo] = {
    info.name: info
    for info in (
        *map(_glue, GLUE.values()),
        _squad("squad", "1.1", "rajpurkar/squad", {"train": 87_599, "dev": 10_570}),
        _squad("squad-v2", "2.0", "rajpurkar/squad_v2", {"train": 130_319, "dev": 11_873}),
    )
}


def known_corpora() -> list[CorpusInfo]:
    """Every corpus: those that `data.name` may be, then those to fine-tune on, for `fullrank data list`."""
    return [*CORPORA.values(), *TASKS.values()]
