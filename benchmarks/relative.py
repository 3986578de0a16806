"""Relative attention: the kernel of this package against the published pad-and-reshape formula and the reference.

    python benchmarks/relative.py [--rounds 9] [--only training | evaluation | layouts | memory] [--json FILE]

    training    forward and backward of contiguous text with earlier keys
    evaluation  forward without gradients, also in bf16 and for one query
    layouts     forward and backward of keys with a gap, and of a window of keys; the formula, which has neither, stands
                beside them with contiguous text of the same size
    memory      how far the peak of resident memory rises during one forward and backward pass, each in a process of its own

The formula is Transformer-XL's (Dai et al. 2019, appendix B), written anew: all scores of all heads at once, a zero column put
in front of the position scores, the whole read again as if rows were one longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fullrank as fr
from fullrank.attention.project import Heads
from fullrank.attention.size import HeadSize
from fullrank.attention.weighted import WeightedValues
from harness import interleave, peak_growth_mib, save

PUBLISHED = "published formula"
Run = Callable[[], object]


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

    def layout(self) -> fr.Layout:
        old = self.earlier // 2
        runs = (
            ((-self.gap, old), (old, self.earlier - old + self.queries))
            if self.gap
            else ((0, self.earlier + self.queries),)
        )
        return fr.Layout.of_runs(self.queries, runs, window=self.window or None)


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
STAGES: dict[str, dict[str, str]] = {
    "relative": {},
    "relative, sigsoftmax": {"normalize": "sigsoftmax"},
    "relative, Mixhead A": {"mix": "position_independent"},
    "relative, Mixhead B": {"mix": "position_wise"},
}


def operands(shape: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """query, keys, values (B, H, ., D), keys of distances (H, M, D), u and v (H, D)."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator).to(dtype).requires_grad_()

    lead, keys = (shape.batch, shape.heads), shape.queries + shape.earlier
    count = shape.layout().distances if shape.gap or shape.window else keys
    return [drawn(*lead, shape.queries, shape.size), drawn(*lead, keys, shape.size), drawn(*lead, keys, shape.size),
            drawn(shape.heads, count, shape.size), drawn(shape.heads, shape.size), drawn(shape.heads, shape.size)]  # fmt: skip


def published(query: Tensor, keys: Tensor, values: Tensor, distances: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """(N, M, B, H) scores; the shift by a zero column and a view; -inf in the future; softmax; weighted values."""
    batch, heads, queries, size = query.shape
    length = keys.shape[2]
    q, k, values = (x.permute(2, 0, 1, 3) for x in (query, keys, values))
    content = torch.einsum("ibnd,jbnd->ijbn", q + u, k)
    position = torch.einsum("ibnd,jnd->ijbn", q + v, distances.flip(1).transpose(0, 1))
    padded = torch.cat([position.new_zeros(queries, 1, batch, heads), position], dim=1)
    position = padded.view(length + 1, queries, batch, heads)[1:].view(queries, length, batch, heads)
    scores = (content + position) * size**-0.5
    future = torch.ones(queries, length, dtype=torch.bool).triu(1 + length - queries)
    weights = scores.masked_fill(future[:, :, None, None], -torch.inf).softmax(dim=1)
    return torch.einsum("ijbn,jbnd->ibnd", weights, values).permute(1, 2, 0, 3)


def ours(shape: Shape, kernel: str, **stages: str) -> Callable[..., Tensor]:
    """Heads as they are given, a table as long as the layout asks for."""
    size = HeadSize(shape.heads, shape.size, shape.heads * shape.size, 1)
    attend, layout = WeightedValues(fr.AttentionConfig(score="relative", **stages), size, 0.0), shape.layout()

    def run(query: Tensor, keys: Tensor, values: Tensor, distances: Tensor, u: Tensor, v: Tensor) -> Tensor:
        attend.score.biases.content_bias, attend.score.biases.position_bias = u, v
        with fr.kernel(kernel):
            return attend(Heads(query, query, keys, values, distances), layout)

    del attend.score.biases.content_bias, attend.score.biases.position_bias
    return run


def pass_of(attend: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> Run:
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype)

    def run() -> None:
        if not backward:
            with torch.no_grad():
                attend(*inputs)
            return
        for tensor in inputs:
            tensor.grad = None
        attend(*inputs).backward(cotangent)

    return run


def candidates(shape: Shape, backward: bool) -> dict[str, Run]:
    """Passes by name. The formula and the reference are first compared with the kernel, where they compute the same."""
    contiguous, inputs = dataclasses.replace(shape, gap=0, window=0), operands(shape)
    checks = [ours(shape, "reference")] + ([published] if shape == contiguous else [])
    given = ours(shape, "blocks")(*inputs)
    for other in checks:
        off = float((given - other(*inputs)).detach().abs().max())
        assert off < 1e-4, f"{shape}: off by {off:.1e}"
    made = {PUBLISHED: pass_of(published, operands(contiguous), backward)}
    made["reference"] = pass_of(ours(shape, "reference"), inputs, backward)
    made |= {name: pass_of(ours(shape, "blocks", **stages), inputs, backward) for name, stages in STAGES.items()}
    if not backward:
        low = operands(shape, torch.bfloat16)
        made[f"{PUBLISHED}, bf16"] = pass_of(published, low, False)
        made["relative, bf16"] = pass_of(ours(shape, "blocks"), low, False)
    if shape != contiguous:
        made["relative, all keys, no gap"] = pass_of(ours(contiguous, "blocks"), operands(contiguous), backward)
    return made


def times(shape: Shape, backward: bool, rounds: int) -> dict[str, Any]:
    print(f"{shape}: {'forward and backward' if backward else 'forward'}")
    made = candidates(shape, backward)
    timings, _ = interleave(made, PUBLISHED, rounds=rounds)
    for timing in timings:
        quartiles = f"[{1 / timing.high:.2f}, {1 / timing.low:.2f}]"
        print(f"  {timing.name:28} {1e3 * timing.seconds:8.2f} ms   {1 / timing.ratio:5.2f}x {quartiles}", flush=True)
    return {"candidates": [{**dataclasses.asdict(timing), "speed_up": 1 / timing.ratio} for timing in timings]}


def peak(shape: Shape, name: str) -> float:
    """MiB above what was there before the pass."""

    def made(shape: Shape) -> Run:
        attend = published if name == PUBLISHED else ours(shape, "blocks", **STAGES.get(name, {}))
        return pass_of(ours(shape, name) if name == "reference" else attend, operands(shape), True)

    made(Shape(1, shape.heads, 8, 8, shape.size))()  # what a first call allocates once and for all
    return peak_growth_mib(made(shape))


def memory(shape: Shape) -> dict[str, Any]:
    print(f"{shape}: peak memory of forward and backward")
    found: dict[str, float] = {}
    numbers = [str(number) for number in dataclasses.astuple(shape)]
    for name in (PUBLISHED, "reference", *STAGES):
        command = [sys.executable, __file__, "--peak", name, *numbers]
        found[name] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(f"  {name:28} {found[name]:8.1f} MiB  {found[name] / found[PUBLISHED]:5.2f}", flush=True)
    return {"mib": found, "share": {name: size / found[PUBLISHED] for name, size in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=["training", "evaluation", "layouts", "memory"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", nargs=8, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        name, *numbers = options.peak
        print(peak(Shape(*map(int, numbers)), name))
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "training": lambda: {str(shape): times(shape, True, options.rounds) for shape in TRAINING},
        "evaluation": lambda: {str(shape): times(shape, False, options.rounds) for shape in EVALUATION},
        "layouts": lambda: {str(shape): times(shape, True, options.rounds) for shape in LAYOUTS},
        "memory": lambda: {str(shape): memory(shape) for shape in TRAINING},
    }
    results = {name: part() for name, part in parts.items() if options.only in (None, name)}
    save(options.json, {"what": "relative attention", "rounds": options.rounds, "results": results})


if __name__ == "__main__":
    main()
