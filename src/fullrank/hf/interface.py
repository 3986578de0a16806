"""The attention functions of injected models, as transformers calls them.

reference:  P = weights of the model's own eager function,  P' = mix(P),  O = dropout(P') V
fast:       the same by our kernels, where the model's own function is plain scaled dot product under a mask that is known
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fullrank import kernels
from fullrank.core import engine
from fullrank.core.engine import Problem
from fullrank.core.errors import InputError
from fullrank.core.mix import mix_heads
from fullrank.core.normalize import Softmax
from fullrank.hf.asked import weights_asked_for
from fullrank.hf.finding import eager_of
from fullrank.hf.heads import Injected
from fullrank.hf.masks import eager_mask, layout_of
from fullrank.hf.own import Own, scores_of, weights_of

MIXED = "fullrank"  # weights are mixed, or normalised otherwise
_ROUTED = f"{MIXED}_"  # followed by the attention function that the model had: only heads are permuted


def name_for(former: str, weights_change: bool) -> str:
    """The name of the attention function of a model whose own was `former`; transformers knows it from now on."""
    name = MIXED if weights_change else _ROUTED + former
    # a name without a mask would get none at all, not even a causal one
    if weights_change:
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, eager_mask)
    else:
        ALL_ATTENTION_FUNCTIONS.register(name, functools.partial(route, former))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[former])
    return name


def route(former: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
          **arguments: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Cross-head attention alone: keys and values permuted, then the attention function that the model had."""
    injected: Injected | None = getattr(module, "fullrank", None)
    if injected is not None:
        key, value = injected.route(key, value)
    elif not _known(module):
        raise _made_without(module)
    attention: Any = eager_of(module) if former == "eager" else ALL_ATTENTION_FUNCTIONS[former]
    result: tuple[Tensor, Tensor | None] = attention(module, query, key, value, attention_mask, **arguments)
    return result


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
           scaling: float | None = None, dropout: float = 0.0, **arguments: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query (B, H, N, D), key and value (B, H_kv, M, D), an additive mask -> output (B, N, H, D), weights (B, H, N, M) or None.

    Weights are mixed over query heads, heads are permuted over key and value heads. Weights are given where somebody asked
    for them, and on the reference path.
    """
    injected: Injected | None = getattr(module, "fullrank", None)
    if injected is None:
        if not _known(module):
            raise _made_without(module)
        return _unmixed(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **arguments)
    key, value = injected.route(key, value)
    own = injected.own(module)
    if scaling is not None and _fast(own, query, key, value, arguments):
        layout = layout_of(attention_mask, query, key)
        if layout is not None:
            groups, p = query.shape[1] // key.shape[1], dropout if module.training else 0.0
            problem = (
                f"no engine knows the normaliser {type(injected.normalize).__name__}"
                if injected.normalize.engine is None
                else Problem(
                    query, _repeated(key, groups), _repeated(value, groups), injected.mix.matrix(query), None, layout,
                    scaling, injected.normalize.engine, p,
                )
            )  # fmt: skip
            if (out := engine.attend(problem)) is not None:
                return out.transpose(1, 2).contiguous(), None
    return _by_weights(injected, own, module, query, key, value, attention_mask, dropout, scaling=scaling, **arguments)


def _fast(own: Own, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> bool:
    """Whether our kernels compute what is asked for, and gain by it: a single query is not worth a kernel."""
    return (
        own.plain
        and query.shape[2] > 1
        and kernels.forced() != "reference"
        and query.dtype == key.dtype == value.dtype
        and value.shape == key.shape
        and all(arguments.get(name) is None for name in own.extras)
        and not weights_asked_for(arguments)
    )


def _by_weights(injected: Injected, own: Own, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                mask: Tensor | None, dropout: float, **arguments: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition: the model's own weights, then our stages."""
    own_dropout = 0.0
    if type(injected.normalize) is Softmax:
        weights, own_dropout = weights_of(module, own, query, key, value, mask, arguments)
    else:
        if given := sorted(name for name in own.extras if arguments.get(name) is not None):
            raise InputError(
                f"{type(module).__name__}: its attention is given a {', '.join(given)} (a soft-cap or position biases), which "
                "other normalisers than softmax would have to take apart; inject without normalize"
            )
        weights = injected.normalize(scores_of(query, key, mask, arguments["scaling"])).to(query.dtype)
    mixed = mix_heads(weights, injected.mix.matrix(query))
    p = max(dropout, own_dropout) if module.training else 0.0
    # torch's own dropout of weights without gaps: it draws the same numbers as in the model's own function
    dropped = F.dropout(mixed.contiguous(), p) if p else mixed
    out = dropped.to(value.dtype) @ _repeated(value, query.shape[1] // value.shape[1])
    return out.transpose(1, 2).contiguous(), mixed


def _repeated(heads: Tensor, groups: int) -> Tensor:
    """(B, H_kv, M, D) -> (B, H, M, D): each key and value head once for each of its query heads."""
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def _unmixed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any
) -> Any:
    """A layer of an injected model into which nothing was injected: as before, under the mask of eager attention."""
    fused = vars(module)[FORMER] == "sdpa" and kernels.forced() != "reference" and not weights_asked_for(arguments)
    if not fused:
        return eager_of(module)(module, query, key, value, mask, **arguments)
    if mask is None:
        arguments["is_causal"] = False  # eager attention without a mask sees everything
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **arguments)


FORMER = "fullrank_former"  # on every attention module of an injected model, also on those that were left as they are


def _known(module: nn.Module) -> bool:
    return FORMER in vars(module)


def _made_without(module: nn.Module) -> InputError:
    return InputError(
        f"{type(module).__name__}: the configuration says that attention was injected (`fullrank`), but this model was "
        "made without; load it with fullrank.load_injected, or call fullrank.inject on it"
    )
