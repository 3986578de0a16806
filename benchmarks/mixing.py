"""Mixhead A and B against plain attention and against the mixed heads of other packages. Heads are the input.

Mixhead A, B              `WeightedValues`, the kernel that is chosen automatically
plain SDPA                F.scaled_dot_product_attention, causal, no mixing
formula A, B              softmax, einsum over heads, product with V; with autograd
compiled A, B             the formula by torch.compile
x-transformers            its attention with talking heads after the softmax, which is Mixhead A
transformers, eager       its attention of products and a softmax, no mixing
FlexAttention             compiled, no mixing; on a GPU only, for it has no backward pass on a CPU
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from candidates import BOTH, FORWARD, Candidate, Comparison, Pass, Settings, missing, uncompiled
from candidates import eager_attention as transformers_attention
from candidates import talking_heads as x_transformers_attention
from fullrank.core.attention import WeightedValues
from fullrank.core.config import WeightedConfig
from fullrank.core.layout import Layout
from fullrank.core.stages import Heads, HeadSize

SDPA, FORMULA, COMPILED, TALKING = "plain SDPA", "formula", "compiled", "x-transformers"
EAGER, FLEX = "transformers, eager", "FlexAttention"
STAGES = {"A": "position_independent", "B": "position_wise"}
_KEPT = {FORWARD: 3, BOTH: 5}  # tensors of all weights that the formula holds at once
Operands = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    tokens: int
    size: int

    def __str__(self) -> str:
        return f"B {self.batch}, H {self.heads}, N {self.tokens:,}, D {self.size}"


@dataclass(frozen=True)
class Problem:
    """One shape and pass; `attention` makes a Pass of any function of the operands."""

    settings: Settings
    shape: Shape
    backward: bool

    @property
    def dims(self) -> tuple[int, int, int, int]:
        return self.shape.batch, self.shape.heads, self.shape.tokens, self.shape.size

    def future(self) -> Tensor:
        ones = torch.ones(self.shape.tokens, self.shape.tokens, dtype=torch.bool, device=self.settings.torch_device)
        return ones.triu(1)

    def operands(self, form: str = "") -> Operands:
        """query, keys, values (B, H, N, D); for A and B also the parameters of mixing, away from their start."""
        named = {name: self.settings.randn(*self.dims, seed=i) for i, name in enumerate(("query", "keys", "values"))}
        named |= mixing_parameters(self.settings, self.shape.heads, self.shape.size, form, seed=3)
        return {name: tensor.requires_grad_() for name, tensor in named.items()}

    def attention(self, attend: Callable[[Operands], Tensor], operands: Operands) -> Pass:
        cotangent = self.settings.randn(*self.dims, seed=5)
        return Pass(functools.partial(attend, operands), operands, cotangent, self.backward)


def mixing_parameters(settings: Settings, heads: int, size: int, form: str, seed: int) -> Operands:
    """Parameters of mixing A or B in fp32, near the identity but not at it; none without a form."""
    fp32 = Settings(device=settings.device)
    named = {}
    if form:
        named["mixing"] = fp32.randn(heads, heads, seed=seed, scale=0.1)
        named["mixing"].diagonal().add_(1)
    if form == "B":
        named["from_query"] = fp32.randn(size, heads, seed=seed + 1, scale=0.1 * size**-0.5)
    return named


def set_mixing(stage: nn.Module, operands: Operands) -> None:
    """Make the operands of mixing the parameters of the stage, so that both names are the same leaves."""
    for name in ("mixing", "from_query"):
        if name in operands:
            operands[name] = nn.Parameter(operands[name].detach())
            setattr(stage, name, operands[name])


def mixing_matrix(operands: Operands) -> Tensor:
    """M, (H, H), or M(n) = Q(n) W + B, (B, N, H, H), in the dtype of the query."""
    dtype = operands["query"].dtype
    if "from_query" not in operands:
        return operands["mixing"].to(dtype)
    product = torch.einsum("bjnd,di->bnji", operands["query"], operands["from_query"].to(dtype))
    return product + operands["mixing"].to(dtype)


def formula(query: Tensor, keys: Tensor, values: Tensor, mixing: Tensor, future: Tensor) -> Tensor:
    """All scores, all weights, all mixed weights."""
    scores = (query @ keys.transpose(-1, -2)) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    equation = "bjnm,ji->binm" if mixing.dim() == 2 else "bjnm,bnji->binm"
    return torch.einsum(equation, weights, mixing) @ values


def _ours(problem: Problem, form: str) -> Pass:
    shape, device = problem.shape, problem.settings.torch_device
    size = HeadSize(shape.heads, shape.size, shape.heads * shape.size, shape.tokens)
    attend = WeightedValues(WeightedConfig(mix=STAGES[form]), size, 0.0).to(device)
    layout, operands = Layout.of(shape.tokens, device=device), problem.operands(form)
    set_mixing(attend.mix, operands)
    return problem.attention(lambda x: attend(Heads(x["query"], x["query"], x["keys"], x["values"]), layout), operands)


def _formula(problem: Problem, form: str, function: Callable[..., Tensor] = formula) -> Pass:
    future = problem.future()
    return problem.attention(
        lambda x: function(x["query"], x["keys"], x["values"], mixing_matrix(x), future), problem.operands(form)
    )


def _compiled(problem: Problem, form: str) -> Pass:
    return _formula(problem, form, torch.compile(formula, dynamic=False))


def _sdpa(problem: Problem) -> Pass:
    return problem.attention(
        lambda x: F.scaled_dot_product_attention(x["query"], x["keys"], x["values"], is_causal=True), problem.operands()
    )


def _talking_heads(problem: Problem) -> Pass:
    settings, operands = problem.settings, problem.operands("A")
    attention = x_transformers_attention()(heads=problem.shape.heads, causal=True, post_talking_heads=True)
    attend = attention.to(settings.torch_device)
    mixing = operands.pop("mixing").detach()
    # a 1 x 1 convolution: its weight is M transposed
    weight = nn.Parameter(mixing.T.contiguous()[:, :, None, None].to(settings.torch_dtype))
    attend.post_softmax_talking_heads.weight = operands["convolution"] = weight
    return problem.attention(lambda x: attend(x["query"], x["keys"], x["values"])[0], operands)


def _eager(problem: Problem) -> Pass:
    attend = transformers_attention()
    module = types.SimpleNamespace(num_key_value_groups=1, training=True)
    future, dtype, scale = problem.future(), problem.settings.torch_dtype, problem.shape.size**-0.5
    mask = torch.zeros(1, 1, *future.shape, dtype=dtype, device=future.device)
    mask.masked_fill_(future, torch.finfo(dtype).min)
    return problem.attention(
        lambda x: attend(module, x["query"], x["keys"], x["values"], mask, scale)[0].transpose(1, 2), problem.operands()
    )


def _flex(problem: Problem) -> Pass:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens, device = problem.shape.tokens, problem.settings.device
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=device)
    function = torch.compile(flex_attention, dynamic=False)
    return problem.attention(
        lambda x: function(x["query"], x["keys"], x["values"], block_mask=mask), problem.operands()
    )


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    """Forward alone, and with backward: ours and all peers."""
    shape = Shape(settings.batch or 1, settings.heads, length, settings.head_dim)
    return [_comparison(Problem(settings, shape, what == BOTH), what) for what in (FORWARD, BOTH)]


def _comparison(problem: Problem, what: str) -> Comparison:
    settings, shape = problem.settings, problem.shape
    takes = _KEPT[what] * shape.batch * shape.heads * shape.tokens**2 * settings.torch_dtype.itemsize
    on_cpu = "" if settings.torch_device.type == "cuda" else "has no backward pass on a CPU; --device cuda measures it"

    def plain(name: str, make: Callable[[Problem], Pass], **options: Any) -> Candidate:
        return Candidate(name, functools.partial(make, problem), "plain", **options)

    def mixed(name: str, form: str, make: Callable[[Problem, str], Pass], **options: Any) -> Candidate:
        return Candidate(f"{name} {form}", functools.partial(make, problem, form), f"Mixhead {form}", **options)

    def peers(form: str) -> tuple[str, ...]:
        return SDPA, f"{FORMULA} {form}", f"{COMPILED} {form}", TALKING, EAGER, FLEX

    compiled: dict[str, Any] = {"absent": uncompiled(settings), "compiled": True}
    talking, absent = functools.partial(_talking_heads, problem), missing("x_transformers")
    return Comparison(
        str(shape),
        shape.tokens,
        what,
        (
            *(mixed("Mixhead", form, _ours, against=peers(form)) for form in STAGES),
            plain(SDPA, _sdpa),
            *(mixed(FORMULA, form, _formula, takes=takes) for form in STAGES),
            *(mixed(COMPILED, form, _compiled, takes=takes, **compiled) for form in STAGES),
            Candidate(TALKING, talking, "Mixhead A", absent=absent, takes=takes),
            plain(EAGER, _eager, absent=missing("transformers"), takes=takes),
            plain(FLEX, _flex, absent=on_cpu or uncompiled(settings), compiled=True),
        ),
    )


def growth(settings: Settings, length: int) -> list[Comparison]:
    """Forward and backward of A and B beside plain attention: what grows with the square of the length, and what does not."""
    _, both = comparisons(settings, length)
    ours = [dataclasses.replace(one, against=(SDPA,)) for one in both.candidates if one.ours]
    plain = [one for one in both.candidates if one.name == SDPA]
    return [dataclasses.replace(both, candidates=(*ours, *plain))]
