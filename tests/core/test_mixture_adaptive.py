"""A mixture of adaptive softmaxes, and sigsoftmax on every vocabulary layer, against their equations."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import mixture_equations as equations
import pytest
import torch
from mixture_equations import DOUBLE, watched
from torch import Tensor, nn

import fullrank as fr
from fullrank.core.output import SoftmaxOutput


@dataclass(frozen=True)
class Adaptive:
    """An adaptive softmax, or with `mixtures` a mixture of them, and the tokens (B, N) it is given."""

    form: str = "fairseq"
    tied: bool = False
    tied_projections: bool | None = None
    bias: bool = False
    div_val: int = 2
    cutoffs: tuple[int, ...] = (4, 9, 15)
    vocabulary: int = 23
    width: int = 9
    mixtures: int | None = 3
    normalize: str = "softmax"
    epsilon: float = 0.0
    tokens: tuple[int, int] = (2, 7)

    def __str__(self) -> str:
        ties = ("tied" if self.tied else "untied") + {None: "", True: "-projections", False: "-own"}[
            self.tied_projections
        ]
        extra = "-".join(str(x) for x in (self.normalize, self.epsilon, "bias" if self.bias else "") if x)
        return f"K{self.mixtures}-{self.form}-{ties}-div{self.div_val}-{len(self.cutoffs) + 1}-{extra}"

    def make(self, dtype: torch.dtype = DOUBLE, **changes: Any) -> tuple[nn.Module, nn.Module | None]:
        """The layer and the input it is tied to; every parameter N(0, 0.7^2)."""
        clusters: dict[str, Any] = {"cutoffs": list(self.cutoffs), "div_val": self.div_val}
        sizes = {"vocab_size": self.vocabulary, "hidden_size": self.width}
        mixed = {"kind": "mixture_of_softmaxes", "mixtures": self.mixtures, "epsilon": self.epsilon}
        config = fr.OutputConfig(
            **({"kind": "adaptive"} if self.mixtures is None else mixed) | clusters | changes, form=self.form,
            tied=self.tied, tied_projections=self.tied_projections, bias=self.bias, normalize=self.normalize,
        )  # fmt: skip
        embedding = fr.AdaptiveInput(fr.InputConfig(kind="adaptive", **clusters), **sizes)
        output = fr.AdaptiveSoftmax(config, embedding if self.tied else None, **sizes)
        torch.manual_seed(11)
        for parameter in (*embedding.parameters(), *output.parameters()):
            parameter.data.copy_(torch.randn(parameter.shape, dtype=DOUBLE) * 0.7)
        return output.to(dtype), embedding.to(dtype) if self.tied else None

    def words(self, tensors: dict[str, Tensor], h: Tensor) -> Tensor:
        """p(v | h) (T, V): the place of a word in the head, or that of its class times its own place in the tail."""
        bounds = [0, *self.cutoffs, self.vocabulary]

        def read(i: int) -> Tensor:
            if self.div_val == 1 or (i == 0 and self.form == "fairseq"):
                return h
            shared = i > 0 and (self.tied if self.tied_projections is None else self.tied_projections)
            return h @ tensors[f"{'input.' if shared else ''}projections.{i}"]

        def scores(i: int) -> Tensor:
            found = read(i) @ tensors[f"{'input.' if self.tied else ''}weights.{i}"].T
            return found + tensors[f"biases.{i}"] if self.bias else found

        classes = read(0) @ tensors["class_weight"].T
        classes = classes + tensors["class_bias"] if self.bias else classes
        head = equations.one_softmax(torch.cat((scores(0), classes), 1), self.normalize)
        tails = [equations.one_softmax(scores(i), self.normalize) for i in range(1, len(bounds) - 1)]
        columns = []
        for word in range(self.vocabulary):
            i = next(i for i, end in enumerate(bounds[1:]) if word < end)
            inside = head[:, self.cutoffs[0] + i - 1] * tails[i - 1][:, word - bounds[i]] if i else head[:, word]
            columns.append(inside)
        return torch.stack(columns, 1)

    def log_prob(self, tensors: dict[str, Tensor], hidden: Tensor) -> Tensor:
        """log(sum_k pi_k p(v | h_k) + epsilon), (B, N, V)."""
        rows = hidden.flatten(0, 1)
        if self.mixtures is None:
            found = self.words(tensors, rows)
        else:
            found = torch.zeros((), dtype=DOUBLE)
            for share, h in equations.components(tensors, rows, self.mixtures):
                found = found + share * self.words(tensors, h)
        return (found + self.epsilon).log().view(*hidden.shape[:2], -1)


CASES = [
    *(Adaptive(form, *ties, bias, div)
      for form, ties, bias, div in itertools.product(
          ["fairseq", "transformer_xl"], [(False, None), (True, True), (True, False)], [False, True], [1, 2])),
    Adaptive(mixtures=1),
    Adaptive("transformer_xl", bias=True, mixtures=10, tokens=(1, 3)),
    Adaptive(cutoffs=(22,), mixtures=2),
    Adaptive(cutoffs=(1, 2), vocabulary=3, width=4, mixtures=2, tokens=(5, 1)),
    Adaptive(epsilon=1e-3, bias=True),
    Adaptive(epsilon=1e-8),
    Adaptive(normalize="sigsoftmax", bias=True),
    Adaptive("transformer_xl", True, normalize="sigsoftmax", epsilon=1e-3),
    Adaptive(normalize="sigsoftmax", bias=True, mixtures=None),
    Adaptive("transformer_xl", True, normalize="sigsoftmax", mixtures=None),
]  # fmt: skip


def both(
    case: Adaptive, dtype: torch.dtype = DOUBLE, targets: Tensor | None = None
) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The layer, hidden states, targets; then what gradients are taken of: the layer's tensors, and the equation's."""
    output, embedding = case.make(dtype)
    leaves = dict(output.named_parameters())
    if embedding is not None:
        used = [f"weights.{i}" for i in range(len(case.cutoffs) + 1)]
        if case.div_val > 1 and case.tied_projections is not False:
            used += [f"projections.{i}" for i in range(1, len(case.cutoffs) + 1)]
        leaves |= {f"input.{name}": embedding.get_parameter(name) for name in used}
    targets = torch.randint(case.vocabulary, case.tokens) if targets is None else targets
    hidden = torch.randn(*targets.shape, case.width, dtype=DOUBLE).to(dtype).requires_grad_()
    leaves["hidden"] = hidden
    return output, hidden, targets, leaves, {n: t.detach().double().clone().requires_grad_() for n, t in leaves.items()}


def check(case: Adaptive, dtype: torch.dtype = DOUBLE, given: Tensor | None = None) -> None:
    """Log-probabilities, nll, losses, and every gradient."""
    layer, hidden, targets, leaves, copies = both(case, dtype, given)
    logs = case.log_prob(copies, copies["hidden"])
    total = 1 + case.vocabulary * case.epsilon
    assert torch.allclose(logs.exp().sum(-1), torch.full(targets.shape, total, dtype=DOUBLE))
    found = layer.log_prob(hidden)
    equations.compared(found, logs, leaves, copies, torch.randn(logs.shape, dtype=DOUBLE))
    assert torch.equal(layer(hidden), found)
    each = -logs.gather(-1, targets[..., None]).squeeze(-1)
    _compared(layer.nll(hidden, targets), each, leaves, copies, torch.randn(targets.shape, dtype=DOUBLE))
    weights = torch.rand(targets.shape, dtype=DOUBLE).to(dtype) + 0.1
    weights[:, 1::3] = 0
    for smoothing, share in ((0.0, None), (0.0, weights), (0.1, weights), (0.6, None)):
        loss, nll = layer.loss(hidden, targets, share, smoothing)
        expected = equations.mean_loss(logs, targets, share, smoothing)
        _compared(loss, expected, leaves, copies, torch.tensor(-1.7, dtype=DOUBLE))
        plain = equations.mean_loss(logs, targets, share, 0.0).detach()
        equations.close("nll", nll, plain, 1e-9 if dtype == DOUBLE else 1e-5)
        assert not nll.requires_grad


def _compared(
    found: Tensor, expected: Tensor, leaves: dict[str, Tensor], copies: dict[str, Tensor], cotangent: Tensor
) -> None:
    """Of the equation, tails that no target is in have no gradient at all; of the layer, one of zeros."""
    nothing = sum((copy.sum() for copy in copies.values()), torch.zeros((), dtype=DOUBLE)) * 0
    equations.compared(found, expected + nothing, leaves, copies, cotangent)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_probability_and_every_gradient(case: Adaptive) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES[3::4], ids=str)
def test_in_single_precision(case: Adaptive) -> None:
    check(case, torch.float32)


@pytest.mark.parametrize("case", [CASES[0], CASES[11], CASES[18]], ids=str)
@pytest.mark.parametrize("cluster", range(4))
def test_targets_of_one_cluster_only(case: Adaptive, cluster: int) -> None:
    bounds = [0, *case.cutoffs, case.vocabulary]
    if cluster + 1 < len(bounds):
        check(case, given=torch.randint(bounds[cluster], bounds[cluster + 1], (2, 5)))
        check(case, given=torch.tensor([[bounds[cluster]]]))


def test_gradcheck() -> None:
    case = Adaptive("transformer_xl", bias=True, cutoffs=(2, 3), vocabulary=6, width=4, mixtures=2)
    layer, hidden, targets, leaves, _ = both(case, targets=torch.tensor([[5, 0, 2, 4]]))
    given = tuple(leaves.values())
    assert torch.autograd.gradcheck(lambda *_: layer.nll(hidden, targets), given)
    assert torch.autograd.gradcheck(lambda *_: layer.loss(hidden, targets)[0], given)
    assert torch.autograd.gradcheck(lambda *_: layer.loss(hidden, targets, None, 0.2)[0], given)
    assert torch.autograd.gradcheck(lambda *_: layer(hidden), given)


def test_parameters() -> None:
    """Those of the adaptive softmax, and those of a mixture."""
    for case in (CASES[3], CASES[7]):
        mixed, plain = case.make()[0].state_dict(), Adaptive(**vars(case) | {"mixtures": None}).make()[0].state_dict()
        own = {name: tuple(tensor.shape) for name, tensor in mixed.items() if name.startswith("mixture.")}
        assert own == {"mixture.latent.weight": (27, 9), "mixture.latent.bias": (27,), "mixture.prior.weight": (3, 9)}
        assert {name: tensor.shape for name, tensor in mixed.items() if name not in own} == {
            name: tensor.shape for name, tensor in plain.items()
        }


@pytest.mark.parametrize("form", ["fairseq", "transformer_xl"])
def test_one_softmax_without_latent_is_the_adaptive_softmax(form: str) -> None:
    case = Adaptive(form, bias=True, mixtures=1)
    mixture, _ = case.make(latent=False)
    plain, _ = Adaptive(form, bias=True, mixtures=None).make()
    assert mixture.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(mixture.state_dict())
    hidden, targets = torch.randn(2, 9, 9, dtype=DOUBLE, requires_grad=True), torch.randint(23, (2, 9))
    for run in (
        lambda made: made(hidden), lambda made: made.nll(hidden, targets), lambda made: made.loss(hidden, targets)[0],
        lambda made: made.loss(hidden, targets, None, 0.3)[0],
    ):  # fmt: skip
        found, expected = run(mixture), run(plain)
        equations.close("value", found.detach(), expected.detach(), 1e-12)
        cotangent = torch.randn_like(found)
        gradients = [
            torch.autograd.grad(value, [hidden, *made.parameters()], cotangent)
            for value, made in ((found, mixture), (expected, plain))
        ]
        for one, other in zip(*gradients, strict=True):
            equations.close("gradient", one, other, 1e-12)


def test_an_improbable_word_keeps_its_gradient() -> None:
    """log p = -200 in fp32, within a tail and as a class."""
    case = Adaptive(cutoffs=(1,), vocabulary=3, width=2, div_val=1, mixtures=2, tokens=(1, 1))
    for target, rare in ((2, "weights.1"), (1, "class_weight")):
        results = []
        for dtype in (torch.float32, DOUBLE):
            layer, _ = case.make(dtype)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(0.1)
                dict(layer.named_parameters())["mixture.latent.bias"].copy_(torch.tensor([0.7, 0.5, 0.6, 0.6]))
                dict(layer.named_parameters())[rare][-1].copy_(torch.tensor([-170.0, -170.0]))
            hidden = torch.tensor([[[0.3, -0.2]]], dtype=dtype, requires_grad=True)
            values = (layer.nll(hidden, torch.tensor([[target]])).sum(), layer.loss(hidden, torch.tensor([[target]]))[0],
                      -layer(hidden)[0, 0, target])  # fmt: skip
            results.append([(float(v.detach()), torch.autograd.grad(v, hidden)[0]) for v in values])
        for (value, gradient), (right, exact) in zip(*results, strict=True):
            assert right > 150
            assert abs(value / right - 1) < 1e-5
            assert float(exact.abs().max()) > 1
            equations.close("gradient", gradient, exact, 1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_memory(smoothing: float) -> None:
    """Never (T, K, V): the tails of a word's own tokens, or with label smoothing some tokens at a time."""
    case = Adaptive(cutoffs=(50, 100), vocabulary=30_100, width=4, mixtures=5, tokens=(1, 300))
    layer, _ = case.make(torch.float32)
    targets = torch.randint(100, case.tokens)
    targets[0, :25] += 20_000
    hidden = torch.randn(1, 300, 4, requires_grad=True)
    everything = 300 * 5 * 30_100
    watch = watched(lambda: layer.loss(hidden, targets, None, smoothing)[0].backward())
    assert watch.largest < everything / 4
    assert watch.peak < 4 * everything
    watch = watched(lambda: layer.nll(hidden, targets).sum().backward())
    assert watch.largest < everything / 4
    if smoothing == 0:
        with torch.no_grad():
            assert watched(lambda: layer(hidden)).largest <= everything / 4  # (T, V) itself is a fifth


def test_dropout_of_latents_and_tails() -> None:
    """One seed, one draw; the gradients are those of the values, also where a part is computed again."""
    case = Adaptive("transformer_xl", bias=True, cutoffs=(2, 4), vocabulary=8, width=5)
    layer, _ = case.make(latent_dropout=0.3, tail_dropout=0.3)
    hidden, targets = torch.randn(1, 4, 5, dtype=DOUBLE, requires_grad=True), torch.tensor([[0, 5, 7, 2]])

    def seeded(run: Any) -> Any:
        def call(*_: Tensor) -> Tensor:
            torch.manual_seed(3)
            value: Tensor = run()
            return value

        return call

    for run in (
        lambda: layer.nll(hidden, targets), lambda: layer.loss(hidden, targets)[0],
        lambda: layer.loss(hidden, targets, None, 0.2)[0], lambda: layer(hidden)[..., ::3],
    ):  # fmt: skip
        assert torch.autograd.gradcheck(seeded(run), (hidden, layer.mixture.latent.bias))
    assert torch.allclose(
        seeded(lambda: layer.nll(hidden, targets).mean())(),
        seeded(lambda: layer.loss(hidden, targets)[0])(),
        atol=1e-12,
    )
    layer.eval()
    expected = case.log_prob(dict(layer.named_parameters()), hidden)
    assert torch.allclose(layer(hidden), expected, atol=1e-10)


def test_under_autocast() -> None:
    case = Adaptive("transformer_xl", bias=True, width=16, tokens=(4, 60))
    layer, hidden, targets, leaves, _ = both(case, torch.float32)
    for smoothing in (0.0, 0.1):
        right = layer.loss(hidden, targets, None, smoothing)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = layer.loss(hidden, targets, None, smoothing)[0]
            assert layer(hidden).dtype == layer.nll(hidden, targets).dtype == loss.dtype == torch.float32
        assert abs(float((loss / right).detach()) - 1) < 3e-3
        asked = list(leaves.values())
        for name, one, other in zip(
            leaves, torch.autograd.grad(loss, asked), torch.autograd.grad(right, asked), strict=True
        ):
            assert one.dtype == torch.float32
            assert float((one - other).norm() / other.norm()) < 5e-2, name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32], ids=["fp64", "fp32"])
def test_sigsoftmax_on_one_softmax(bias: bool, dtype: torch.dtype) -> None:
    """p proportional to e^z sigmoid(z); the model's logits are what it is the softmax of."""
    config = fr.ModelConfig(
        vocab_size=211, hidden_size=5, num_attention_heads=1, output=fr.OutputConfig(normalize="sigsoftmax", bias=bias)
    )
    layer = SoftmaxOutput(config, nn.Identity()).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    hidden, targets = torch.randn(3, 13, 5, dtype=DOUBLE).to(dtype).requires_grad_(), torch.randint(211, (3, 13))
    leaves = dict(layer.named_parameters()) | {"hidden": hidden}
    copies = {name: tensor.detach().double().clone().requires_grad_() for name, tensor in leaves.items()}
    scores = copies["hidden"].flatten(0, 1) @ copies["weight"].T + (copies["bias"] if bias else 0)
    logs = equations.one_softmax(scores, "sigsoftmax").log().view(3, 13, -1)
    cotangent = torch.randn(3, 13, 211, dtype=DOUBLE)
    for found in (layer.log_prob(hidden), torch.log_softmax(layer(hidden), -1)):
        equations.compared(found, logs, leaves, copies, cotangent)
    each = -logs.gather(-1, targets[..., None]).squeeze(-1)
    equations.compared(layer.nll(hidden, targets), each, leaves, copies, cotangent[..., 0])
    for smoothing in (0.0, 0.1, 0.6):
        expected = equations.mean_loss(logs, targets, None, smoothing)
        loss = layer.loss(hidden, targets, None, smoothing)[0]
        equations.compared(loss, expected, leaves, copies, torch.tensor(2.5, dtype=DOUBLE))
