"""Relative attention, with and without mixing, against Transformer-XL's published formula, on heads that are given.

The formula (Dai et al. 2019, appendix B) is written anew: all scores of all heads at once, a zero column put in front of the
position scores, the whole read again as if rows were one longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullrank.bench.candidates import BOTH, FORWARD, Candidate, Comparison, Pass, Settings, drawn
from fullrank.bench.mixing import STAGES, mixing_matrix
from fullrank.core.attention import WeightedValues
from fullrank.core.config import AttentionConfig
from fullrank.core.layout import Layout
from fullrank.core.project import Heads
from fullrank.core.score import XLRelative
from fullrank.core.stage import HeadSize
from fullrank.kernels import kernel as fixed_kernel

PUBLISHED = "published formula"
OURS = "relative"
GIVEN = ("query", "keys", "values", "distances", "u", "v")
_KEPT = {FORWARD: 4, BOTH: 7}  # tensors of all scores that the formula holds at once


@dataclass(frozen=True)
class Shape:
    """Texts, heads, queries, earlier keys, size of a head; tokens left out amid the earlier keys; window in tokens, 0: none."""

    batch: int
    heads: int
    queries: int
    earlier: int
    size: int
    gap: int = 0
    window: int = 0

    def __str__(self) -> str:
        text = f"B {self.batch}, H {self.heads}, N {self.queries}, M {self.queries}+{self.earlier}, D {self.size}"
        text += f", gap of {self.gap}" if self.gap else ""
        return text + (f", window of {self.window}" if self.window else "")

    def layout(self, device: torch.device | None = None) -> Layout:
        old = self.earlier // 2
        runs = (
            ((-self.gap, old), (old, self.earlier - old + self.queries))
            if self.gap
            else ((0, self.earlier + self.queries),)
        )
        return Layout.of_runs(self.queries, runs, window=self.window or None, device=device)


def operands(shape: Shape, settings: Settings) -> dict[str, Tensor]:
    """query, keys, values (B, H, ., D), keys of distances (H, M, D), u and v (H, D)."""
    lead, keys = (shape.batch, shape.heads), shape.queries + shape.earlier
    count = shape.layout().distances if shape.gap or shape.window else keys
    dims = ((*lead, shape.queries), (*lead, keys), (*lead, keys), (shape.heads, count), (shape.heads,), (shape.heads,))
    return {
        name: drawn(settings, *each, shape.size, seed=seed).requires_grad_()
        for seed, (name, each) in enumerate(zip(GIVEN, dims, strict=True))
    }


def published(
    query: Tensor, keys: Tensor, values: Tensor, distances: Tensor, u: Tensor, v: Tensor, mixing: Tensor | None = None
) -> Tensor:
    """(N, M, B, H) scores; the shift by a zero column and a view; -inf in the future; softmax; weighted values.

    mixing, (H, H) or (B, N, H, H), is applied after the softmax.
    """
    batch, heads, queries, size = query.shape
    length = keys.shape[2]
    q, k, values = (x.permute(2, 0, 1, 3) for x in (query, keys, values))
    content = torch.einsum("ibnd,jbnd->ijbn", q + u, k)
    position = torch.einsum("ibnd,jnd->ijbn", q + v, distances.flip(1).transpose(0, 1))
    padded = torch.cat([position.new_zeros(queries, 1, batch, heads), position], dim=1)
    position = padded.view(length + 1, queries, batch, heads)[1:].view(queries, length, batch, heads)
    scores = (content + position) * size**-0.5
    future = torch.ones(queries, length, dtype=torch.bool, device=query.device).triu(1 + length - queries)
    weights = scores.masked_fill(future[:, :, None, None], -torch.inf).softmax(dim=1)
    if mixing is not None:
        weights = torch.einsum("ijbn,nm->ijbm" if mixing.dim() == 2 else "ijbn,binm->ijbm", weights, mixing)
    return torch.einsum("ijbn,jbnd->ibnd", weights, values).permute(1, 2, 0, 3)


def ours(
    shape: Shape, given: dict[str, Tensor], kernel: str = "auto", *, normalize: str = "softmax", mix: str = "none"
) -> tuple[Callable[[], Tensor], WeightedValues]:
    """Attention with our stages over heads as they are given, and its module; u and v are those of `given`."""
    size = HeadSize(shape.heads, shape.size, shape.heads * shape.size, 1)
    device = given["query"].device
    attend = WeightedValues(AttentionConfig(score="relative", normalize=normalize, mix=mix), size, 0.0).to(device)
    assert isinstance(attend.score, XLRelative)
    layout, biases = shape.layout(device), attend.score.biases
    assert biases is not None
    del biases.content_bias, biases.position_bias
    for name, tensor in (("content_bias", given["u"]), ("position_bias", given["v"])):
        setattr(biases, name, tensor)  # leaves of the comparison in place of parameters

    def run() -> Tensor:
        heads = Heads(given["query"], given["query"], given["keys"], given["values"], given["distances"])
        with fixed_kernel(kernel):
            out: Tensor = attend(heads, layout)
        return out

    return run, attend


def pass_of(forward: Callable[[], Tensor], given: dict[str, Tensor], backward: bool) -> Pass:
    query = given["query"]
    cotangent = torch.randn(query.shape, generator=torch.Generator().manual_seed(len(GIVEN))).to(query)
    return Pass(forward, given, cotangent, backward)


def _mixed(settings: Settings, shape: Shape, form: str) -> dict[str, Tensor]:
    """The operands, and those of mixing A or B, away from its start; parameters are fp32."""
    given, wide = operands(shape, settings), Settings(device=settings.device)
    if form:
        given["mixing"] = drawn(wide, shape.heads, shape.heads, seed=7, scale=0.1)
        given["mixing"].diagonal().add_(1)
    if form == "B":
        given["from_query"] = drawn(wide, shape.size, shape.heads, seed=8, scale=0.1 * shape.size**-0.5)
    return {name: tensor.requires_grad_() for name, tensor in given.items()}


def _ours(settings: Settings, shape: Shape, backward: bool, form: str) -> Pass:
    given = _mixed(settings, shape, form)
    forward, attend = ours(shape, given, mix=STAGES[form] if form else "none")
    for name in ("mixing", "from_query"):
        if name in given:
            given[name] = nn.Parameter(given[name].detach())
            setattr(attend.mix, name, given[name])
    return pass_of(forward, given, backward)


def _published(settings: Settings, shape: Shape, backward: bool, form: str) -> Pass:
    given = _mixed(settings, shape, form)
    read = {name: given[name] for name in GIVEN}
    return pass_of(lambda: published(**read, mixing=mixing_matrix(given) if form else None), given, backward)


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    """`length` queries over as many earlier keys and themselves."""
    shape = Shape(settings.batch or 1, settings.heads, length, length, settings.head_dim)
    return [_comparison(settings, shape, what) for what in (FORWARD, BOTH)]


def _comparison(settings: Settings, shape: Shape, what: str) -> Comparison:
    scores = shape.batch * shape.heads * shape.queries * (shape.queries + shape.earlier)
    takes = _KEPT[what] * scores * settings.torch_dtype.itemsize
    found = []
    for form in ("", *STAGES):
        more = f", Mixhead {form}" if form else ""
        given = settings, shape, what == BOTH, form
        peers = (OURS, PUBLISHED + more) if form else (PUBLISHED,)
        found.append(Candidate(OURS + more, functools.partial(_ours, *given), more, peers))
        found.append(Candidate(PUBLISHED + more, functools.partial(_published, *given), more, takes=takes))
    return Comparison(str(shape), shape.queries, what, tuple(found))
