"""docs/combinations.md, made from what configurations say: `python -m research.combinations`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import fullrank as fr
from fullrank.core import registry
from fullrank.core.encoder import MaskedLanguageModel
from fullrank.core.errors import InputError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "combinations.md"
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SLOTS = {
    "score": "attention.score", "normalize": "attention.normalize", "mix": "attention.mix",
    "mix_qkv": "attention.mix_qkv", "mix_scores": "attention.mix_scores", "gate": "attention.gate", "position": "position",
    "norm_type": "norm_type", "activation": "hidden_act",
}  # fmt: skip
# what a choice has to bring with it
NEEDS: dict[str, dict[str, Any]] = {
    "model.attention.score: relative": {"position": "relative"},
    "model.position: relative": {"attention.score": "relative"},
    "model.attention.gate: differential": {"num_key_value_heads": 2},
}
PLAIN = ("dot_product", "softmax", "none", "sinusoidal", "layer_norm", "relu")  # says nothing beyond a plain model
OTHERS: dict[str, dict[str, Any]] = {
    "model.attention.kind: multilinear": {"attention.kind": "multilinear", "position": None},
    "model.attention.kind: multilinear, output_map: decayed": {
        "attention.kind": "multilinear", "attention.output_map": "decayed", "position": None,
    },
    "model.attention.cross_head": {"attention.cross_head": 0.1},
    "model.attention.pattern: strided": {"attention.pattern": "strided", "attention.stride": 3},
    "model.attention.qk_norm": {"attention.qk_norm": True},
    "model.num_key_value_heads": {"num_key_value_heads": 2},
    "model.memory_length": {"memory_length": 8},
    "model.document_token_id (data.documents)": {"document_token_id": 3},
    "a masked model": {"masked": True},
    "a translation model": {"encoder.num_hidden_layers": 2},
}  # fmt: skip
HEAD = """# What goes with what

Made by `python -m research.combinations` from configurations of every pair of choices. What is not named here
goes together: it trains, decodes with a cache, saves, loads and exports, and `tests/properties` runs it. Choices of one key
exclude each other. A pair that does not go together is refused with a message that names both keys.
[Injected models](hugging_face.md) have the same mixings, normalisers and cross-head attention.

## What does not

| choices | refused beside them |
| --- | --- |
"""


def list_choices() -> dict[str, dict[str, Any]]:
    """List every choice by the name of its key, as the keys that it sets."""
    choices: dict[str, dict[str, Any]] = {}
    for slot, key in SLOTS.items():
        for name in registry.names(slot):
            if name not in PLAIN:
                choice = f"model.{key}: {name}"
                choices[choice] = {key: name, **NEEDS.get(choice, {})}
    return choices | OTHERS


def merge(*choices: dict[str, Any]) -> dict[str, Any] | None:
    """Merge the keys of several choices, None where two set the same one."""
    merged: dict[str, Any] = {}
    for keys in choices:
        for key, value in keys.items():
            if merged.get(key) not in (None, value):
                return None
            merged[key] = merged.get(key) if value is None else value
    return merged


def build(keys: dict[str, Any]) -> Any:
    """Build the model of these keys."""
    raw: dict[str, Any] = {}
    chosen = {key: value for key, value in keys.items() if value is not None}
    for key, value in {"position": "sinusoidal", **chosen}.items():
        section, _, name = key.rpartition(".")
        inner = raw.setdefault(section, {}) if section else raw
        inner[name] = value
    masked = raw.pop("masked", False)
    config = fr.ModelConfig.from_dict(SIZES | raw)
    kind: Any = fr.LanguageModel
    if masked or config.encoder is not None:
        kind = MaskedLanguageModel if masked else fr.Translator
    return kind(config)


def is_refused(keys: dict[str, Any]) -> bool:
    """Return whether these keys do not go together: such a model, without numbers, cannot be built."""
    try:
        with torch.device("meta"):
            build(keys)
    except InputError:
        return True
    return False


def list_refused() -> dict[tuple[str, ...], list[str]]:
    """Group the choices by those that are refused beside them; those of the empty tuple go together with all."""
    choices = list_choices()
    groups: dict[tuple[str, ...], list[str]] = {}
    for choice, keys in choices.items():
        refused = []
        for other, other_keys in choices.items():
            merged = merge(keys, other_keys)
            if other != choice and merged is not None and is_refused(merged):
                refused.append(other)
        groups.setdefault(tuple(refused), []).append(choice)
    return groups


def join_choices(names: Iterable[str]) -> str:
    """Join names of choices in a cell; `any` where all of a key are there."""
    left = list(names)
    for slot, key in SLOTS.items():
        every = [f"model.{key}: {name}" for name in registry.names(slot) if name not in PLAIN]
        if {*every} <= {*left}:
            left = [f"model.{key}: any", *(name for name in left if name not in every)]
    return "; ".join(left).replace("model.attention.", "").replace("model.", "")


def write_page() -> str:
    """Write the page as Markdown."""
    groups = list_refused()
    refused = "".join(f"| {join_choices(groups[key])} | {join_choices(key)} |\n" for key in groups if key)
    return HEAD + refused


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
