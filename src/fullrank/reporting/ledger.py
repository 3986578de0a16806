"""The ledger: a file with one JSON object per line for each finished run, in the order in which they were added.

A line holds the run's result.json without paths. It states its own checksum (`id`) and that of result.json (`result`): a line
that was damaged, or edited and not sealed again, is refused, and a run has one line. Who seals an edited line anew, or edits
result.json before it is added, is not found out here: `fullrank ledger pages --verify` evaluates checkpoints that still exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.load import flatten
from fullrank.config.recipe import resolve_any
from fullrank.config.run import RunConfig
from fullrank.core.errors import FullRankError, InputError
from fullrank.core.section import Count, CountOrZero, Positive, PositiveOrZero
from fullrank.files import as_record, digest, one_at_a_time, read_small, write_text
from fullrank.reporting.runs import CIRCUMSTANCES, Figures, Origin, Protocol, mapping, without_version

_FILES = {
    *(f"data.{key}" for key in ("train", "valid", "test", "codes")),
    "train.distill.run",
}  # which checksums stand for
_LARGEST = 1 << 26  # bytes
_OF_TEXT = ("vocab_size", "max_position_embeddings")
Row = Mapping[str, Any]


class _Environment(TypedDict):
    commit: NotRequired[str | None]


class _Parameters(TypedDict):
    total: NotRequired[CountOrZero | None]


class _Name(TypedDict):
    name: NotRequired[str | None]


class LedgerRow(TypedDict):
    """The keys of a line that are read; older lines have fewer."""

    id: str
    result: NotRequired[str | None]
    task: NotRequired[str | None]
    recipe: str
    row: str | None
    scale: str | None
    seed: CountOrZero
    set: dict[str, Any] | None
    corpus: dict[str, Any]
    sha256: NotRequired[dict[str, str | None] | None]
    protocols: dict[str, Protocol | None]
    final: dict[str, Figures]
    parameters: NotRequired[_Parameters | None]
    tokens_seen: NotRequired[CountOrZero | None]
    wall_seconds: NotRequired[PositiveOrZero | None]
    environment: _Environment
    training: NotRequired[Origin | None]
    curve: NotRequired[list[tuple[Count, Positive]] | None]
    teacher: NotRequired[_Name | None]


def differences(
    config: RunConfig | FinetuneConfig, recipe: str, row: str | None, scale: str | None
) -> dict[str, Any] | None:
    """Settings in which a configuration differs from a recipe's row at a scale; None if there is no such recipe any more.

    Where a run lay and how it was watched is left out, and so are sizes that come from its text.
    """
    try:
        stated = flatten(resolve_any(recipe, row, scale).config.to_dict())
    except FullRankError:
        return None
    here = flatten(config.to_dict())
    names = [name for name in {**here, **stated} if name not in CIRCUMSTANCES | _FILES]
    return {
        name: Path(here[name]).name if name == "model.pretrained" else here.get(name)
        for name in names
        if here.get(name) != stated.get(name) and not (name.endswith(_OF_TEXT) and stated.get(name) is None)
    }


def sealed(row: Row) -> dict[str, Any]:
    """A row with the checksum of its content as `id`."""
    content = {key: value for key, value in row.items() if key != "id"}
    return {"id": digest(content)[:16], **content}


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The rows of a ledger, none if it does not exist; InputError for a line that was changed by hand."""
    rows = []
    try:
        text = read_small(path, _LARGEST) if path.exists() else b""
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(text.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        row: dict[str, Any] = as_record(dict[str, Any], line, where)
        if sealed(row) != row:
            raise InputError(f"{where} does not match its checksum; restore it, or delete the line")
        as_record(LedgerRow, line, where)
        rows.append(row)
    return rows


def add_rows(path: Path, rows: Iterable[Row]) -> int:
    """Add the rows of runs; one that the ledger has is replaced where it changed (a run was analysed). Returns how many.

    One process at a time adds to a ledger: none loses what another one has added.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(path.parent):
        book, changed = {row["result"] or row["id"]: row for row in read_ledger(path)}, 0  # old rows name no result
        for row in map(sealed, rows):
            changed += book.get(row["result"]) != row
            book[row["result"]] = row
        if changed:
            write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in book.values()))
    return changed


def text_of(row: Row) -> str:
    """The text of a row: the label of its corpus, or its task."""
    return str(row["corpus"].get("label") or row.get("task"))


def protocol_of(row: Row, split: str) -> dict[str, Any]:
    """The protocol of a split's figures: `words`, `settings` where they are recorded, and the `signature` of a BLEU."""
    signature = mapping(row["final"].get(split)).get("bleu_signature")
    signed = {"signature": without_version(signature)} if signature else {}
    return {**mapping(row["protocols"].get(split)), **signed}


def settings(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that differ only in their seed, together."""
    groups = dict[str, list[Row]]()
    for row in rows:
        protocols = {split: protocol_of(row, split) for split in row["protocols"]}
        same = [row["recipe"], row["row"], row["scale"], row["set"], text_of(row), protocols]
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(row)
    return list(groups.values())
