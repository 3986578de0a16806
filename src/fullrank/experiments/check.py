"""`fullrank check`: a recipe, a run, a saved model or a model of Hugging Face, made ready and handed to the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fullrank.checking import Report, check, check_scoring
from fullrank.config.load import Resolved, flatten, resolve
from fullrank.config.run import RunConfig
from fullrank.core.config import AdaptiveConfig, AdaptiveInputConfig, EncoderConfig, LayerConfig, ModelConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.section import Section
from fullrank.core.translator import Translator
from fullrank.experiments.analyze import note_hub
from fullrank.experiments.run import with_vocabulary
from fullrank.experiments.task import Say
from fullrank.models import open_model
from fullrank.names import model_kind
from fullrank.plugins import import_function
from fullrank.storage import is_export, read_saved_kind

_SEED = 1  # of a fresh model
_SENTENCE = 47  # tokens of the targets of a translation model in its own size


def check_named(
    name: str,
    *,
    row: str | None = None,
    scale: str | None = None,
    overrides: Sequence[str] = (),
    full: bool = False,
    checkpoint: str = "best",
    say: Say = print,
    **options: Any,
) -> Report:
    """Everything that can be checked of `name`, a recipe or YAML file or any model that `models.model_kind` knows.

    row, scale, overrides, full (in its own sizes): of a configuration. checkpoint: of a trained model. options: `length`,
    `vocab_size` and `quick` of `fullrank.check`.
    Raises InputError for what is none of them, and for options that it does not have.
    """
    kind = model_kind(name)
    if kind == "configuration":
        options.pop("vocab_size", None)
        return check_configuration(resolve(name, row, scale, overrides), name, full, say, **options)
    choice = {"--row": row, "--scale": scale, "KEY=VALUE": overrides, "--full": full}
    if wrong := [option for option, value in choice.items() if value]:
        raise InputError(f"{', '.join(wrong)}: for a recipe or a configuration; {name} is a {kind}, checked as it is")
    folder, is_ours = Path(name).expanduser(), kind in ("run", "saved model")
    about = {"name": str(folder) if is_ours else name, "kind": kind}
    if (is_ours or is_export(folder)) and read_saved_kind(folder, checkpoint) == "Translator":
        model, inputs = Translator.load(folder, checkpoint), None
    else:
        note_hub(name, kind, say)
        loaded = open_model(name, checkpoint=checkpoint, device="cpu", causal=True, tokenizer=False)
        model, inputs = loaded.module, loaded.inputs
    return check(model, inputs, description=about, **options)


def check_scoring_named(function: str, vocab_size: int | None = None, length: int | None = None) -> Report:
    """`check_scoring` of `MODULE:FUNCTION`, also of the working directory, with random token ids."""
    if vocab_size is None:
        raise InputError("--scoring: give --vocab-size N, the number of token ids that the function knows")
    score = import_function(function.removeprefix("python:"), "--scoring ")
    if not callable(score):
        raise InputError(f"--scoring {function}: a function is needed, given {type(score).__name__}")
    return check_scoring(score, vocab_size=vocab_size, length=length or 67, description={"name": function})


def check_configuration(
    resolved: Resolved[RunConfig], name: str, full: bool, say: Say, length: int | None = None, quick: bool = False
) -> Report:
    """The checks of a model that is drawn anew, small unless `full`."""
    run, translates = resolved.config, resolved.config.translates
    if run.masks:
        raise InputError(
            f"{name}: train.objective: masked, so every token sees every other; what is checked is that none sees a later one"
        )
    if (
        run.data.documents is not None and run.model.document_token_id is None
    ):  # some token, until there is a vocabulary
        run = replace(run, model=replace(run.model, document_token_id=0))
    config, changed = (with_vocabulary(run, say).model, ()) if full else shrink_config(run.model, translates=translates)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model: LanguageModel | Translator = Translator(config) if translates else LanguageModel(config)
    if full and length is None:  # the segment's, or a little less: no other size of the model is it
        sizes = {size for parameter in model.parameters() for size in parameter.shape}
        length = _SENTENCE if translates else run.train.segment_length
        length = min(length, model.max_length or length)
        length = next((n for n in range(length, 2, -1) if n not in sizes), length)
    about = {"name": name, "kind": "configuration", "row": resolved.row, "scale": resolved.scale, "full": full}
    return check(model, length=length, quick=quick, description=about, shrunk=changed)


# -- a configuration made small --------------------------------------------------------------------------------------

VOCABULARY = 32
_SMALL = 100_000  # parameters of a model that is taken as it is
_HEADS, _HEAD_DIM, _INTERMEDIATE, _POSITIONS = 4, 4, 32, 40
# sizes that are made smaller wherever they stand, in the model and in the sections inside it
_MOST = {"num_hidden_layers": 2, "memory_length": 8, "rank": 6, "cores": 3, "decays": 3, "mixtures": 3, "stride": 3}
_PAIRED = 23  # positions where there are parameters for each pair of them
_OTHER = 3  # how many words more the source knows: languages that are mixed up show


def shrink_config(config: ModelConfig, *, translates: bool = False) -> tuple[ModelConfig, tuple[str, ...]]:
    """`config` small, and what was changed: "hidden_size 512 -> 16". A small configuration stays as it is.

    Mechanisms, kinds of positions, norms, clusters by number, tying and dropout stay. translates: it is that of a
    translation model.
    """
    parts = [config]
    if translates:
        parts = [config.get_encoder_config(), config.get_decoder_config(), config.get_cross_config()]
    tied_to_length = any(attention.tied_to_length for part in parts for attention in part.attentions)
    as_it_is = config
    clusters, least = [0, 0], 1
    for i, part in enumerate((config.input, config.output)):
        if isinstance(part, AdaptiveInputConfig | AdaptiveConfig):
            clusters[i] = len(part.cutoffs or ())
            least = max(least, (part.div_val or 1) ** clusters[i])  # the narrowest cluster keeps a dimension
    if config.vocab_size is None and not any(clusters):
        as_it_is = replace(config, vocab_size=VOCABULARY)
    at_least = 2 * config.num_hidden_layers * config.hidden_size * (config.intermediate_size or 0)
    if as_it_is.vocab_size is not None and at_least <= _SMALL and _parameters(as_it_is, translates) <= _SMALL:
        return as_it_is, _changes(config, as_it_is)
    heads, assumed = min(config.num_attention_heads, _HEADS), config.head_dim or 1
    shared = config.num_key_value_heads
    if shared is not None:
        most = max(1, shared * heads // config.num_attention_heads)
        shared = max(count for count in range(1, most + 1) if heads % count == 0)
    head_dim = min(assumed, _HEAD_DIM)
    adds_up = config.hidden_size == config.num_attention_heads * assumed
    width = heads * head_dim + heads * (not adds_up)  # heads that do not add up to the width stay so
    while width < min(least, config.hidden_size):
        width += heads * head_dim
    vocab_size = max(min(config.vocab_size or VOCABULARY, VOCABULARY), 2 * (max(clusters) + 1))
    capped = _cap_sizes(config)
    for key, count in zip(("input", "output"), clusters, strict=True):  # boundaries evenly spread
        cutoffs = [vocab_size * (i + 1) // (count + 1) for i in range(count)]
        capped[key] = capped[key].with_known(cutoffs=cutoffs)
    if translates:
        encoder = capped.get("encoder") or EncoderConfig()
        words = None if encoder.share_embedding else vocab_size + _OTHER
        capped["encoder"] = replace(encoder, vocab_size=words)
    capped |= _select_layers(config, capped)
    small = replace(
        config,
        **capped,
        vocab_size=vocab_size,
        document_token_id=None if config.document_token_id is None else min(config.document_token_id, vocab_size - 1),
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=width // heads if adds_up else head_dim,
        intermediate_size=min(config.intermediate_size or _INTERMEDIATE, _INTERMEDIATE),
        max_position_embeddings=min(config.max_position_embeddings, _PAIRED if tied_to_length else _POSITIONS),
    )
    return small, _changes(config, small)


def _cap_sizes(section: Section) -> dict[str, Any]:
    """The sizes of a section that `_MOST` limits, and its sections with theirs."""
    capped: dict[str, Any] = {}
    for name, value in vars(section).items():
        if isinstance(value, Section):
            capped[name] = replace(value, **_cap_sizes(value))
        elif name in _MOST and value is not None:
            capped[name] = min(value, _MOST[name])
    return capped


def _select_layers(config: ModelConfig, capped: dict[str, Any]) -> dict[str, Any]:
    """The first layer of each attention that `model.layers` has, and not fewer than two layers, on each side."""
    own = config.own_attentions
    few = [attention for layer, attention in enumerate(own) if attention not in own[:layer]]
    few = few if len(few) > 1 else own[:2]
    layers = [LayerConfig(attention=attention and replace(attention, **_cap_sizes(attention))) for attention in few]
    sides = {side: replace(capped[side], num_hidden_layers=None) for side in ("encoder", "decoder") if capped.get(side)}
    return {**sides, "layers": layers, "num_hidden_layers": len(few)} if config.layers else {}


def _changes(config: ModelConfig, small: ModelConfig) -> tuple[str, ...]:
    """Settings that were changed, in words; entries of layers by their number."""
    if config.encoder is None and small.encoder is not None:
        config = replace(config, encoder=EncoderConfig())
    before, after = flatten(config.to_dict()), flatten(small.to_dict())
    words = []
    for key in sorted((key for key in after if after[key] != before.get(key)), key=lambda key: "." in key):
        old, new = (
            f"{len(value or ())} entries" if key == "layers" else value for value in (before.get(key), after[key])
        )
        words.append(f"{key} {'that of the data' if old is None else old} -> {new}")
    return tuple(words)


def _parameters(config: ModelConfig, translates: bool) -> int:
    with torch.device("meta"):
        return (Translator(config) if translates else LanguageModel(config)).num_parameters()
