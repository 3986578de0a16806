"""The machine of a run: device, precision, compiling, random numbers, signals, the lock of the run folder, and processes.

Each of several processes reads its rows of every batch. With `train.sharding: ddp` (DistributedDataParallel) it holds the whole
model, with `fsdp` (FSDP2) a part of each parameter. All processes compute the same figures and take the same decisions; the
first one writes them.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import random
import re
import signal
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullrank.config.run import Device, TrainConfig, TrainingConfig
from fullrank.core import draws
from fullrank.core.errors import InputError, Interrupted, RunError, one_line
from fullrank.core.section import read_value
from fullrank.files import is_distributed, out_of_memory, python_command, read_variable, usable_cores
from fullrank.training.values import Carry, Loss, Objective, TrainingPosition

# -- device and precision --------------------------------------------------------------------------------------------


def choose_device(name: str, key: str = "train.device") -> torch.device:
    """Return the device called `name`; `auto` is a GPU when there is one. InputError names the configuration `key`.

    Of several processes that train together each takes the GPU of its number.
    """
    name = read_value(Device, name, key)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and is_distributed():
        name = f"cuda:{read_variable('LOCAL_RANK', 0)}"
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
    """Return the device of the model's parameters."""
    return next(model.parameters()).device


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Run the block in a precision.

    `bf16`: matrix products in bfloat16, parameters and sums in fp32; `fp32`: nothing changes.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def synchronize(device: torch.device) -> None:
    """Wait for the work that was queued on a GPU, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_mib(device: torch.device) -> float:
    """Measure the peak memory so far, in MiB: of tensors on a GPU, of this process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource  # absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


@contextmanager
def explain_failures(options: TrainConfig) -> Iterator[None]:
    """Run the block; where memory runs out in it, raise RunError, which says which keys to change."""
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


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of a model in place, names of parameters unchanged; one compilation serves them all."""
    for block in find_blocks(model):
        block.compile()


def checkpoint_blocks(model: nn.Module) -> None:
    """Keep the inputs of each block alone (`train.activation_checkpointing`): the backward pass computes the rest again."""
    for block in find_blocks(model):
        block.forward = partial(draws.checkpoint_function, block.forward)


# random numbers are functions of configuration, seed and place alone, so that no state of a generator is saved
_CALL_STRIDE = 0x9E3779B97F4A7C15F39CC0605CEDC835  # 2^128 / golden ratio, odd: calls draw from sequences far apart


def seed_everything(*key: int) -> None:
    """Set every generator to a state that depends on `key` alone: a seed, or the numbers of a pass and a process with it."""
    seed = key[0]
    if len(key) > 1:
        (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
        seed = int(state)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def begin_draws(seed: int, number: int) -> None:
    """Begin the draws of pass `number` (from 1) of a training, and seed the generators for it."""
    seed_everything(seed, number, rank())
    generator = np.random.PCG64([seed, number])
    position = 0

    def words(call: int, start: int, size: int) -> Tensor:
        nonlocal position
        target = call * _CALL_STRIDE + start
        generator.advance((target - position) % 2**128)
        position = target + size
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
    """Run the block with the first SIGINT or SIGTERM as a request to end after the step; the second acts as usual.

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


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Run the block with a lock on `folder`, which ends with the process, however it ends.

    Raises RunError if another process trains there, or if the folder cannot be written to.
    """
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
        yield


# -- several processes -------------------------------------------------------------------------------------------------

Value = TypeVar("Value")
TIMEOUT = 1800  # seconds that a process waits for the others; FULLRANK_TIMEOUT changes it
# in the messages of a failed communication
_LOST = re.compile("gloo|NCCL|Connection closed by peer|Connection reset|Timed out waiting|Broken pipe")


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Run the block with the processes that torchrun started as a group; alone, nothing happens. The next block reuses it.

    A process that fails ends the others: the first one to fail says why. Raises RunError if a process hangs or is gone.
    """
    if not is_distributed():
        yield
        return
    if sys.platform == "linux":  # torchrun may be killed, too: then this process is asked to end
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    seconds = read_variable("FULLRANK_TIMEOUT", TIMEOUT)
    if not dist.is_initialized():
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "nccl"
        timeout = timedelta(seconds=seconds)
        try:
            store, number, count = next(dist.rendezvous("env://", timeout=timeout))
            # when torchrun starts processes again, its store still has the addresses of those that are gone
            attempt = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            dist.init_process_group(backend, timeout=timeout, store=attempt, rank=number, world_size=count)
        except (ValueError, RuntimeError, OSError) as error:
            ignore_sigterm()
            raise RunError(
                f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not join the others: one of them is gone, "
                "or cannot be reached; start with torchrun or `fullrank train --procs N`, or unset WORLD_SIZE; "
                f"{one_line(error)}"
            ) from error
        atexit.register(dist.destroy_process_group)
    try:
        yield
    except BaseException as error:
        ignore_sigterm()
        if not _is_first_failure(error):
            raise SystemExit(1) from error
        is_lost = isinstance(error, RuntimeError) and _LOST.search(str(error))
        if isinstance(error, dist.DistError) or is_lost:
            raise RunError(
                f"process {rank()} of {world_size()} waited for another one, which is gone or did nothing for "
                f"{seconds} seconds; run the same command again to go on from the last checkpoint"
            ) from error
        raise
    else:
        dist.barrier()


def ignore_sigterm() -> None:
    """Ignore SIGTERM, which torchrun sends to all when one process has failed: this one ends by itself, with its message."""
    if is_distributed():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _is_first_failure(error: BaseException) -> bool:
    """Return whether this process reports the failure: the first that failed.

    A request to end reaches all processes, and the first process reports it.
    """
    if isinstance(error, Interrupted):
        return rank() == 0
    store = dist.distributed_c10d._get_default_store()
    try:
        return bool(store.add("fullrank_failed", 1) == 1)
    except RuntimeError:  # the store went with the process that kept it
        return False


def launch(processes: int, words: Sequence[str]) -> int:
    """Run `fullrank` with `words` in so many processes on this machine, by torchrun, and return its exit status.

    Raises Interrupted if they were interrupted, and RunError if the system killed them before one could say why.
    """
    if "LOGLEVEL" not in os.environ:
        logging.disable()  # a process that fails says why; torchrun's lines would bury it
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns where every parameter was reached
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // processes)))
    try:
        options = ["--standalone", f"--nproc-per-node={processes}", "--no-python"]
        run(get_args_parser().parse_args([*options, *python_command(["-m", "fullrank", *words])]))
    except ChildFailedError as failed:
        codes = {number: failure.exitcode for number, failure in failed.failures.items()}
        if all(code < 0 for code in codes.values()):  # else one of them has said why
            first = failed.get_first_failure()[0]
            raise RunError(
                f"process {first} of {processes} was ended by {signal.Signals(-codes[first]).name} before any could say why "
                "(by the system, for want of memory?); run the same command again to go on from the last checkpoint"
            ) from failed
        if Interrupted.status in codes.values():
            raise Interrupted(f"{processes} processes were interrupted") from failed
        return max(*codes.values(), 1)
    except SignalException as caught:
        raise Interrupted(f"{processes} processes were ended by {signal.Signals(caught.sigval).name}") from caught
    return 0


# -- collective operations -------------------------------------------------------------------------------------------


def all_reduce(numbers: Tensor) -> Tensor:
    """Sum each number over all processes, in place, and return the tensor."""
    if world_size() > 1:
        dist.all_reduce(numbers)
    return numbers


def barrier() -> None:
    """Wait for all processes."""
    if world_size() > 1:
        dist.barrier()


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the block in the first process, and then in the others, which read there what it has prepared."""
    if rank() > 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


def all_gather(value: Value) -> list[Value]:
    """Gather the values of all processes, in their order; plain Python objects."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def share_of_process(total: int) -> range:
    """Return the indices of this process among `total` things that are read one by one."""
    return range(rank(), total, world_size())


def merge_shares(results: list[Value]) -> list[Value]:
    """Merge the results of all processes for their shares (`share_of_process`), in order."""
    shares = all_gather(results)
    total = sum(len(share) for share in shares)
    return [shares[i % len(shares)][i // len(shares)] for i in range(total)]


# -- tensors in parts ------------------------------------------------------------------------------------------------


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is in parts on several processes.

    Such a tensor is a `torch.distributed.tensor.DTensor`, which is slow to import.
    """
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Any) -> Any:
    """Gather a tensor of which each process holds a part; any other stays as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def distribute_like(tensor: Tensor, example: Any) -> Tensor:
    """Copy a whole tensor, of which this process keeps the part that it holds of `example`."""
    if not is_sharded(example):
        return tensor.clone()
    from torch.distributed.tensor import distribute_tensor

    mesh = example.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, example.placements)


def gather_rows(tensor: Tensor) -> Tensor:
    """Gather the rows of all processes, in their order; a tensor with fewer than two dimensions is the same in all."""
    if world_size() == 1 or tensor.ndim < 2:
        return tensor
    rows = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return torch.cat(rows)


def take_rows(tensor: Tensor) -> Tensor:
    """Take the rows of this process of a tensor that `gather_rows` made."""
    return tensor if world_size() == 1 or tensor.ndim < 2 else tensor.chunk(world_size())[rank()].clone()


# -- the model -------------------------------------------------------------------------------------------------------


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the blocks of a model, of ours or of another library: the members of its outermost lists of modules."""
    if isinstance(model, nn.ModuleList):
        return [*model]
    return [block for child in model.children() for block in find_blocks(child)]


def shard(model: nn.Module, options: TrainingConfig) -> None:
    """Leave a part of each parameter in each process (FSDP2), before an optimizer is made; a block is gathered at a time.

    With `train.precision: bf16` parameters are gathered in bfloat16, and gradients are summed in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    # a penalty reaches into blocks before the gradient of their outputs, which would gather them again
    reshards = not (options.orthogonality or options.overlap)
    for block in find_blocks(model):
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard(model, mp_policy=policy)
    if hasattr(model, "loss_parts"):
        register_fsdp_forward_method(model, "loss_parts")


class Step(nn.Module):
    """A training pass as a module, which DistributedDataParallel can wrap: the loss of a batch."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Any, carry: Carry, position: TrainingPosition) -> Loss:
        loss = self.objective(batch, carry, position)
        value = loss.value
        if not value.requires_grad:  # no token to predict here, but the others await gradients
            value = value + 0 * next(self.model.parameters()).sum()
        # the graph of the value alone says which parameters are reached
        carry = {name: tensor.detach() for name, tensor in loss.carry.items()}
        return replace(loss, value=value, nll=torch.as_tensor(loss.nll).detach(), carry=carry)


class TrainingPasses:
    """The training passes of a model in one process, or in several, which average their gradients.

    Parameters may have no gradient: those of a skipped layer, and of a tail of the vocabulary without a token in this process.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self.model = model
        self.objective = objective
        self.sharded = any(is_sharded(p) for p in model.parameters())
        self.wrapped: nn.parallel.DistributedDataParallel | None = None
        if world_size() > 1 and not self.sharded:
            with warnings.catch_warnings():  # torch before 2.13 has no other name for `broadcast_buffers`
                warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
                self.wrapped = nn.parallel.DistributedDataParallel(
                    Step(model, objective),
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    find_unused_parameters=True,
                )

    def __call__(self, batch: Any, carry: Carry, position: TrainingPosition) -> Loss:
        compute: Objective = self.wrapped or self.objective
        return compute(batch, carry, position)

    def gradients(self, last: bool) -> AbstractContextManager[object]:
        """Run the block, a forward and a backward pass; processes exchange gradients only in the last batch of an update.

        last: whether this is the last batch.
        """
        if self.sharded:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif self.wrapped is not None and not last:
            return self.wrapped.no_sync()
        return nullcontext()

    @contextmanager
    def gather_parameters(self) -> Iterator[None]:
        """Run the block with all parameters in every process, for evaluation.

        Hooks of FSDP2 do not run. They would record the forward passes, to gather parameters in the next backward pass, but
        each process makes other passes here: it reads another part of the validation text.
        """
        if not self.sharded:
            yield
            return
        from torch.distributed.fsdp import FSDPModule

        modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        hooks = [(module, module._forward_pre_hooks, module._forward_hooks) for module in modules]
        for module in modules:
            module.unshard()
            module._forward_pre_hooks = OrderedDict()
            module._forward_hooks = OrderedDict()
        try:
            yield
        finally:
            for module, before, after in hooks:
                module._forward_pre_hooks = before
                module._forward_hooks = after
                module.reshard()
