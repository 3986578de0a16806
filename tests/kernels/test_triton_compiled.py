"""The Triton kernels of mixed heads as machine code: made here for an H200, run where there is a GPU; in compiled models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mixed_formula import DEVICE, EXACT, check, drawn, problem
from torch import Tensor

import fullrank as fr
from fullrank.kernels.triton_mixed import attend as triton_mixed

if sys.platform != "linux":
    pytest.importorskip("triton", reason="Triton is for Linux")

L = fr.Layout.of


@pytest.mark.parametrize("mixing", ["A", "B"])
def test_one_graph_when_compiled(mixing: str) -> None:
    layout = L(9)
    given = drawn(1, 2, layout, 16, mixing)
    asked = [x for x in given if x is not None]

    def attend(query: Tensor, keys: Tensor, values: Tensor, matrix: Tensor) -> Tensor:
        return triton_mixed(problem((query + 1, keys, values, matrix), layout)) * 2

    expected = attend(*given)  # type: ignore[arg-type]
    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(found, expected)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), asked) for o in (found, expected)), strict=True):
        assert torch.equal(a, b)


def test_block_sizes_for_every_number_and_size_of_heads() -> None:
    """Something is tried everywhere, within the shared memory of an H200, and no group is empty."""
    from fullrank.kernels.triton_blocks import KERNELS, choices

    for name in KERNELS:
        for heads in (1, 2, 3, 7, 8, 10, 12, 16, 31, 32):
            for width in (16, 32, 64, 128):
                for size, precision in ((2, "ieee"), (4, "tf32"), (4, "tf32x3")):
                    found = choices(name, heads, width, size, precision, 232_448)
                    assert 1 <= len(found) <= 4, (name, heads, width, size, precision)
                    for sizes, warps, _ in found:
                        assert warps in (4, 8)
                        for group in (sizes.get("G", 1), sizes.get("GJ", 1)):
                            assert 1 <= group <= heads
                            assert (-(-heads // group) - 1) * group < heads


def test_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Every kernel becomes machine code of an H200, with its first choice of block sizes; no GPU is needed for that."""
    script = Path(__file__).with_name("compile_triton.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 6, ran.stdout


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixing", ["none", "A", "B"])
@pytest.mark.parametrize(("heads", "size"), [(8, 64), (3, 24), (10, 41), (16, 128), (32, 16)])
def test_real_sizes_on_a_gpu(heads: int, size: int, mixing: str, dtype: torch.dtype) -> None:
    layout = L(203, 331)
    tolerance = {torch.float32: EXACT, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    check(drawn(2, heads, layout, size, mixing, dtype), layout, "softmax", tolerance)


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_memory_grows_with_the_length() -> None:
    """Four times the tokens take four times the memory, within a tenth; weights would take sixteen times."""
    found = []
    for length in (2048, 8192):
        given = drawn(1, 8, L(length), 64, "A", torch.bfloat16)
        for _ in range(2):  # the first call tries block sizes
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            triton_mixed(problem(given, L(length))).square().sum().backward()
            torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated() - before)
    assert found[1] < 4.4 * found[0]
