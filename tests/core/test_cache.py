"""A cache that new tokens are written behind is still a value: whoever goes on from it, in whatever order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.core.cache import Buffer, append
from moving import moved


def some(tokens: int, seed: int) -> Tensor:
    return torch.randn(2, 3, tokens, 4, generator=torch.Generator().manual_seed(seed))


def test_two_go_on_from_one() -> None:
    """Both find what they appended; the one that came second has a storage of its own."""
    first, a, b, c = some(5, 0), some(1, 1), some(2, 2), some(1, 3)
    with torch.no_grad():
        begun, room = append(first, Buffer.full(first), some(1, 4))
        one, room_one = append(begun, room, a)
        two, room_two = append(begun, room, b)
        more, room_more = append(one, room_one, c)
    start = torch.cat((first, some(1, 4)), 2)
    assert torch.equal(begun, start)
    assert torch.equal(one, torch.cat((start, a), 2))
    assert torch.equal(two, torch.cat((start, b), 2))
    assert torch.equal(more, torch.cat((start, a, c), 2))
    assert room is room_one is room_more
    assert room_two is not room


def test_what_is_given_is_never_written_to_and_growing_is_rare() -> None:
    tokens = some(5, 0)
    kept, rooms = tokens.clone(), []
    found, room = tokens, Buffer.full(tokens)
    with torch.no_grad():
        for i in range(300):
            found, room = append(found, room, some(1, i + 1))
            rooms.append(room)
    assert torch.equal(tokens, kept)
    assert torch.equal(found, torch.cat((tokens, *(some(1, i + 1) for i in range(300))), 2))
    assert len({id(room) for room in rooms}) == 4  # 64, 128, 256, 512 tokens


def test_gradients_and_other_dtypes_are_joined() -> None:
    tokens = some(5, 0).requires_grad_()
    found, room = append(tokens, Buffer.full(tokens), some(1, 1))
    assert room is None
    found.sum().backward()
    assert torch.equal(tokens.grad, torch.ones_like(tokens))  # type: ignore[arg-type]
    with torch.no_grad():
        found, room = append(some(5, 0), Buffer.full(some(5, 0)), some(1, 1).double())
    assert room is None
    assert found.dtype == torch.float64


def test_a_cache_of_inference_mode_goes_on_outside_of_it() -> None:
    with torch.inference_mode():
        first = some(5, 0)
        begun, room = append(first, Buffer.full(first), some(1, 1))
    with torch.no_grad():
        found, _ = append(begun, room, some(1, 2))
    assert torch.equal(found, torch.cat((some(5, 0), some(1, 1), some(1, 2)), 2))


@pytest.mark.parametrize("mix", ["none", "position_independent", "position_wise", "random", "average"])
@pytest.mark.parametrize("score", ["dot_product", "relative"])
@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
def test_texts_that_branch_are_those_of_one_pass(mix: str, score: str, normalize: str) -> None:
    """Token after token, then twice from the same cache: each branch has the logits of its own text read at once."""
    config = fr.ModelConfig(
        vocab_size=11, hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
        position="relative" if score == "relative" else "sinusoidal",
        attention=fr.AttentionConfig(mix=mix, score=score, normalize=normalize),
    )  # fmt: skip
    torch.manual_seed(3)
    model = moved(fr.LanguageModel(config)).double().eval()
    text = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(5))
    other = text.flip(0).clone()
    other[:, :6] = text[:, :6]
    with torch.no_grad():
        whole, branch = model(text).logits, model(other).logits
        cache, begun = model.new_cache(), model.new_cache()
        for i in range(9):
            out = model(text[:, i : i + 1], cache=cache)
            cache = out.cache
            begun = cache if i == 5 else begun
            torch.testing.assert_close(out.logits[:, 0], whole[:, i], rtol=0, atol=1e-11)
        for i in range(6, 9):
            out = model(other[:, i : i + 1], cache=begun)
            begun = out.cache
            torch.testing.assert_close(out.logits[:, 0], branch[:, i], rtol=0, atol=1e-11)
