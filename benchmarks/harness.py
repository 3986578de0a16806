"""Interleaved timing: ratios, not seconds.

All candidates run once a round, in one process, in an order that rotates; a ratio is the median over rounds of the two
times of the same round. With one thread the clock is CPU time, which a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PEAK_SIZE = 1024  # rows and columns of the square matrices whose product is called the machine's peak
_PEAK_FLOPS = 2 * _PEAK_SIZE**3

PROTOCOL = (
    "all candidates once a round in one process, in rotating order; CPU time with one thread, wall-clock time with more; "
    "ratio = median over rounds of the ratio of two times of the same round, low and high its quartiles; "
    f"peak = products of {_PEAK_SIZE} x {_PEAK_SIZE} matrices, timed in the same rounds"
)


@dataclass(frozen=True)
class Timing:
    """Median seconds of a candidate, its median ratio to the reference, and the ratio's quartiles."""

    name: str
    seconds: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Peak:
    """Speed of large matrix products in GFLOP/s, measured in the same rounds: what nothing built on them can exceed."""

    fp32: float
    bf16: float


def interleave(
    candidates: Mapping[str, Callable[[], Any]], reference: str, *, rounds: int, warm_up: int = 2
) -> tuple[list[Timing], Peak]:
    """Time every candidate `rounds` (at least 2) times, interleaved; ratios are candidate / reference."""
    runs = {**candidates, "peak fp32": _product(torch.float32), "peak bf16": _product(torch.bfloat16)}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for run in runs.values():
        for _ in range(warm_up):
            run()
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            begin = clock()
            runs[name]()
            times[name].append(clock() - begin)
    found = []
    for name in candidates:
        ratios = [own / other for own, other in zip(times[name], times[reference], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found.append(Timing(name, statistics.median(times[name]), middle, low, high))
    fp32, bf16 = (4 * _PEAK_FLOPS / statistics.median(times[name]) / 1e9 for name in ("peak fp32", "peak bf16"))
    return found, Peak(fp32, bf16)


def _product(dtype: torch.dtype) -> Callable[[], None]:
    a, b = torch.randn(2, _PEAK_SIZE, _PEAK_SIZE).to(dtype)

    def run() -> None:
        for _ in range(4):
            torch.mm(a, b)

    return run


def environment() -> dict[str, Any]:
    """Processor, versions and threads of this process."""
    return {
        "cpu": _cpu(),
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu() -> str:
    """Name, family and model of the processor; a virtual machine may hide the name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    facts = dict(line.partition(":")[::2] for line in text.split("\n\n")[0].splitlines())
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = facts.get("flags", "").split()
    words = [facts.get("model name", "unknown"), f"family {facts.get('cpu family')} model {facts.get('model')}"]
    words += [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    return ", ".join(words)


def peak_growth_mib(run: Callable[[], Any]) -> float:
    """Growth of the resident high-water mark while `run` runs, in MiB. Linux only; use a fresh process for each figure."""
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again at what is resident now
    before = _status_mib("VmHWM")
    run()
    return _status_mib("VmHWM") - before


def memory_mib(script: str, *arguments: object) -> float:
    """The number that `script --memory ARGUMENTS` prints, in a process of its own with as many threads as this one."""
    words = [sys.executable, script, "--memory", *map(str, arguments), "--threads", str(torch.get_num_threads())]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def _status_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) / 1024


def options(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark takes: --rounds, --threads, --json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser


def save(path: Path | None, content: dict[str, Any]) -> None:
    """Keep `content`, the protocol and the environment as JSON in `path`, if given."""
    if path is None:
        return
    whole = {**content, "protocol": PROTOCOL, "environment": environment()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(whole), indent=2) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    """Floats with four figures: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
