"""The machine a benchmark runs on: its description, its free memory, the memory a run takes; JSON of what it measured."""

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import fullrank
from fullrank import files
from fullrank.experiments.run import read_cpuinfo

_STATUS = Path("/proc/self/status")
_MARK = Path("/proc/self/clear_refs")


def describe_machine(device: torch.device | None = None) -> dict[str, Any]:
    """Describe the processor, versions and threads of this process; the GPU's name, if that is the device."""
    description = {
        "cpu": _describe_processor(),
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "fullrank": fullrank.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device is not None and device.type == "cuda":
        description["gpu"] = torch.cuda.get_device_name(device)
        description["cuda"] = torch.version.cuda
    return description


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write what a script measured, and on which machine, to `path`, if given."""
    if path is not None:
        files.write_json(path, {**content, "environment": describe_machine()})


def round_numbers(value: Any) -> Any:
    """Round the floats of nested JSON to four figures: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: round_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(item) for item in value]
    return value


def _describe_processor() -> str:
    """Describe the processor by name, family and model; a virtual machine may hide the name."""
    name = read_cpuinfo("model name")
    if not name:
        return platform.processor() or "unknown"
    flags = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in read_cpuinfo("flags").split()]
    return ", ".join([name, f"family {read_cpuinfo('cpu family')} model {read_cpuinfo('model')}", *flags])


def read_free_bytes(device: torch.device) -> int | None:
    """Read the free memory of the device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    memory = Path("/proc/meminfo")
    return 1024 * _read_kib(memory, "MemAvailable") if memory.exists() else None


def _read_kib(file: Path, key: str) -> int:
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    raise KeyError(key)


def counts_resident_memory() -> bool:
    """Return whether `measure_growth_mib` works on this system."""
    return _STATUS.exists() and _MARK.exists()


def measure_growth_mib(run: Callable[[], Any]) -> float:
    """Measure the growth of the resident high-water mark during `run`, in MiB.

    It works on Linux only. Use a fresh process for each figure.
    """
    _MARK.write_text("5")  # resets the mark to what is resident now
    before = _read_kib(_STATUS, "VmHWM")
    run()
    return (_read_kib(_STATUS, "VmHWM") - before) / 1024


def measure_cuda_growth_mib(run: Callable[[], Any], device: torch.device) -> float:
    """Measure the growth of the most memory that tensors take on the GPU during `run`, in MiB."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
