"""Models with a cache: what is seen depends on how the text is cut into calls."""

import types
from collections.abc import Callable

import leaky_models as leaky
import torch
from torch import Tensor, nn

from museum.exhibit import EVERY_WAY, Exhibit, future, later, plainly, tokens

Sees = Callable[[int, int], Tensor]
Pair = tuple[Tensor, Tensor]


def causal(new, past):
    """(new, past + new): the last query sees all."""
    return torch.ones(new, past + new, dtype=torch.bool).tril(past)


def everything_after_a_cache(new, past):
    """A later chunk sees itself whole. https://github.com/nntrainer/nntrainer/issues/4333"""
    return causal(new, past) if past == 0 else torch.ones(new, past + new, dtype=torch.bool)


def everything_after_a_long_cache(new, past):
    """The same, once the cache is as long as a block of the kernel (there 64 tokens, here 16).

    https://github.com/tenstorrent/tt-metal/issues/48899
    """
    return causal(new, past) if past < 16 else torch.ones(new, past + new, dtype=torch.bool)


def masked_step_by_step(new, past):
    """The branch of single tokens masks, where there is nothing to mask; that of several tokens does not.

    DeepSeek-V2 of mlxcel: https://github.com/lablup/mlxcel/issues/991, mended by /pull/998
    """
    return causal(new, past) if new == 1 else torch.ones(new, past + new, dtype=torch.bool)


class CachedAttention(leaky.Attention):
    """Gives its output and the keys and values so far."""

    def __init__(self, sees):
        super().__init__(leaky.causal)
        self.sees_after = sees

    def forward(self, x, past=None):
        query, key, value = self.project(x).chunk(3, dim=-1)
        if past is not None:
            key = torch.cat((past[0], key), dim=1)
            value = torch.cat((past[1], value), dim=1)
        new = x.shape[1]
        scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
        scores = scores.masked_fill(~self.sees_after(new, key.shape[1] - new), float("-inf"))
        return scores.softmax(-1) @ value, (key, value)


class CachedBlock(leaky.Block):
    def forward(self, x, past=None):
        seen, pair = self.attention(self.norm(x), past)
        x = x + seen
        return x + self.feed_forward(x), pair


class Cached(nn.Module):
    """Takes and gives `past_key_values`: keys and values of each layer."""

    def __init__(self, sees):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(leaky.VOCABULARY, leaky.WIDTH)
        self.blocks = nn.ModuleList(CachedBlock(CachedAttention(s)) for s in (causal, sees))
        self.output = nn.Linear(leaky.WIDTH, leaky.VOCABULARY)

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        x = self.embedding(input_ids)
        pairs = []
        for i, block in enumerate(self.blocks):
            x, pair = block(x, None if past_key_values is None else past_key_values[i])
            pairs.append(pair)
        return types.SimpleNamespace(logits=self.output(x), past_key_values=tuple(pairs) if use_cache else None)


class CachedByKeyword(Cached):
    """`use_cache` is among other options, as in many models of transformers."""

    def forward(self, input_ids, past_key_values=None, **options):
        return super().forward(input_ids, past_key_values, options.get("use_cache", False))


class CachedAmongOthers(Cached):
    """The cache itself is among other options, too."""

    def forward(self, input_ids, **options):
        return super().forward(input_ids, options.get("past_key_values"), options.get("use_cache", False))


class CachedInATuple(Cached):
    """Gives (logits, cache), as models with return_dict=False."""

    def forward(self, *args, **options):
        out = super().forward(*args, **options)
        return out.logits, out.past_key_values


class ReorderedByModel(Cached):
    """The model itself reorders its cache for beams."""

    def __init__(self, does_nothing):
        super().__init__(causal)
        self.does_nothing = does_nothing

    def _reorder_cache(self, past, index):
        return past if self.does_nothing else tuple((key[index], value[index]) for key, value in past)


class Store(list[Pair]):
    """Keys and values of the layers, which beams take along, or leave behind as MiniMax's of transformers 5.23."""

    is_left_behind = False

    def reorder_cache(self, index):
        if not self.is_left_behind:
            self[:] = [(key[index], value[index]) for key, value in self]


class CachedForBeams(CachedByKeyword):
    """Its cache is a `Store`."""

    def __init__(self, is_left_behind):
        super().__init__(causal)
        self.is_left_behind = is_left_behind

    def forward(self, input_ids, past_key_values=None, **options):
        out = super().forward(input_ids, past_key_values, **options)
        if out.past_key_values is not None:
            out.past_key_values = Store(out.past_key_values)
            out.past_key_values.is_left_behind = self.is_left_behind
        return out


def _reordered(model):
    """Another text takes over a row of the cache."""
    ids = tokens()
    order = torch.tensor([1, 1])
    with torch.no_grad():
        cache = model.double()(ids[:, :20], use_cache=True).past_key_values
        if hasattr(model, "_reorder_cache"):
            cache = model._reorder_cache(cache, order)
        else:
            cache.reorder_cache(order)
        step = model(ids[order, 20:21], past_key_values=cache, use_cache=True).logits
        return float((step[:, 0] - plainly(model, ids[order])[:, 20]).abs().max())


def _after_a_cache(model, ids):
    parts = []
    past = None
    for piece in (ids[:, :20], ids[:, 20:]):
        out = model(piece, past_key_values=past, use_cache=True)
        logits, past = out if isinstance(out, tuple) else (out.logits, out.past_key_values)
        parts.append(logits)
    return torch.cat(parts, dim=1)


AFTER = future("perturbation, after a cache") | {"incremental decoding = one pass"}
CHUNKS = [
    ("nntrainer: a chunk after a cache", "https://github.com/nntrainer/nntrainer/issues/4333", Cached,
     everything_after_a_cache),
    ("a chunk after a cache, use_cache in **kwargs", "", CachedByKeyword, everything_after_a_cache),
    ("a chunk after a cache, all of it in **kwargs", "", CachedAmongOthers, everything_after_a_cache),
    ("a chunk after a cache, in a returned tuple", "", CachedInATuple, everything_after_a_cache),
    ("tt-metal: a chunk after a long cache", "https://github.com/tenstorrent/tt-metal/issues/48899", Cached,
     everything_after_a_long_cache),
]  # fmt: skip
EXHIBITS = [
    *(Exhibit(name, link, lambda model=model, sees=sees: model(sees), lambda model=model: model(causal),
              later(_after_a_cache), AFTER) for name, link, model, sees in CHUNKS),
    *(Exhibit(name, "", lambda model=model: model(True), lambda model=model: model(False), _reordered,
              frozenset({"incremental decoding = one pass"}))
      for name, model in (("a cache that beams leave behind", CachedForBeams),
                          ("a model whose reordering does nothing", ReorderedByModel))),
    Exhibit("DeepSeek-V2 of mlxcel: step by step it is causal", "https://github.com/lablup/mlxcel/issues/991",
            lambda: Cached(masked_step_by_step), lambda: Cached(causal), later(), EVERY_WAY | AFTER),
]  # fmt: skip
