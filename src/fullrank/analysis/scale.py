"""Memory, time of an update and communication of a run on N GPUs: arithmetic from stated assumptions. Nothing is run.

Each GPU has ceil(B / N) rows of a batch of B. P parameters; w bytes for each that is gathered, 4, or 2 with bf16.

    train.sharding   bytes of weights, gradients, each optimizer state   bytes that each GPU sends in an update
    ddp              4 P                                                 2 (N - 1) / N 4 P
    fsdp             4 P / N, and whole blocks while they work           (N - 1) / N (w P_gathered + 4 P)

P_gathered counts blocks twice for each batch of an update, for the forward and for the backward pass (once with a penalty on
attention weights), and the rest, embedding and output, once. Computing takes FLOPs / (utilization x peak), or as long as the
host needs to launch its kernels. Communication goes on while the GPU computes: the backward pass of the last batch (ddp), or
all passes (fsdp). Exposed is what is left, and what nothing hides: the gradient of the embedding, which is formed last, and
under fsdp the gathering of embedding and output.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullrank.analysis.activations import forward_pass
from fullrank.analysis.size import on_meta, size_of_run
from fullrank.config.run import RunConfig
from fullrank.config.training import TrainConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError, suggest
from fullrank.core.masked import MaskedLanguageModel
from fullrank.core.output import Output
from fullrank.core.translator import Translator
from fullrank.training.distributed import blocks_of
from fullrank.training.optimizer import make_optimizer
from fullrank.training.randomness import checkpoint_blocks

BUCKET = 25 * 2**20  # bytes of gradients that DistributedDataParallel sends at a time
LOGITS = 256 * 2**20  # bytes of the logits of a chunk on a GPU, and rows at most (`kernels/vocabulary.py`)
LOGIT_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions about a GPU and its links; the defaults are an H100 SXM by its data sheet, in machines of eight.

    link_gb: 10^9 bytes a second that a GPU sends to others of its machine. network_gb: that a machine sends, by all of its
    adapters; every machine is a part of as many rings as it has adapters. A collective takes log2 N hops of `latency_us` each
    way. launch_us: time of the host for a kernel. reserved_gib: CUDA, NCCL, gaps between tensors.
    """

    memory_gib: float = 80
    fp32_tflops: float = 67
    bf16_tflops: float = 989
    utilization: float = 0.4
    gpus_per_machine: float = 8
    link_gb: float = 450
    network_gb: float = 400
    latency_us: float = 10
    launch_us: float = 8
    reserved_gib: float = 3


GPUS = {
    "a100": Assumptions(fp32_tflops=19.5, bf16_tflops=312, link_gb=300, network_gb=200),
    "h100": Assumptions(),
    "h200": Assumptions(memory_gib=140),
}


def assumptions(gpu: str, given: Mapping[str, float]) -> Assumptions:
    """Assumptions about the GPU called `gpu`, with the `given` ones in place of its own; InputError for an unknown name."""
    if gpu not in GPUS:
        raise InputError(f"--gpu: '{gpu}' is not known; {suggest(gpu, GPUS)}")
    known = [field.name for field in dataclasses.fields(Assumptions)]
    for name, value in given.items():
        if name not in known:
            raise InputError(f"--assume: '{name}' is not assumed; {suggest(name, known)}")
        if not 0 < value < math.inf:
            raise InputError(f"--assume: {name} must be above 0, given {value}")
    return dataclasses.replace(GPUS[gpu], **given)


def scale_of_run(run: RunConfig, gpus: int, assumed: Assumptions, length: int | None = None) -> dict[str, Any]:
    """Memory, time and communication of a run on `gpus` GPUs, as plain numbers: bytes and seconds, of one GPU and one update.

    length: of a sequence; the training segment's, of translations 25. `efficiency`: tokens per second and GPU, over those of
    one GPU that trains the same batch. Raises InputError where the batch cannot be shared by so many processes.
    """
    train = run.train
    size = size_of_run(run, length)
    length = size["flops_per_token"]["length"]
    batch = max(1, (train.batch_tokens or 1) // length) if run.translates else train.batch_size
    if run.task == "language_model" and train.order == "contiguous" and batch % gpus:
        raise InputError(
            f"train.batch_size: {batch} streams cannot be shared evenly by {gpus} GPUs; give a multiple of {gpus}, or another "
            "number of GPUs"
        )
    own = _PerGpu(run, size, gpus, batch, length, assumed)
    alone = copy.copy(own)
    alone.gpus, alone.rows, alone.sharded = 1, batch, False
    seconds, memory = own.seconds(), own.memory()
    tokens = batch * length * train.gradient_accumulation_steps
    total = sum(memory.values())
    return {
        "number": gpus,
        "assumptions": dataclasses.asdict(assumed),
        "sharding": train.sharding if gpus > 1 else None,
        "precision": train.precision,
        "rows": {"batch": batch, "per_gpu": own.rows, "gpus_without": max(0, gpus - batch)},
        "memory": {**memory, "total": total, "fits": total <= assumed.memory_gib * 2**30},
        "bytes_sent": round(sum(part.sent for part in own.communication().values())),
        "seconds": seconds,
        "tokens_per_update": tokens,
        "tokens_per_second": tokens / seconds["update"],
        "efficiency": alone.seconds()["update"] / seconds["update"] / gpus,
        "bound": "rows" if batch < gpus else _bound(seconds),
    }


def _bound(seconds: Mapping[str, float]) -> str:
    """The part that takes most of an update."""
    busy = "computing" if seconds["computing"] >= seconds["launching"] else "launching"
    if seconds["exposed"] <= seconds[busy]:
        return busy
    return "sending" if seconds["sending"] >= seconds["latency"] else "latency"


@dataclass(frozen=True)
class _Sent:
    """Bytes that a GPU sends, and hops that it waits for, in an update."""

    sent: float = 0.0
    hops: float = 0.0


class _PerGpu:
    """The share of one of `gpus` GPUs in a run."""

    def __init__(
        self, run: RunConfig, size: Mapping[str, Any], gpus: int, batch: int, length: int, assumed: Assumptions
    ) -> None:
        self.run, self.train, self.gpus, self.length, self.assumed = run, run.train, gpus, length, assumed
        self.rows = -(-batch // gpus)
        self.sharded = self.train.sharding == "fsdp" and gpus > 1
        self.narrow = self.train.precision == "bf16"
        self.parts, self.flops = size["parameters"], size["flops_per_token"]
        model = _model(run)
        self.output: Output = getattr(model, "decoder", model).output
        self.blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
        self.outside = self.parts["total"] - sum(self.blocks)
        if self.sharded and self.narrow:
            model.bfloat16()  # gathered so
        autocast = self.narrow and not self.sharded
        whole = forward_pass(run, model, self.rows, length, autocast=autocast)
        self.activations, self.carried, self.launches = whole.activations, whole.memory, whole.launches
        if self.train.activation_checkpointing:
            checkpoint_blocks(model)
            inputs = forward_pass(run, model, self.rows, length, autocast=autocast).activations
            self.activations = inputs + (whole.activations - inputs) // len(self.blocks)  # of one block at a time

    def memory(self) -> dict[str, int]:
        """Bytes by part at the end of the forward pass, where most is held.

        Under fsdp gradients of several batches are summed whole; gathered are what is outside of blocks and two blocks, with
        the gradients of one that are being exchanged (with a penalty on attention weights: all blocks).
        """
        train, parameters = self.train, self.parts["total"]
        held = -(-4 * parameters // self.gpus) if self.sharded else 4 * parameters
        width = 2 if self.narrow else 4
        gathered = 0
        if self.sharded:
            blocks = 2 * max(self.blocks) if self._gathered_twice else sum(self.blocks)
            gathered = width * (self.outside + blocks) + (width + 4) * max(self.outside, *self.blocks)
        summed = 4 * parameters if self.sharded and train.gradient_accumulation_steps > 1 else 0
        vocabulary = self.run.model.vocab_size or 1
        rows = min(max(min(LOGITS // (4 * vocabulary), LOGIT_ROWS), 64), self.rows * self.length)
        return {
            "weights": held,
            "gradients": held + summed,
            "optimizer": round(optimizer_states(train) * held),
            "averages": held * (train.averaging != "none"),
            "gathered": gathered,
            "activations": self.activations,
            "logits": 2 * 4 * rows * vocabulary,
            "segments": 2 * self.carried,
            "reserved": round(self.assumed.reserved_gib * 2**30),
        }

    @property
    def _gathered_twice(self) -> bool:
        return not (self.train.orthogonality or self.train.overlap)

    def communication(self) -> dict[str, _Sent]:
        """Communication that computing can hide, and communication that it cannot."""
        if self.gpus == 1:
            return {"hidden": _Sent(), "exposed": _Sent()}
        once = (self.gpus - 1) / self.gpus
        hop, total = math.ceil(math.log2(self.gpus)), self.parts["total"]
        agreed = 2 * hop  # the loss, and which parameters were reached
        if not self.sharded:
            last = max(4 * self.parts["embedding"], min(BUCKET, 4 * total))
            others = 4 * total - last
            return {
                "hidden": _Sent(2 * once * others, 2 * hop * math.ceil(others / BUCKET)),
                "exposed": _Sent(2 * once * last, 2 * hop + agreed),
            }
        width, batches, blocks = 2 if self.narrow else 4, self.train.gradient_accumulation_steps, sum(self.blocks)
        gathers = batches * (1 + self._gathered_twice)
        return {
            "hidden": _Sent(once * blocks * (width * gathers + 4), hop * len(self.blocks) * (gathers + 1)),
            "exposed": _Sent(once * self.outside * (width * batches + 4), hop * (batches + 1) + agreed),
        }

    def seconds(self) -> dict[str, float]:
        """Time of an update and of its parts; `exposed` is the communication that computing does not hide."""
        batches, assumed, flops = self.train.gradient_accumulation_steps, self.assumed, self.flops
        peak = assumed.bf16_tflops if self.narrow else assumed.fp32_tflops
        per_token, passes = flops["training"], 3
        if self.train.activation_checkpointing:
            predicted = self.train.mlm_probability if self.run.masks else 1
            per_token, passes = per_token + flops["forward"] - predicted * self.output.flops_per_token(), 4
        computing = batches * self.rows * self.length * per_token / (peak * 1e12 * assumed.utilization)
        launching = batches * passes * self.launches * assumed.launch_us * 1e-6
        speed = 1e9 * assumed.link_gb
        if self.gpus > assumed.gpus_per_machine:
            speed = min(speed, 1e9 * assumed.network_gb)
        parts = self.communication()
        took = {name: part.sent / speed + part.hops * assumed.latency_us * 1e-6 for name, part in parts.items()}
        busy = max(computing, launching)
        hides = busy if self.sharded else busy * 2 / 3 / batches
        exposed = took["exposed"] + max(0.0, took["hidden"] - hides)
        return {
            "computing": computing,
            "launching": launching,
            "sending": sum(part.sent for part in parts.values()) / speed,
            "latency": sum(part.hops for part in parts.values()) * assumed.latency_us * 1e-6,
            "exposed": exposed,
            "update": busy + exposed,
        }


def _model(run: RunConfig) -> Any:
    cls: Any = Translator if run.translates else MaskedLanguageModel if run.masks else LanguageModel
    return on_meta(cls, run.model).train()


def optimizer_states(options: TrainConfig) -> float:
    """Numbers that the optimizer holds for each parameter, found by a step of it on a few; of muon at most."""
    parameter = nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.zeros(1000)
    optimizer = make_optimizer(options.optimizer, [{"params": [parameter]}], options)
    optimizer.step()
    states = [x for x in optimizer.state[parameter].values() if isinstance(x, torch.Tensor) and x.ndim]
    return sum(x.numel() for x in states) / parameter.numel()
