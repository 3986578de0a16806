"""The trainings of a plan, their order and folders; processes that are started, stopped and reported."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fullrank.config.load import read_yaml, to_yaml
from fullrank.config.plan import PlanFile
from fullrank.core.errors import InputError, Interrupted, RunError
from fullrank.experiments.queue import Training, TrainingsFailed, in_lines, listing, train_all, trainings_of

TABLE = "mixhead/table6"


def plan(*entries: dict[str, object], **others: object) -> PlanFile:
    return PlanFile.from_dict({"trainings": list(entries), **others})


def test_all_rows_of_a_seed_come_before_the_next_seed_and_settings_are_in_the_folders_name() -> None:
    settings = {"train.learning_rate": 2e-3}
    planned = trainings_of(
        plan(
            {"table": TABLE, "rows": ["plain", "b"], "seeds": [3, 1], "scale": "small"},
            {"table": TABLE, "rows": ["b"], "scale": "small", "set": settings},
            set={"train": {"batch_size": 8}},
        ),
        out=Path("here"),
    )
    assert [str(one.cell.folder) for one in planned] == [
        f"here/mixhead-table6/{name}"
        for name in (
            "plain-small-batch_size=8-seed3", "b-small-batch_size=8-seed3", "plain-small-batch_size=8-seed1",
            "b-small-batch_size=8-seed1", "b-small-batch_size=8-learning_rate=0.002-seed1",
        )
    ]  # fmt: skip
    trained = planned[-1].cell.resolved.config.train
    assert (trained.seed, trained.batch_size, trained.learning_rate, trained.threads) == (1, 8, 2e-3, 1)


def test_what_the_ledger_has_is_not_trained_again(tmp_path: Path) -> None:
    settings = {"train.learning_rate": 2e-3}
    entry = {"table": TABLE, "rows": ["plain", "b"], "seeds": [1, 2], "scale": "small", "set": settings}
    row = {"recipe": TABLE, "row": "b", "scale": "small", "seed": 2, "set": settings}
    others = [row | {"seed": 1, "set": {}}, row | {"row": "plain", "scale": "tiny"}]
    planned = trainings_of(plan(entry), out=tmp_path, ledger=[*others, row])
    state = listing(planned, 1)
    assert [one["state"] for one in state["trainings"]] == ["open", "open", "open", "recorded"]
    assert [*in_lines(state, 1)][-1] == "1 of 4 finished"
    asyncio.run(train_all(planned[-1:], [0], lambda folder: pytest.fail("trained again")))


def test_the_end_of_training_in_an_entry_replaces_that_of_the_plan() -> None:
    entry = {"table": "mixhead/table1-vanilla", "rows": ["b"], "scale": "tiny", "set": {"train.steps": 5}}
    (one,) = trainings_of(plan(entry, set={"train.tokens": 1000}))
    assert (one.cell.resolved.config.train.steps, one.cell.resolved.config.train.tokens) == (5, None)


def test_a_table_of_several_backbones_and_all_rows() -> None:
    planned = trainings_of(plan({"table": "mixhead/table1", "scale": "tiny"}))
    assert {one.cell.resolved.recipe for one in planned} > {"mixhead/table1-vanilla", "mixhead/table1-transformer-xl"}
    assert len({one.cell.folder for one in planned}) == len(planned) > 12


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"table": TABLE, "rows": ["c"]}, f"{TABLE} has no row 'c'"),
        ({"table": "mixhead/table66"}, "neither a file nor a shipped recipe"),
        ({"table": TABLE, "set": {"train.steqs": 1}}, "unknown key 'train.steqs'; did you mean 'train.steps'?"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is(entry: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        trainings_of(plan({"table": TABLE}, entry))


def test_the_folder_of_corpora_is_given_to_those_that_read_one(tmp_path: Path) -> None:
    def given(table: str, scale: str, **settings: object) -> bool:
        (one, *_) = trainings_of(plan({"table": table, "scale": scale, "set": settings}), tmp_path)
        return f'data.dir="{tmp_path}"' in one.overrides

    assert given("mixhead/table1-vanilla", "small")
    assert given("mixhead/table5", "small")
    assert not given("mixhead/table5", "tiny")  # invented sentences
    assert not given("mixhead/table1-vanilla", "small", **{"data.name": "text", "data.train": "my.txt"})


def test_the_time_left_is_estimated_from_finished_runs(tmp_path: Path) -> None:
    entries = [{"table": table, "rows": ["plain", "b"], "scale": "small"} for table in (TABLE, "mixhead/table7")]
    planned = trainings_of(plan(*entries), out=tmp_path)
    assert listing(planned, 1)["seconds_left"] is None
    folder = planned[0].cell.folder
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(planned[0].cell.resolved.config))
    (folder / "result.json").write_text('{"wall_seconds": 100.0}')
    content = listing(planned, 2)
    assert [one["state"] for one in content["trainings"]] == ["finished", "open", "open", "open"]
    assert content["seconds_left"] == pytest.approx(300 / 2)
    assert list(in_lines(content, 2))[-1] == "1 of 4 finished, about 2 min 30 s left on 2 cores"


# -- processes --------------------------------------------------------------------------------------------------------

NOTE = "import os, sys, time; print('noted', file=sys.stderr); open(sys.argv[1], 'a').write(sys.argv[2]);"


def stand_in(monkeypatch: pytest.MonkeyPatch, note: Path, code: str) -> list[Training]:
    """Four trainings, each replaced by a small program that notes its row and seed."""
    monkeypatch.setattr(
        Training, "command", property(lambda one: ["-c", NOTE + code, str(note), f"{one.cell.row}{one.cell.seed} "])
    )
    return trainings_of(
        plan({"table": TABLE, "rows": ["plain", "b"], "seeds": [1, 2], "scale": "small"}), out=note.parent
    )


def test_one_that_fails_is_reported_with_its_last_lines_and_the_queue_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = stand_in(monkeypatch, tmp_path / "note", "sys.exit('no rows left' if sys.argv[2] == 'b1 ' else 0)")
    finished, said = list[Path](), list[str]()
    core = min(os.sched_getaffinity(0))
    with pytest.raises(TrainingsFailed, match=rf"^1 of 4 trainings failed: {TABLE} b seed 1$") as failed:
        asyncio.run(train_all(planned, [core], finished.append, said.append))
    assert failed.value.outputs == {planned[1].cell.folder: "noted\nno rows left\n"}
    assert (tmp_path / "note").read_text() == "plain1 b1 plain2 b2 "
    assert finished == [planned[place].cell.folder for place in (0, 2, 3)]
    place = said.index(f"failed: {TABLE} b seed 1, exit status 1")
    assert said[place + 1 : place + 3] == ["  noted", "  no rows left"]


def test_a_training_that_ends_before_it_has_its_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int, cores: set[int]) -> None:
        raise ProcessLookupError

    planned = stand_in(monkeypatch, tmp_path / "note", "")[:1]
    monkeypatch.setattr(os, "sched_setaffinity", gone)
    finished = list[Path]()
    asyncio.run(train_all(planned, [0], finished.append, [].append))
    assert finished == [planned[0].cell.folder]


def test_a_training_has_its_core_one_thread_and_low_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "time.sleep(0.1); print(os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0) >= 10,"
        " os.environ['OMP_NUM_THREADS']); sys.exit(1)"
    )
    planned = stand_in(monkeypatch, tmp_path / "note", code)[:1]
    said, core = list[str](), max(os.sched_getaffinity(0))
    with pytest.raises(RunError):
        asyncio.run(train_all(planned, [core], lambda folder: None, said.append))
    assert f"  {{{core}}} True 1" in said


def test_a_signal_stops_the_training_and_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], 'a').write('saved'), sys.exit(1)));"
    )
    planned = stand_in(monkeypatch, tmp_path / "note", code + "open(sys.argv[1] + 2 * 'x', 'w'); time.sleep(60)")

    def stop() -> None:
        while not (tmp_path / "notexx").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        asyncio.run(train_all(planned, [min(os.sched_getaffinity(0))], lambda folder: None, lambda text: None))
    assert (tmp_path / "note").read_text() == "plain1 saved"


def test_a_paused_queue_pauses_its_training(tmp_path: Path) -> None:
    """SIGTSTP stops both, SIGCONT lets both go on."""
    child = "import os, time; print(os.getpid(), file=open('pid', 'w')); time.sleep(1); print('done', file=open('end', 'w'))"
    code = (
        "import asyncio; from test_queue import *; from fullrank.experiments import queue;"
        f"queue.Training.command = ['-c', {child!r}];"
        "one = trainings_of(plan({'table': TABLE, 'rows': ['b'], 'scale': 'small'}));"
        "asyncio.run(train_all(one, [min(os.sched_getaffinity(0))], lambda folder: None))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}) as queue:

        def state(pid: int) -> str:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        pid = int((tmp_path / "pid").read_text())
        queue.send_signal(signal.SIGTSTP)
        while (state(queue.pid), state(pid)) != ("T", "T"):  # a busy machine stops them one after another
            time.sleep(0.02)
        queue.send_signal(signal.SIGCONT)
        assert queue.wait() == 0
    assert (tmp_path / "end").exists()


def test_a_training_elsewhere_is_seen_as_running(tmp_path: Path) -> None:
    planned = trainings_of(plan({"table": TABLE, "rows": ["b"], "scale": "small"}), out=tmp_path)
    folder = planned[0].cell.folder
    folder.mkdir(parents=True)
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert listing(planned, 1)["trainings"][0]["state"] == "running"
    assert listing(planned, 1)["trainings"][0]["state"] == "open"


@pytest.mark.parametrize("name", ["plan.yaml", "plan_gpu.yaml"])
def test_the_plans_of_the_repository_can_be_trained(name: str, tmp_path: Path) -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "results" / name
    planned = trainings_of(PlanFile.of_file(read_yaml(path), name), out=tmp_path)
    assert len({training.cell.folder for training in planned}) == len(planned) >= 3
    assert all(training.decides for training in planned)
