"""The machine of a run: device, precision, compiling, random numbers, signals, and the lock of the run folder."""

from __future__ import annotations

import random
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.config.training import TrainConfig, TrainingConfig
from fullrank.core import draws
from fullrank.core.errors import InputError, RunError
from fullrank.files import out_of_memory, remove_leftovers
from fullrank.training.distributed import HasBlocks, blocks_of, ignore_sigterm, is_distributed, rank, read_variable

# -- device and precision --------------------------------------------------------------------------------------------


def choose_device(name: str, key: str = "train.device") -> torch.device:
    """The device called `name`; `auto` is a GPU when there is one. InputError names the configuration `key`.

    Of several processes that train together each takes the GPU of its number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and is_distributed():
        name = f"cuda:{read_variable('LOCAL_RANK', 0)}"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InputError(f"{key}: auto, cpu, cuda or cuda:0, given '{name}'")
    device = torch.device(name)
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
    import resource  # absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


@contextmanager
def explain_failures(options: TrainConfig) -> Iterator[None]:
    """Turn a want of memory inside the block into a RunError that says which keys to change."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise RunError(
                f"out of memory: lower train.batch_size (now {options.batch_size}) and raise "
                f"train.gradient_accumulation_steps (now {options.gradient_accumulation_steps}) by the same factor, or lower "
                f"train.segment_length; {(str(error).splitlines() or ['no more memory'])[0]}"
            ) from error
        raise


def compile_blocks(model: nn.Module) -> int:
    """`torch.compile` in place, names of parameters unchanged; returns how many modules are compiled.

    A model that has `compile_targets()` says which modules (its blocks: one compilation serves them all); any other is
    compiled whole, which reaches calls of `model(...)` only.
    """
    modules = list(model.compile_targets()) if isinstance(model, HasBlocks) else [model]
    for module in modules:
        module.compile()
    return len(modules)


def checkpoint_blocks(model: nn.Module) -> None:
    """Keep the inputs of each block alone (`train.activation_checkpointing`): the backward pass computes the rest again."""
    for block in blocks_of(model):
        block.forward = partial(draws.checkpoint_function, block.forward)


# random numbers are functions of configuration, seed and place alone, so that no state of a generator is saved
_APART = 0x9E3779B97F4A7C15F39CC0605CEDC835  # 2^128 / golden ratio, odd: sequences of calls lie far from each other


def seed_everything(*key: int) -> None:
    """Set every generator to a state that depends on `key` alone: a seed, or the numbers of a pass and a process with it."""
    seed = key[0] if len(key) == 1 else int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def begin_draws(seed: int, number: int) -> None:
    """Begin the draws of pass `number` (from 1) of a training, and seed the generators for it."""
    seed_everything(seed, number, rank())
    generator, at = np.random.PCG64([seed, number]), 0

    def words(call: int, start: int, size: int) -> Tensor:
        nonlocal at
        target = call * _APART + start
        generator.advance((target - at) % 2**128)
        at = target + size
        return torch.from_numpy(generator.random_raw(size).view(np.int64))

    draws.current = draws.Draws(words)


def end_draws() -> None:
    """Leave the draws to torch's generators, as outside of training."""
    draws.current = None


@dataclass
class Signals:
    """The name of the signal that asked for an end while training, None so far."""

    signal: str | None = None


@contextmanager
def catch_signals() -> Iterator[Signals]:
    """Inside the block the first SIGINT or SIGTERM is a request to end after the step; the second acts as usual.

    Signals reach the main thread only: in any other, nothing is changed.
    """
    request = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number).name
        restore()

    former = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in former.items():
            signal.signal(number, handler or signal.SIG_DFL)

    try:
        yield request
    except BaseException:
        restore()
        ignore_sigterm()
        raise
    restore()


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
    import fcntl  # absent on Windows

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
