"""Memory, time and communication of N GPUs against the equations, by hand."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from fullrank.analysis.scale import assumptions, optimizer_states, scale_of_run
from fullrank.analysis.size import size_of_run
from fullrank.config.run import RunConfig
from fullrank.config.training import TrainConfig
from fullrank.core.errors import InputError

VOCABULARY, WIDTH, LAYERS, LENGTH = 1000, 32, 3, 16
MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "intermediate_size": 64, "output": {"tied": True},
}  # fmt: skip
BLOCK = 4 * (WIDTH**2 + WIDTH) + 2 * WIDTH * 64 + 64 + WIDTH + 4 * WIDTH  # attention, feed-forward, two norms
OUTSIDE = VOCABULARY * WIDTH + 2 * WIDTH
TOTAL = OUTSIDE + LAYERS * BLOCK


def run_of(model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    settings = {"steps": 1, "segment_length": LENGTH, "batch_size": 8, "order": "shuffled", **train}
    return RunConfig.from_dict({"model": {**MODEL, **(model or {})}, "train": settings})


def scale(run: RunConfig, gpus: int, **assumed: float) -> dict[str, Any]:
    return scale_of_run(run, gpus, assumptions("h100", assumed))


def held(memory: dict[str, int]) -> int:
    return memory["weights"] + memory["gradients"] + memory["optimizer"]


def test_ddp_holds_sixteen_bytes_for_a_parameter() -> None:
    run = run_of()
    assert size_of_run(run)["parameters"]["total"] == TOTAL
    for gpus in (1, 4):
        memory = scale(run, gpus)["memory"]
        assert held(memory) == 16 * TOTAL
        assert memory["gathered"] == memory["averages"] == memory["segments"] == 0
    assert scale(run_of(averaging="ema"), 4)["memory"]["averages"] == 4 * TOTAL


def test_fsdp_holds_its_share_and_two_blocks() -> None:
    memory = scale(run_of(sharding="fsdp"), 4)["memory"]
    assert held(memory) == pytest.approx(16 * TOTAL / 4, abs=16)
    assert memory["gathered"] == 4 * (OUTSIDE + 2 * BLOCK) + 8 * OUTSIDE
    memory = scale(run_of(sharding="fsdp", precision="bf16", overlap=0.1), 4)["memory"]
    assert memory["gathered"] == 2 * TOTAL + 6 * OUTSIDE
    memory = scale(run_of(sharding="fsdp", gradient_accumulation_steps=2), 4)["memory"]  # sums of whole gradients
    assert held(memory) == pytest.approx(16 * TOTAL / 4 + 4 * TOTAL, abs=16)


@pytest.mark.parametrize(
    ("options", "states"),
    [({"optimizer": "sgd"}, 0), ({"optimizer": "nag", "momentum": 0.9}, 1), ({"optimizer": "adamw"}, 2)],
)
def test_states_of_optimizers(options: dict[str, Any], states: int) -> None:
    assert optimizer_states(TrainConfig(steps=1, **options)) == states


def test_bytes_that_are_sent() -> None:
    """Ring all-reduce 2 (N - 1) / N, all-gather and reduce-scatter (N - 1) / N of the bytes."""
    assert scale(run_of(), 1)["bytes_sent"] == 0
    assert scale(run_of(), 8)["bytes_sent"] == 2 * 7 * 4 * TOTAL // 8
    assert scale(run_of(gradient_accumulation_steps=4), 8)["bytes_sent"] == 2 * 7 * 4 * TOTAL // 8
    blocks = LAYERS * BLOCK
    sharded = scale(run_of(sharding="fsdp", precision="bf16", gradient_accumulation_steps=3), 8)
    assert sharded["bytes_sent"] == round(7 / 8 * (3 * 2 * (2 * blocks + OUTSIDE) + 4 * TOTAL))
    whole = scale(run_of(sharding="fsdp", overlap=0.1), 8)
    assert whole["bytes_sent"] == round(7 / 8 * (4 + 4) * TOTAL)


def test_time_of_an_update() -> None:
    """Half of 1 GFLOP/s; nothing is hidden: a model below 25 MiB is one bucket, all-reduced after the backward pass."""
    slow = {
        "fp32_tflops": 1e-3,
        "utilization": 0.5,
        "launch_us": 1e-9,
        "link_gb": 1.0,
        "network_gb": 0.1,
        "latency_us": 1.0,
    }
    flops = size_of_run(run_of())["flops_per_token"]
    found = scale(run_of(), 4, **slow)
    computing = 2 * LENGTH * flops["training"] / 0.5e9
    exposed = 2 * 3 / 4 * 4 * TOTAL / 1e9 + (4 + 4) * 1e-6  # two ways of log2 4 hops, for gradients and for the loss
    assert found["seconds"]["update"] == pytest.approx(computing + exposed)
    assert found["tokens_per_second"] == pytest.approx(8 * LENGTH / (computing + exposed))
    assert found["efficiency"] == pytest.approx(computing / (computing + exposed))
    between_machines = scale(run_of(), 4, **slow, gpus_per_machine=2)
    assert between_machines["seconds"]["sending"] == pytest.approx(10 * found["seconds"]["sending"])
    again = scale(run_of(activation_checkpointing=True), 4, **slow)["seconds"]["computing"]
    blocks = flops["forward"] - 2 * VOCABULARY * WIDTH  # which are computed again
    assert again == pytest.approx(computing * (1 + blocks / flops["training"]))


def test_what_bounds() -> None:
    fast = {"launch_us": 1e-9, "latency_us": 1e-9, "link_gb": 1e9}
    assert scale(run_of(), 8, **fast)["bound"] == "computing"
    assert scale(run_of(), 8, **fast | {"launch_us": 1.0})["bound"] == "launching"
    assert scale(run_of(), 8, **fast | {"link_gb": 1e-3})["bound"] == "sending"
    assert scale(run_of(), 8, **fast | {"latency_us": 1e6})["bound"] == "latency"


def test_more_gpus_than_rows() -> None:
    found = scale(run_of(), 64)
    assert found["rows"] == {"batch": 8, "per_gpu": 1, "gpus_without": 56}
    assert found["bound"] == "rows"
    with pytest.raises(InputError, match=r"train\.batch_size: 8 streams cannot be shared evenly by 3 GPUs"):
        scale(run_of(order="contiguous"), 3)


def test_less_memory_with_more_gpus_or_computing_again() -> None:
    run = run_of({"memory_length": 32, "position": "relative", "attention": {"score": "relative"}}, order="contiguous")
    one, two = (scale(run, gpus)["memory"] for gpus in (1, 2))
    assert one["segments"] == 2 * 4 * LAYERS * 8 * 32 * WIDTH == 2 * two["segments"]
    assert one["activations"] > 1.3 * two["activations"]
    again = dataclasses.replace(run, train=dataclasses.replace(run.train, activation_checkpointing=True))
    assert scale(again, 1)["memory"]["activations"] < 0.6 * one["activations"]
    assert not scale(run, 1, memory_gib=1)["memory"]["fits"]


@pytest.mark.parametrize(
    ("gpu", "given", "message"),
    [
        ("h1000", {}, "--gpu: 'h1000' is not known; did you mean 'h100'"),
        ("h100", {"tflops": 1}, "--assume: 'tflops' is not assumed"),
        ("h100", {"utilization": 0}, "--assume: utilization must be above 0"),
    ],
)
def test_wrong_assumptions(gpu: str, given: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        assumptions(gpu, given)
