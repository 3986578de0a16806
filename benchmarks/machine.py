"""The machine a benchmark runs on: its description, its free memory, the memory a run takes."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fullrank

_STATUS = Path("/proc/self/status")
_MARK = Path("/proc/self/clear_refs")


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Processor, versions and threads of this process; the GPU's name, if that is the device."""
    description = {
        "cpu": _cpu(),
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "fullrank": fullrank.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device is not None and device.type == "cuda":
        description |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return description


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


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def counts_resident_memory() -> bool:
    """True if `peak_growth_mib` works on this system."""
    return _STATUS.exists() and _MARK.exists()


def peak_growth_mib(run: Callable[[], Any]) -> float:
    """Growth of the resident high-water mark during `run`, in MiB. Linux only; use a fresh process for each figure."""
    _MARK.write_text("5")  # resets the mark to what is resident now
    before = _status_mib("VmHWM")
    run()
    return _status_mib("VmHWM") - before


def _status_mib(key: str) -> float:
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) / 1024


def cuda_growth_mib(run: Callable[[], Any], device: torch.device) -> float:
    """Growth of the most memory that tensors take on the GPU during `run`, in MiB."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
