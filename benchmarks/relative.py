"""Relative attention: the kernel of this package against the published pad-and-reshape formula and the reference.

    python benchmarks/relative.py [--rounds 9] [--forward] [--memory]

Candidates run interleaved in one process on one thread; times are CPU time (other work on the machine hardly shows in it),
and each figure is the median over rounds of the ratio to the published formula in the same round. `--memory` measures instead
how far the peak of resident memory rises during one forward and backward pass, each in a process of its own.
The formula is Transformer-XL's (Dai et al. 2019, appendix B), written anew: all scores of all heads at once, a zero column put
in front of the position scores, the whole read again as if rows were one longer.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import fullrank as fr
from fullrank.attention.project import Heads
from fullrank.attention.size import HeadSize
from fullrank.attention.weighted import WeightedValues

# texts, heads, queries, earlier keys, size of a head
SHAPES = [(4, 10, 150, 0, 41), (4, 10, 150, 150, 41), (1, 8, 512, 0, 64), (1, 8, 512, 512, 64), (4, 10, 512, 512, 41)]
Run = Callable[[], object]


def operands(shape: tuple[int, ...]) -> list[Tensor]:
    """query, keys, values (B, H, ., D), keys of distances (H, M, D), u and v (H, D)."""
    batch, heads, queries, earlier, size = shape
    generator = torch.Generator().manual_seed(0)

    def drawn(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator).requires_grad_()

    keys = queries + earlier
    return [drawn(batch, heads, queries, size), drawn(batch, heads, keys, size), drawn(batch, heads, keys, size),
            drawn(heads, keys, size), drawn(heads, size), drawn(heads, size)]  # fmt: skip


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


def ours(shape: tuple[int, ...], kernel: str, **stages: str) -> Callable[..., Tensor]:
    _, heads, queries, earlier, size = shape
    attend = WeightedValues(fr.AttentionConfig(score="relative", **stages), HeadSize(heads, size, heads * size, 1), 0.0)
    layout = fr.Layout.of(queries, queries + earlier)

    def run(query: Tensor, keys: Tensor, values: Tensor, distances: Tensor, u: Tensor, v: Tensor) -> Tensor:
        attend.score.biases.content_bias, attend.score.biases.position_bias = u, v
        with fr.kernel(kernel):
            return attend(Heads(query, query, keys, values, distances), layout)

    del attend.score.biases.content_bias, attend.score.biases.position_bias
    return run


def candidates(shape: tuple[int, ...]) -> dict[str, Callable[..., Tensor]]:
    return {
        "published formula": published,
        "reference": ours(shape, "reference"),
        "relative": ours(shape, "relative"),
        "relative, sigsoftmax": ours(shape, "relative", normalize="sigsoftmax"),
        "relative, Mixhead A": ours(shape, "relative", mix="position_independent"),
        "relative, Mixhead B": ours(shape, "relative", mix="position_wise"),
    }


def pass_of(attend: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> Run:
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))

    def run() -> None:
        if not backward:
            with torch.no_grad():
                attend(*inputs)
            return
        for tensor in inputs:
            tensor.grad = None
        attend(*inputs).backward(cotangent)

    return run


def times(shape: tuple[int, ...], rounds: int, backward: bool) -> None:
    inputs = operands(shape)
    made = candidates(shape)
    expected = made["published formula"](*inputs)
    for name in ("reference", "relative"):
        off = float((made[name](*inputs) - expected).detach().abs().max())
        assert off < 1e-4, f"{name} is off by {off:.1e}"
    runs = {name: pass_of(attend, inputs, backward) for name, attend in made.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 2):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if index >= 2:  # the first two warm up
                taken[name].append(time.process_time() - start)
    for name, seconds in taken.items():
        ratio = statistics.median(a / b for a, b in zip(taken["published formula"], seconds, strict=True))
        print(f"  {name:22} {1e3 * statistics.median(seconds):8.1f} ms   {ratio:5.2f}x", flush=True)


def resident(key: str) -> float:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024  # MiB


def peak(shape: tuple[int, ...], name: str) -> float:
    """MiB above what was there before the pass."""
    small = (1, *shape[1:2], 8, 8, shape[4])
    pass_of(candidates(small)[name], operands(small), True)()
    run = pass_of(candidates(shape)[name], operands(shape), True)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def memory(shape: tuple[int, ...]) -> None:
    found: dict[str, float] = {}
    for name in candidates(shape):
        command = [sys.executable, __file__, "--peak", name, *map(str, shape)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = float(done.stdout)
        print(f"  {name:22} {found[name]:8.1f} MiB  {found[name] / found['published formula']:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--forward", action="store_true", help="forward only, without gradients")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--peak", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        name, *shape = options.peak
        print(peak(tuple(map(int, shape)), name))
        return
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread, fp32")
    for shape in SHAPES:
        batch, heads, queries, earlier, size = shape
        what = "forward" if options.forward else "forward + backward"
        print(f"B {batch}, H {heads}, N {queries}, M {queries}+{earlier}, D {size}: {what}")
        if options.memory:
            memory(shape)
        else:
            times(shape, options.rounds, not options.forward)


if __name__ == "__main__":
    main()
