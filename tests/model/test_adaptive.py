"""Adaptive input and adaptive softmax against their definitions: every probability, every gradient, every total."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fullrank as fr
from fullrank.decoding import beam_search
from fullrank.errors import ConfigError

DOUBLE = torch.float64


@dataclass(frozen=True)
class Case:
    """One kind of adaptive softmax with its input."""

    form: str | None
    tied: bool
    tied_projections: bool | None
    bias: bool | None
    div_val: int
    cutoffs: tuple[int, ...] = (5, 8, 20)
    vocabulary: int = 31
    width: int = 11

    def __str__(self) -> str:
        ties = ("tied" if self.tied else "untied") + ("-projections" if self.tied_projections else "")
        return f"{self.form}-{ties}-bias={self.bias}-div{self.div_val}-{len(self.cutoffs)}"

    def layers(self) -> tuple[fr.AdaptiveInput, fr.AdaptiveSoftmax]:
        clusters: dict[str, Any] = {"cutoffs": list(self.cutoffs), "div_val": self.div_val}
        sizes = {"vocab_size": self.vocabulary, "hidden_size": self.width}
        embedding = fr.AdaptiveInput(fr.InputConfig(kind="adaptive", **clusters), **sizes)
        config = fr.OutputConfig(
            kind="adaptive", tied=self.tied, tied_projections=self.tied_projections, bias=self.bias, form=self.form,
            **clusters,
        )  # fmt: skip
        output = fr.AdaptiveSoftmax(config, embedding if self.tied else None, **sizes)
        for parameter in (*embedding.parameters(), *output.parameters()):
            nn.init.normal_(parameter, std=0.7)
        return embedding.double(), output.double()


CASES = [
    *(Case(form, *ties, bias, div)
      for form, ties, bias, div in itertools.product(
          ["fairseq", "transformer_xl"], [(True, True), (True, False), (False, None)], [False, True], [1, 2])),
    Case("transformer_xl", True, None, None, 2, (30,)),
    Case("fairseq", False, None, None, 3, (1, 2), 3, 9),
    Case(None, True, None, None, 2, (1, 2, 3, 4), 9, 16),
]  # fmt: skip
cases = pytest.mark.parametrize("case", CASES, ids=str)


def definition(case: Case, embedding: nn.Module, output: nn.Module, hidden: Tensor) -> Tensor:
    """log p (T, V) one word at a time: p(v) = p(v in the head), or p(class of v in the head) p(v in its tail)."""
    read, own = dict(embedding.named_parameters()), dict(output.named_parameters())
    bounds = [0, *case.cutoffs, case.vocabulary]
    matrices = [(read if case.tied else own)[f"weights.{i}"] for i in range(len(bounds) - 1)]
    biases = [own.get(f"biases.{i}", torch.zeros(len(m), dtype=DOUBLE)) for i, m in enumerate(matrices)]
    form = case.form or ("transformer_xl" if output.class_bias is not None else "fairseq")
    shared = case.tied if case.tied_projections is None else case.tied_projections
    reads = []
    for i in range(len(matrices)):
        if case.div_val == 1 or (i == 0 and form == "fairseq"):
            reads.append(hidden)
        elif i == 0 or not shared:
            reads.append(hidden @ own[f"projections.{i}"])
        else:
            reads.append(hidden @ read[f"projections.{i}"])
    classes = reads[0] @ own["class_weight"].T + own.get("class_bias", 0)
    head = torch.cat((reads[0] @ matrices[0].T + biases[0], classes), 1).exp()
    head = head / head.sum(1, keepdim=True)
    columns = []
    for word in range(case.vocabulary):
        i = next(i for i, end in enumerate(bounds[1:]) if word < end)
        if i == 0:
            columns.append(head[:, word].log())
        else:
            tail = (reads[i] @ matrices[i].T + biases[i]).exp()
            inside = tail[:, word - bounds[i]] / tail.sum(1)
            columns.append((head[:, case.cutoffs[0] + i - 1] * inside).log())
    return torch.stack(columns, 1)


def gradients(value: Tensor, cotangent: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(value, list(leaves.values()), cotangent, retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        off = float((found[name] - right).detach().abs().max())
        assert off <= tolerance * max(1.0, float(right.detach().abs().max())), f"{name} is off by {off:.1e}"


def leaves_of(case: Case, embedding: nn.Module, output: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    leaves = {"hidden": hidden} | {f"output.{n}": p for n, p in output.named_parameters()}
    return leaves | ({f"embedding.{n}": p for n, p in embedding.named_parameters()} if case.tied else {})


def check(case: Case, targets: Tensor, smoothings: tuple[float, ...] = (0.0, 0.1, 0.8)) -> None:
    """Log-probabilities, nll and loss, and their gradients with respect to everything, for `targets` (B, N)."""
    embedding, output = case.layers()
    hidden = torch.randn(*targets.shape, case.width, dtype=DOUBLE, requires_grad=True)
    leaves = leaves_of(case, embedding, output, hidden)
    expected = definition(case, embedding, output, hidden.flatten(0, 1)).view(*targets.shape, -1)
    assert torch.allclose(expected.exp().sum(-1), torch.ones(targets.shape, dtype=DOUBLE))

    full = output(hidden)
    assert full.shape == (*targets.shape, case.vocabulary)
    cotangent = torch.randn_like(full)
    compare(
        {"value": full} | gradients(full, cotangent, leaves),
        {"value": expected} | gradients(expected, cotangent, leaves),
    )

    each, found = -expected.gather(-1, targets[..., None]).squeeze(-1), output.nll(hidden, targets)
    assert found.shape == targets.shape
    cotangent = torch.randn_like(each)
    compare(
        {"value": found} | gradients(found, cotangent, leaves), {"value": each} | gradients(each, cotangent, leaves)
    )

    weights = torch.rand(targets.shape, dtype=DOUBLE)
    weights[..., ::3] = 0 if targets.shape[1] > 1 else 1
    for smoothing, weighted in itertools.product(smoothings, (None, weights)):
        share = torch.ones_like(weights) if weighted is None else weighted
        smoothed = (1 - smoothing) * each - smoothing * expected.mean(-1)
        mean, plain = ((x * share).sum() / share.sum() for x in (smoothed, each))
        loss, nll = output.loss(hidden, targets, weighted, smoothing)
        cotangent = torch.tensor(-1.3, dtype=DOUBLE)
        compare(
            {"value": loss, "nll": nll} | gradients(loss, cotangent, leaves),
            {"value": mean, "nll": plain} | gradients(mean, cotangent, leaves),
        )
        assert not nll.requires_grad


@cases
def test_every_probability_and_every_gradient(case: Case) -> None:
    check(case, torch.randint(case.vocabulary, (3, 7)))


@pytest.mark.parametrize("case", [CASES[1], CASES[7], CASES[9], CASES[15]], ids=str)
@pytest.mark.parametrize("cluster", range(4))
def test_empty_clusters_and_single_tokens(case: Case, cluster: int) -> None:
    """All tokens of one cluster, and a text of one token."""
    bounds = [0, *case.cutoffs, case.vocabulary]
    check(case, torch.randint(bounds[cluster], bounds[cluster + 1], (2, 5)), (0.0, 0.3))
    check(case, torch.tensor([[bounds[cluster]]]), (0.0, 0.3))
    check(case, torch.tensor([[bounds[cluster + 1] - 1]]), (0.0,))


def test_a_cluster_without_tokens_gets_a_gradient_of_zero() -> None:
    """Not none: what an optimiser does must not hang on which words a batch holds."""
    for case in (CASES[1], CASES[17]):
        embedding, output = case.layers()
        for value in (lambda h, x, o=output: o.nll(h, x).sum(), lambda h, x, o=output: o.loss(h, x)[0]):
            output.zero_grad()
            embedding.zero_grad()
            value(torch.randn(1, 4, case.width, dtype=DOUBLE), torch.zeros(1, 4, dtype=torch.int64)).backward()
            tail = (embedding if case.tied else output).weights[2]
            assert torch.equal(tail.grad, torch.zeros_like(tail))
            assert all(p.grad is not None for p in output.parameters())


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5), div=st.integers(1, 3), rows=st.integers(1, 12),
    extra=st.integers(0, 4), tied=st.booleans(), bias=st.booleans(), form=st.sampled_from(["fairseq", "transformer_xl"]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_size(
    sizes: list[int], div: int, rows: int, extra: int, tied: bool, bias: bool, form: str, seed: int
) -> None:
    torch.manual_seed(seed)
    ends = list(itertools.accumulate(sizes))
    case = Case(form, tied, None, bias, div, tuple(ends[:-1]), ends[-1], div ** (len(sizes) - 1) + extra)
    check(case, torch.randint(case.vocabulary, (1, rows)), (0.0, 0.2))


def test_gradcheck() -> None:
    _, output = Case("transformer_xl", False, None, True, 2, (2, 3), 6, 4).layers()
    hidden, targets = torch.randn(1, 4, 4, dtype=DOUBLE, requires_grad=True), torch.tensor([[5, 0, 2, 4]])
    assert torch.autograd.gradcheck(lambda h: output.nll(h, targets), hidden)
    assert torch.autograd.gradcheck(lambda h: output.loss(h, targets, label_smoothing=0.2)[0], hidden)


def test_nll_is_in_the_order_of_the_tokens() -> None:
    _, output = CASES[1].layers()
    hidden, targets = torch.randn(1, 12, 11, dtype=DOUBLE), torch.randint(31, (1, 12))
    order = torch.randperm(12)
    assert torch.allclose(
        output.nll(hidden[:, order], targets[:, order]), output.nll(hidden, targets)[:, order], atol=1e-12
    )


def test_equals_pytorchs_adaptive_softmax() -> None:
    """`nn.AdaptiveLogSoftmaxWithLoss` is the untied form without biases in the tails."""
    case = Case("fairseq", False, None, False, 2)
    _, output = case.layers()
    other = nn.AdaptiveLogSoftmaxWithLoss(case.width, case.vocabulary, list(case.cutoffs), div_value=2.0).double()
    with torch.no_grad():
        other.head.weight.copy_(torch.cat((output.weights[0], output.class_weight)))
        for i, (project, out) in enumerate(other.tail, start=1):
            project.weight.copy_(output.projections[str(i)].T)
            out.weight.copy_(output.weights[i])
    hidden, targets = torch.randn(40, case.width, dtype=DOUBLE), torch.randint(case.vocabulary, (40,))
    assert torch.allclose(output.log_prob(hidden[None])[0], other.log_prob(hidden), atol=1e-12)
    assert torch.allclose(-output.nll(hidden[None], targets[None])[0], other(hidden, targets).output, atol=1e-12)
    assert torch.allclose(output.loss(hidden[None], targets[None])[0], other(hidden, targets).loss, atol=1e-12)


FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "transformer_xl_adaptive.json").read_text())


@pytest.mark.parametrize(
    "case", FIXTURE["cases"], ids=lambda c: f"div{c['div_val']}-{c['tied']}-{c['tied_projections']}"
)
def test_equals_transformer_xl(case: dict[str, Any]) -> None:
    """Vectors, log-probabilities and nll of Hugging Face's Transformer-XL for the same parameters (see `origin`)."""
    sizes = {name: FIXTURE[name] for name in ("vocab_size", "hidden_size")}
    clusters = {"cutoffs": FIXTURE["cutoffs"], "div_val": case["div_val"]}
    config = fr.ModelConfig(
        **sizes, num_attention_heads=1, scale_embedding=True, input=fr.InputConfig(kind="adaptive", **clusters),
        output=fr.OutputConfig(kind="adaptive", form="transformer_xl", tied=case["tied"],
                               tied_projections=case["tied_projections"] and case["tied"]),
    )  # fmt: skip
    embedding = fr.AdaptiveInput(config).double()
    layers = nn.ModuleDict({"embedding": embedding, "output": fr.AdaptiveSoftmax(config, embedding).double()})
    given = {name: torch.tensor(numbers, dtype=DOUBLE) for name, numbers in case["parameters"].items()}
    layers.load_state_dict({name: given[name].view_as(p) for name, p in layers.named_parameters()})
    assert given.keys() == dict(layers.named_parameters()).keys()
    hidden, count = torch.tensor(case["hidden"], dtype=DOUBLE).view(1, -1, sizes["hidden_size"]), len(case["ids"])
    for found, expected in (
        (embedding(torch.tensor([case["ids"]])), case["embedded"]),
        (layers["output"](hidden), case["log_prob"]),
        (layers["output"].nll(hidden, torch.tensor([case["targets"]])), case["nll"]),
    ):
        assert found.shape[:2] == (1, count)
        assert torch.allclose(found.flatten(), torch.tensor(expected, dtype=DOUBLE), atol=1e-12)


# -- adaptive input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("div_val", [1, 2, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_adaptive_input(div_val: int, scaled: bool) -> None:
    """A row of its cluster's table, projected, token by token; and the gradients of both."""
    width, cutoffs, vocabulary = 27, [4, 5, 11], 17
    layer = fr.AdaptiveInput(
        fr.ModelConfig(vocab_size=vocabulary, hidden_size=width, num_attention_heads=3, scale_embedding=scaled,
                       input=fr.InputConfig(kind="adaptive", cutoffs=cutoffs, div_val=div_val))
    ).double()  # fmt: skip
    assert [tuple(w.shape) for w in layer.weights] == [(n, width // div_val**i) for i, n in enumerate([4, 1, 6, 6])]
    assert len(layer.projections) == (0 if div_val == 1 else 4)
    ids = torch.tensor([[0, 3, 4, 5, 10], [11, 16, 3, 3, 11]])

    def vector(word: int) -> Tensor:
        i = sum(word >= cutoff for cutoff in cutoffs)
        row = layer.weights[i][word - [0, *cutoffs][i]]
        row = row if div_val == 1 else layer.projections[i] @ row
        return row * (width**0.5 if scaled else 1)

    expected = torch.stack([torch.stack([vector(int(word)) for word in row]) for row in ids])
    found, cotangent = layer(ids), torch.randn(2, 5, width, dtype=DOUBLE)
    leaves = dict(layer.named_parameters())
    compare(
        {"value": found} | gradients(found, cotangent, leaves),
        {"value": expected} | gradients(expected, cotangent, leaves),
    )


def test_ids_outside_the_vocabulary_are_refused_as_by_other_layers() -> None:
    embedding, output = CASES[1].layers()
    hidden = torch.randn(1, 1, 11, dtype=DOUBLE)
    for wrong in (-1, 31, 10_000):
        with pytest.raises(IndexError):
            embedding(torch.tensor([[wrong]]))
        with pytest.raises(RuntimeError, match="index"):
            output.nll(hidden, torch.tensor([[wrong]]))


# -- cost -------------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Notes the largest tensor and the rows of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.dim() > 1:
                self.largest = max(self.largest, tensor.numel())
        if "mm" in str(func):
            self.products.append(tuple(out.shape))
        return out


def test_training_never_builds_what_a_full_softmax_would() -> None:
    """Each tail sees its own tokens only, and its logits exist a chunk at a time."""
    case = Case("fairseq", True, None, False, 2, (50, 100), 60_100, 8)
    embedding, output = (layer.float() for layer in case.layers())
    targets = torch.randint(100, (1, 600))
    targets[0, :200] += 30_000
    for smoothing, allowed in ((0.0, 600 * 60_100 // 3), (0.1, 600 * 60_100 // 3)):
        for value in (
            lambda h: output.nll(h, targets).sum(),
            lambda h, s=smoothing: output.loss(h, targets, None, s)[0],
        ):
            hidden = torch.randn(1, 600, 8, requires_grad=True)
            with Watch() as watch:
                value(hidden).backward()
            assert watch.largest < allowed
            if smoothing == 0:
                assert sum(shape[0] for shape in watch.products if shape[1:] == (60_000,)) in (200, 400)  # nll: twice
    embedding(targets)


def test_a_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question is a wait for a GPU; its backward pass asks none that the CPU's does not (`cross_entropy`)."""
    embedding, output = CASES[1].layers()
    hidden, targets = torch.randn(2, 9, 11, dtype=DOUBLE), torch.randint(31, (2, 9))
    asked: list[str] = []
    for name in [
        "tolist",
        "item",
        "nonzero",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "cpu",
        "numpy",
        "unique",
    ]:
        original = getattr(Tensor, name)

        def noted(self: Tensor, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            asked.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, noted)
    output.nll(hidden, targets)
    assert asked == ["tolist"]
    output.loss(hidden, targets, label_smoothing=0.1)
    assert asked == ["tolist", "tolist"]
    embedding(targets)
    output(hidden)
    assert asked == ["tolist", "tolist"]


def test_without_gradients_none_are_formed() -> None:
    _, output = CASES[1].layers()
    hidden, targets = torch.randn(1, 6, 11, dtype=DOUBLE), torch.randint(31, (1, 6))
    with torch.no_grad(), Watch() as watch:
        loss, _ = output.loss(hidden, targets)
        each = output.nll(hidden, targets)
    assert not loss.requires_grad
    assert not each.requires_grad
    assert abs(float(each.mean() - loss)) < 1e-12
    assert not any(shape == tuple(w.shape) for shape in watch.products for w in output.weights)


# -- whole models -----------------------------------------------------------------------------------------------------


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


# -- starts -----------------------------------------------------------------------------------------------------------


def large(initializer: str, tied: bool, form: str) -> fr.LanguageModel:
    torch.manual_seed(3)
    return fr.LanguageModel(
        fr.ModelConfig(
            vocab_size=900, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, initializer=initializer,
            input=fr.InputConfig(kind="adaptive", cutoffs=[200, 500], div_val=2),
            output=fr.OutputConfig(kind="adaptive", tied=tied, form=form, bias=True, tied_projections=False),
        )
    )  # fmt: skip


def spread(tensor: Tensor) -> tuple[float, float]:
    """Standard deviation, and the largest number in units of it: sqrt(3) for a uniform distribution."""
    std = float(tensor.std())
    return std, float(tensor.abs().max()) / std


def is_normal(tensor: Tensor, std: float) -> None:
    found, longest = spread(tensor.detach())
    assert abs(found / std - 1) < 5 / (2 * tensor.numel()) ** 0.5
    assert longest > 2


def is_uniform(tensor: Tensor, bound: float) -> None:
    tensor = tensor.detach()
    assert float(tensor.abs().max()) <= bound * (1 + 1e-6)
    assert float(tensor.abs().max()) > bound * (1 - 20 / tensor.numel())
    found, longest = spread(tensor.detach())
    assert longest < 2.2
    assert abs(found / bound * 3**0.5 - 1) < 5 / tensor.numel() ** 0.5


def test_fairseq_starts() -> None:
    """Vectors N(0, 1 / width); projections, tails and the head (words and classes as one matrix) Xavier; biases 0."""
    made = large("fairseq", False, "transformer_xl")
    for i, width in enumerate((64, 32, 16)):
        is_normal(made.embedding.weights[i], width**-0.5)
        is_uniform(made.embedding.projections[i], (6 / (64 + width)) ** 0.5)
        is_uniform(made.output.projections[str(i)], (6 / (64 + width)) ** 0.5)
        assert float(made.output.biases[i].detach().abs().max()) == 0
    for part in (made.output.weights[0], made.output.class_weight):
        is_uniform(part, (6 / (64 + 202)) ** 0.5)
    is_uniform(made.output.weights[1], (6 / (300 + 32)) ** 0.5)
    is_uniform(made.output.weights[2], (6 / (400 + 16)) ** 0.5)
    is_uniform(large("fairseq", True, "fairseq").output.class_weight, (6 / (64 + 2)) ** 0.5)


def test_transformer_xl_starts() -> None:
    made = large("transformer_xl", False, "transformer_xl")
    for layer in (made.embedding, made.output):
        assert len(layer.projections) == 3
        for projection in layer.projections if layer is made.embedding else layer.projections.values():
            is_normal(projection, 0.01)
        for weight in layer.weights:
            is_normal(weight, 0.02)
    is_normal(made.output.class_weight, 0.02)
    assert all(float(p.detach().abs().max()) == 0 for n, p in made.output.named_parameters() if p.dim() == 1)


def test_pytorch_starts() -> None:
    """As nn.Embedding and nn.Linear."""
    made = large("pytorch", False, "transformer_xl")
    for i, width in enumerate((64, 32, 16)):
        is_normal(made.embedding.weights[i], 1.0)
        is_uniform(made.embedding.projections[i], width**-0.5)
        is_uniform(made.output.weights[i], width**-0.5)
        is_uniform(made.output.biases[i], width**-0.5)
        is_uniform(made.output.projections[str(i)], 1 / 8)
    is_uniform(made.output.class_weight, 1 / 8)
    assert 0 < float(made.output.class_bias.detach().abs().max()) <= 1 / 8


def test_layers_alone_start_too() -> None:
    sizes = {"vocab_size": 30, "hidden_size": 16}
    torch.manual_seed(1)
    embedding = fr.AdaptiveInput(fr.InputConfig(kind="adaptive", cutoffs=[10], div_val=4), **sizes)
    tied = fr.OutputConfig(kind="adaptive", cutoffs=[10], div_val=4, tied=True)
    output = fr.AdaptiveSoftmax(tied, embedding, **sizes)
    hidden = embedding(torch.tensor([[1, 29]]))
    assert hidden.isfinite().all()
    assert float(output.nll(hidden, torch.tensor([[29, 1]])).detach().min()) > 0


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_layers_alone_refuse() -> None:
    read, sizes = fr.InputConfig(kind="adaptive", cutoffs=[10], div_val=4), {"vocab_size": 30, "hidden_size": 16}
    written = fr.OutputConfig(kind="adaptive", cutoffs=[10], tied=True)
    for build, message in (
        (lambda: fr.AdaptiveInput(read), "give a ModelConfig, or an InputConfig with vocab_size and hidden_size"),
        (lambda: fr.AdaptiveInput(read, hidden_size=16), r"model\.vocab_size: must be a number"),
        (lambda: fr.AdaptiveInput(read, vocab_size=10, hidden_size=16), r"model\.input\.cutoffs: below .* 10"),
        (lambda: fr.AdaptiveInput(read, vocab_size=30, hidden_size=3), r"model\.input\.div_val: .* 3 / 4\^1 < 1"),
        (lambda: fr.AdaptiveInput(fr.ModelConfig(vocab_size=30, input=read), **sizes), "has its own sizes"),
        (lambda: fr.AdaptiveSoftmax(written), "or an OutputConfig with vocab_size and hidden_size"),
        (lambda: fr.AdaptiveSoftmax(written, **sizes), "tied to an AdaptiveInput with the same clusters"),
        (lambda: fr.AdaptiveSoftmax(written, fr.AdaptiveInput(read, **sizes), **sizes), "with the same clusters"),
        (lambda: fr.AdaptiveSoftmax(fr.OutputConfig(kind="adaptive"), **sizes), r"model\.output\.cutoffs: an adaptive"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            build()
