"""Faults other than kills, each made to happen to a small training: what that says, and that it then ends as in peace.

A fault is a function of a Scene. It returns how the training met it, or raises Failed. Disks that are full or read-only
are mounted in a namespace of their own (`unshare`), which needs no rights.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

from fault_runs import Kind, Training, ended, last_step, outcome


class Failed(Exception):
    """A fault was not met as it should be; the text says how."""


class Scene:
    """A kind of run with its data: trained in peace (`whole`) and stopped half-way (`half`)."""

    def __init__(self, kind: Kind, place: Path) -> None:
        self.kind, self.place, self.config = kind, place, kind.write(place)
        self.train(self.place / "whole")
        self.expected = outcome(self.place / "whole")
        training = self.start(self.place / "half")
        while not (self.place / "half" / "checkpoints" / "previous").exists() and training.poll() is None:
            time.sleep(0.002)
        for pid in training.processes():
            os.kill(pid, signal.SIGKILL)
        expect(training.wait() != 0, "the run to be stopped half-way ended before that")

    def start(self, folder: Path, *keys: str, config: Path | None = None, **options: object) -> Training:
        log = folder.with_name(f"{folder.name}.log")
        return Training(self.kind, [config or self.config, *keys, "--out", folder], log, **options)  # type: ignore[arg-type]

    def train(self, folder: Path, code: int = 0, *keys: str, **options: object) -> str:
        """Train, or resume, in `folder`; what it said. Failed if it ends with another status, or in a traceback."""
        training = self.start(folder, *keys, **options)  # type: ignore[arg-type]
        status = training.wait(300)
        expect("Traceback" not in training.said(), f"a traceback: {training.said()[-600:]}")
        expect(status == code, f"status {status} instead of {code}: {training.said()[-600:]}")
        return training.said()

    def copy(self, name: str) -> Path:
        """A copy of the run that was stopped half-way."""
        folder = self.place / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.place / "half", folder, symlinks=True)
        return folder

    def ends_as_in_peace(self, folder: Path) -> None:
        """Resume the run in `folder`; Failed if it does not go on, or ends with anything else than the one in peace."""
        self.train(folder)
        other = [key for key, value in outcome(folder).items() if self.expected.get(key) != value]
        expect(not other, f"it went on and ended with other {', '.join(other)}")


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


def sentence(said: str, pattern: str) -> str:
    """The first line of `said` that holds the pattern; Failed without one."""
    line = next((line for line in said.splitlines() if re.search(pattern, line)), None)
    expect(line is not None, f"nothing like '{pattern}' was said, but: {said[-600:]}")
    return re.sub(r"/\S*/", "", str(line)).removeprefix("fullrank: ")


# -- disks ------------------------------------------------------------------------------------------------------------


def _mounted(mount: str, place: Path) -> list[str]:
    """Words in front of a command: it runs where `mount` was done first, and all of `place` is copied out at its end."""
    script = f'mount {mount} && "$@"; status=$?; cp -a {place}/. {place}.kept 2>/dev/null; exit $status'
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]


def full_disk(scene: Scene) -> str:
    """A disk that takes the files of a start, and one that takes two checkpoints and no third."""
    size = sum(path.stat().st_size for path in (scene.place / "whole/checkpoints/last/").rglob("*"))
    said = ""
    for room in (64 << 10, (1 << 16) + 5 * size // 2):
        disk = scene.place / f"disk-{room}"
        disk.mkdir(exist_ok=True)
        kept = disk.with_name(f"{disk.name}.kept")
        said = scene.train(disk / "run", 1, within=_mounted(f"-t tmpfs -o size={room} tmpfs {disk}", disk))
        said = sentence(said, r"[Nn]o space left on")
        expect((last_step(kept / "run") > 0) == (room > 64 << 10), f"{last_step(kept / 'run')} steps on {room} bytes")
        scene.ends_as_in_peace(kept / "run")
    return said


def read_only_folder(scene: Scene) -> str:
    folder = scene.copy("locked")
    ours = _mounted(f"--bind {folder} {folder} && mount -o remount,bind,ro {folder}", folder)
    said = sentence(scene.train(folder, 1, within=ours), "cannot be written")
    scene.ends_as_in_peace(folder)
    return said


# -- files ------------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Turn one bit over, at a place that depends on the name of the file."""
    content, draw = bytearray(path.read_bytes()), random.Random(path.name)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def damaged_checkpoint(damage: Callable[[Path], None], scene: Scene) -> str:
    """Each file of the last checkpoint in turn."""
    said, last = "", scene.place / "half" / "checkpoints" / "last"
    names = sorted(str(path.relative_to(last)) for path in last.rglob("*") if path.is_file())
    for name in names:
        folder = scene.copy("damaged")
        damage(folder / "checkpoints" / "last" / name)
        before = last_step(scene.place / "half")
        heard = scene.train(folder)
        said = sentence(heard, r"last is damaged: .* going on from the checkpoint before it")
        other = [key for key, value in outcome(folder).items() if scene.expected.get(key) != value]
        expect(not other and before > 0, f"after damage to {name} it ended with other {', '.join(other)}")
    return said


def all_checkpoints_damaged(scene: Scene) -> str:
    folder = scene.copy("hopeless")
    for path in (folder / "checkpoints").glob("step-*/model.safetensors"):
        flip(path)
    return sentence(scene.train(folder, 2), "is damaged: .*delete .* or start again")


def changed_data(scene: Scene) -> str:
    """A text that was changed since the run began is refused, and goes again once it is as it was."""
    folder, file = scene.copy("changed"), scene.place / "train.txt"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"?")
    try:
        said = sentence(scene.train(folder, 2), "was changed since")
    finally:
        file.write_bytes(content)
    scene.ends_as_in_peace(folder)
    return said


# -- processes --------------------------------------------------------------------------------------------------------


def two_runs_in_one_folder(scene: Scene) -> str:
    """Both at once in a new folder: one trains, the other says so."""
    folder = scene.place / "shared"
    pair = [Training(scene.kind, [scene.config, "--out", folder], scene.place / f"{i}.log") for i in range(2)]
    codes = sorted(training.wait() or 0 for training in pair)
    said = "".join(training.said() for training in pair)
    expect(codes == [0, 1], f"they ended with {codes}: {said[-600:]}")
    scene.ends_as_in_peace(folder)
    return sentence(said, "another process is training there")


def _impatient() -> None:
    """Let this process wait five seconds for others, not half an hour."""
    os.environ["FULLRANK_TIMEOUT"] = "5"


def failing_process(number: signal.Signals, scene: Scene) -> str:
    """One of two processes stands still, or dies: the other ends with a message, and the run goes on when both are gone."""
    folder = scene.copy("failing")
    lines = folder / "timing.jsonl"
    length, training = lines.stat().st_size, scene.start(folder, before=_impatient)
    while lines.stat().st_size <= length and training.poll() is None:
        time.sleep(0.002)
    *others, last = training.processes()
    begun = time.monotonic()
    os.kill(last, number)
    expect(ended(others, 60), f"the other one went on for a minute: {training.said()[-600:]}")
    seconds = time.monotonic() - begun
    ended([last], 0)
    training.wait()
    expect(number == signal.SIGSTOP or seconds < 4, f"{seconds:.0f} s went by before the other one ended")
    said = sentence(training.said(), "waited for another one")
    scene.ends_as_in_peace(folder)
    return said


# -- numbers, memory, clocks --------------------------------------------------------------------------------------------


def loss_not_a_number(scene: Scene) -> str:
    """A rate that destroys the model: the run ends with a message, and so it does when it is started again."""
    folder = scene.place / "diverging"
    said = [scene.train(folder, 1, "train.learning_rate=1e30") for _ in range(2)]
    return sentence(said[1], r"not a finite number: lower train\.learning_rate")


def _little_memory() -> None:
    """Let this process have 256 MiB more than it has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def out_of_memory(scene: Scene) -> str:
    """Batches that do not fit, and a model that does not: the message says what to reduce."""
    wide = scene.train(scene.place / "wide", 1, "model.hidden_size=8192", before=_little_memory)
    sentence(wide, "out of memory: .* the size of the model")
    keys = ("train.batch_size=60", "train.segment_length=90", "model.intermediate_size=65536")
    said = scene.train(scene.place / "large", 1, *keys, before=_little_memory)
    return sentence(said, "out of memory: lower train.batch_size .now 60")


def _jumping_clocks() -> None:
    """The time of day goes back a day or forward two at every look; other clocks are 1,000 times as fast."""
    draw, began, steady, counter = random.Random(0), time.time(), time.monotonic, time.perf_counter
    day = [began]

    def time_of_day() -> float:
        day[0] += draw.choice((-86400.0, 172800.0))
        return day[0]

    time.time = time_of_day
    time.monotonic = lambda: 1000 * steady()
    time.perf_counter = lambda: 1000 * counter()


def jumping_clocks(scene: Scene) -> str:
    """Metrics and weights are the same, and without `train.save_every_steps` a checkpoint is made every 5 minutes."""
    folder = scene.place / "clocks"
    scene.train(folder, before=_jumping_clocks)
    scene.ends_as_in_peace(folder)
    settings = yaml.safe_load(scene.config.read_text(encoding="utf-8"))
    del settings["train"]["save_every_steps"]
    settings["eval"]["every_steps"] = 1000
    seldom = scene.place / "seldom.yaml"
    seldom.write_text(yaml.safe_dump(settings), encoding="utf-8")
    steps: list[set[str]] = []
    for before in (int, _jumping_clocks):
        folder = scene.place / f"seldom-{len(steps)}"
        training, seen = scene.start(folder, config=seldom, before=before), set[str]()
        while training.poll() is None:
            seen |= {path.name for path in folder.glob("checkpoints/step-*")}
        expect(training.poll() == 0, training.said()[-600:])
        steps.append(seen)
    expect(
        len(steps[0]) == 1 < len(steps[1]),
        f"{[*map(len, steps)]} checkpoints at the usual pace and a thousand times it",
    )
    return f"metrics and weights are the same; at 1,000 times the pace {len(steps[1])} checkpoints, not {len(steps[0])}"


ALONE, TOGETHER = "memory, Skip-Retain, cross-head", "two processes, DDP"
FAULTS: dict[str, tuple[Callable[[Scene], str], str]] = {
    "full disk": (full_disk, ALONE),
    "read-only folder": (read_only_folder, ALONE),
    "truncated checkpoint": (partial(damaged_checkpoint, cut), ALONE),
    "bit-flipped checkpoint": (partial(damaged_checkpoint, flip), ALONE),
    "all checkpoints damaged": (all_checkpoints_damaged, ALONE),
    "data changed under a resumed run": (changed_data, ALONE),
    "two runs in one folder": (two_runs_in_one_folder, ALONE),
    "loss not a number": (loss_not_a_number, ALONE),
    "out of memory": (out_of_memory, ALONE),
    "clock jumps": (jumping_clocks, ALONE),
    "hanging process": (partial(failing_process, signal.SIGSTOP), TOGETHER),
    "dying process": (partial(failing_process, signal.SIGKILL), TOGETHER),
    "full disk, two processes": (full_disk, TOGETHER),
    "bit-flipped checkpoint, two processes": (partial(damaged_checkpoint, flip), TOGETHER),
}
