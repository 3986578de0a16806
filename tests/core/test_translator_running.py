"""The translator under every kernel, in other precisions, compiled: the same numbers as the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fullrank as fr
from translator_models import (
    TARGET,
    close,
    every_mechanism,
    padding,
    sentences,
    tokens,
    translator,
)  # fmt: skip

LENGTHS = [7, 3, 5]


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


@pytest.mark.parametrize("side", ["", "right", "left"])
@pytest.mark.parametrize("mechanism", ["plain", "B", "sigsoftmax with B", "relative positions with B, own biases"])
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


@every_mechanism
def test_single_precision_and_autocast(mechanism: str) -> None:
    model = translator(mechanism)
    source, target = sentences(model)
    mask = padding(LENGTHS, 7, "right")
    wanted = tokens(TARGET, 3, 5, seed=9)
    with torch.no_grad():
        expected = model(source, target, mask).logits
        single = model.float()(source, target, mask).logits
    assert single.dtype == torch.float32
    close(single.double(), expected, "fp32", 2e-5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(source, target, wanted, None, mask, label_smoothing=0.1)
        logits = model(source, target, mask).logits
        with torch.no_grad():
            writer = model.of_source(model.encode(source, mask))
            first = writer(target[:, :2], cache=writer.new_cache())
            rest = writer(target[:, 2:], cache=first.cache).logits
    loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), name
    span = float(expected.max() - expected.min())
    for given in (logits, torch.cat((first.logits, rest), 1)):
        assert float((given.detach().double() - expected).abs().max()) < 0.2 * span
