"""The machine code of the Triton kernels, compiled for GPUs that need not be there: `benchmarks/compile_gpu.py`.

Limits are a tenth above what the compiler gave when block sizes were chosen.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.importorskip("triton", reason="Triton is for Linux")

ROOT = Path(__file__).resolve().parents[2]


def compile_kernels(folder, *words):
    """The table that the script writes: cards and kinds of heads, each with the best block sizes of its kernels."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    environment = inherited | {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": paths}
    table = folder / "table.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "compile_gpu.py"), "--json", str(table), *words]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    return json.loads(table.read_text())["results"]


def test_outputs_load_and_compute_no_more_than_chosen(tmp_path):
    """On an H100 with 8 heads of 64. Reading queries again for each tile of keys would load 11 bytes for a score."""
    results = compile_kernels(tmp_path, "--capabilities", "90", "--calls", "0", "--kernels", "outputs", "--most", "1")
    (row,) = results["H100, 8 heads of 64, bf16, A"]["kernels"]
    assert row["fits"]
    assert row["tensor"] > 0
    assert row["bytes"] <= 3.3
    assert row["instructions"] <= 26
    assert row["spilled"] <= 200


@pytest.mark.full
@pytest.mark.parametrize(("capability", "call"), [(80, 0), (89, 0), (90, 0), (90, 6), (100, 0), (120, 0)])
def test_every_kernel_compiles_for_every_card(tmp_path, capability, call):
    """Mixhead A; on an H100 talking heads, too."""
    kernels, forward, backward = {0: (6, 2.4, 2.9), 6: (7, 4.1, 7.9)}[call]
    (table,) = compile_kernels(tmp_path, "--capabilities", str(capability), "--calls", str(call)).values()
    assert len(table["kernels"]) == kernels
    assert all(row["tensor"] > 0 for row in table["kernels"])
    assert all(row["spilled"] <= 1065 for row in table["kernels"])
    if capability == 90:
        assert table["over_flash"]["forward"] <= forward
        assert table["over_flash"]["backward"] <= backward
