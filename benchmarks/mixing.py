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
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from candidates import (
    BOTH,
    Candidate,
    Comparison,
    Pass,
    Settings,
    Shape,
    explain_missing,
    import_talking_heads,
)
from fullrank.core.attention import WeightedValues
from fullrank.core.config import WeightedConfig
from fullrank.core.layout import Layout
from fullrank.core.stages import Heads, HeadSize

SDPA = "plain SDPA"
TALKING = "x-transformers"
EAGER = "transformers, eager"
FLEX = "FlexAttention"
MIXES = {"A": "position_independent", "B": "position_wise"}
HEADS = ("query", "keys", "values")
_KEPT = 5  # tensors of all weights that the formula holds at once
Operands = dict[str, Tensor]
Attend = Callable[..., Tensor]  # of query, keys and values


@dataclass(frozen=True)
class Problem:
    """One shape and pass, without mixing or with A or B."""

    settings: Settings
    backward: bool
    form: str
    shape: Shape

    def draw(self, seed: int) -> Tensor:
        """Draw random heads (B, H, N, D)."""
        drawn = self.settings.randn(*dataclasses.astuple(self.shape), seed=seed)
        return drawn.to(self.settings.torch_dtype)

    def make_mask(self) -> Tensor:
        """Make the mask (N, N) that is True where a key is later than the query."""
        tokens = self.shape.tokens
        ones = torch.ones(tokens, tokens, dtype=torch.bool, device=self.settings.torch_device)
        return ones.triu(1)

    def make_operands(self) -> Operands:
        """Make query, keys, values; for A and B also the parameters of mixing, away from their start."""
        named = {name: self.draw(seed) for seed, name in enumerate(HEADS)}
        named |= make_mixing(self.settings, self.shape.heads, self.shape.size, self.form, seed=3)
        return {name: tensor.requires_grad_() for name, tensor in named.items()}

    def make_pass(self, attend: Attend, operands: Operands | None = None) -> Pass:
        """Make a pass of a function of query, keys and values."""
        leaves = operands or self.make_operands()
        heads = [leaves[name] for name in HEADS]
        return Pass(partial(attend, *heads), leaves, self.draw(seed=5), self.backward)


def make_mixing(settings: Settings, heads: int, size: int, form: str, seed: int) -> Operands:
    """Make parameters of mixing A or B in fp32, near the identity but not at it.

    Args:
        settings: device of the parameters.
        heads: number of heads.
        size: numbers of a head.
        form: A or B; empty for no parameters.
        seed: of the random numbers.
    """
    named = {}
    if form:
        named["mixing"] = 0.1 * settings.randn(heads, heads, seed=seed)
        named["mixing"].diagonal().add_(1)
    if form == "B":
        named["from_query"] = 0.1 * size**-0.5 * settings.randn(size, heads, seed=seed + 1)
    return named


def set_mixing(stage: nn.Module, operands: Operands) -> None:
    """Make the operands of mixing the parameters of the stage, so that both names are the same leaves."""
    for name in ("mixing", "from_query"):
        if name in operands:
            operands[name] = nn.Parameter(operands[name].detach())
            setattr(stage, name, operands[name])


def compute_matrix(operands: Operands) -> Tensor:
    """Compute M, (H, H), or M(n) = Q(n) W + B, (B, N, H, H), in the dtype of the query."""
    dtype = operands["query"].dtype
    mixing = operands["mixing"].to(dtype)
    if "from_query" not in operands:
        return mixing
    return torch.einsum("bjnd,di->bnji", operands["query"], operands["from_query"].to(dtype)) + mixing


def formula(query: Tensor, keys: Tensor, values: Tensor, mixing: Tensor, future: Tensor) -> Tensor:
    """Compute mixed attention as the equation reads: all scores, all weights, all mixed weights.

    Args:
        query: (B, H, N, D).
        keys: (B, H, M, D).
        values: (B, H, M, D).
        mixing: (H, H) or (B, N, H, H).
        future: (N, M), True where a key is later than the query.

    Returns:
        (B, H, N, D).
    """
    scores = (query @ keys.transpose(-1, -2)) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    equation = "bjnm,ji->binm" if mixing.dim() == 2 else "bjnm,bnji->binm"
    return torch.einsum(equation, weights, mixing) @ values


def _make_ours(problem: Problem) -> Pass:
    shape = problem.shape
    device = problem.settings.torch_device
    size = HeadSize(shape.heads, shape.size, shape.heads * shape.size, shape.tokens)
    attend = WeightedValues(WeightedConfig(mix=MIXES[problem.form]), size, 0.0).to(device)
    layout = Layout.of(shape.tokens, device=device)
    operands = problem.make_operands()
    set_mixing(attend.mix, operands)
    return problem.make_pass(lambda query, *others: attend(Heads(query, query, *others), layout), operands)


def _make_formula(problem: Problem, function: Attend = formula) -> Pass:
    operands = problem.make_operands()
    future = problem.make_mask()
    return problem.make_pass(lambda *heads: function(*heads, compute_matrix(operands), future), operands)


def _make_compiled(problem: Problem) -> Pass:
    return _make_formula(problem, torch.compile(formula, dynamic=False))


def _make_sdpa(problem: Problem) -> Pass:
    return problem.make_pass(partial(F.scaled_dot_product_attention, is_causal=True))


def _make_talking_heads(problem: Problem) -> Pass:
    settings = problem.settings
    operands = problem.make_operands()
    make = import_talking_heads()
    attend = make(heads=problem.shape.heads, causal=True, post_talking_heads=True).to(settings.torch_device)
    mixing = operands.pop("mixing").detach()
    # a 1 x 1 convolution: its weight is M transposed
    weight = nn.Parameter(mixing.T.contiguous()[:, :, None, None].to(settings.torch_dtype))
    attend.post_softmax_talking_heads.weight = operands["convolution"] = weight
    return problem.make_pass(lambda *heads: attend(*heads)[0], operands)


def _make_eager(problem: Problem) -> Pass:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    module = types.SimpleNamespace(num_key_value_groups=1, training=True)
    dtype = problem.settings.torch_dtype
    future = problem.make_mask()
    mask = torch.zeros(future.shape, dtype=dtype, device=future.device)
    mask = mask.masked_fill_(future, torch.finfo(dtype).min)[None, None]
    scale = problem.shape.size**-0.5
    return problem.make_pass(lambda *heads: eager_attention_forward(module, *heads, mask, scale)[0].transpose(1, 2))


def _make_flex(problem: Problem) -> Pass:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = problem.shape.tokens
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=problem.settings.device)
    return problem.make_pass(partial(torch.compile(flex_attention, dynamic=False), block_mask=mask))


def _make(make: Callable[[Problem], Pass], form: str, settings: Settings, backward: bool, shape: Shape) -> Pass:
    return make(Problem(settings, backward, form, shape))


def compare(settings: Settings, length: int) -> list[Comparison]:
    """Compare ours with all peers."""
    shape = Shape(settings.batch or 1, settings.heads, length, settings.head_dim)
    takes = _KEPT * shape.batch * shape.heads * shape.tokens**2 * settings.torch_dtype.itemsize
    uncompiled = "" if settings.compile else "left out; --compile measures it too"
    no_flex = "" if settings.torch_device.type == "cuda" else "has no backward pass on a CPU; --device cuda measures it"

    def candidate(name: str, make: Callable[[Problem], Pass], form: str = "", **options: Any) -> Candidate:
        computes = f"Mixhead {form}" if form else "plain"
        return Candidate(name, partial(_make, make, form), computes, **options)

    candidates = []
    for form in MIXES:
        peers = (SDPA, f"formula {form}", f"compiled {form}", TALKING, EAGER, FLEX)
        candidates.append(candidate(f"Mixhead {form}", _make_ours, form, against=peers))
    for form in MIXES:
        candidates.append(candidate(f"formula {form}", _make_formula, form, takes=takes))
        compiled = candidate(f"compiled {form}", _make_compiled, form, takes=takes, absent=uncompiled, compiled=True)
        candidates.append(compiled)
    candidates += [
        candidate(SDPA, _make_sdpa),
        candidate(TALKING, _make_talking_heads, "A", absent=explain_missing("x_transformers"), takes=takes),
        candidate(EAGER, _make_eager, absent=explain_missing("transformers"), takes=takes),
        candidate(FLEX, _make_flex, absent=no_flex or uncompiled, compiled=True),
    ]
    return [Comparison(shape, dataclasses.replace(shape, tokens=13), length, candidates)]


def compare_growth(settings: Settings, length: int) -> list[Comparison]:
    """Compare forward and backward of A and B with plain attention alone.

    It shows what grows with the square of the length, and what does not.
    """
    (comparison,) = compare(settings, length)
    candidates = [candidate for candidate in comparison.candidates if candidate.ours or candidate.name == SDPA]
    return [dataclasses.replace(comparison, candidates=candidates, passes=(BOTH,))]
