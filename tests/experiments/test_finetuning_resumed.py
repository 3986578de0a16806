"""A run of fine-tuning that is killed goes on exactly where its last checkpoint was, from another folder, too."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_encoder import tiny_encoder, write_cola

from fullrank.config.load import build_finetune
from fullrank.config.recipe import Resolved
from fullrank.experiments.finetuning import GlueTuning
from fullrank.experiments.run import resume, train
from fullrank.experiments.task import Parts

pytest.importorskip("transformers")


class Killed(BaseException):
    """Nothing catches it, so nothing is saved on the way out."""


def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_encoder(tmp_path / "encoder")
    write_cola(tmp_path / "glue")
    config = build_finetune(
        {
            "model": {"pretrained": "encoder", "attention": {"mix": "position_independent", "cross_head": 0.5}},
            "data": {"name": "glue/cola", "dir": "glue", "max_length": 20},
            "train": {"batch_size": 8, "steps": 11, "learning_rate": 1e-3, "save_every_steps": 3},
            "eval": {"every_steps": 5, "checkpoint": "best"},
        }
    )
    parts = GlueTuning.parts

    def parts_until_the_ninth_step(self: GlueTuning, *given: Any) -> Parts:
        whole, calls = parts(self, *given), []

        def objective(*batch: Any) -> Any:
            calls.append(1)
            if len(calls) == 9:
                raise Killed
            return whole.objective(*batch)

        return dataclasses.replace(whole, objective=objective)

    monkeypatch.chdir(tmp_path)
    train(Resolved(config, "test"), Path("whole"), quiet=True, say=lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(GlueTuning, "parts", parts_until_the_ninth_step)
        with pytest.raises(Killed):
            train(Resolved(config, "test"), Path("killed"), quiet=True, say=lambda _: None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume(tmp_path / "killed", quiet=True, say=lambda _: None)
    for name in ("metrics.jsonl", "predictions-dev.tsv"):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "whole" / name).read_text()
    one, other = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("whole", "killed"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
