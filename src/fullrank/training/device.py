"""The machine of a run: device, precision, compiling, signals, and the lock of the run folder."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.config.training import TrainConfig, TrainingConfig
from fullrank.core.errors import InputError, RunError
from fullrank.files import out_of_memory, remove_leftovers
from fullrank.training.distributed import HasBlocks, choose_local_device, ignore_sigterm

# -- device and precision --------------------------------------------------------------------------------------------


def choose_device(name: str, key: str = "train.device") -> torch.device:
    """The device called `name`; `auto` is a GPU when there is one. InputError names the configuration `key`.

    Of several processes that train together each takes the GPU of its number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    name = choose_local_device(name)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"{key}: '{name}' is not a device; give auto, cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"{key}: '{name}' is not supported; give auto, cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"{key}: '{name}' is given, but this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def prepare_machine(options: TrainingConfig) -> torch.device:
    """Apply `train.threads` to this process and return the device of `train.device`."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return choose_device(options.device)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters."""
    return next(model.parameters()).device


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """`bf16`: matrix products in bfloat16, parameters and sums in fp32; `fp32`: nothing changes."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def synchronize(device: torch.device) -> None:
    """Wait for the work that was queued on a GPU, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory so far, in MiB: of tensors on a GPU, of this process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


@contextmanager
def explain_failures(options: TrainConfig) -> Iterator[None]:
    """Turn failures of the machine inside the block into RunErrors that say which key to change."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise RunError(
                f"out of memory: lower train.batch_size (now {options.batch_size}) and raise "
                f"train.gradient_accumulation_steps (now {options.gradient_accumulation_steps}) by the same factor, or lower "
                f"train.segment_length; {(str(error).splitlines() or ['no more memory'])[0]}"
            ) from error
        if options.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise RunError(
                f"torch.compile failed; set train.compile=false; {str(error).strip().splitlines()[0]}"
            ) from error
        raise


# -- compiling and CUDA graphs ---------------------------------------------------------------------------------------


def compile_blocks(model: nn.Module, cuda_graphs: bool = False) -> int:
    """`torch.compile` in place, names of parameters unchanged; returns how many modules are compiled.

    A model that has `compile_targets()` says which modules (its blocks: one compilation serves them all); any other is
    compiled whole, which reaches calls of `model(...)` only.
    cuda_graphs: the GPU kernels of a block are recorded once for each shape, and replayed.
    """
    modules = list(model.compile_targets()) if isinstance(model, HasBlocks) else [model]
    options: dict[str, Any] = {"mode": "reduce-overhead"} if cuda_graphs else {}
    for module in modules:
        module.compile(**options)
    return len(modules)


def check_cuda_graphs(options: TrainConfig, device: torch.device) -> None:
    """Raises InputError for `train.cuda_graphs` without a GPU, or with a torch that is too old."""
    if not options.cuda_graphs:
        return
    if device.type != "cuda":
        raise InputError(
            f"train.cuda_graphs: the model is on the device '{device}'; give train.device: cuda, or leave train.cuda_graphs out"
        )
    if not hasattr(torch.Tag, "cudagraph_unsafe"):  # some operators must not be recorded
        raise InputError(
            f"train.cuda_graphs: needs torch 2.9 or later, given {torch.__version__}; leave train.cuda_graphs out"
        )


def begin_pass(options: TrainConfig) -> None:
    """Mark the start of a forward pass: the memory of a recorded graph may be reused from here on."""
    if options.cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()


def detach_carry(tensor: Tensor, options: TrainConfig) -> Tensor:
    """A tensor for the next pass, without its graph; a copy of recorded memory, which a replay overwrites."""
    return tensor.detach().clone() if options.cuda_graphs else tensor.detach()


def eager_evaluation(options: TrainConfig) -> AbstractContextManager[object]:
    """Evaluate without compiled code where training is recorded: shapes differ, and no pass is marked."""
    return torch.compiler.set_stance("force_eager") if options.cuda_graphs else nullcontext()


# -- signals and the lock of a run folder ----------------------------------------------------------------------------


@dataclass
class Signals:
    """Signals that came while training. `signal`: the name of the one that asked for an end, None so far.

    continued: the process was stopped and went on (SIGSTOP, SIGCONT), which its clock has not seen yet.
    """

    signal: str | None = None
    continued: bool = False


@contextmanager
def catch_signals() -> Iterator[Signals]:
    """Inside the block the first SIGINT or SIGTERM is a request to end after the step; the second acts as usual.

    Signals reach the main thread only: in any other, nothing is changed.
    """
    request = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note_end(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number).name
        restore(signal.SIGINT, signal.SIGTERM)

    def note_continued(number: int, frame: FrameType | None) -> None:
        request.continued = True

    handlers = {signal.SIGINT: note_end, signal.SIGTERM: note_end, signal.SIGCONT: note_continued}
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}

    def restore(*numbers: signal.Signals) -> None:
        for number in numbers:
            signal.signal(number, former[number] or signal.SIG_DFL)

    try:
        yield request
    except BaseException:
        restore(*handlers)
        ignore_sigterm()
        raise
    restore(*handlers)


def is_locked(folder: Path) -> bool:
    """True if a process trains in `folder`."""
    if not (folder / ".lock").is_file():
        return False
    try:
        with lock_folder(folder):
            return False
    except RunError:
        return True


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """RunError if another process trains in `folder`; the lock ends with the process, however it ends."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "wb")  # noqa: SIM115 - held until the end of the block
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another folder with --out") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{folder}: another process is training there; wait for it, or choose another --out"
            ) from None
        except OSError:
            pass  # a file system without locks
        remove_leftovers(folder)
        for path in folder.iterdir():
            remove_leftovers(path)
        yield
