"""Attention functions of injected models, as transformers calls them, and the masks that they get.

definition:  P = weights of the model's own eager function,  P' = mix(P),  O = dropout(P') V
engines:     the same, where the model's own function is plain scaled dot product under a mask that a layout can describe
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from fullrank import kernels
from fullrank.core import engine
from fullrank.core.config import Stage
from fullrank.core.engine import Problem
from fullrank.core.errors import InputError
from fullrank.core.layout import Layout, measure_distances
from fullrank.core.stages import (
    KeepHeads,
    Mixing,
    Normalizer,
    Softmax,
    StochasticCrossHead,
    build_stage,
    mix_heads,
    repeat_heads,
)
from fullrank.core.trace import LayerTrace, Trace
from fullrank.hf.families import eager_of, find_projection, head_size, split_queries

MIXED = "fullrank"  # the attention implementation of injected models
FORMER = "fullrank_former"  # on every attention module of an injected model, on unchanged ones too: its former function


class Injected(nn.Module):
    """The stages that an attention module has as its submodule `fullrank`.

    `route` permutes key and value heads, `normalize` and `mix` act on the weights. They are the stages of our own models, with
    their names and their start. `attend` reads them; there is no forward pass.
    `projection` names the submodule of the attention module whose output holds the query that the mixing reads. None: the
    mixing reads the query that the attention function gets.
    """

    no_weight_decay = True

    def __init__(self, module: nn.Module, mix: Stage, normalize: Stage, cross_head: float) -> None:
        super().__init__()
        self.size = head_size(module)
        self.eager = eager_of(module)
        self.normalize: Normalizer = build_stage("normalize", normalize, self.size)
        self.mix: Mixing = build_stage("mix", mix, self.size)
        self.route = StochasticCrossHead(cross_head)
        self.keeps_weights = isinstance(self.mix, KeepHeads) and isinstance(self.normalize, Softmax)
        self.projection, self.blocks = find_projection(module) if "query" in self.mix.needs else (None, None)
        self._rules: EagerRules | None = None

    def rules(self, module: nn.Module) -> EagerRules:
        """Return the rules of the model's own attention, tried out once: the parameters of `module` must have values."""
        if self._rules is None:
            self._rules = try_out(module, self)
        return self._rules


_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def traced(trace: Trace | None) -> Iterator[None]:
    """Run the block with `trace`, which collects the attention of every injected layer; None collects nothing.

    The models of transformers hand no trace on, so it reaches their layers beside the call; compiled layers do not see it.
    """
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)


class Call(NamedTuple):
    """A call of an attention function: query (B, H, N, D), key and value (B, H_kv, M, D), an additive mask, other arguments."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    dropout: float
    others: dict[str, Any]

    @property
    def dropout_now(self) -> float:
        return self.dropout if self.module.training else 0.0

    def repeat(self, heads: Tensor) -> Tensor:
        """Repeat key or value heads (B, H_kv, M, D), one for each query head."""
        return repeat_heads(heads, self.query.shape[1] // heads.shape[1])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with injected stages, as an attention function of transformers.

    Weights are mixed over query heads, key and value heads are permuted. Engines give no weights, the definition does.

    Args:
        module: the attention module, with its stages as the submodule `fullrank`.
        query: (B, H, N, D).
        key: (B, H_kv, M, D).
        value: (B, H_kv, M, D).
        attention_mask: additive, (B or 1, 1, N or 1, M); None: every query sees all keys.
        scaling: what scores are multiplied by; None: the model's own function decides.
        dropout: rate of dropout on the weights, in training.
        **arguments: further arguments of the model's own attention function.

    Returns:
        Output (B, N, H, D), and the mixed weights (B, H, N, M) or None.

    Raises:
        InputError: the configuration says that attention was injected, but the model has no stages; the model's own function
            adds biases to scores, which the injected normaliser cannot take apart; or the query projection was not called.
    """
    injected = _find_stages(module)
    if injected is not None:
        key, value = injected.route(key, value)
    call = Call(module, query, key, value, attention_mask, scaling, dropout, arguments)
    if injected is None or injected.keeps_weights:
        return _attend_unmixed(call)
    mixing = injected.mix.matrix(_query_of_mixing(injected, module, query))
    out = _attend_plain(call, injected, mixing)
    if out is not None:
        return injected.mix.finish(out).transpose(1, 2).contiguous(), None
    return _definition(call, injected, mixing)


# a name without a mask would get none at all, not even a causal one
ALL_ATTENTION_FUNCTIONS.register(MIXED, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(MIXED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


# -- the query that position-wise mixing reads, on its way from the projection to the attention function ------------------


class _Handed(threading.local):
    """Output of the query projection of the attention module that this thread is in, and the position that is read next."""

    output: Tensor | None = None
    position = 0


_handed = _Handed()


def hand_over(projection: nn.Module, arguments: object, output: Tensor) -> None:
    """Keep the output of a query projection for the attention function: a forward hook.

    Args:
        projection: the module that projects queries; not read.
        arguments: not read.
        output: (..., W), which holds the queries.
    """
    _handed.output = output
    _handed.position = 0


def let_go(module: nn.Module, arguments: object, output: object) -> None:
    """Forget the projected query when an attention module ends: a forward hook.

    Args:
        module: the attention module; not read.
        arguments: not read.
        output: not read.
    """
    _handed.output = None


def _query_of_mixing(injected: Injected, module: nn.Module, query: Tensor) -> Tensor:
    """Return the projected query (B, H, N, D), or the one that the attention function gets.

    Vision models call the function for one image after the other, which are parts of one projection; DiffLlama calls it twice
    for all positions.
    """
    if injected.projection is None:
        return query
    if _handed.output is None:
        raise InputError(
            f"{type(module).__name__}: its projection `{injected.projection}` was not called, whose output position-wise "
            "mixing reads; inject with another mix"
        )
    output = _handed.output.reshape(query.shape[0], -1, _handed.output.shape[-1])
    start = _handed.position % output.shape[1]
    _handed.position = end = start + query.shape[2]
    queries = split_queries(output[:, start:end], injected.size, injected.blocks)
    return queries.transpose(1, 2).to(query.dtype)


def prepare(module: Any, _: object) -> None:
    """Set `hand_over` on the query projection of an injected module, which PEFT and quantizers replace: a forward pre-hook.

    Raises InputError if the configuration names an attention function that leaves the stages out.
    """
    if module.config._attn_implementation_internal != MIXED:  # not by its slow property
        raise InputError(
            f"{type(module).__name__}: its attention was set to '{module.config._attn_implementation}' after injection, which "
            "leaves out what was injected; call fullrank.remove(model), set_attn_implementation, then fullrank.inject again"
        )
    if module.fullrank.projection is not None:
        projection = getattr(module, module.fullrank.projection)
        if hand_over not in projection._forward_hooks.values():
            projection.register_forward_hook(hand_over)


def drop_hooks(module: nn.Module, *functions: Any) -> None:
    """Take hooks out of a module again."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in functions]:
            del hooks[key]


def _find_stages(module: nn.Module) -> Any:
    """Find the stages of a module, None for a layer without any; InputError where a whole model has none."""
    stages = module._modules.get("fullrank")  # an Injected, or PEFT's wrapper around it
    if stages is None and FORMER not in vars(module):
        raise InputError(
            f"{type(module).__name__}: the configuration says that attention was injected (`fullrank`), but this model was "
            "made without; load it with fullrank.load_injected, or call fullrank.inject on it"
        )
    return stages


def _attend_plain(call: Call, injected: Injected, mixing: Tensor | None) -> Tensor | None:
    """Compute scaled dot-product attention (B, H, N, D) by an engine; None: none can, or for one query none is faster."""
    rules = injected.rules(call.module)
    normalize = injected.normalize
    is_plain = (
        rules.plain
        and normalize.reason is None
        and call.query.shape[2] > 1
        and call.scaling is not None
        and kernels.get_forced() != "reference"
        and call.query.dtype == call.key.dtype == call.value.dtype
        and call.value.shape == call.key.shape
        and all(call.others.get(name) is None for name in rules.extras)
        and not _weights_wanted(call)
    )
    layout = layout_of(call.mask, call.query, call.key) if is_plain else None
    if layout is None:
        return None
    keys, values = call.repeat(call.key), call.repeat(call.value)
    scaling = cast(float, call.scaling)
    problem = Problem(call.query, keys, values, mixing, None, layout, scaling, normalize.engine, call.dropout_now)
    return engine.load().attend(problem)


def _weights_wanted(call: Call) -> bool:
    """Return whether weights are asked for: by `output_attentions`, by `traced`, or by a model that collects them."""
    if call.others.get("output_attentions"):
        return True
    if torch.compiler.is_compiling():
        return False
    if _trace.get() is not None:
        return True
    return any("attentions" in key for key in _active_collector.get() or ())


def _definition(call: Call, injected: Injected, mixing: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute attention by the model's own weights, then our stages."""
    own_dropout = 0.0
    if type(injected.normalize) is Softmax:
        weights, own_dropout = _compute_weights(call, injected)
    else:
        extras = injected.rules(call.module).extras
        biases = sorted(name for name in extras if call.others.get(name) is not None)
        if biases:
            raise InputError(
                f"{type(call.module).__name__}: its attention takes a {', '.join(biases)} (a soft-cap or position biases), "
                "which other normalisers than softmax would have to take apart; inject without normalize"
            )
        weights = injected.normalize(_scores(call)).to(call.query.dtype)
    mixed = mix_heads(weights, mixing)
    values = call.repeat(call.value)
    if not torch.compiler.is_compiling() and (trace := _trace.get()) is not None:
        trace.layers.append(LayerTrace(weights, mixed, mixing, injected.mix.learned, values))
    p = max(call.dropout_now, own_dropout)
    # torch's own dropout of contiguous weights draws the same numbers as the model's own function
    dropped = F.dropout(mixed.contiguous(), p) if p else mixed
    out = injected.mix.finish(dropped.to(values.dtype) @ values)
    return out.transpose(1, 2).contiguous(), mixed


def _attend_unmixed(call: Call) -> Any:
    """Compute attention whose weights stay as they are, by the module's former function under the mask of eager attention."""
    run = eager_of(call.module)
    arguments = {"scaling": call.scaling, "dropout": call.dropout, **call.others}
    if vars(call.module)[FORMER] == "sdpa" and kernels.get_forced() != "reference" and not _weights_wanted(call):
        run = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if call.mask is None:
            arguments["is_causal"] = False  # eager attention without a mask sees everything
    return run(call.module, call.query, call.key, call.value, call.mask, **arguments)


# -- the model's own attention -------------------------------------------------------------------------------------------

# arguments of eager attention functions that change no plain weights; the mask holds the window
_STANDARD = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "sliding_window"}
# attributes of the module that a plain function may read
_HARMLESS = {"num_key_value_groups", "config", "is_causal", "scaling", "layer_idx", "head_dim"}


@dataclass(frozen=True)
class EagerRules:
    """What a model's own eager attention function computes.

    Attributes:
        plain: its weights are softmax(s Q K^T + mask), so that engines compute the same where no `extras` are given.
        after: it changes the weighted values further (Granite's sinks scale them), which belongs to the weights.
        extras: its arguments beside the standard ones (a soft-cap, a position bias).
    """

    plain: bool
    after: bool
    extras: set[str]


class _WithoutDropout:
    """An attention module as its eager function reads it, without dropout. `p` is the rate of the dropout left out."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.p = 0.0
        self.training = False
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        self.read.add(name)
        if isinstance(value, nn.Dropout):
            self.p = value.p
            return nn.Identity()
        return value


def _compute_weights(call: Call, injected: Injected) -> tuple[Tensor, float]:
    """Compute the weights (B, H, N, M) of a module's own attention function before dropout, and return its dropout rate too.

    The function is called with values of no width, so that only weights are computed: all that it does to scores is kept.
    Where it changes weighted values further, values are the identity, and the output is the weights.
    """
    module = call.module
    value = call.value
    reader: Any = _WithoutDropout(module) if module.training else module
    if injected.rules(module).after:
        identity = torch.eye(call.key.shape[2], device=value.device, dtype=value.dtype)
        values = identity.expand(*value.shape[:2], -1, -1)
    else:
        values = value[..., :0]
    out, weights = injected.eager(
        reader, call.query, call.key, values, call.mask, dropout=0.0, scaling=call.scaling, **call.others
    )
    if injected.rules(module).after:
        weights = out.transpose(1, 2)
    return weights, reader.p if module.training else 0.0


def _scores(call: Call) -> Tensor:
    """Compute the masked scores (B, H, N, M) of a plain attention function, -inf for hidden keys, as normalisers read them.

    A query that sees no key is padding: it sees all keys here, so that no weight becomes NaN.
    """
    query = call.query
    mask = call.mask
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = query @ call.repeat(call.key).transpose(2, 3) * scaling
    if mask is None:
        return scores
    hidden = _hidden(mask)
    padding = hidden.all(-1, keepdim=True)
    return (scores + mask.masked_fill(hidden, 0)).masked_fill(hidden & ~padding, float("-inf"))


def try_out(module: nn.Module, injected: Injected) -> EagerRules:
    """Try out the eager attention function of a module on small random heads, the same ones every time.

    Raises InputError if it cannot be called like the others, gives no weights, or an output of another shape.
    """
    reader = _WithoutDropout(module)
    device = next(module.parameters(), torch.empty(0)).device
    groups = getattr(module, "num_key_value_groups", 1)
    heads = injected.size.num_heads
    width = injected.size.head_dim
    shapes = ((2, heads, 3, width), *((2, heads // groups, 5, width),) * 2)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        query, key, value = (3 * torch.randn(shape, device="cpu").to(device) for shape in shapes)
        mask = torch.zeros(2, 1, 3, 5, device=device)
        mask[..., 4] = torch.finfo(mask.dtype).min
        try:
            out, weights = injected.eager(reader, query, key, value, mask, dropout=0.0, scaling=0.5)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise InputError(
                f"{type(module).__name__}: its own (eager) attention function fails: {error}; choose others with `layers`"
            ) from error
        if weights is None or weights.shape != (2, heads, 3, 5) or out.shape != (2, 3, heads, width):
            raise InputError(
                f"{type(module).__name__}: its own attention function gives no weights (B, H, N, M) to mix; "
                "this model cannot be injected into"
            )
        scores = 0.5 * query @ repeat_heads(key, groups).transpose(2, 3) + mask
        # an attribute of unknown use may change weights: a parameter, a buffer, a number
        plain = reader.read <= _HARMLESS and torch.allclose(weights, torch.softmax(scores, -1), atol=1e-6)
        after = not torch.allclose(out.transpose(1, 2), weights @ repeat_heads(value, groups), atol=1e-5)
    arguments = inspect.signature(injected.eager).parameters
    named = {name for name, argument in arguments.items() if argument.kind is not argument.VAR_KEYWORD}
    return EagerRules(plain and not after, after, named - _STANDARD)


# -- masks: the layouts that they describe -------------------------------------------------------------------------------


def layout_of(mask: Tensor | None, query: Tensor, key: Tensor) -> Layout | None:
    """Find the layout that describes a mask. A mask is read once, by the first layer.

    Args:
        mask: additive, (B or 1, 1, N or 1, M); None: every query sees all keys.
        query: (B, H, N, D).
        key: (B, H_kv, M, D).

    Returns:
        The layout of N queries and M keys; None where no layout describes the mask, and for any mask in compiled code.
    """
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        return Layout.of(queries, keys, causal=False, device=query.device)
    if torch.compiler.is_compiling():
        return None
    if mask.is_inference():  # such a tensor does not count writes
        layout = _read_layout(mask)
    else:
        layout, version = vars(mask).get("fullrank_layout", (None, None))
        if version != mask._version:  # a mask that was written into has another layout
            layout = _read_layout(mask)
            mask.fullrank_layout = layout, mask._version  # type: ignore[attr-defined]
    return layout if layout is not None and layout.shape == (queries, keys) else None


def _read_layout(mask: Tensor) -> Layout | None:
    """Read the layout of an additive mask (B or 1, 1, N or 1, M): padding, alone or with causality and perhaps a window."""
    if mask.dim() != 4 or mask.shape[1] != 1 or not mask.is_floating_point() or mask.requires_grad:
        return None
    mask = mask[:, 0]
    hidden = _hidden(mask)
    if (mask.masked_fill(hidden, 0) != 0).any():
        return None  # it is a bias as well
    visible = ~hidden
    queries, keys = mask.shape[1:]
    tokens = visible.any(1)
    key_mask = None if tokens.all() else tokens
    layouts = [Layout.of(queries, keys, causal=False, device=mask.device, key_mask=key_mask)]
    if queries <= keys:
        causal = replace(layouts[0], causal=True)
        distances = measure_distances(causal.query_positions, causal.key_positions)
        farthest = int(distances.masked_fill(~visible, 0).max())
        layouts += [causal, replace(causal, window=farthest + 1)]
    for layout in layouts:
        if torch.equal(layout.visible()[:, 0] & tokens[:, None], visible):
            return layout
    return None


def _hidden(mask: Tensor) -> Tensor:
    """Return a boolean mask, True where an additive mask hides a key."""
    return mask <= torch.finfo(mask.dtype).min / 2
