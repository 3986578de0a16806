"""Which checkpoint is the best, by the loss or by a score, and what follows the same figure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_toy import (
    LENGTH,
    STREAMS,
    Death,
    Even,
    Found,
    Told,
    Toy,
    at_call,
    die,
    evaluate_scored,
    outcome,
    train,
)

from fullrank.config.run import EvalConfig, TrainConfig
from fullrank.core.errors import ConfigError, InputError, RunError
from fullrank.training import Judged

BY_BLEU = {"every_steps": 5, "metric": "bleu"}


def following(nll: Sequence[float], bleu: Sequence[float]) -> Callable[[nn.Module], Judged]:
    """The n-th evaluation of every 5 steps gives the n-th nll per token and the n-th BLEU."""

    def judged(model: nn.Module) -> Judged:
        assert isinstance(model, Toy)
        number = int(model.seen) // (5 * STREAMS * LENGTH) - 1
        return Judged(10 * nll[number], 10, {"bleu": bleu[number], "chrf": 2 * bleu[number]})

    return judged


FALLING, BLEU = [5.0, 4.0, 3.0, 2.0, 1.0], [10.0, 30.25, 30.25, 20.0, 25.0]


@pytest.mark.parametrize(("metric", "best", "value"), [("loss", 25, 1.0), ("bleu", 10, 30.25)])
def test_the_best_checkpoint_is_the_one_of_the_metric(metric: str, best: int, value: float, tmp_path: Path) -> None:
    """The loss falls all the way; BLEU is highest, for the first time, at step 10."""
    told = Told()
    options = {"steps": 25, "batches": Even(), "evaluate": following(FALLING, BLEU), "observers": [told]}
    _, result = train(tmp_path, **options, eval_options=BY_BLEU | {"metric": metric})
    assert (result.best_step, result.best_metric) == (best, value)
    assert result.best_nll == FALLING[best // 5 - 1]
    links = {name: (tmp_path / "checkpoints" / name).readlink().name for name in ("last", "best")}
    assert links == {"last": "step-00000025", "best": f"step-{best:08d}"}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["nll"], line["bleu"], line["chrf"]) for line in lines if line["split"] == "valid"]
    assert found == [(5 * n, FALLING[n - 1], BLEU[n - 1], 2 * BLEU[n - 1]) for n in range(1, 6)]
    assert not any("bleu" in line for line in lines if line["split"] == "train")
    assert [line for line in told.lines if "split" in line] == lines


@pytest.mark.parametrize(("metric", "end"), [("loss", 25), ("bleu", 20)])
def test_patience_counts_evaluations_without_improvement_of_the_metric(metric: str, end: int, tmp_path: Path) -> None:
    options = {"steps": 25, "batches": Even(), "evaluate": following(FALLING, BLEU), "patience": 2}
    _, result = train(tmp_path, **options, eval_options=BY_BLEU | {"metric": metric})
    assert (result.steps, result.stopped_early) == (end, end < 25)


@pytest.mark.parametrize(
    ("metric", "rates"), [("loss", [0.8, 0.8, 0.8, 0.8, 0.8]), ("bleu", [0.8, 0.8, 0.8, 0.4, 0.2])]
)
def test_the_plateau_schedule_follows_the_metric(metric: str, rates: list[float], tmp_path: Path) -> None:
    """Evaluations 3, 4 and 5 do not improve on the BLEU of the second; each halves what follows. One stop between."""
    options = {"steps": 25, "batches": Even(), "evaluate": following(FALLING, BLEU), "schedule": "plateau"}
    options |= {"learning_rate": 0.8, "log_every_steps": 5, "eval_options": BY_BLEU | {"metric": metric}}
    with pytest.raises(Death):
        train(tmp_path, **options, objective=at_call(18, die))
    train(tmp_path, **options)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines if line["split"] == "train"] == rates


def test_an_evaluation_without_the_score_is_said_with_the_key_to_change(tmp_path: Path) -> None:
    wanted = r"eval.metric: the evaluation of this task gives no 'bleu' \(it gives loss\); set eval.metric: loss"
    with pytest.raises(InputError, match=wanted):
        train(tmp_path, steps=5, eval_options=BY_BLEU)
    with pytest.raises(ConfigError, match=r"eval.metric: 'loss' or 'bleu', given 'chrf'"):
        EvalConfig(metric="chrf")  # type: ignore[arg-type]


def test_a_score_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="validation loss at step 5 is not a finite number"):
        train(tmp_path, steps=5, evaluate=lambda model: Judged(1.0, 1, {"bleu": math.nan}))


def without_the_metric(checkpoint: Path) -> None:
    """Make it one of the versions that knew no metric."""
    file = checkpoint / "checkpoint.json"
    content = json.loads(file.read_text())["content"]
    assert {content["state"].pop("metric"), content["state"].pop("best_metric")} == {
        "loss",
        content["state"]["best_nll"],
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({"sha256": digest, "content": content}))


@pytest.mark.parametrize("old", [False, True])
def test_a_stopped_run_keeps_its_best(old: bool, tmp_path: Path) -> None:
    """The best evaluation lies before the stop: none after it may take its place. Checkpoints of earlier versions, too."""
    curve = [3.0, 1.0, 2.0, 2.5, 1.5]
    options: dict[str, Any] = {"steps": 25, "batches": Even(), "patience": 4}
    options["evaluate"] = following(curve, curve)
    train(tmp_path / "whole", **options)
    with pytest.raises(Death):
        train(tmp_path / "killed", **options, objective=at_call(18, die))
    if old:
        for link in ("last", "best"):
            without_the_metric((tmp_path / "killed" / "checkpoints" / link).resolve())
    _, result = train(tmp_path / "killed", **options)
    assert (result.resumed_from, result.best_step, result.best_nll, result.best_metric) == (15, 10, 1.0, 1.0)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def test_a_checkpoint_of_another_metric_is_refused(tmp_path: Path) -> None:
    options = {"steps": 5, "evaluate": evaluate_scored}
    train(tmp_path, **options)
    with pytest.raises(InputError, match=r"was made with eval\.metric: loss, now it is bleu; set it back"):
        train(tmp_path, **options, eval_options=BY_BLEU)


def test_an_evaluation_without_scores_is_as_it_was(tmp_path: Path) -> None:
    train(tmp_path / "none", steps=10)
    train(tmp_path / "empty", steps=10, evaluate=lambda model: Judged(1.0, 1))
    train(tmp_path / "plain", steps=10, evaluate=lambda model: Found(1.0, 1))
    assert outcome(tmp_path / "empty") == outcome(tmp_path / "plain")
    lines = [json.loads(line) for line in (tmp_path / "none" / "metrics.jsonl").read_text().splitlines()]
    assert {key for line in lines for key in line} == {"step", "split", "nll", "ppl", "tokens", "lr"}
    assert torch.isfinite(torch.tensor([line["nll"] for line in lines])).all()


@pytest.mark.parametrize("key", ["batch_tokens", "keep_checkpoints"])
@pytest.mark.parametrize("value", [0, -4, 2**63])
def test_counts_are_positive_and_bounded(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"train\.{key}: .* given {value}"):
        TrainConfig(**{key: value})  # type: ignore[arg-type]
    assert getattr(TrainConfig(**{key: 4096}), key) == 4096  # type: ignore[arg-type]
    assert getattr(TrainConfig(), key) is None
