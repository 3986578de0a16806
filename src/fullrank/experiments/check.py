"""`fullrank check`: a recipe, a run, a saved model or a model of Hugging Face, made ready and handed to the checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fullrank.checking import Report, check, check_scoring
from fullrank.checking.copies import list_attentions
from fullrank.config.load import Resolved, flatten, resolve
from fullrank.config.run import RunConfig
from fullrank.core.config import EncoderConfig, ModelConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.section import Section
from fullrank.core.translator import Translator
from fullrank.experiments.run import task_of
from fullrank.models import open_model
from fullrank.names import model_kind
from fullrank.plugins import import_function
from fullrank.storage import is_export, read_saved_kind

_SEED = 1  # of a fresh model
_SEES_ALL = "every token sees every other; what is checked is that none sees a later one"
_SENTENCE = 47  # tokens of the targets of a translation model in its own size


def check_named(
    name: str,
    *,
    row: str | None = None,
    scale: str | None = None,
    overrides: Sequence[str] = (),
    full: bool = False,
    checkpoint: str = "best",
    **options: Any,
) -> Report:
    """Check a model by its name.

    Args:
        name: a recipe, a YAML file, or any model that `fullrank.names.model_kind` knows.
        row: of a recipe; None for the only or first one.
        scale: of a recipe; None for the largest that it has.
        overrides: `KEY=VALUE` texts laid on a configuration.
        full: check a configuration in its own sizes; False: made small.
        checkpoint: of a run: `best`, `last`, or `average`.
        **options: `length`, `vocab_size` and `quick` of `fullrank.check`.

    Returns:
        The report, with a finding for each check.

    Raises:
        InputError: the name is none of these, or has no such options.
    """
    kind = model_kind(name)
    if kind == "configuration":
        if options.pop("vocab_size", None) is not None:
            raise InputError(f"--vocab-size: for a model that does not say it; {name} is a configuration, which does")
        if checkpoint != "best":
            raise InputError(f"--checkpoint: of a run; {name} is a configuration; leave it out, given '{checkpoint}'")
        return check_configuration(resolve(name, row, scale, overrides), name, full, **options)
    choice = {"--row": row, "--scale": scale, "KEY=VALUE": overrides, "--full": full}
    if wrong := [option for option, value in choice.items() if value]:
        raise InputError(f"{', '.join(wrong)}: for a recipe or a configuration; {name} is a {kind}, checked as it is")
    folder = Path(name).expanduser()
    is_ours = kind in ("run", "saved model")
    facts = {"name": str(folder) if is_ours else name, "kind": kind}
    saved = read_saved_kind(folder, checkpoint) if is_ours or is_export(folder) else ""
    if saved == "MaskedLanguageModel":
        raise InputError(f"{name}: a masked language model: {_SEES_ALL}")
    if saved == "Translator":
        return check(Translator.load(folder, checkpoint), description=facts, **options)
    loaded = open_model(name, checkpoint=checkpoint, device="cpu", causal=True, tokenizer=False)
    return check(loaded.module, loaded.inputs, description=facts, **options)


def check_scoring_named(function: str, vocab_size: int | None = None, length: int | None = None) -> Report:
    """Check the scoring of `MODULE:FUNCTION`, also of the working directory, with random token ids.

    Args:
        function: its name, `MODULE:FUNCTION`.
        vocab_size: how many token ids it knows.
        length: tokens of the longest text; None: 67.

    Returns:
        The report, with a finding for each check.

    Raises:
        InputError: there is no such function, or no vocab_size.
    """
    if vocab_size is None:
        raise InputError("--scoring: give --vocab-size N, the number of token ids that the function knows")
    score = import_function(function.removeprefix("python:"), "--scoring ")
    if not callable(score):
        raise InputError(f"--scoring {function}: a function is needed, given {type(score).__name__}")
    return check_scoring(score, vocab_size=vocab_size, length=length or 67, description={"name": function})


def check_configuration(
    resolved: Resolved[RunConfig], name: str, full: bool, length: int | None = None, quick: bool = False
) -> Report:
    """Check a fresh model of a configuration.

    Args:
        resolved: the configuration, with its row and scale.
        name: of the configuration, for the report.
        full: build the model in its own sizes; False: small.
        length: tokens of the texts; None: about 67, and with `full` about a segment of training.
        quick: as for `fullrank.check`.

    Returns:
        The report, with a finding for each check, and what was made small.

    Raises:
        InputError: the configuration is that of a masked language model.
    """
    run = resolved.config
    translates = run.translates
    if run.masks:
        raise InputError(f"{name}: train.objective: masked: {_SEES_ALL}")
    if (
        run.data.documents is not None and run.model.document_token_id is None
    ):  # some token, until there is a vocabulary
        run = replace(run, model=replace(run.model, document_token_id=0))
    if full and run.model.vocab_size is None:
        run = task_of(run).prepare().config
    config = run.model if full else shrink_config(run.model, translates=translates)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model: LanguageModel | Translator = Translator(config) if translates else LanguageModel(config)
    if full and length is None:  # the segment's, or a little less: no other size of the model is it
        sizes = {size for parameter in model.parameters() for size in parameter.shape}
        length = _SENTENCE if translates else run.train.segment_length
        length = min(length, model.max_length or length)
        length = next((n for n in range(length, 2, -1) if n not in sizes), length)
    facts = {"name": name, "kind": "configuration", "row": resolved.row, "scale": resolved.scale, "full": full}
    return check(model, length=length, quick=quick, description=facts, shrunk=list_changes(run.model, config))


# -- a configuration made small --------------------------------------------------------------------------------------

VOCABULARY = 32
_SMALL = 100_000  # parameters of a model that is taken as it is
# sizes that are made smaller wherever they stand, in the model and in the sections inside it
_MOST = {
    "num_attention_heads": 4, "head_dim": 4, "intermediate_size": 32, "memory_length": 8, "max_position_embeddings": 40,
    "vocab_size": VOCABULARY, "rank": 6, "cores": 3, "decays": 3, "mixtures": 3, "stride": 3,
}  # fmt: skip
_LAYERS = 2
_PAIRED = 23  # positions of a model that has parameters for each pair of positions
_OTHER = 3  # tokens that the source vocabulary has more: languages that are mixed up show


def shrink_config(config: ModelConfig, *, translates: bool = False) -> ModelConfig:
    """Make a configuration small; one that is small already stays as it is.

    Mechanisms, kinds of positions, norms, clusters by number, tying and dropout stay, and all layers where `model.layers`
    sets some of them. With `translates` it is the configuration of a translation model.
    """
    clusters = {key: len(getattr(vars(config)[key], "cutoffs", None) or ()) for key in ("input", "output")}
    if config.vocab_size or not any(clusters.values()):
        sized = replace(config, vocab_size=config.vocab_size or VOCABULARY)
        with torch.device("meta"):
            model = Translator(sized) if translates else LanguageModel(sized)
        if model.num_parameters() <= _SMALL:
            return sized
    if translates:
        config = replace(config, encoder=config.encoder or EncoderConfig())
    most = _MOST if config.layers else _MOST | {"num_hidden_layers": _LAYERS}
    sizes = _cap_sizes(config, most)
    sizes["vocab_size"] = vocab_size = sizes.get("vocab_size", VOCABULARY)
    if config.document_token_id is not None:
        sizes["document_token_id"] = min(config.document_token_id, vocab_size - 1)
    if config.num_key_value_heads is not None:
        groups = config.num_attention_heads // config.num_key_value_heads
        sizes["num_key_value_heads"] = max(1, sizes["num_attention_heads"] // groups)
    if any(attention.tied_to_length for attention in list_attentions(config, translates=translates)):
        sizes["max_position_embeddings"] = min(config.max_position_embeddings, _PAIRED)
    heads = sizes["num_attention_heads"]
    head_dim = sizes.get("head_dim", 1)
    for key, count in clusters.items():
        if count:  # boundaries evenly spread; the narrowest cluster keeps a dimension
            cutoffs = [vocab_size * (i + 1) // (count + 1) for i in range(count)]
            sizes[key] = replace(sizes[key], cutoffs=cutoffs)
            head_dim = max(head_dim, math.ceil((sizes[key].div_val or 1) ** count / heads))
    adds_up = config.hidden_size == config.num_attention_heads * (config.head_dim or 1)
    sizes |= {"head_dim": head_dim, "hidden_size": heads * (head_dim + (not adds_up))}  # what does not add up stays so
    if translates and not sizes["encoder"].share_embedding:
        sizes["encoder"] = replace(sizes["encoder"], vocab_size=vocab_size + _OTHER)
    return replace(config, **sizes)


def _cap_sizes(section: Section, most: Mapping[str, int]) -> dict[str, Any]:
    """Limit the sizes of a section, and of the sections inside it; return those that are limited, by name."""
    capped: dict[str, Any] = {}
    for name, value in vars(section).items():
        if isinstance(value, Section):
            capped[name] = replace(value, **_cap_sizes(value, most))
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            capped[name] = [replace(entry, **_cap_sizes(entry, most)) for entry in value]
        elif name in most and value is not None:
            capped[name] = min(value, most[name])
    return capped


def list_changes(config: ModelConfig, small: ModelConfig) -> tuple[str, ...]:
    """List the settings that were changed, in words: "hidden_size 512 -> 16"."""
    before = flatten(config.to_dict())
    after = flatten(small.to_dict())
    changes = []
    for key, value in after.items():
        size = before.get(key)  # of a section that is left out, none
        if value != size:
            changes.append(f"{key} {'that of the data' if size is None else size} -> {value}")
    return tuple(changes)
