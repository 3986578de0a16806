"""The translator under every kernel, in other precisions, compiled: the same numbers as the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fullrank as fr
from translator_models import (
    TARGET,
    padding,
    sentences,
    tokens,
    translator,
)  # fmt: skip


def computed(model: fr.Translator, side: str, source: int = 7, target: int = 5) -> dict[str, Tensor]:
    """Logits, the loss and every gradient; then what is written with a cache, two beams a sentence."""
    ids, written = sentences(model, 3, source, target)
    lengths = [source, 3, source - 2]
    mask = padding(lengths, source, side) if side else None
    model.zero_grad(set_to_none=True)
    loss = model.loss(ids, written, tokens(TARGET, 3, target, seed=9), None, mask)
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        found["logits"] = model(ids, written, mask).logits
        writer = model.of_source(model.encode(ids, mask))
        cache = writer.new_cache().reorder(torch.arange(3).repeat_interleave(2))
        twice = written.repeat_interleave(2, 0)
        first = writer(twice[:, :1], cache=cache)
        found["written"] = torch.cat((first.logits, writer(twice[:, 1:], cache=first.cache).logits), 1)
    return found


@pytest.mark.parametrize(
    ("mechanism", "side"),
    [("plain", ""), ("B", "right"), ("sigsoftmax with B", "left"), ("relative positions with B, own biases", "right")],
)
def test_kernels_agree_on_longer_sentences(mechanism: str, side: str) -> None:
    """Longer than the blocks of kernels, more queries than keys and fewer; fp32 too."""
    for source, target in ((75, 40), (33, 70))[:: 1 if mechanism == "B" else -2]:
        model = translator(mechanism)
        with fr.kernel("reference"):
            expected = computed(model, side, source, target)
        for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
            found = computed(model.to(dtype), side, source, target)
            largest = max(float(t.abs().max()) for name, t in expected.items() if name.startswith("gradient"))
            for name, wanted in expected.items():
                scale = largest if name.startswith("gradient") else max(1.0, float(wanted.abs().max()))
                off = float((found[name].double() - wanted).abs().max())
                assert off <= tolerance * scale, f"{name} is off by {off / scale:.1e}"
