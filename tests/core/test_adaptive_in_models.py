"""Adaptive input and adaptive softmax in whole models: losses, files, decoding, lower precision, dropout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adaptive_equations import DOUBLE, Case, compare
from torch.nn import functional as F

import fullrank as fr
from fullrank.decoding import beam_search


def model(seed: int = 1, **changes: Any) -> fr.LanguageModel:
    torch.manual_seed(seed)
    output: dict[str, Any] = {"kind": "adaptive", "tied": True} | changes.pop("output", {})
    settings: dict[str, Any] = {
        "vocab_size": 19, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer": "pytorch",
        "input": fr.InputConfig(kind="adaptive", cutoffs=[4, 9], div_val=2), "output": fr.OutputConfig(**output),
    }  # fmt: skip
    return fr.LanguageModel(fr.ModelConfig(**settings | changes))


KINDS = [
    {"tied": True},
    {"tied": True, "form": "transformer_xl"},
    {"tied": True, "tied_projections": False},
    {"tied": False},
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


@kinds
@pytest.mark.parametrize("training", [False, True])
def test_nll_and_loss_are_the_cross_entropy_of_the_logits(kind: dict[str, Any], training: bool) -> None:
    """The logits are normalised, so that cross entropy takes them as they are; tied tensors get both gradients."""
    made = model(output=kind).double().train(training)
    read, targets = torch.randint(19, (3, 5)), torch.randint(19, (3, 5))
    logits = made(read).logits
    assert torch.allclose(logits.exp().sum(-1), torch.ones(3, 5, dtype=DOUBLE))
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=0.1)
    found = {}
    for name, value in (
        ("logits", each.mean()), ("loss", made.loss(read, targets, label_smoothing=0.1)),
        ("nll", made.nll(read, targets).per_token.mean()),
        ("logits' nll", F.cross_entropy(logits.flatten(0, 1), targets.flatten())),
    ):  # fmt: skip
        made.zero_grad()
        value.backward(retain_graph=True)
        found[name] = {"value": value.detach()} | {n: p.grad.clone() for n, p in made.named_parameters()}
    compare(found["loss"], found["logits"])
    compare(found["nll"], found["logits' nll"])
    assert all(float(g.abs().max()) > 0 for g in found["nll"].values())


@kinds
def test_saved_once_and_loaded(kind: dict[str, Any], tmp_path: Path) -> None:
    made = model(output=kind)
    made.save(tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    names = {name for name in header if name.startswith("output.")}
    assert any("weights" in name for name in names) is not kind["tied"]
    assert ("output.projections.1" in names) is (kind.get("tied_projections", kind["tied"]) is False)
    loaded = fr.LanguageModel.load(tmp_path)
    read, targets = torch.randint(19, (2, 6)), torch.randint(19, (2, 6))
    made.eval()
    assert torch.equal(loaded(read).logits, made(read).logits)
    assert loaded.config == made.config
    loaded.loss(read, targets).backward()  # what is tied is tied again
    made.loss(read, targets).backward()
    for (name, a), b in zip(loaded.named_parameters(), made.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_decoding(tmp_path: Path) -> None:
    """Beam search over all tails finds the best text, as counting every text does; its sums are those of the nll."""
    made = model(output={"tied": True}).double().eval()
    found = beam_search(made, torch.tensor([[3]]), beams=19, max_new_tokens=2, eos_id=None, length_penalty=0.0)
    pairs = torch.cartesian_prod(torch.arange(19), torch.arange(19))
    texts = torch.cat((torch.full((361, 1), 3), pairs), 1)
    with torch.no_grad():
        total = made.nll(texts[:, :-1], texts[:, 1:]).per_token.sum(1)
    best = int(total.argmin())
    assert found.ids[0, 0].tolist() == pairs[best].tolist()
    assert abs(float(found.log_probs[0, 0] + total[best])) < 1e-10


def test_under_autocast() -> None:
    """Products in bf16, sums and softmaxes in fp32, and the stream of hidden states as with any embedding."""
    for kind in KINDS:
        made = model(output=kind, hidden_size=32, initializer="fairseq")
        read, targets = torch.randint(19, (4, 16)), torch.randint(19, (4, 16))
        exact = made.loss(read, targets, label_smoothing=0.1)
        right = torch.autograd.grad(exact, list(made.parameters()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert made.embedding(read).dtype == torch.float32
            assert made(read).logits.dtype == torch.float32
            assert made.nll(read, targets).per_token.dtype == torch.float32
            loss = made.loss(read, targets, label_smoothing=0.1)
        assert abs(float((loss - exact).detach())) < 0.02
        found = torch.autograd.grad(loss, list(made.parameters()))
        for (name, p), a, b in zip(made.named_parameters(), found, right, strict=True):
            assert a.dtype == p.dtype
            if not name.endswith("key.bias"):
                assert float((a - b).norm() / b.norm()) < 0.06, name


def test_in_bfloat16_throughout() -> None:
    made = model().to(torch.bfloat16).eval()
    read, targets = torch.randint(19, (2, 5)), torch.randint(19, (2, 5))
    loss = made.loss(read, targets, label_smoothing=0.1)
    loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in made.parameters())
    other = model().eval()
    assert abs(float(loss.detach()) - float(other.loss(read, targets, label_smoothing=0.1).detach())) < 0.1


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_beside_compiled_parts() -> None:
    """The input compiles without a break; the rest of a compiled model leaves the losses as they are."""
    torch._dynamo.reset()
    eager, compiled = model(num_hidden_layers=1), model(num_hidden_layers=1)
    read, targets = torch.randint(19, (2, 5)), torch.randint(19, (2, 5))
    whole = torch.compile(compiled.embedding, fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(read), eager.embedding(read))
    for block in compiled.compile_targets():
        block.compile(backend="aot_eager")
    for made in (eager, compiled):
        made.loss(read, targets).backward()
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6), name
    torch._dynamo.reset()
    everything = torch.compile(eager.eval(), backend="aot_eager")
    assert torch.allclose(everything(read).logits, compiled.eval()(read).logits, atol=1e-6)


def test_dropout_in_tails() -> None:
    """Between their two matrices, scaled, in training only, and nowhere in the head."""
    _, output = Case("transformer_xl", False, None, True, 2, (3, 4), 12, 64).layers()
    output.tail_dropout.p = 0.5
    hidden = torch.randn(1, 5, 64, dtype=DOUBLE)
    plain, again = output.eval()(hidden), output(hidden)
    assert torch.equal(plain, again)
    output.train()
    noisy = output(hidden)
    assert torch.equal(noisy[..., :3], plain[..., :3])
    assert torch.equal(noisy[..., 3], plain[..., 3])  # alone in its tail
    assert not torch.allclose(noisy[..., 4:], plain[..., 4:])
    with torch.no_grad():
        output.weights[2].zero_()
        output.weights[2][0, 0] = 1
    read = (hidden @ output.projections["2"])[..., 0]
    seen = []
    for _ in range(30):
        logits = output(hidden)[..., 4:] - output.biases[2]
        seen.append((logits[..., 0] - logits[..., 1]) / read)
    values = torch.stack(seen)
    assert bool(((values - 2).abs().minimum(values.abs()) < 1e-8).all())
    assert 0.3 < float((values > 1).double().mean()) < 0.7
