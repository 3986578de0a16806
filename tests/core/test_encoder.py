"""The encoder alone: everything sees everything, padding is no place, and what it is built from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.core.errors import ConfigError, InputError
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
every_kind = pytest.mark.parametrize("kind", KINDS)


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
            said = model.encode(ids, mask, padded_right=side == "right").hidden
            assert torch.equal(said[seen], model(ids, mask)[seen])
        for whole in (torch.ones(3, 7), torch.ones(3, 7, dtype=torch.bool)):
            assert torch.equal(model(ids, whole), model(ids))


def test_a_text_read_backwards_is_another_text_unless_there_are_no_positions() -> None:
    ids = tokens(SOURCE, 2, 6)
    with torch.no_grad():
        for kind in KINDS:
            model = encoder(kind)
            same = torch.allclose(model(ids.flip(1)).flip(1), model(ids), atol=1e-9)
            assert same == (kind == "no positions"), kind


def test_as_published_is_masked_here() -> None:
    """Nothing is hidden from an encoder anyway."""
    published, masked = (
        encoder("pairs", attention=PAIRS | {"causal": "as_published", "not_next_token_perplexity": True}),
        encoder("pairs"),
    )
    ids = tokens(SOURCE, 2, 6)
    with torch.no_grad():
        assert torch.equal(published(ids), masked(ids))


def test_the_longest_sentence() -> None:
    for kind, longest in (
        ("plain", None),
        ("learned", 16),
        ("random", 16),
        ("dense", 16),
        ("pairs", 16),
        ("decayed", None),
    ):
        model = encoder(kind)
        assert model.max_length == longest
        with torch.no_grad():
            assert model(tokens(SOURCE, 1, 16)).isfinite().all()
            if longest is None:
                assert model(tokens(SOURCE, 1, 40)).isfinite().all()
                continue
            with pytest.raises(InputError, match="17"):
                model(tokens(SOURCE, 1, 17))
            long, mask = tokens(SOURCE, 1, 20), padding([16], 20, "left")  # padding takes no place
            close(model(long, mask)[:, 4:], model(long[:, 4:]), kind)


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="an encoder reads sentences, not a running text"):
        fr.Encoder(fr.ModelConfig(**SIZES, memory_length=3))
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        fr.Encoder(fr.ModelConfig())
    model = encoder()
    with pytest.raises(InputError, match=r"input_ids must be \(B, M\)"):
        model(torch.zeros(3, dtype=torch.long))
    with pytest.raises(InputError, match=r"attention_mask must be \(2, 3\)"):
        model(torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4))
    with pytest.raises(InputError, match="at least one token"):
        model(torch.zeros(2, 0, dtype=torch.long))
