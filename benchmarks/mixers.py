"""A layer of attention with each mixer of heads against the same layer without one, over PyTorch's fused attention.

All are one `fullrank.Attention`, causal, projections included. The kernel is the one that is chosen; for a mixing before
the softmax that is the definition, which holds all weights. The second differential attention has twice the query heads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import fullrank as fr
from candidates import BOTH, FORWARD, Candidate, Comparison, Pass, Settings

SDPA = "plain, SDPA"
MIXERS: dict[str, dict[str, Any]] = {
    "Mixhead A": {"mix": "position_independent"},
    "Mixhead B": {"mix": "position_wise"},
    "low rank": {"mix": "low_rank"},
    "differential": {"mix": "differential"},
    "differential 2": {"gate": "differential"},
    "dynamic, by the query": {"mix": {"name": "dynamic", "keys": False}},
    "knocking": {"mix_qkv": "knocking"},
    "interleaved, P = 2": {"mix_qkv": "interleaved"},
    "gate of heads": {"gate": "head"},
    "gate of numbers": {"gate": "elementwise"},
    "exclusive": {"gate": "exclusive"},
    "talking heads": {"mix_scores": "talking_heads", "mix": "talking_heads"},
    "multi-token": {"mix_scores": "multi_token"},
    "dynamic": {"mix_scores": "dynamic", "mix": "dynamic"},
}
_KEPT = {FORWARD: 4, BOTH: 12}  # tensors of all weights that the definition holds at once
_DEFINED = ("talking heads", "multi-token", "dynamic")  # by the definition


def layer_of(settings: Settings, attention: dict[str, Any]) -> fr.Attention:
    shared = settings.heads
    heads = 2 * shared if attention.get("gate") == "differential" else shared
    config = fr.ModelConfig(
        hidden_size=shared * settings.head_dim, num_attention_heads=heads, num_key_value_heads=shared,
        head_dim=settings.head_dim, position="none", attention=fr.AttentionConfig(**attention),
    )  # fmt: skip
    torch.manual_seed(0)
    return fr.Attention(config).to(settings.torch_device, settings.torch_dtype)


def _pass(settings: Settings, batch: int, length: int, attention: dict[str, Any], kernel: str, backward: bool) -> Pass:
    layer, width = layer_of(settings, attention), settings.heads * settings.head_dim
    x = settings.randn(batch, length, width, seed=1).requires_grad_()

    def forward() -> Tensor:
        with fr.kernel(kernel):
            return layer(x)

    leaves = {"x": x, **dict(layer.named_parameters())}
    return Pass(forward, leaves, settings.randn(batch, length, width, seed=2), backward)


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    """Forward alone, and with backward."""
    batch = settings.batch or 1
    shape = f"B {batch}, H {settings.heads}, N {length:,}, D {settings.head_dim}"
    made = []
    for what in (FORWARD, BOTH):
        weights = batch * settings.heads * length**2 * settings.torch_dtype.itemsize

        def candidate(name: str, attention: dict[str, Any], kernel: str, what: str = what, **more: Any) -> Candidate:
            make = functools.partial(_pass, settings, batch, length, attention, kernel, what == BOTH)
            return Candidate(name, make, name, **more)

        ours = [
            candidate(name, attention, "auto", against=(SDPA,), takes=_KEPT[what] * weights * (name in _DEFINED))
            for name, attention in MIXERS.items()
        ]
        made.append(Comparison(shape, length, what, (*ours, candidate(SDPA, {}, "sdpa"))))
    return made
