"""A cache that new tokens are written behind is still a value: whoever goes on from it, in whatever order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.core.cache import KeyValues
from moving import moved


def some(tokens: int, seed: int) -> Tensor:
    return torch.randn(2, 3, tokens, 4, generator=torch.Generator().manual_seed(seed))


def start(tokens: Tensor) -> KeyValues:
    return KeyValues.join(None, None, tokens, None)


def join(past: KeyValues, new: Tensor) -> KeyValues:
    return KeyValues.join(past, None, new, None)


def test_two_go_on_from_one() -> None:
    """Both find what they appended; the one that came second has a storage of its own."""
    first, a, b, c = some(5, 0), some(1, 1), some(2, 2), some(1, 3)
    with torch.no_grad():
        shared = join(start(first), some(1, 4))
        one = join(shared, a)
        two = join(shared, b)
        more = join(one, c)
    text = torch.cat((first, some(1, 4)), 2)
    for found, parts in ((shared, (text,)), (one, (text, a)), (two, (text, b)), (more, (text, a, c))):
        assert torch.equal(found.values, torch.cat(parts, 2))
    assert shared.buffers[1] is one.buffers[1] is more.buffers[1]
    assert two.buffers[1] is not shared.buffers[1]


def test_what_is_given_is_never_written_to_and_growing_is_rare() -> None:
    tokens = some(5, 0)
    found, buffers = start(tokens), []
    with torch.no_grad():
        for i in range(300):
            found = join(found, some(1, i + 1))
            buffers.append(found.buffers[1])
    assert torch.equal(tokens, some(5, 0))
    assert torch.equal(found.values, torch.cat((tokens, *(some(1, i + 1) for i in range(300))), 2))
    assert len({id(buffer) for buffer in buffers}) == 4  # 64, 128, 256, 512 tokens


@pytest.mark.parametrize(
    ("mix", "score", "normalize"),
    [
        ("none", "dot_product", "softmax"),
        ("position_independent", "relative", "softmax"),
        ("position_wise", "dot_product", "sigsoftmax"),
        ("position_wise", "relative", "softmax"),
    ],
)
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
