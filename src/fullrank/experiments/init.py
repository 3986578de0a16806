"""A configuration with comments for one's own text: every value by a rule (`rules.py`), from the text and the time."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullrank.config.data import DataConfig
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.data.files import open_text
from fullrank.data.sources import files_of
from fullrank.files import write_text

if TYPE_CHECKING:
    from fullrank.experiments.task import Say


@dataclass(frozen=True)
class Request:
    """Options of `fullrank init`.

    texts: files, folders and patterns of a text; for translation the common prefix of two files, or both of them.
    languages: of translation, the suffixes of source and target.
    """

    texts: Sequence[str]
    task: str = "lm"
    tokens: str | None = None
    size: str | None = None
    minutes: float = 5.0
    memory: bool = False
    languages: tuple[str, str] | None = None


def write_configuration(request: Request, out: Path, *, force: bool = False, say: Say = print) -> RunConfig:
    """Write the configuration to `out` and return it. InputError for bad requests or texts, and where `out` exists."""
    check_request(request)
    if out.exists() and not force:
        raise InputError(f"{out} exists already: give --out another file, or --force to replace it")
    data = choose_pairs(request) if request.task == "translation" else choose_text(request)

    # after all that can be refused at once
    import torch

    from fullrank.experiments.rules import settle
    from fullrank.experiments.run import TEXT_TASKS

    if request.tokens:
        data["tokens"] = request.tokens
    task = TEXT_TASKS["translation" if request.task == "translation" else "language_model"]
    settled = settle(data, request.size, request.memory, seconds=60 * request.minutes, task=task, say=say)
    given = " ".join(request.texts)
    texts = "".join(c if c.isprintable() else "?" for c in given)
    lines = [
        f"# Written by `fullrank init {texts}`: {settled.parameters:,} parameters, {settled.have:,} tokens to train on.",
        f"# Takes about {settled.seconds / 60:.1f} minutes on this machine with {torch.get_num_threads()} of its threads, "
        "evaluation included:",
        f"#     fullrank train {out}",
        "# Each value is by a rule (docs/own_text.md); change what you like.",
        *settled.lines,
    ]
    write_text(out, "\n".join(lines) + "\n")
    return settled.config


def check_request(request: Request) -> None:
    """InputError for options that are not allowed, or not for this task."""
    if not 0 < request.minutes < math.inf:
        raise InputError(f"--minutes: a positive number, given {request.minutes:g}")
    if request.task == "translation":
        if request.memory or request.tokens in ("character", "byte"):
            raise InputError("--task translation: sentence pairs take --tokens word or bpe, and no --memory")
        if len(request.texts) > 2:
            raise InputError(f"TEXT: of translations a prefix or two files, given {len(request.texts)}")


def choose_text(request: Request) -> dict[str, Any]:
    """The data section of a text, whose files can be read."""
    if [*request.texts] == ["builtin"] and not Path("builtin").exists():
        return {"name": "builtin"}
    names = [str(Path(text).expanduser().absolute()) for text in request.texts]
    config = DataConfig(name="text", train=list(request.texts))
    for path in files_of(config, "train"):
        open_text(path, "TEXT").close()
    return {"name": "text", "train": names[0] if len(names) == 1 else names}


def choose_pairs(request: Request) -> dict[str, Any]:
    """Prefixes and suffixes of the files. Validation and test lie beside training files that have `train` in their name."""
    paths = [Path(text).expanduser().resolve() for text in request.texts]
    prefix = paths[0]
    suffixes: Sequence[str] = request.languages or ()
    if len(paths) == 2:
        prefix = prefix.with_suffix("")
        suffixes = [path.suffix[1:] for path in paths]
    if not suffixes:
        found = prefix.parent.glob(f"{glob.escape(prefix.name)}.*")
        suffixes = sorted(path.suffix[1:] for path in found)
    languages = set(suffixes) - {""}
    if len(languages) != 2:
        listed = ", ".join(suffixes) or "none"
        raise InputError(
            f"TEXT: {prefix}.* are {len(suffixes)} files ({listed}), not one for each of two languages; "
            "give both files, or the suffixes as --source and --target"
        )
    for suffix in suffixes:
        open_text(Path(f"{prefix}.{suffix}"), "TEXT").close()
    data = {"name": "parallel", "train": str(prefix), "source": suffixes[0], "target": suffixes[1]}
    for split, name in (("valid", "valid"), ("valid", "val"), ("valid", "dev"), ("test", "test")):
        beside = prefix.with_name(prefix.name.replace("train", name))
        if beside == prefix:
            continue
        if all(Path(f"{beside}.{suffix}").is_file() for suffix in suffixes):
            data.setdefault(split, str(beside))
    return data
