"""A cache stays a value although new tokens are stored behind it: any calls may go on from it, in any order."""

import torch

from fullrank.core.cache import KeyValues


def some(tokens, seed):
    return torch.randn(2, 3, tokens, 4, generator=torch.Generator().manual_seed(seed))


def join(past, new):
    return past.append(KeyValues(None, new))


def test_two_go_on_from_one():
    """Each holds what it appended; the second one to go on gets a storage of its own."""
    first, a, b, c = some(5, 0), some(1, 1), some(2, 2), some(1, 3)
    with torch.no_grad():
        shared = join(KeyValues(None, first), some(1, 4))
        left = join(shared, a)
        right = join(shared, b)
        longer = join(left, c)
    text = torch.cat((first, some(1, 4)), 2)
    for cache, parts in ((shared, (text,)), (left, (text, a)), (right, (text, b)), (longer, (text, a, c))):
        assert torch.equal(cache.values, torch.cat(parts, 2))
    assert shared.buffers[1] is left.buffers[1] is longer.buffers[1]
    assert right.buffers[1] is not shared.buffers[1]


def test_what_is_given_is_never_written_to_and_growing_is_rare():
    tokens = some(5, 0)
    cache = KeyValues(None, tokens)
    buffers = []
    with torch.no_grad():
        for i in range(300):
            cache = join(cache, some(1, i + 1))
            buffers.append(cache.buffers[1])
    assert torch.equal(tokens, some(5, 0))
    assert torch.equal(cache.values, torch.cat((tokens, *(some(1, i + 1) for i in range(300))), 2))
    assert len({id(buffer) for buffer in buffers}) == 4  # 64, 128, 256, 512 tokens
