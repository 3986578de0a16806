"""The machine: which device, which precision, how much memory, and compiling."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from fullrank.config.run import TrainConfig
from fullrank.core.errors import InputError, RunError


def choose_device(name: str, key: str = "train.device") -> torch.device:
    """The device called `name`; `auto` is a GPU when there is one. InputError names the configuration `key`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"{key}: '{name}' is not a device; give auto, cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"{key}: '{name}' is not supported; give auto, cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"{key}: '{name}' is given, but this machine has {torch.cuda.device_count()} CUDA devices")
    return device


class Machine(Protocol):
    """What a train section says about the machine."""

    @property
    def threads(self) -> int | None: ...
    @property
    def device(self) -> str: ...


def prepare_machine(options: Machine) -> torch.device:
    """Apply `train.threads` to this process and return the device of `train.device`."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return choose_device(options.device)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """`bf16`: matrix products in bfloat16, parameters and sums in fp32; `fp32`: nothing changes."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def wait_for(device: torch.device) -> None:
    """Let the device finish what it was given, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_mib(device: torch.device) -> float:
    """Most memory held so far, in MiB: by tensors on a GPU, by this process otherwise (0 where nobody counts)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def compile_blocks(model: nn.Module, cuda_graphs: bool = False) -> int:
    """`torch.compile` in place, names of parameters unchanged; returns how many modules are compiled.

    cuda_graphs: what a block launches on a GPU is recorded once for each shape, and replayed.

    A model that has `compile_targets()` says which modules (its blocks: one compilation serves them all); any other is
    compiled whole, which reaches what is called as `model(...)`.
    """
    targets = getattr(model, "compile_targets", None)
    modules = list(targets()) if callable(targets) else [model]
    for module in modules:
        if cuda_graphs:
            module.compile(mode="reduce-overhead")
        else:
            module.compile()
    return len(modules)


def check_cuda_graphs(options: TrainConfig, device: torch.device) -> None:
    """Raises InputError where `train.cuda_graphs` is asked for, and there is no GPU to record, or torch is too old."""
    if options.cuda_graphs and device.type != "cuda":
        raise InputError(
            f"train.cuda_graphs: the model is on the device '{device}'; give train.device: cuda, or leave train.cuda_graphs out"
        )
    if options.cuda_graphs and not hasattr(torch.Tag, "cudagraph_unsafe"):  # some operators must not be recorded
        raise InputError(
            f"train.cuda_graphs: needs torch 2.9 or later, given {torch.__version__}; leave train.cuda_graphs out"
        )


def begin_pass(options: TrainConfig) -> None:
    """Before a forward pass: what a recorded graph left behind may be written over from here on."""
    if options.cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()


def outliving(tensor: Tensor, options: TrainConfig) -> Tensor:
    """What a pass leaves for the next one: of a recorded graph, whose replay would write over it, a copy."""
    return tensor.detach().clone() if options.cuda_graphs else tensor.detach()


def judging(options: TrainConfig) -> AbstractContextManager[object]:
    """Evaluation runs as it is where training is recorded: other shapes, and passes that nothing marks."""
    return torch.compiler.set_stance("force_eager") if options.cuda_graphs else nullcontext()


@contextmanager
def explaining(options: TrainConfig) -> Iterator[None]:
    """Failures of the machine inside the block as RunErrors that say which key to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of memory: lower train.batch_size (now {options.batch_size}) and raise train.gradient_accumulation_steps "
            f"(now {options.gradient_accumulation_steps}) by the same factor; {str(error).splitlines()[0]}"
        ) from error
    except Exception as error:
        if options.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise RunError(
                f"torch.compile failed; set train.compile=false; {str(error).strip().splitlines()[0]}"
            ) from error
        raise
