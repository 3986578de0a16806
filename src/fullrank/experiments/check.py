"""`fullrank check`: a recipe, a run, a saved model or a model of Hugging Face, made ready and handed to the checks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fullrank.checking import Report, check
from fullrank.config.recipe import resolve, shipped
from fullrank.config.run import RunConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator
from fullrank.data import load_tokenizer, prepare, prepare_pairs
from fullrank.experiments.evaluate import corpus_of
from fullrank.experiments.language_model import with_vocabulary
from fullrank.experiments.models import load_causal
from fullrank.experiments.rank import encoded, own_pieces
from fullrank.experiments.run_folder import is_run, open_run
from fullrank.experiments.shrink import shrunk
from fullrank.experiments.task import Say
from fullrank.experiments.translation import with_vocabularies
from fullrank.storage import holds_translator

_SEGMENTS, _LENGTH, _SEED = 256, 64, 1  # of a text, and of a fresh model
_SENTENCE = 47  # tokens of the targets of a translation model in its own size


@dataclass(frozen=True)
class Choice:
    """What of `name` is checked, and how. full: a configuration in its own sizes. text: of a trained model."""

    row: str | None = None
    scale: str | None = None
    overrides: tuple[str, ...] = ()
    full: bool = False
    text: Path | None = None
    checkpoint: str = "best"


def check_named(name: str, choice: Choice | None = None, say: Say = print) -> Report:
    """Everything that can be checked of `name`: a recipe or YAML file, a run folder, a saved model, a Hugging Face model.

    Raises InputError for what is none of them, and for options that it does not have.
    """
    choice = choice or Choice()
    kind = _kind(name)
    if kind == "configuration":
        return _of_configuration(name, choice, say)
    given = {"--row": choice.row, "--scale": choice.scale, "KEY=VALUE": choice.overrides, "--full": choice.full}
    if wrong := [option for option, value in given.items() if value]:
        raise InputError(f"{', '.join(wrong)}: for a recipe or a configuration; {name} is a {kind}, checked as it is")
    if kind == "Hugging Face model":
        return _of_hugging_face(name, choice, say)
    return _of_folder(Path(name).expanduser(), kind, choice, say)


def _kind(name: str) -> Literal["configuration", "run", "saved model", "Hugging Face model"]:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if is_run(folder):
            return "run"
        if (folder / "config.yaml").is_file():
            return "saved model" if (folder / "model.safetensors").is_file() else "configuration"
        if (folder / "config.json").is_file():
            return "Hugging Face model"
        raise InputError(
            f"{name}: no model there; give a recipe, a YAML file, a run folder, or a folder written by model.save or "
            "save_pretrained"
        )
    papers = {recipe.partition("/")[0] for recipe in shipped()}
    parts = Path(name).parts
    if folder.suffix in (".yaml", ".yml") or folder.is_file() or (parts and parts[0] in papers):
        return "configuration"
    if name.startswith((".", "/", "~")) or not 1 <= len(parts) <= 2 or Path(parts[0]).is_dir():
        raise InputError(f"{name}: no such folder, file or recipe")  # nor could it be a name on the hub
    return "Hugging Face model"


def _of_configuration(name: str, choice: Choice, say: Say) -> Report:
    resolved = resolve(name, choice.row, choice.scale, choice.overrides)
    if choice.text is not None:
        raise InputError(f"--text: for a model that was trained; {name} is a configuration, which random tokens test")
    run, length = resolved.config, None
    if run.masks:
        raise InputError(
            f"{name}: train.objective: masked, so every token sees every other; what is checked is that none sees a later one"
        )
    changed: tuple[str, ...] = ()
    translates = run.translates
    if choice.full:
        config = _with_vocabulary(run, say).model
    else:
        config, changed = shrunk(run.model, translates=translates)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model: LanguageModel | Translator = Translator(config) if translates else LanguageModel(config)
    if choice.full:
        length = _own_length(model, _SENTENCE if translates else run.train.segment_length)
    about = {"name": name, "kind": "configuration", "row": resolved.row, "scale": resolved.scale, "full": choice.full}
    return check(model, length=length, description=about, shrunk=changed)


def _with_vocabulary(run: RunConfig, say: Say) -> RunConfig:
    """`run` with what its model takes from the data."""
    if run.model.vocab_size is not None:
        return run
    if run.translates:
        return with_vocabularies(run, prepare_pairs(run.data, allow_slice=True, report=say))
    return with_vocabulary(run, prepare(run.data, report=say))


def _own_length(model: LanguageModel | Translator, segment_length: int) -> int:
    """The segment's, or a little less: no other size of the model is it."""
    taken = {size for parameter in model.parameters() for size in parameter.shape}
    longest = min(segment_length, model.max_length or segment_length)
    return next((n for n in range(longest, 2, -1) if n not in taken), longest)


def _of_folder(folder: Path, kind: str, choice: Choice, say: Say) -> Report:
    if holds_translator(folder, choice.checkpoint):
        return _of_translator(folder, kind, choice)
    model = LanguageModel.load(folder, choice.checkpoint)
    length = open_run(folder)[0].train.segment_length if kind == "run" else _LENGTH
    length = min(length, model.max_length or length)
    read: Iterable[int] | None = None
    about: dict[str, Any] = {"name": str(folder), "kind": kind}
    if choice.text is not None:
        tokenizer = load_tokenizer(folder)
        read = itertools.chain.from_iterable(map(tokenizer.encode, own_pieces(choice.text, tokenizer)))
        about["text"] = str(choice.text)
    elif kind == "run":
        corpus = corpus_of(folder, "valid", say)
        read = corpus.ids("valid")[: _SEGMENTS * (length + 1)].tolist()
        about["text"] = f"{corpus.label}, valid"
    return check(model, text=None if read is None else _segments(read, length), description=about)


def _of_translator(folder: Path, kind: str, choice: Choice) -> Report:
    if choice.text is not None:
        raise InputError(
            f"--text: for models of running text; {folder} is a translation model, which random sentences test"
        )
    return check(Translator.load(folder, choice.checkpoint), description={"name": str(folder), "kind": kind})


def _of_hugging_face(name: str, choice: Choice, say: Say) -> Report:
    if not Path(name).expanduser().is_dir():
        say(f"{name}: no such folder, file or recipe; looking for it on the Hugging Face hub")
    loaded = load_causal(name, torch.float32, tokenizer=choice.text is not None)
    model: nn.Module = loaded.model
    about: dict[str, Any] = {"name": name, "kind": "Hugging Face model"}
    text: Tensor | None = None
    if choice.text is not None:
        length = min(_LENGTH, loaded.max_length or _LENGTH)
        text = _segments(itertools.chain.from_iterable(encoded(loaded.tokenizer, choice.text)), length)
        about["text"] = str(choice.text)
    return check(model, text=text, description=about)


def _segments(read: Iterable[int], length: int) -> Tensor:
    """(S, N + 1): the text from its start, at most 256 segments."""
    ids = list(itertools.islice(read, _SEGMENTS * (length + 1)))
    count = len(ids) // (length + 1)
    if count < 2:
        raise InputError(f"the text has {len(ids)} tokens; the last-position test needs two segments of {length + 1}")
    return torch.tensor(ids[: count * (length + 1)]).view(count, length + 1)
