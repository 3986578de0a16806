"""The memory of a training: its formula beside what autograd and optimizers keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.analysis.size import optimizer_states, size_of_run
from fullrank.config.run import RunConfig
from fullrank.config.training import TrainConfig

VOCABULARY, WIDTH, LAYERS, ROWS, LENGTH = 300, 48, 2, 3, 192
MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 3,
    "max_position_embeddings": LENGTH, "hidden_act": "gelu",
}  # fmt: skip


def run_of(**train: Any) -> RunConfig:
    settings = {"steps": 1, "batch_size": ROWS, "segment_length": LENGTH, **train}
    return RunConfig.from_dict({"model": MODEL, "train": settings})


def test_activations_are_within_a_tenth_of_what_autograd_saves() -> None:
    run = run_of()
    model = fr.LanguageModel(run.model).train()
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.loss_parts(ids, ids, None, None)
    saved_bytes = sum(size for pointer, size in saved.items() if pointer not in parameters)
    assert size_of_run(run)["memory"]["activations"] == pytest.approx(saved_bytes, rel=0.1)


def test_the_formula() -> None:
    parameters = fr.LanguageModel(run_of().model).num_parameters()
    tokens, inner = ROWS * LENGTH, 4 * WIDTH
    memory = size_of_run(run_of())["memory"]
    activations = 4 * tokens * LAYERS * (8 * WIDTH + 2 * inner)
    expected = {
        "parameters": 4 * parameters, "gradients": 4 * parameters, "optimizer": 8 * parameters, "activations": activations,
    }  # fmt: skip
    assert memory == {**expected, "total": sum(expected.values())}
    assert size_of_run(run_of(precision="bf16"))["memory"]["activations"] == activations // 2
    again = size_of_run(run_of(activation_checkpointing=True))["memory"]["activations"]
    assert again == 4 * tokens * (LAYERS * WIDTH + 8 * WIDTH + 2 * inner)
    pairs = RunConfig.from_dict(
        {"model": MODEL, "data": {"name": "multi30k-de-en"}, "train": {"steps": 1, "batch_tokens": 50}}
    )
    translating = size_of_run(pairs, 10)["memory"]["activations"]
    assert translating == 4 * 2 * 10 * LAYERS * (22 * WIDTH + 4 * inner)  # two sentences; 6 E of cross-attention


@pytest.mark.parametrize(
    ("options", "states"),
    [({"optimizer": "sgd"}, 0), ({"optimizer": "nag", "momentum": 0.9}, 1), ({"optimizer": "adamw"}, 2)],
)
def test_states_of_optimizers(options: dict[str, Any], states: int) -> None:
    assert optimizer_states(TrainConfig(steps=1, **options)) == states
