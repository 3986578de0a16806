"""Successive halving with a small model whose best learning rate is known; the runs train in this process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fullrank.cli import main
from fullrank.config.load import read_yaml
from fullrank.config.recipe import resolve_any
from fullrank.core.errors import InputError, RunError
from fullrank.experiments import search as searching
from fullrank.experiments.language_model import LanguageModelTask
from fullrank.experiments.queue import Training, TrainingsFailed
from fullrank.experiments.run import train
from fullrank.experiments.search import FILE, Request, combinations, left_at, minutes_of, search
from fullrank.experiments.speed import Speed
from fullrank.seal import read_record
from fullrank.training.loop import _Loop

RATES = "train.learning_rate=1e-6,0.02,1e-5,1e-4"  # 0.02 is the best: the others hardly move
STEPS = 26  # rungs of four combinations end after 6, 12 and 26 updates
MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "dropout": {"residual": 0.1}}
TRAIN = {
    "steps": STEPS, "batch_size": 4, "segment_length": 8, "schedule": "cosine", "warmup_steps": 3, "device": "cpu",
    "log_every_steps": 5,
}  # fmt: skip


class Killed(BaseException):
    """Stands for a SIGKILL: nothing catches it."""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration over a text in which each word decides the next one."""
    for split, lines in (("train", 150), ("valid", 20), ("test", 20)):
        text = "\n".join(["the cat sees a dog and a bird sings"] * lines)
        (tmp_path / f"{split}.txt").write_text(text + "\n", encoding="utf-8")
    files = {split: str(tmp_path / f"{split}.txt") for split in ("train", "valid", "test")}
    data = {"name": "text", **files, "cache": str(tmp_path / "cache")}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({"model": MODEL, "data": data, "train": TRAIN}), encoding="utf-8")
    return str(path)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Runs train in this process by the command of the queue; the folder and the step of every update."""
    updates = list[tuple[str, int]]()
    update = _Loop.update

    def noted(loop: Any, stop: Any) -> None:
        update(loop, stop)
        updates.append((loop.folder.name, loop.state.counters.step))

    async def in_process(planned: Sequence[Training], cores: Any, finished: Any, say: Any) -> None:
        outputs = {}
        for training in planned:
            if not training.finished:
                try:
                    main([*training.command[2:], "--quiet", "--debug"])
                except SystemExit as ended:  # of a command that is done
                    if ended.code:
                        raise
                except RunError as error:
                    outputs[training.cell.folder] = str(error)
        if outputs:
            raise TrainingsFailed("failed", outputs)

    monkeypatch.setattr(_Loop, "update", noted)
    monkeypatch.setattr(searching, "train_all", in_process)
    return updates


def silent(text: str) -> None:
    pass


def searched(request: Request, out: Path) -> dict[str, Any]:
    content = search(request, out, [0], silent)
    assert json.loads((out / FILE).read_text()) == json.loads(json.dumps(content))
    return content


def outcome(folder: Path) -> dict[str, bytes]:
    """Files of a run, times aside."""
    last = folder / "checkpoints" / "last"
    files = (folder / "metrics.jsonl", last / "model.safetensors", last / "training.safetensors")
    return {path.name: path.read_bytes() for path in files}


# -- training ----------------------------------------------------------------------------------------------------------


def test_the_best_combination_wins_and_the_others_stop_at_their_rungs(
    config: str, tmp_path: Path, trained: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winner is the run that its YAML makes without a search; only it is measured on test text, once."""
    measured, figures = [], LanguageModelTask.figures

    def counted(task: Any, data: Any, model: Any, split: str, *rest: Any) -> dict[str, Any]:
        measured.append(split)
        return figures(task, data, model, split, *rest)

    monkeypatch.setattr(LanguageModelTask, "figures", counted)
    out = tmp_path / "out"
    content = searched(Request(config, [RATES]), out)
    assert content["winner"]["settings"] == {"train.learning_rate": 0.02}
    assert measured == ["valid", "test"]
    assert content["left"] == [4, 2, 1]
    assert [arm["rungs"] for arm in content["arms"]] == [[6, 12, STEPS]] * 4
    by_rate = {arm["settings"]["train.learning_rate"]: arm for arm in content["arms"]}
    assert {rate: arm["dropped"] for rate, arm in by_rate.items()} == {1e-6: 1, 0.02: None, 1e-5: 1, 1e-4: 2}
    assert by_rate[0.02]["nll"] == sorted(by_rate[0.02]["nll"], reverse=True)
    assert by_rate[1e-4]["nll"][0] < by_rate[1e-5]["nll"][0] < by_rate[1e-6]["nll"][0]
    reached = {}
    for arm in content["arms"]:
        folder = out / f"{arm['name']}-seed1"
        reached[arm["settings"]["train.learning_rate"]] = read_record(folder / "checkpoints" / "last").state["step"]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert {line["split"] for line in lines} == {"train", "valid"}
        assert (folder / "result.json").exists() == (arm["dropped"] is None)
    assert reached == {1e-6: 6, 0.02: STEPS, 1e-5: 6, 1e-4: 12}
    assert len(trained) == len(set(trained)) == sum(reached.values())  # no update was made twice
    assert content["full_trainings"] * STEPS == pytest.approx(sum(reached.values()))
    (winner,) = content["winner"]["folders"]
    assert read_yaml(out / "winner.yaml")["train"]["steps"] == STEPS
    train(resolve_any(str(out / "winner.yaml")), tmp_path / "alone", quiet=True, say=silent)
    assert outcome(Path(winner)) == outcome(tmp_path / "alone")
    assert measured == ["valid", "test"] * 2

    trained.clear()
    assert searched(Request(config, [RATES]), out) == json.loads(json.dumps(content))  # there is nothing to be done
    assert not trained
    assert len(measured) == 4


def test_a_killed_search_goes_on_and_ends_as_one_never_killed(
    config: str, tmp_path: Path, trained: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of the first rung, before its last run, and in that of the winner."""
    request, whole_updates = Request(config, [RATES]), 4 * 6 + 2 * 6 + 14
    whole = searched(request, tmp_path / "whole")
    assert len(trained) == whole_updates
    update, out = _Loop.update, tmp_path / "out"
    for moment, lost in ((9, 2), (13, 0), (21, 2)):  # updates of each part; those since the last checkpoint are lost
        trained.clear()
        calls = iter(range(1, 1000))

        def deadly(loop: Any, stop: Any, calls: Any = calls, moment: int = moment) -> None:
            if next(calls) == moment:
                raise Killed
            update(loop, stop)

        monkeypatch.setattr(_Loop, "update", deadly)
        with pytest.raises(Killed):
            search(request, out, [0], silent)
        assert len(trained) == moment - 1
        assert not list(out.glob("*/result.json"))
        whole_updates -= moment - 1 - lost
    monkeypatch.setattr(_Loop, "update", update)
    trained.clear()
    content = searched(request, out)
    assert len(trained) == whole_updates
    assert content["arms"] == whole["arms"]
    assert content["winner"]["nll"] == whole["winner"]["nll"]
    (one,), (other,) = content["winner"]["folders"], whole["winner"]["folders"]
    assert outcome(Path(one)) == outcome(Path(other))


def test_several_seeds_count_by_their_mean(config: str, tmp_path: Path, trained: list[tuple[str, int]]) -> None:
    content = searched(Request(config, ["train.learning_rate=1e-6,0.02"], seeds=[3, 5], epochs=0.5), tmp_path / "out")
    assert content["winner"]["settings"] == {"train.learning_rate": 0.02}
    assert [Path(folder).name[-5:] for folder in content["winner"]["folders"]] == ["seed3", "seed5"]
    results = [json.loads((Path(folder) / "result.json").read_text()) for folder in content["winner"]["folders"]]
    assert [result["seed"] for result in results] == [3, 5]
    for split in ("valid", "test"):
        mean = sum(result["final"][split]["nll"] for result in results) / 2
        assert content["winner"]["nll"][split] == pytest.approx(mean, rel=1e-12)
    assert results[0]["epochs"] == pytest.approx(0.5, abs=0.02)
    assert len(trained) == content["full_trainings"] * content["arms"][0]["rungs"][-1]


def test_one_that_diverges_is_dropped_and_any_other_failure_ends_the_search(
    config: str, tmp_path: Path, trained: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = searched(Request(config, ["train.learning_rate=1e30,0.02,1e-6"]), tmp_path / "out")
    diverged, best, other = content["arms"]
    assert (diverged["nll"], diverged["dropped"]) == ([None], 1)
    assert (best["dropped"], other["dropped"]) == (None, 1)
    with pytest.raises(RunError, match=r"every combination of rung 1 diverged; lower train\.learning_rate"):
        search(Request(config, ["train.learning_rate=1e30,1e31"]), tmp_path / "none", [0], silent)

    def full(loop: Any, stop: Any) -> None:
        raise RunError("no space left on the disk")

    monkeypatch.setattr(_Loop, "update", full)
    with pytest.raises(TrainingsFailed):
        search(Request(config, [RATES]), tmp_path / "full", [0], silent)
    assert all(not arm["nll"] for arm in json.loads((tmp_path / "full" / FILE).read_text())["arms"])


def test_the_command(config: str, tmp_path: Path, trained: list[tuple[str, int]], capsys: Any) -> None:
    """Its table, its JSON document, and its faults in one line."""
    out = str(tmp_path / "out")
    words = ["search", config, "train.steps=6", "--set", "train.learning_rate=1e30,0.02", "--out", out]

    def told(*more: str) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main([*words, *more])
        return capsys.readouterr()

    told("--eta", "3")
    content = json.loads(told("--eta", "3", "--json")[0])
    assert [(arm["dropped"], arm["rungs"]) for arm in content["arms"]] == [(1, [2, 6]), (None, [2, 6])]
    shown, said = told("--eta", "3")
    rows = [line.split() for line in shown.splitlines() if "e+30" in line or "0.02 " in line][:2]
    nll = [f"{value:.4f}" for value in content["arms"][1]["nll"]]
    assert rows == [["0.02", "winner", *nll], ["1e+30", "diverged", "in", "rung", "1", "-"]]
    assert "2 combinations, 1 seed, equal budgets in each rung: 2 to 0.0" in said
    assert "in all 1.33 full trainings instead of 2" in shown
    assert f"test {content['winner']['nll']['test']:.4f}" in shown
    other = f"fullrank: {out} holds another search: eta is 3 there, 2 here; give another --out\n"
    assert told() == ("", other)
    assert "Invalid value for '--eta': Input should be greater than or equal to 2" in told("--eta", "1")[1]
    both = "fullrank: --budget decides the length of a full training: leave out --epochs, or --budget\n"
    assert told("--epochs", "1", "--budget", "3 min") == ("", both)
    wrong = "fullrank: --budget: a time on the wall such as '90 minutes' or '2 hours', given '3 apples'\n"
    assert told("--budget", "3 apples") == ("", wrong)


# -- plan --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "eta", "left"),
    [(6, 2, [6, 3, 1]), (7, 2, [7, 3, 1]), (8, 2, [8, 4, 2, 1]), (9, 3, [9, 3, 1]), (2, 4, [2, 1])],
)
def test_numbers_of_combinations_in_the_rungs(number: int, eta: int, left: list[int]) -> None:
    assert left_at(number, eta) == left


@pytest.mark.parametrize(("text", "minutes"), [("120 minutes", 120), ("1.5 hours", 90), ("90 seconds", 1.5)])
def test_durations(text: str, minutes: float) -> None:
    assert minutes_of(text) == minutes


def test_the_time_of_all_trainings_adds_up_to_the_budget(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six combinations with two seeds on three cores, a step of 2 s and an evaluation of 5 s."""
    measured, planned = [], list[list[Training]]()

    def speed(parts: Any, *, clock: Callable[[], float]) -> Speed:
        measured.append(parts)
        return Speed(2.0, 32.0, 5.0)

    async def stop(trainings: Sequence[Training], *rest: Any) -> None:
        planned.append(list(trainings))
        raise Killed

    monkeypatch.setattr(searching, "measure_speed", speed)
    monkeypatch.setattr(searching, "train_all", stop)
    values = ["train.learning_rate=1e-3,1e-4,1e-5", "model.dropout.residual=0,0.1"]
    request = Request(config, values, seeds=[1, 2], minutes=200)
    with pytest.raises(Killed):
        search(request, tmp_path / "out", [0, 1, 2], silent)
    assert len(measured) == 1  # all have the same shape
    content = json.loads((tmp_path / "out" / FILE).read_text())
    seconds, before = 0.0, 0
    steps = content["arms"][0]["rungs"]
    for left, step in zip((6, 3, 1), steps, strict=True):
        waves = -(-left * 2 // 3)
        seconds += waves * (7 + 2.0 * (step - before) + 5.0 * (step // steps[0] - before // steps[0]))
        before = step
    assert 0.98 * 200 * 60 <= seconds <= 200 * 60 + 10
    assert len(planned[0]) == 12
    training = planned[0][-1]
    assert training.until == steps[0]
    config_ = training.cell.resolved.config
    assert config_.train.epochs == content["epochs"]
    assert training.command[-2:] == ["--until", str(steps[0])]
    for other in (dataclasses.replace(request, minutes=0.5), Request(config, values, epochs=0.001)):
        with pytest.raises(InputError, match=r"a full training would have \d updates, and 3 rungs with --eta 2 need 4"):
            search(other, tmp_path / "short", [0], silent)


def test_random_combinations_are_a_function_of_the_seed() -> None:
    values = ["train.learning_rate=1e-5..1e-2", "model.dropout.residual=0,0.1,0.2"]
    one, again, other = (combinations(Request("x", values, draws=50, seeds=[seed])) for seed in (1, 1, 2))
    assert one == again != other
    assert len(one) == 50
    rates = [settings["train.learning_rate"] for settings in one]
    assert 1e-5 <= min(rates) < 1e-4 < 1e-3 < max(rates) <= 1e-2
    assert 10 < sum(rate < 10**-3.5 for rate in rates) < 40  # half of them, if their logarithms are uniform
    drawn = combinations(Request("x", ["train.weight_decay=0,0.1", "train.betas=[0.9,0.98],[0.9,0.99]"], draws=9))
    assert sorted(map(json.dumps, drawn)) == sorted(
        json.dumps({"train.weight_decay": decay, "train.betas": [0.9, beta]})
        for decay in (0, 0.1)
        for beta in (0.98, 0.99)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": ["train.lerning_rate=1,2"]}, "unknown key 'train.lerning_rate'; did you mean 'train.learning_rate'?"),
        ({"values": ["model.dropout.residual=0.1,1.5"]}, "model.dropout.residual: a probability below 1, given 1.5"),
        ({"values": ["model.num_attention_heads=2,3"]}, "model.hidden_size"),
        ({"values": ["train.batch_size=4,100000"]}, "too few for 100000 streams"),
        ({"values": ["train.steps=5,6"]}, "--set train.steps: text, budget, seeds and evaluation are the same"),
        ({"values": ["data.tokens=word,byte"]}, "--set data.tokens: text, budget, seeds and evaluation are the same"),
        ({"values": ["train.learning_rate"]}, "--set train.learning_rate: give a key with its values"),
        ({"values": ["train.learning_rate=1e-3,1e-3"]}, "at least two combinations, given 1; use `fullrank train`"),
        ({"values": ["train.learning_rate=1e-3..1e-2,1"]}, "0 < low < high, and goes with --random N"),
        ({"values": ["train.learning_rate=0..1"], "draws": 4}, "a range is low..high with 0 < low < high"),
        ({"overrides": ["train.seed=3"]}, "train.seed: set by the search"),
        ({"overrides": ["train.learning_rate=3"]}, "train.learning_rate: set by the search"),
        ({"config": "mixhead/table5"}, "`fullrank finetune`"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_refused_before_anything_is_trained(
    change: dict[str, Any], message: str, config: str, tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    with pytest.raises(InputError) as refused:
        search(dataclasses.replace(Request(config, [RATES]), **change), tmp_path / "out", [0], silent)
    assert message in str(refused.value)
    assert not trained
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_is_refused(config: str, tmp_path: Path, trained: list[tuple[str, int]]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").touch()
    with pytest.raises(InputError, match="out is not empty and holds no search; give another --out"):
        search(Request(config, [RATES]), out, [0], silent)
    (out / "notes.txt").unlink()
    content = {"request": dataclasses.asdict(Request(config, [RATES], eta=3))}
    (out / FILE).write_text(json.dumps(content))
    with pytest.raises(InputError, match="out holds another search: eta is 3 there, 2 here; give another --out"):
        search(Request(config, [RATES]), out, [0], silent)
    (out / FILE).write_text("{")
    with pytest.raises(InputError, match="damaged"):
        search(Request(config, [RATES]), out, [0], silent)
    assert not trained
