"""Relative attention, with and without mixing, against Transformer-XL's published formula. Heads are the input.

The formula (Dai et al. 2019, appendix B) is written anew: all scores of all heads at once, a zero column put in front of the
position scores, the whole read again as if rows were one longer. `relative` has as many earlier keys as queries.
`relative-shapes` has the shapes of Transformer-XL's models: training on contiguous text, evaluation without gradients, also of
one query, and training on keys with a gap and on a window of keys. The formula has neither gap nor window; there it
stands beside them with contiguous text of the same size.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from candidates import BOTH, FORWARD, Candidate, Comparison, Pass, Settings
from fullrank.core.attention import WeightedValues
from fullrank.core.config import AttentionConfig
from fullrank.core.layout import Layout
from fullrank.core.stages import Heads, HeadSize
from fullrank.kernels import kernel as fixed_kernel
from mixing import MIXES, compute_matrix, make_mixing, set_mixing

PUBLISHED = "published formula"
OURS = "relative"
OPERANDS = ("query", "keys", "values", "distances", "u", "v")
_KEPT = 7  # tensors of all scores that the formula holds at once


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

    def fill(self) -> "Shape":
        """Return the shape of contiguous text of the same size."""
        return dataclasses.replace(self, gap=0, window=0)

    def make_layout(self, device: torch.device | None = None) -> Layout:
        old = self.earlier // 2
        gapped = ((-self.gap, old), (old, self.earlier - old + self.queries))
        runs = gapped if self.gap else ((0, self.earlier + self.queries),)
        return Layout.from_runs(self.queries, runs, window=self.window or None, device=device)


def make_operands(shape: Shape, settings: Settings, form: str) -> dict[str, Tensor]:
    """Make query, keys, values (B, H, ., D), keys of distances (H, M, D), u and v (H, D), and the parameters of mixing."""
    keys = shape.queries + shape.earlier
    dims = {
        "query": (shape.batch, shape.heads, shape.queries),
        "keys": (shape.batch, shape.heads, keys),
        "values": (shape.batch, shape.heads, keys),
        "distances": (shape.heads, keys if shape == shape.fill() else shape.make_layout().distances),
        "u": (shape.heads,),
        "v": (shape.heads,),
    }
    named = {}
    for seed, (name, leading) in enumerate(dims.items()):
        named[name] = settings.randn(*leading, shape.size, seed=seed).to(settings.torch_dtype)
    named |= make_mixing(settings, shape.heads, shape.size, form, seed=7)
    return {name: tensor.requires_grad_() for name, tensor in named.items()}


def published(
    query: Tensor, keys: Tensor, values: Tensor, distances: Tensor, u: Tensor, v: Tensor, mixing: Tensor | None = None
) -> Tensor:
    """Compute relative attention by the published formula.

    It has scores (N, M, B, H), the shift by a zero column and a view, -inf in the future, the softmax, and weighted values.

    Args:
        query: (B, H, N, D).
        keys: (B, H, M, D).
        values: (B, H, M, D).
        distances: keys of distances (H, M, D), the nearest first.
        u: content bias (H, D).
        v: position bias (H, D).
        mixing: (H, H) or (B, N, H, H), applied after the softmax; None for none.

    Returns:
        (B, H, N, D).
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
        equation = "ijbn,nm->ijbm" if mixing.dim() == 2 else "ijbn,binm->ijbm"
        weights = torch.einsum(equation, weights, mixing)
    return torch.einsum("ijbn,jbnd->ibnd", weights, values).permute(1, 2, 0, 3)


def _make_pass(settings: Settings, forward: Callable[[], Tensor], operands: dict[str, Tensor], backward: bool) -> Pass:
    cotangent = settings.randn(*operands["query"].shape, seed=len(OPERANDS)).to(settings.torch_dtype)
    return Pass(forward, operands, cotangent, backward)


def make_ours(
    settings: Settings,
    backward: bool,
    shape: Shape,
    *,
    form: str = "",
    kernel: str = "auto",
    normalize: str = "softmax",
) -> Pass:
    """Make a pass of this package; u and v, and the parameters of mixing, are leaves of the comparison."""
    operands = make_operands(shape, settings, form)
    size = HeadSize(shape.heads, shape.size, shape.heads * shape.size, 1)
    config = AttentionConfig(score="relative", normalize=normalize, mix=MIXES.get(form, "none"))
    attend = WeightedValues(config, size, 0.0).to(settings.torch_device)
    layout = shape.make_layout(settings.torch_device)
    biases = attend.score.biases
    del biases.content_bias, biases.position_bias
    biases.content_bias = operands["u"]
    biases.position_bias = operands["v"]
    set_mixing(attend.mix, operands)

    def run() -> Tensor:
        heads = Heads(operands["query"], operands["query"], operands["keys"], operands["values"], operands["distances"])
        with fixed_kernel(kernel):
            return attend(heads, layout)

    return _make_pass(settings, run, operands, backward)


def make_published(settings: Settings, backward: bool, shape: Shape, form: str = "") -> Pass:
    """Make a pass of the formula; of a shape with a gap or a window, on contiguous text of the same size."""
    operands = make_operands(shape.fill(), settings, form)
    read = {name: operands[name] for name in OPERANDS}

    def run() -> Tensor:
        return published(**read, mixing=compute_matrix(operands) if form else None)

    return _make_pass(settings, run, operands, backward)


def make_contiguous(settings: Settings, backward: bool, shape: Shape) -> Pass:
    """Make a pass of ours without the gap or the window."""
    return make_ours(settings, backward, shape.fill())


def compare(settings: Settings, length: int) -> list[Comparison]:
    """Compare attention of `length` queries over as many earlier keys and themselves."""
    return [_compare(settings, Shape(settings.batch or 1, settings.heads, length, length, settings.head_dim))]


def _compare(settings: Settings, shape: Shape) -> Comparison:
    scores = shape.batch * shape.heads * shape.queries * (shape.queries + shape.earlier)
    takes = _KEPT * scores * settings.torch_dtype.itemsize
    candidates = []
    for form in ("", *MIXES):
        suffix = f", Mixhead {form}" if form else ""
        peer = PUBLISHED + suffix
        against = (OURS, peer) if form else (peer,)
        candidates.append(Candidate(OURS + suffix, partial(make_ours, form=form), suffix, against))
        computes = suffix if shape == shape.fill() else f"{suffix}, contiguous"
        candidates.append(Candidate(peer, partial(make_published, form=form), computes, takes=takes))
    gap = min(shape.gap, 4)
    window = min(shape.window, 8)
    tiny = dataclasses.replace(shape, queries=13, earlier=12, gap=gap, window=window)
    return Comparison(shape, tiny, shape.queries, candidates)


TRAINING = (
    Shape(4, 10, 150, 0, 41),
    Shape(4, 10, 150, 150, 41),
    Shape(1, 8, 512, 0, 64),
    Shape(1, 8, 512, 512, 64),
    Shape(4, 10, 512, 512, 41),
    Shape(4, 10, 150, 150, 41, gap=50),
    Shape(4, 10, 150, 150, 41, gap=600),
    Shape(4, 10, 150, 150, 41, window=150),
    Shape(1, 8, 512, 512, 64, gap=512),
    Shape(1, 8, 512, 512, 64, window=512),
)
EVALUATION = (
    Shape(1, 10, 64, 640, 41),
    Shape(1, 10, 128, 1600, 41),
    Shape(4, 10, 150, 150, 41),
    Shape(1, 10, 1, 640, 41),
)


def compare_shapes(settings: Settings) -> list[Comparison]:
    """Compare in all shapes, also our reference, sigsoftmax, and ours on contiguous text beside a gap or a window."""
    comparisons = []
    for shape, what in [(shape, BOTH) for shape in TRAINING] + [(shape, FORWARD) for shape in EVALUATION]:
        comparison = _compare(settings, shape)
        candidates = [
            *comparison.candidates,
            Candidate("reference", partial(make_ours, kernel="reference"), "", (PUBLISHED,)),
            Candidate("relative, sigsoftmax", partial(make_ours, normalize="sigsoftmax"), "sigsoftmax", (PUBLISHED,)),
        ]
        if shape != shape.fill():
            candidates.append(Candidate("relative, contiguous", make_contiguous, ", contiguous", (PUBLISHED,)))
        comparisons.append(dataclasses.replace(comparison, candidates=candidates, passes=(what,)))
    return comparisons
