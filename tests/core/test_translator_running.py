"""The translator under every kernel, in other precisions, compiled: the same numbers as the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.core.errors import InputError
from fullrank.kernels import NAMES, chosen
from translator_models import (
    MECHANISMS,
    PAIRS,
    TARGET,
    B,
    close,
    every_mechanism,
    padding,
    sentences,
    tokens,
    translator,
)  # fmt: skip

LENGTHS = [7, 3, 5]
FAST = [name for name in NAMES if name not in ("reference", "triton")]  # that one runs on a GPU


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


SIDES = ("right", "left", "")  # in turn


@every_mechanism
def test_kernels_agree(mechanism: str) -> None:
    """Every kernel: self-attention without a causal mask, and cross-attention, with padding and without."""
    side = SIDES[list(MECHANISMS).index(mechanism) % 3]
    model = translator(mechanism)
    with fr.kernel("reference"):
        expected = computed(model, side)
    largest = max(float(t.abs().max()) for name, t in expected.items() if name.startswith("gradient"))
    for kernel in FAST:
        try:
            with fr.kernel(kernel):
                found = computed(model, side)
        except InputError:
            if kernel == "auto":
                raise
            continue  # it cannot compute these stages
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            scale = largest if name.startswith("gradient") else max(1.0, float(wanted.abs().max()))
            assert float((found[name] - wanted).abs().max()) <= 1e-11 * scale, (kernel, name)


def test_kernels_were_compared() -> None:
    """Every fast kernel computes encoder, decoder and cross-attention of some mechanism."""
    for kernel, changes in (
        ("sdpa", {}), ("native", {"attention": B}), ("blocks", {"attention": B}), ("multilinear", {"attention": PAIRS}),
    ):  # fmt: skip
        with fr.kernel(kernel):
            computed(translator("plain", **changes), "right")
    with chosen() as taken:
        computed(translator("B"), "right")
    assert "native" in taken


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


# -- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo asks every tensor for its gradient
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_equal_eager(backend: str) -> None:
    """Each block by itself, as `train.compile` does: the same numbers, no graph break, and sentences of other lengths, in
    both languages, make no new graphs once some were read."""
    torch._dynamo.reset()
    eager, fast = (translator("B", num_hidden_layers=1).train() for _ in range(2))
    assert len(fast.compile_targets()) == 2
    for block in fast.compile_targets():
        block.compile(fullgraph=True, backend=backend)
    assert fast.state_dict().keys() == eager.state_dict().keys()
    graphs = []
    for source, target, side in ((9, 6, "right"), (7, 8, "right"), (10, 5, "right"), (8, 11, "right")):
        given, expected = (trained(model, side, source, target) for model in (fast, eager))
        for name, wanted in expected.items():
            close(given[name], wanted, f"{name}, {source} and {target}, {side}")
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1], graphs
    torch._dynamo.reset()


def trained(model: fr.Translator, side: str, source: int, target: int) -> dict[str, Tensor]:
    """The loss of a batch and its gradients."""
    ids, written = sentences(model, 3, source, target)
    mask = padding([source, 3, 4], source, side) if side else None
    model.zero_grad(set_to_none=True)
    loss = model.loss(ids, written, tokens(TARGET, 3, target, seed=9), None, mask)
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
