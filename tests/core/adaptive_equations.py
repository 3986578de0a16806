"""Adaptive softmax as its equations read, for tests that compare every probability and every gradient."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullrank as fr

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
