"""`train.phases`: when a phase ends, what follows, which position the objective is given, and that a kill changes nothing."""

import json
import math
import random

import pytest
from training_toy import LENGTH, STREAMS, Death, Even, Objective, Recorder, at_call, die, outcome, train

from fullrank.config.run import PhaseConfig, PlateauConfig
from fullrank.training.values import EvaluationResult, note_best
from run_files import read_metrics


def phase(name, plateau=None, **options):
    flat = None if plateau is None else PlateauConfig(ppl=plateau[0], steps=plateau[1])
    return PhaseConfig(name=name, plateau=flat, **options)


class Positions:
    """The toy's objective, which records the position of every call."""

    def __init__(self):
        self.seen = []

    def __call__(self, model):
        def objective(batch, carry, position):
            self.seen.append(position)
            return Objective(model)(batch, carry, position)

        return objective

    def phases(self):
        """The names of the phases, a letter for each update."""
        return "".join(
            "-" if position.phase is None else position.phase.name for position in self.seen if position.part == 0
        )


def evaluation(perplexities):
    """An evaluation that gives these perplexities, by update; every update reads a batch of the same size."""

    def evaluate(model):
        return EvaluationResult(math.log(perplexities[int(model.seen) // (STREAMS * LENGTH)]), 1)

    return evaluate


def test_phases_on_steps_and_epochs_follow_each_other(tmp_path):
    """Three steps, one epoch of 7, and half an epoch of 7, rounded to 4."""
    positions = Positions()
    phases = [phase("a", steps=3, skip="linear"), phase("b", epochs=1), phase("c", epochs=0.5)]
    _, result = train(tmp_path, phases=phases, objective=positions, log_every_steps=100, schedule="linear")
    assert positions.phases() == "aaa" + 7 * "b" + 4 * "c"
    assert (result.step, result.stopped_early) == (14, False)
    train_lines = [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert [(line["step"], line["phase"]) for line in train_lines] == [(3, "a"), (10, "b"), (14, "c")]
    valid_lines = [line for line in read_metrics(tmp_path) if line["split"] == "valid"]
    assert [(line["step"], line["phase"]) for line in valid_lines] == [(5, "b"), (10, "b"), (14, "c")]
    assert train_lines[0]["lr"] == pytest.approx(1e-3 * (1 - 3 / 14))


def test_the_objective_gets_its_position(tmp_path):
    """Seven batches an epoch by threes: updates of 3, 3 and 1; every update has the numbers of three passes."""
    positions = Positions()
    a, b = phase("a", steps=2), phase("b", steps=3)
    train(tmp_path / "three", phases=[a, b], gradient_accumulation_steps=3, objective=positions)
    expected = [(1, 0, a), (1, 1, a), (1, 2, a), (2, 0, a), (2, 1, a), (2, 2, a), (3, 0, b)]
    expected += [(4, 0, b), (4, 1, b), (4, 2, b), (5, 0, b), (5, 1, b), (5, 2, b)]
    assert [(position.step, position.part, position.phase) for position in positions.seen] == expected
    assert [position.number for position in positions.seen] == [1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]
    positions = Positions()
    train(tmp_path / "one", steps=9, objective=positions)
    assert [position.number for position in positions.seen] == list(range(1, 10))
    assert [position.step for position in positions.seen] == list(range(1, 10))


@pytest.mark.parametrize("seed", range(5))
def test_a_plateau_is_what_its_equation_says(seed):
    draw = random.Random(seed)
    plateau = PlateauConfig(ppl=draw.choice([0.3, 1.0, 3.0]), steps=draw.randint(1, 12))
    every = []
    bests = []
    verdicts = set()
    step = 0
    level = 100.0
    for _ in range(200):
        step += draw.randint(1, 4)
        level *= draw.choice([0.97, 0.999, 1.0])
        ppl = level + draw.choice([0.0, 0.5, 2.0])
        every.append((step, ppl))
        flat = note_best(bests, step, ppl, plateau)
        before = [value for at, value in every if at <= step - plateau.steps]
        assert flat == (bool(before) and min(before) - min(value for _, value in every) < plateau.ppl)
        verdicts.add(flat)
    assert verdicts == {False, True}


CURVE = {5: 90.0, 10: 80.0, 15: 78.8, 20: 85.0, 25: 78.5, 30: 60.0, 35: 59.9, 40: 61.0, 45: 59.85, 50: 59.84, 55: 59.0}


def test_a_plateau_ends_its_phase_and_looks_at_its_phase_only(tmp_path):
    """a: from 78.8 (step 15) to 78.5 (step 25) is less than 1 in ten steps; b: 60 after 5 of its steps, 59.85 after 20."""
    positions = Positions()
    phases = [phase("a", plateau=(1.0, 10)), phase("b", plateau=(0.16, 15)), phase("c")]
    options = {"batches": Even(), "schedule": "linear", "log_every_steps": 100}
    _, result = train(tmp_path, steps=55, phases=phases, objective=positions, evaluate=evaluation(CURVE), **options)
    assert positions.phases() == 25 * "a" + 20 * "b" + 10 * "c"
    assert (result.step, result.stopped_early) == (55, False)
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["phase"]) for line in lines if line["split"] == "train"] == [
        (25, "a"),
        (45, "b"),
        (55, "c"),
    ]
    assert lines[-1]["split"] == "valid"
    assert lines[5]["lr"] == pytest.approx(1e-3 * (1 - 25 / 55)), "the rate follows what was planned"


@pytest.mark.parametrize(
    ("a", "expected"),
    [
        (phase("a", plateau=(1.0, 10), steps=40), 25 * "a" + 5 * "b"),  # flat before its steps are over
        (phase("a", plateau=(1.0, 10), steps=25), 25 * "a" + 5 * "b"),  # both at once
        (phase("a", plateau=(1.0, 10), steps=12), 12 * "a" + 5 * "b"),  # its steps first
        (phase("a", plateau=(0.2, 10), steps=30), 30 * "a" + 5 * "b"),  # never flat
    ],
)
def test_a_phase_with_steps_and_a_plateau_ends_with_whatever_comes_first(a, expected, tmp_path):
    """Training ends with the steps of the last phase, if all phases say when they end."""
    positions = Positions()
    curve = dict.fromkeys(range(100), 50.0) | CURVE
    options = {"batches": Even(), "evaluate": evaluation(curve), "objective": positions}
    _, result = train(tmp_path, phases=[a, phase("b", steps=5)], **options)
    assert positions.phases() == expected
    assert (result.step, result.stopped_early) == (len(expected), False)


KILLED = {
    "steps": {"phases": [phase("a", steps=4), phase("b", epochs=1.0), phase("c", steps=5)]},
    "plateau": {"phases": [phase("a", plateau=(1e9, 4)), phase("b", plateau=(1e9, 3), steps=8), phase("c")], "tokens": 230},
    "accumulation": {"phases": [phase("a", steps=3), phase("b")], "steps": 7, "gradient_accumulation_steps": 2,
                     "averaging": "swa", "swa_start": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("name", KILLED)
def test_killed_before_every_batch_it_ends_as_if_it_had_not_been(name, every, tmp_path):
    """One run, killed before the first batch, then before the second, and so on, so also between two phases; with checkpoints
    after every step, or only where validation improves."""
    options = KILLED[name] | {"save_every_steps": every, "log_every_steps": 3}
    options |= {"eval_options": {"every_steps": 2}}
    positions = Positions()
    train(tmp_path / "whole", **options, objective=positions)
    names = [config.name for config in options["phases"]]
    assert sorted(set(positions.phases())) == names
    first_batch = {position.step: index for index, position in reversed(list(enumerate(positions.seen)))}  # by update
    saved = 0
    for number in range(len(positions.seen)):
        with pytest.raises(Death):
            train(tmp_path / "killed", **options, objective=at_call(number - saved + 1, die))
        last = tmp_path / "killed" / "checkpoints" / "last" / "checkpoint.json"
        saved = first_batch[json.loads(last.read_text())["content"]["state"]["step"] + 1] if last.exists() else 0
    remaining = Positions()
    recorder = Recorder()
    train(tmp_path / "killed", **options, objective=remaining, observers=[recorder])
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    assert remaining.seen == positions.seen[saved:]
    assert recorder.began[0] or every == 100
