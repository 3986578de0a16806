"""A configuration with comments for one's own text: every value by a rule (`rules.py`), from the text and the time."""

from __future__ import annotations

import csv
import glob
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullrank.config.data import DataConfig
from fullrank.config.run import RunConfig
from fullrank.config.training import SIZES, Budget
from fullrank.core.errors import InputError
from fullrank.data.files import lines, open_text
from fullrank.data.sources import files_of
from fullrank.files import as_record, write_text

if TYPE_CHECKING:
    from fullrank.experiments.task import Say

TOKENS = ("character", "word", "bpe", "byte")
TABLES = (".csv", ".tsv", ".jsonl")


@dataclass(frozen=True)
class Request:
    """Options of `fullrank init`.

    texts: files, folders and patterns of a text; for translation the common prefix of two files, or both of them.
    column: of a table (csv, tsv, jsonl), the column that holds the text.
    """

    texts: Sequence[str]
    task: str = "lm"
    tokens: str | None = None
    size: str | None = None
    minutes: float = 5.0
    memory: bool = False
    languages: tuple[str, str] | None = None  # suffixes of source and target
    column: str | None = None


def write_configuration(request: Request, out: Path, *, force: bool = False, say: Say = print) -> RunConfig:
    """Write the configuration to `out` and return it. InputError for bad requests or texts, and where `out` exists."""
    for name, given, allowed in (
        ("--task", request.task, ("lm", "translation")),
        ("--tokens", request.tokens or TOKENS[0], TOKENS),
        ("--size", request.size or "tiny", tuple(SIZES)),
    ):
        if given not in allowed:
            raise InputError(f"{name}: one of {', '.join(allowed)}, given '{given}'")
    if not 0 < request.minutes < math.inf:
        raise InputError(f"--minutes: a positive number, given {request.minutes:g}")
    if request.task == "translation" and (request.memory or request.tokens in ("character", "byte")):
        raise InputError("--task translation: sentence pairs take --tokens word or bpe, and no --memory")
    if request.task == "translation" and len(request.texts) > 2:
        raise InputError(f"TEXT: of translations a prefix or two files, given {len(request.texts)}")
    if out.exists() and not force:
        raise InputError(f"{out} exists already: give --out another file, or --force to replace it")
    data = _choose_pairs(request) if request.task == "translation" else _choose_text(request, out, say)

    # after all that can be refused at once
    import torch

    from fullrank.experiments.rules import settle
    from fullrank.experiments.run import TEXT_TASKS
    from fullrank.training.device import choose_device

    stated = _state(request, data)
    alone = torch.get_num_threads() == 1 and choose_device("auto").type == "cpu"  # CPU time: others do not change it
    budget = Budget(seconds=60 * request.minutes, cpu=alone)
    made = settle(stated, budget, TEXT_TASKS, say, begun=False)
    assert made.seconds is not None
    texts = "".join(c if c.isprintable() else "?" for c in " ".join(request.texts))
    lines = [
        f"# Written by `fullrank init {texts}`: {made.parameters:,} parameters, {made.have:,} tokens to train on.",
        f"# Takes about {made.seconds / 60:.1f} minutes on this machine with {torch.get_num_threads()} of its threads, "
        "evaluation included:",
        f"#     fullrank train {out}",
        "# Each value is by a rule (docs/own_text.md); change what you like.",
        *made.table(),
    ]
    write_text(out, "\n".join(lines) + "\n")
    return made.config


def _state(request: Request, data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The stated configuration of a request on `data`."""
    from fullrank.experiments.rules import choose_data, choose_reach

    stated: dict[str, dict[str, Any]] = {"data": data, "model": {}}
    if request.tokens:
        data["tokens"] = request.tokens
    if request.size:
        stated["model"] = dict(SIZES[request.size])
    if request.task == "lm":
        stated["eval"] = {"sample": True}
    if request.memory:
        stated["model"]["memory_length"] = 3 * choose_reach(choose_data(data)["tokens"]) // 4
    return stated


def _choose_text(request: Request, out: Path, say: Say) -> dict[str, Any]:
    if [*request.texts] == ["builtin"] and not Path("builtin").exists():
        return {"name": "builtin"}
    paths = [_without_table(Path(text).expanduser(), request.column, out, say) for text in request.texts]
    for path in files_of(DataConfig(name="text", train=[str(path) for path in paths]), "train"):
        open_text(path, "TEXT").close()
        if path.suffix in TABLES:
            raise InputError(f"TEXT: {path} is a table; give it by its name, with --column")
    names = [str(path.absolute()) for path in paths]
    return {"name": "text", "train": names[0] if len(names) == 1 else names}


def _without_table(path: Path, column: str | None, out: Path, say: Say) -> Path:
    """The path itself, or a text file beside `out` with the texts of a column, if it is a table."""
    if path.suffix not in TABLES:
        if column is not None:
            raise InputError(f"--column: of a table ({', '.join(TABLES)}), given {path}")
        return path
    rows = _rows(path)
    first = next(rows, {})
    if column is None or column not in first:
        wanted = "" if column is None else f", which has no column {column!r}"
        raise InputError(
            f"TEXT: {path} is a table{wanted}; --column names its text, one of {', '.join(map(str, first))}"
        )
    target = out.parent / f"{path.stem}.{column}.txt"
    write_text(target, "".join(f"{row.get(column) or ''}\n" for row in itertools.chain([first], rows)))
    say(f"{target}: the column {column} of {path}, a line each")
    return target


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a table; InputError for a line that is none."""
    if path.suffix == ".jsonl":
        for number, line in enumerate(lines(path, "TEXT"), start=1):
            if line.strip():
                yield as_record(dict[str, Any], line, f"{path}, line {number}")
        return
    ended = (f"{line}\n" for line in lines(path, "TEXT"))
    try:
        yield from csv.DictReader(ended, delimiter="\t" if path.suffix == ".tsv" else ",")
    except csv.Error as error:
        raise InputError(f"TEXT: {path} is no table of this kind ({error})") from error


def _choose_pairs(request: Request) -> dict[str, Any]:
    """Prefixes and suffixes of the files. Validation and test lie beside training files that have `train` in their name."""
    paths = [Path(text).expanduser().resolve() for text in request.texts]
    prefix = paths[0]
    suffixes: Sequence[str] = request.languages or ()
    if len(paths) == 2:
        prefix, suffixes = paths[0].with_suffix(""), tuple(path.suffix[1:] for path in paths)
    suffixes = suffixes or sorted(path.suffix[1:] for path in prefix.parent.glob(f"{glob.escape(prefix.name)}.*"))
    if len(set(suffixes) - {""}) != 2:
        raise InputError(
            f"TEXT: {prefix}.* are {len(suffixes)} files ({', '.join(suffixes) or 'none'}), not one for each of two languages; "
            "give both files, or the suffixes as --source and --target"
        )
    sides = [Path(f"{prefix}.{suffix}") for suffix in suffixes]
    for side in sides:
        open_text(side, "TEXT").close()
    data = {"name": "parallel", "train": str(prefix), "source": suffixes[0], "target": suffixes[1]}
    for split, names in (("valid", ("valid", "val", "dev")), ("test", ("test", "test*"))):
        for name in names if "train" in prefix.name else ():
            pattern = glob.escape(prefix.name).replace("train", name)
            beside = sorted(path.with_suffix("") for path in prefix.parent.glob(f"{pattern}.{suffixes[0]}"))
            whole = [path for path in beside if Path(f"{path}.{suffixes[1]}").is_file()]
            if whole:
                data.setdefault(split, str(whole[0]))
    return data
