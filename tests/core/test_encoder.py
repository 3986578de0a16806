"""The encoder alone: everything sees everything, padding is no place, and what it is built from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fullrank as fr
from moving import moved
from translator_models import DECAYED, PAIRS, SIZES, SOURCE, WIDE, WIDTH, close, padding, tokens

LENGTHS = [7, 3, 5]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "post-norm": {"norm": "post"},
    "B": {"attention": {"mix": "position_wise"}},
    "A, sigsoftmax": {"attention": {"mix": "position_independent", "normalize": "sigsoftmax"}},
    "learned": {"position": "learned"},
    "rotary": {"position": "rotary"},
    "relative": {"position": "relative", "attention": {"score": "relative"}},
    "relative, B": {"position": "relative", "attention": {"score": "relative", "mix": "position_wise"}},
    "no positions": {"position": "none"},
    "dense": {"attention": {"score": "dense_synthesizer"}},
    "random": {"attention": {"score": "random_synthesizer"}},
    "pairs": {"attention": PAIRS},
    "position term": {"position": "relative", "attention": PAIRS | {"score": "relative"}},
    "decayed": {"attention": DECAYED},
    "adaptive": {"input": {"kind": "adaptive", "cutoffs": [4, 8], "div_val": 2}},
}
EVERYDAY = {"B", "relative, B", "random", "decayed", "adaptive"}
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in EVERYDAY else pytest.mark.full) for kind in KINDS]
)


def encoder(kind: str = "plain", **changes: Any) -> fr.Encoder:
    keys = KINDS[kind] | changes
    keys["attention"] = fr.AttentionConfig(**keys.get("attention", {}))
    if "input" in keys:
        keys["input"] = fr.InputConfig(**keys["input"])
    torch.manual_seed(2)
    return moved(fr.Encoder(fr.ModelConfig(**SIZES | {"vocab_size": SOURCE} | keys)).double().eval())


@every_kind
def test_every_token_sees_every_other(kind: str) -> None:
    """By gradient and by perturbation: no output without a part of each token."""
    model: Any = encoder(kind)
    read: list[Tensor] = []

    def leaf(module: Any, args: Any, out: Tensor) -> Tensor:
        read.append(out.detach().requires_grad_())
        return read[-1]

    handle = model.embedding.register_forward_hook(leaf)
    ids = tokens(SOURCE, 2, 6)
    hidden = model(ids)
    assert hidden.shape == (2, 6, WIDTH)
    for place in range(6):
        (gradient,) = torch.autograd.grad(hidden[:, place], read, torch.randn(2, WIDTH, dtype=WIDE), retain_graph=True)
        assert (gradient.abs().amax(2) > 0).all(), f"the state of token {place} leaves a token out"
    handle.remove()
    with torch.no_grad():
        for place in range(6):
            other = ids.clone()
            other[:, place] = (other[:, place] + 1) % SOURCE
            moved_by = (model(other) - model(ids)).abs().amax(2)
            assert (moved_by > 1e-9).all(), f"token {place} is not seen by all"


@every_kind
def test_padding_takes_no_place(kind: str) -> None:
    model = encoder(kind)
    ids = tokens(SOURCE, 3, 7)
    with torch.no_grad():
        for side in ("right", "left"):
            mask = padding(LENGTHS, 7, side)
            found = [model(ids.masked_fill(mask == 0, junk), mask) for junk in (0, SOURCE - 1)]
            seen = mask.bool()
            assert torch.equal(found[0][seen], found[1][seen]), "what stands in the padding is read"
            assert found[0].isfinite().all()
            for row in range(3):
                close(found[0][row][seen[row]], model(ids[row][seen[row]][None])[0], f"{side}, row {row}")
        for whole in (torch.ones(3, 7), torch.ones(3, 7, dtype=torch.bool)):
            close(model(ids, whole), model(ids), "whole")
