"""Mixhead A and B against plain attention and against what others offer for mixed heads, on heads that are given.

Mixhead A, B              `WeightedValues`, the kernel that is chosen automatically
plain SDPA                F.scaled_dot_product_attention, causal, no mixing: what it costs not to mix
formula A, B              softmax, einsum over heads, product with V; with autograd
compiled A, B             the formula by torch.compile
x-transformers            its attention with talking heads after the softmax, which is Mixhead A
transformers, eager       its attention of products and a softmax, no mixing
FlexAttention             compiled, no mixing; on a GPU only, for it has no backward pass on a CPU
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.bench import peers
from fullrank.bench.candidates import BOTH, FORWARD, Candidate, Comparison, Pass, Settings, drawn, missing, uncompiled
from fullrank.core.attention import WeightedValues
from fullrank.core.config import AttentionConfig
from fullrank.core.layout import Layout
from fullrank.core.project import Heads
from fullrank.core.stage import HeadSize

SDPA, FORMULA, COMPILED, TALKING = "plain SDPA", "formula", "compiled", "x-transformers"
EAGER, FLEX = "transformers, eager", "FlexAttention"
STAGES = {"A": "position_independent", "B": "position_wise"}
_KEPT = {FORWARD: 3, BOTH: 5}  # tensors of all weights that the formula holds at once


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    tokens: int
    size: int

    def __str__(self) -> str:
        return f"B {self.batch}, H {self.heads}, N {self.tokens:,}, D {self.size}"


Attend = Callable[[dict[str, Tensor]], Tensor]


def leaves(settings: Settings, shape: Shape, form: str = "") -> dict[str, Tensor]:
    """query, keys, values (B, H, N, D); for A and B also the parameters of mixing, away from their start."""
    dims = (shape.batch, shape.heads, shape.tokens, shape.size)
    found = {name: drawn(settings, *dims, seed=seed) for seed, name in enumerate(("query", "keys", "values"))}
    wide = Settings(device=settings.device)  # parameters are fp32
    if form:
        found["mixing"] = drawn(wide, shape.heads, shape.heads, seed=3, scale=0.1)
        found["mixing"].diagonal().add_(1)
    if form == "B":
        found["from_query"] = drawn(wide, shape.size, shape.heads, seed=4, scale=0.1 * shape.size**-0.5)
    return {name: leaf.requires_grad_() for name, leaf in found.items()}


def _pass(settings: Settings, shape: Shape, backward: bool, attend: Attend, given: dict[str, Tensor]) -> Pass:
    cotangent = drawn(settings, shape.batch, shape.heads, shape.tokens, shape.size, seed=5)
    return Pass(functools.partial(attend, given), given, cotangent, backward)


def mixing_matrix(given: dict[str, Tensor]) -> Tensor:
    """M, (H, H), or M(n) = Q(n) W + B, (B, N, H, H), in the dtype of the query."""
    dtype = given["query"].dtype
    if "from_query" not in given:
        return given["mixing"].to(dtype)
    made = torch.einsum("bjnd,di->bnji", given["query"], given["from_query"].to(dtype))
    return made + given["mixing"].to(dtype)


def formula(query: Tensor, keys: Tensor, values: Tensor, mixing: Tensor, future: Tensor) -> Tensor:
    """All scores, all weights, all mixed weights."""
    scores = (query @ keys.transpose(-1, -2)) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    equation = "bjnm,ji->binm" if mixing.dim() == 2 else "bjnm,bnji->binm"
    return torch.einsum(equation, weights, mixing) @ values


def _future(settings: Settings, shape: Shape) -> Tensor:
    return torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=settings.where).triu(1)


def _ours(settings: Settings, shape: Shape, backward: bool, form: str) -> Pass:
    size = HeadSize(shape.heads, shape.size, shape.heads * shape.size, shape.tokens)
    attend = WeightedValues(AttentionConfig(mix=STAGES[form]), size, 0.0).to(settings.where)
    layout = Layout.of(shape.tokens, device=settings.where)
    given = leaves(settings, shape, form)
    for name in ("mixing", "from_query"):
        if name in given:
            given[name] = nn.Parameter(given[name].detach())
            setattr(attend.mix, name, given[name])
    return _pass(
        settings, shape, backward,
        lambda x: attend(Heads(x["query"], x["query"], x["keys"], x["values"]), layout), given,
    )  # fmt: skip


def _formula(settings: Settings, shape: Shape, backward: bool, form: str, compiled: bool = False) -> Pass:
    future = _future(settings, shape)
    function = torch.compile(formula, dynamic=False) if compiled else formula
    return _pass(
        settings, shape, backward,
        lambda x: function(x["query"], x["keys"], x["values"], mixing_matrix(x), future), leaves(settings, shape, form),
    )  # fmt: skip


def _sdpa(settings: Settings, shape: Shape, backward: bool) -> Pass:
    return _pass(
        settings, shape, backward,
        lambda x: F.scaled_dot_product_attention(x["query"], x["keys"], x["values"], is_causal=True),
        leaves(settings, shape),
    )  # fmt: skip


def _talking_heads(settings: Settings, shape: Shape, backward: bool) -> Pass:
    attend = peers.talking_heads()(heads=shape.heads, causal=True, post_talking_heads=True).to(settings.where)
    given = leaves(settings, shape, "A")
    mixing = given.pop("mixing").detach()
    # a 1 x 1 convolution: its weight is M transposed
    weight = nn.Parameter(mixing.T.contiguous()[:, :, None, None].to(settings.torch_dtype))
    attend.post_softmax_talking_heads.weight = given["convolution"] = weight
    return _pass(settings, shape, backward, lambda x: attend(x["query"], x["keys"], x["values"])[0], given)


def _eager(settings: Settings, shape: Shape, backward: bool) -> Pass:
    attend = peers.eager_attention()
    module = types.SimpleNamespace(num_key_value_groups=1, training=True)
    mask = torch.zeros(1, 1, shape.tokens, shape.tokens, dtype=settings.torch_dtype, device=settings.where)
    mask.masked_fill_(_future(settings, shape), torch.finfo(settings.torch_dtype).min)
    scale = shape.size**-0.5
    return _pass(
        settings, shape, backward,
        lambda x: attend(module, x["query"], x["keys"], x["values"], mask, scale)[0].transpose(1, 2),
        leaves(settings, shape),
    )  # fmt: skip


def _flex(settings: Settings, shape: Shape, backward: bool) -> Pass:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = shape.tokens
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=settings.device)
    function = torch.compile(flex_attention, dynamic=False)
    return _pass(
        settings, shape, backward,
        lambda x: function(x["query"], x["keys"], x["values"], block_mask=mask), leaves(settings, shape),
    )  # fmt: skip


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    """Forward alone, and with backward: ours and all peers."""
    shape = Shape(settings.batch or 1, settings.heads, length, settings.head_dim)
    return [_comparison(settings, shape, what) for what in (FORWARD, BOTH)]


def _comparison(settings: Settings, shape: Shape, what: str) -> Comparison:
    given = settings, shape, what == BOTH
    square = shape.batch * shape.heads * shape.tokens**2 * settings.torch_dtype.itemsize
    takes = _KEPT[what] * square
    gpu_only = "" if settings.where.type == "cuda" else "has no backward pass on a CPU; --device cuda measures it"
    found = []
    for form in STAGES:
        found.append(_mixhead(given, form, (SDPA, f"{FORMULA} {form}", f"{COMPILED} {form}", TALKING, EAGER, FLEX)))
    found.append(Candidate(SDPA, functools.partial(_sdpa, *given), "plain"))
    for form in STAGES:
        make = functools.partial(_formula, *given, form)
        found.append(Candidate(f"{FORMULA} {form}", make, f"Mixhead {form}", takes=takes))
    for form in STAGES:
        make, absent = functools.partial(_formula, *given, form, compiled=True), uncompiled(settings)
        found.append(Candidate(f"{COMPILED} {form}", make, f"Mixhead {form}", (), absent, takes, compiled=True))
    talking = functools.partial(_talking_heads, *given)
    found += [
        Candidate(TALKING, talking, "Mixhead A", absent=missing("x_transformers"), takes=takes),
        Candidate(EAGER, functools.partial(_eager, *given), "plain", absent=missing("transformers"), takes=takes),
        Candidate(
            FLEX, functools.partial(_flex, *given), "plain", absent=gpu_only or uncompiled(settings), compiled=True
        ),
    ]
    return Comparison(str(shape), shape.tokens, what, tuple(found))


def _mixhead(given: tuple[Settings, Shape, bool], form: str, against: tuple[str, ...]) -> Candidate:
    return Candidate(f"Mixhead {form}", functools.partial(_ours, *given, form), f"Mixhead {form}", against)


def growth(settings: Settings, length: int) -> list[Comparison]:
    """Forward and backward of A and B beside plain attention: what grows with the square of the length, and what does not."""
    shape = Shape(settings.batch or 1, settings.heads, length, settings.head_dim)
    given = settings, shape, True
    found = [_mixhead(given, form, (SDPA,)) for form in STAGES]
    found.append(Candidate(SDPA, functools.partial(_sdpa, *given), "plain"))
    return [Comparison(str(shape), length, BOTH, tuple(found))]
