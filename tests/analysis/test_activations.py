"""Activation memory on the meta device, beside what autograd saves in the same pass on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fullrank.analysis.activations import forward_pass
from fullrank.analysis.size import on_meta
from fullrank.config.run import RunConfig
from fullrank.core.attention import Trace
from fullrank.core.decoder import LanguageModel
from fullrank.core.masked import MaskedLanguageModel
from fullrank.core.memory import Memory
from fullrank.core.translator import Translator
from fullrank.kernels import kernel
from fullrank.training.randomness import checkpoint_blocks

# so many queries that no kernel saves attention weights, and heads of 16, which C++ does not pad
VOCABULARY, WIDTH, LAYERS, ROWS, LENGTH = 300, 48, 2, 3, 192
_XL = {"position": "relative", "attention": {"score": "relative", "mix": "position_wise"}, "memory_length": 64}
_CLUSTERS = {"kind": "adaptive", "cutoffs": [40, 120]}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "Mixhead B": {"model": {"attention": {"mix": "position_wise"}}},
    "memory, relative, Mixhead B": {"model": _XL},
    "mixture of softmaxes": {"model": {"output": {"kind": "mixture_of_softmaxes", "mixtures": 3}}},
    "adaptive": {"model": {"input": _CLUSTERS, "output": _CLUSTERS}},
    "multi-linear": {"model": {"attention": {"kind": "multilinear", "rank": 6}}},
    "decayed sums": {"model": {"attention": {"kind": "multilinear", "rank": 6, "output_map": "decayed"}}},
    "dense synthesizer": {"model": {"attention": {"score": "dense_synthesizer"}}},
    "penalty": {"model": {"attention": {"mix": "position_wise"}}, "train": {"overlap": 0.1}},
    "masked": {"train": {"objective": "masked"}},
    "translation": {"data": {"name": "multi30k-de-en"}, "train": {"batch_tokens": 100}},
    "bf16": {"train": {"precision": "bf16"}},
}


def run_of(name: str) -> RunConfig:
    changes = RUNS[name]
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 3,
        "intermediate_size": 4 * WIDTH, "max_position_embeddings": LENGTH, **changes.get("model", {}),
    }  # fmt: skip
    return RunConfig.from_dict({**changes, "model": sizes, "train": {"steps": 1, **changes.get("train", {})}})


def saved_on_the_cpu(run: RunConfig, model: Any) -> int:
    """Bytes of the storages that autograd saves, other than parameters and the memory that is read."""
    words = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(0)) * math.log(VOCABULARY)
    ids, memory = words.exp().long().clamp_max(VOCABULARY - 1), None  # by Zipf's law
    known = [*model.parameters(), *model.buffers()]
    if run.model.memory_length:
        memory = Memory.zeros(LAYERS, ROWS, run.model.memory_length, torch.zeros(1, WIDTH))
        known += [layer.hidden for layer in memory.layers]
    own, saved = {tensor.untyped_storage().data_ptr() for tensor in known}, {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    trace = Trace() if run.train.overlap else None
    with (  # C++ saves two sums for a relative score, which no kernel of a GPU does
        kernel("blocks" if run.model.position == "relative" else "auto"),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=run.train.precision == "bf16"),
    ):
        if run.translates:
            model.loss_parts(ids, ids, ids)
        elif run.masks:
            at = torch.arange(round(run.train.mlm_probability * ids.numel()))
            model.loss_parts(ids, ids.flatten()[at], at=at)
        else:
            model.loss_parts(ids, ids, None, memory, trace=trace)
    return sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in own)


@pytest.mark.parametrize("name", RUNS)
def test_within_a_tenth_of_what_autograd_saves(name: str) -> None:
    run = run_of(name)
    kind: Any = Translator if run.translates else MaskedLanguageModel if run.masks else LanguageModel
    autocast, found = run.train.precision == "bf16", []
    for recomputing in (False, True):
        real, meta = kind(run.model).train(), on_meta(kind, run.model).train()
        if recomputing:
            checkpoint_blocks(real)
            checkpoint_blocks(meta)
        estimated = forward_pass(run, meta, ROWS, LENGTH, autocast=autocast).activations
        found.append(estimated)
        assert estimated == pytest.approx(saved_on_the_cpu(run, real), rel=0.1)
    assert found[1] < 0.6 * found[0]


def test_memory_of_segments() -> None:
    """Every layer remembers its inputs: L B M E numbers."""
    run = run_of("memory, relative, Mixhead B")
    found = forward_pass(run, on_meta(LanguageModel, run.model), ROWS, LENGTH, autocast=False)
    assert found.memory == 4 * LAYERS * ROWS * 64 * WIDTH
