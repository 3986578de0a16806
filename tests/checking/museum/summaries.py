"""Summaries of blocks, choices among keys and filters that reach into the future."""

import leaky_models as leaky
import torch
from torch import nn

from museum.exhibit import BY_PERTURBATION, EVERY_WAY, Exhibit, later, with_block


def means(x, size):
    """Means (B, M, E) of the complete blocks of `size` tokens."""
    count = x.shape[1] // size
    return x[:, : count * size].unflatten(1, (count, size)).mean(2) if count else x[:, :0]


def spread(summaries, size, length, late):
    """Every position gets the summary of its block, or of the block before with `late`; zero where there is none."""
    if late:
        summaries = torch.cat((torch.zeros_like(summaries[:, :1]), summaries), dim=1)
    out = summaries.repeat_interleave(size, dim=1)[:, :length]
    return nn.functional.pad(out, (0, 0, 0, length - out.shape[1]))


class BlockSummaries(leaky.Attention):
    """Queries, keys and values get the means of their block of 16 tokens, later ones among them. 0.024 bits per byte.

    https://github.com/karpathy/nanochat/issues/844 (there 64 tokens)
    """

    size = 16

    def __init__(self, late):
        super().__init__(leaky.causal)
        self.late = late

    def forward(self, x):
        projected = self.project(x)
        projected = projected + spread(means(projected, self.size), self.size, x.shape[1], self.late)
        query, key, value = projected.chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
        return scores.masked_fill(~leaky.causal(x.shape[1]), float("-inf")).softmax(-1) @ value


class Wrapped(nn.Module):
    """A filter of 4 taps by a transform of the text's own size wraps around: the first 3 tokens see the last 3.

    What the padding is for: https://github.com/state-spaces/s4/pull/104
    """

    def __init__(self, padding):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(4, leaky.WIDTH))
        self.padding = padding

    def forward(self, x):
        wide = x.float() if x.dtype == torch.bfloat16 else x
        size = x.shape[1] + self.padding
        response = torch.fft.rfft(self.taps.to(wide.dtype), size, dim=0)
        filtered = torch.fft.irfft(torch.fft.rfft(wide, size, dim=1) * response, size, dim=1)
        return filtered[:, : x.shape[1]].to(x.dtype)


class Compressed(leaky.Attention):
    """Attention to itself and to the `chosen` best of compressed blocks, each of which stands for `ratio` tokens.

    An indexer scores the blocks. seen: "all" blocks (https://github.com/huggingface/transformers/issues/45820, DeepSeek-V4);
    "begun" ones, among them that of the query itself (https://github.com/vllm-project/tpu-inference/issues/3536); or the
    "complete" ones.
    """

    ratio, chosen = 4, 8

    def __init__(self, seen):
        super().__init__(leaky.causal)
        self.seen = seen
        self.index = nn.Linear(leaky.WIDTH, 2 * leaky.WIDTH)

    def forward(self, x):
        n = x.shape[1]
        query, key, value = self.project(x).chunk(3, dim=-1)
        index_query, index_key = self.index(x).chunk(2, dim=-1)
        blocks = torch.arange(n // self.ratio, device=x.device)
        position = torch.arange(n, device=x.device)[:, None]
        last = {"all": blocks.max() + 1 if n >= self.ratio else 0, "begun": position // self.ratio,
                "complete": (position + 1) // self.ratio - 1}[self.seen]  # fmt: skip
        allowed = blocks <= last
        index = (index_query @ means(index_key, self.ratio).transpose(1, 2)).masked_fill(~allowed, float("-inf"))
        best = index.topk(min(self.chosen, len(blocks)), dim=-1).indices
        taken = torch.zeros_like(index, dtype=torch.bool).scatter(-1, best, True) & allowed
        scores = (query @ means(key, self.ratio).transpose(1, 2)).masked_fill(~taken, float("-inf"))
        scores = torch.cat(((query * key).sum(-1, keepdim=True), scores), dim=-1) / leaky.WIDTH**0.5
        weights = scores.softmax(-1)
        return weights[..., :1] * value + weights[..., 1:] @ means(value, self.ratio)


class Indexer(leaky.Attention):
    """An indexer chooses 8 keys for each query among all keys; only then is the future masked.

    Later tokens are never read, but they take the places of earlier ones. DeepSeek-V3.2:
    https://github.com/lablup/mlxcel/issues/619
    """

    chosen = 8

    def __init__(self, masked):
        super().__init__(leaky.causal)
        self.masked = masked
        self.index = nn.Linear(leaky.WIDTH, 2 * leaky.WIDTH)

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        index_query, index_key = self.index(x).chunk(2, dim=-1)
        causal = leaky.causal(x.shape[1])
        index = index_query @ index_key.transpose(1, 2)
        if self.masked:
            index = index.masked_fill(~causal, float("-inf"))
        best = index.topk(min(self.chosen, x.shape[1]), dim=-1).indices
        taken = torch.zeros_like(index, dtype=torch.bool).scatter(-1, best, True)
        seen = (taken & causal) | torch.eye(x.shape[1], dtype=torch.bool)
        scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value


EXHIBITS = [
    Exhibit(
        "nanochat, first: means of blocks",
        "https://github.com/karpathy/nanochat/issues/844",
        with_block(lambda: BlockSummaries(late=False)),
        with_block(lambda: BlockSummaries(late=True)),
        later(),
        EVERY_WAY,
    ),
    Exhibit(
        "a filter that wraps around: from more than 60 tokens ahead only",
        "https://github.com/state-spaces/s4/pull/104",
        with_block(lambda: Wrapped(padding=0)),
        with_block(lambda: Wrapped(padding=3)),
        later(),
        EVERY_WAY,
        length=67,
    ),
    Exhibit(
        "DeepSeek-V4: an indexer without a mask",
        "https://github.com/huggingface/transformers/issues/45820",
        with_block(lambda: Compressed("all")),
        with_block(lambda: Compressed("complete")),
        later(),
        EVERY_WAY,
    ),
    Exhibit(
        "DeepSeek-V4 on TPU: the block in progress",
        "https://github.com/vllm-project/tpu-inference/issues/3536",
        with_block(lambda: Compressed("begun")),
        with_block(lambda: Compressed("complete")),
        later(cut=42),
        EVERY_WAY,
    ),
    Exhibit(
        "DeepSeek-V3.2: later tokens decide which keys are seen",
        "https://github.com/lablup/mlxcel/issues/619",
        with_block(lambda: Indexer(masked=False)),
        with_block(lambda: Indexer(masked=True)),
        later(),
        BY_PERTURBATION,
    ),
]
