"""Relative attention, with and without mixing, against Transformer-XL's published formula. Heads are the input.

The formula (Dai et al. 2019, appendix B) is written anew: all scores of all heads at once, a zero column put in front of the
position scores, the whole read again as if rows were one longer. `fullrank bench relative` compares both; as a script this
file looks closer:

    python benchmarks/relative.py [--rounds 9] [--threads 1] [--only training | evaluation | layouts | memory] [--json FILE]

    training    forward and backward of contiguous text with earlier keys
    evaluation  forward without gradients, also in bf16 and for one query
    layouts     forward and backward of keys with a gap, and of a window of keys; the formula, which has neither, stands
                beside them with contiguous text of the same size
    memory      peak growth of resident memory during one forward and backward pass, each in a process of its own
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from candidates import BOTH, FORWARD, Candidate, Comparison, Pass, Settings
from closer import memory_mib, parse, save, table
from fullrank.core.attention import WeightedValues
from fullrank.core.config import AttentionConfig
from fullrank.core.layout import Layout
from fullrank.core.score import XLRelative
from fullrank.core.stages import Heads, HeadSize
from fullrank.kernels import kernel as fixed_kernel
from mixing import STAGES, mixing_matrix, mixing_parameters, set_mixing

PUBLISHED = "published formula"
OURS = "relative"
OPERANDS = ("query", "keys", "values", "distances", "u", "v")
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
        gapped = ((-self.gap, old), (old, self.earlier - old + self.queries))
        runs = gapped if self.gap else ((0, self.earlier + self.queries),)
        return Layout.from_runs(self.queries, runs, window=self.window or None, device=device)


def operands_of(shape: Shape, settings: Settings, form: str = "") -> dict[str, Tensor]:
    """query, keys, values (B, H, ., D), keys of distances (H, M, D), u and v (H, D), and the parameters of mixing."""
    lead, keys = (shape.batch, shape.heads), shape.queries + shape.earlier
    count = shape.layout().distances if shape.gap or shape.window else keys
    dims = ((*lead, shape.queries), (*lead, keys), (*lead, keys), (shape.heads, count), (shape.heads,), (shape.heads,))
    named = {
        name: settings.randn(*each, shape.size, seed=seed)
        for seed, (name, each) in enumerate(zip(OPERANDS, dims, strict=True))
    }
    named |= mixing_parameters(settings, shape.heads, shape.size, form, seed=7)
    return {name: tensor.requires_grad_() for name, tensor in named.items()}


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


def attention_pass(forward: Callable[[], Tensor], operands: dict[str, Tensor], backward: bool) -> Pass:
    query = operands["query"]
    cotangent = torch.randn(query.shape, generator=torch.Generator().manual_seed(len(OPERANDS))).to(query)
    return Pass(forward, operands, cotangent, backward)


def ours(
    shape: Shape,
    settings: Settings,
    backward: bool,
    form: str = "",
    *,
    kernel: str = "auto",
    normalize: str = "softmax",
) -> Pass:
    """The attention of this package; u and v, and the parameters of mixing, are leaves of the comparison."""
    operands = operands_of(shape, settings, form)
    size = HeadSize(shape.heads, shape.size, shape.heads * shape.size, 1)
    config = AttentionConfig(score="relative", normalize=normalize, mix=STAGES[form] if form else "none")
    attend = WeightedValues(config, size, 0.0).to(settings.torch_device)
    assert isinstance(attend.score, XLRelative)
    layout, biases = shape.layout(settings.torch_device), attend.score.biases
    assert biases is not None
    del biases.content_bias, biases.position_bias
    for name, operand in (("content_bias", "u"), ("position_bias", "v")):
        setattr(biases, name, operands[operand])
    set_mixing(attend.mix, operands)

    def run() -> Tensor:
        heads = Heads(operands["query"], operands["query"], operands["keys"], operands["values"], operands["distances"])
        with fixed_kernel(kernel):
            out: Tensor = attend(heads, layout)
        return out

    return attention_pass(run, operands, backward)


def by_formula(shape: Shape, settings: Settings, backward: bool, form: str = "") -> Pass:
    operands = operands_of(shape, settings, form)
    read = {name: operands[name] for name in OPERANDS}
    return attention_pass(
        lambda: published(**read, mixing=mixing_matrix(operands) if form else None), operands, backward
    )


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    """`length` queries over as many earlier keys and themselves."""
    shape = Shape(settings.batch or 1, settings.heads, length, length, settings.head_dim)
    return [_comparison(settings, shape, what) for what in (FORWARD, BOTH)]


def _comparison(settings: Settings, shape: Shape, what: str) -> Comparison:
    scores = shape.batch * shape.heads * shape.queries * (shape.queries + shape.earlier)
    takes = _KEPT[what] * scores * settings.torch_dtype.itemsize
    candidates = []
    for form in ("", *STAGES):
        suffix = f", Mixhead {form}" if form else ""
        common = shape, settings, what == BOTH, form
        peers = (OURS, PUBLISHED + suffix) if form else (PUBLISHED,)
        candidates.append(Candidate(OURS + suffix, functools.partial(ours, *common), suffix, peers))
        candidates.append(Candidate(PUBLISHED + suffix, functools.partial(by_formula, *common), suffix, takes=takes))
    return Comparison(str(shape), shape.queries, what, tuple(candidates))


# the closer look

TRAINING = [
    Shape(4, 10, 150, 0, 41),
    Shape(4, 10, 150, 150, 41),
    Shape(1, 8, 512, 0, 64),
    Shape(1, 8, 512, 512, 64),
    Shape(4, 10, 512, 512, 41),
]
EVALUATION = [
    Shape(1, 10, 64, 640, 41),
    Shape(1, 10, 128, 1600, 41),
    Shape(4, 10, 150, 150, 41),
    Shape(1, 10, 1, 640, 41),
]
LAYOUTS = [
    Shape(4, 10, 150, 150, 41, gap=50),
    Shape(4, 10, 150, 150, 41, gap=600),
    Shape(4, 10, 150, 150, 41, window=150),
    Shape(1, 8, 512, 512, 64, gap=512),
    Shape(1, 8, 512, 512, 64, window=512),
]
VARIANTS: dict[str, Callable[..., Pass]] = {
    PUBLISHED: by_formula,
    "reference": functools.partial(ours, kernel="reference"),
    "relative": ours,
    "relative, sigsoftmax": functools.partial(ours, normalize="sigsoftmax"),
    "relative, Mixhead A": functools.partial(ours, form="A"),
    "relative, Mixhead B": functools.partial(ours, form="B"),
}
FP32, BF16 = Settings(), Settings(dtype="bf16")


def variants(shape: Shape, backward: bool) -> dict[str, Pass]:
    """Passes by name. The formula and the reference are first compared with the kernel, where they compute the same."""
    contiguous = dataclasses.replace(shape, gap=0, window=0)
    expected = ours(shape, FP32, False)()
    for name in ["reference", *([PUBLISHED] if shape == contiguous else [])]:
        off = float((expected - VARIANTS[name](shape, FP32, False)()).abs().max())
        assert off < 1e-4, f"{shape}: off by {off:.1e}"
    passes = {name: make(shape, FP32, backward) for name, make in VARIANTS.items() if name != PUBLISHED}
    passes = {PUBLISHED: by_formula(contiguous, FP32, backward), **passes}
    if not backward:
        passes[f"{PUBLISHED}, bf16"] = by_formula(shape, BF16, False)
        passes["relative, bf16"] = ours(shape, BF16, False)
    if shape != contiguous:
        passes["relative, all keys, no gap"] = ours(contiguous, FP32, backward)
    return passes


def times(shape: Shape, backward: bool, rounds: int) -> dict[str, Any]:
    title = f"{shape}: {'forward and backward' if backward else 'forward'}"
    return table(title, variants(shape, backward), PUBLISHED, rounds)


def memory(shape: Shape) -> dict[str, Any]:
    print(f"{shape}: peak memory of forward and backward")
    mib: dict[str, float] = {}
    for name in VARIANTS:
        mib[name] = memory_mib(name, shape)
        print(f"  {name:28} {mib[name]:8.1f} MiB  {mib[name] / mib[PUBLISHED]:5.2f}", flush=True)
    return {"mib": mib, "share": {name: size / mib[PUBLISHED] for name, size in mib.items()}}


def main() -> None:
    given = parse(
        __doc__,
        make=lambda numbers, name: VARIANTS[name](Shape(*numbers), FP32, True),
        tiny=lambda numbers: (1, numbers[1], 8, 8, numbers[4]),
        only={"choices": ["training", "evaluation", "layouts", "memory"]},
    )
    parts: dict[str, tuple[list[Shape], Callable[[Shape], dict[str, Any]]]] = {
        "training": (TRAINING, lambda shape: times(shape, True, given.rounds)),
        "evaluation": (EVALUATION, lambda shape: times(shape, False, given.rounds)),
        "layouts": (LAYOUTS, lambda shape: times(shape, True, given.rounds)),
        "memory": (TRAINING, memory),
    }
    results = {
        name: {str(shape): measured(shape) for shape in shapes}
        for name, (shapes, measured) in parts.items()
        if given.only in (None, name)
    }
    save(given.json, "relative attention", given.rounds, results)


if __name__ == "__main__":
    main()
