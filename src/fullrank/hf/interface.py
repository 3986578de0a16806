"""The attention functions of injected models, as transformers calls them.

reference:  P = weights of the model's own eager function,  P' = mix(P),  O = dropout(P') V
fast:       the same by our kernels, where the model's own function is plain scaled dot product under a mask that is known
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from fullrank.attention import kernels
from fullrank.attention.layout import Layout
from fullrank.attention.normalize import Softmax
from fullrank.attention.project import Heads
from fullrank.attention.score import DotProduct
from fullrank.attention.size import HeadSize
from fullrank.errors import InputError
from fullrank.hf.finding import eager_of
from fullrank.hf.heads import Injected
from fullrank.hf.masks import eager_mask, layout_of
from fullrank.hf.own import scores_of, weights_of

MIXED = "fullrank"  # weights are mixed, or normalised otherwise
_USUAL = ("is_causal", "output_attentions", "use_cache", "position_ids")


def routed(former: str) -> str:
    """The name of the attention that only permutes heads and leaves the rest to `former`."""
    return f"{MIXED}_{former}"


def register(name: str) -> None:
    """Make an attention function and its mask known to transformers; a name without a mask would get none at all."""
    if name == MIXED:
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, eager_mask)
    else:
        former = name.removeprefix(f"{MIXED}_")
        ALL_ATTENTION_FUNCTIONS.register(name, functools.partial(route, former))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[former])


def route(former: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
          **arguments: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Cross-head attention alone: keys and values permuted, then the attention function that the model had."""
    injected: Injected | None = getattr(module, "fullrank", None)
    if injected is not None:
        key, value = injected.route(key, value)
    return _former(former, module)(module, query, key, value, attention_mask, **arguments)


def _former(name: str, module: nn.Module) -> Any:
    return eager_of(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
           scaling: float | None = None, dropout: float = 0.0, **arguments: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query (B, H, N, D), key and value (B, H_kv, M, D), an additive mask -> output (B, N, H, D), weights (B, H, N, M) or None.

    Weights are mixed over query heads; heads are permuted over key and value heads. Weights are given where somebody asked
    for them, and on the reference path.
    """
    injected: Injected | None = getattr(module, "fullrank", None)
    if injected is None:
        return _as_before(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **arguments)
    key, value = injected.route(key, value)
    layout = None
    if _fast(injected, arguments) and query.dtype == key.dtype == value.dtype:
        layout = layout_of(attention_mask, query, key)
    if layout is None or scaling is None:
        return _by_weights(injected, module, query, key, value, attention_mask, dropout, scaling=scaling, **arguments)
    groups = query.shape[1] // key.shape[1]
    heads = Heads(query, query, _repeated(key, groups), _repeated(value, groups))
    stages: Any = _Stages(_dot_product(scaling), injected, dropout if module.training else 0.0)
    out = kernels.kernel_for(stages, tracing=False)(stages, heads, layout, None)
    return (out if injected.own.heads_first else out.transpose(1, 2).contiguous()), None


def _fast(injected: Injected, arguments: dict[str, Any]) -> bool:
    """Whether our kernels may compute what is asked for."""
    return injected.own.plain and kernels.forced() != "reference" and not _wants_weights(arguments)


def _wants_weights(arguments: dict[str, Any]) -> bool:
    if arguments.get("output_attentions"):
        return True
    collected = output_capturing._active_collector.get()
    return bool(collected) and any("attentions" in key for key in collected)


def _by_weights(injected: Injected, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                dropout: float, **arguments: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    own_dropout = 0.0
    if type(injected.normalize) is not Softmax:
        weights = injected.normalize(scores_of(query, key, mask, arguments["scaling"])).to(query.dtype)
    else:
        weights, own_dropout = weights_of(module, injected.own.eager, query, key, value, mask, arguments)
    mixed = injected.mix(weights, query)
    # torch's own dropout: the same numbers are drawn as by the model's own function
    dropped = F.dropout(mixed, max(dropout, own_dropout), module.training)
    out = dropped.to(value.dtype) @ _repeated(value, query.shape[1] // value.shape[1])
    return (out if injected.own.heads_first else out.transpose(1, 2).contiguous()), mixed


def _repeated(heads: Tensor, groups: int) -> Tensor:
    """(B, H_kv, M, D) -> (B, H, M, D): each key and value head once for each of its query heads."""
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def _as_before(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any
) -> Any:
    """A layer of an injected model into which nothing was injected."""
    former = vars(module).get("fullrank_former")
    if former is None:
        raise InputError(
            f"{type(module).__name__}: the configuration says that attention was injected (`fullrank`), but this model was "
            "made without; load it with fullrank.load_injected, or call fullrank.inject on it"
        )
    return eager_of(module)(module, query, key, value, mask, **arguments)


@functools.lru_cache(maxsize=64)
def _dot_product(scale: float) -> DotProduct:
    score = DotProduct(None, HeadSize(num_heads=1, head_dim=1, hidden_size=1, max_length=0))
    score.scale = scale
    return score


@dataclass
class _Stages:
    """One call as the kernels see it: what `WeightedValues` is in our own models."""

    score: DotProduct
    injected: Injected
    dropout: float
    training: bool = True

    @property
    def normalize(self) -> Any:
        return self.injected.normalize

    @property
    def mix(self) -> Any:
        return self.injected.mix

    @property
    def size(self) -> HeadSize:
        return self.injected.size

    def scores(self, heads: Heads, layout: Layout) -> Tensor:
        assert heads.scored is not None
        assert heads.keys is not None
        return self.score(heads.scored, heads.keys, layout)
