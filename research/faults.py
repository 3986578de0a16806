"""Is anything lost, or different, where machines fail? Trainings in processes of their own, killed and mistreated.

    make faults                                  # 200 kills of all kinds of runs, then every other fault
    make faults ARGS="--kills 30 --seed 7"
    make faults ARGS="--kills 0 --only clock,disk"            # faults whose names hold one of these words

Each kind (`small_runs.KINDS`) is trained once in peace. The same run is then trained in another folder, where it is killed by
SIGKILL and started again until it ends, and again from the beginning until all its kills are used up: after a random time, or
amid the files of a checkpoint. Of several processes all are killed, or one. A fifth of the signals is SIGTERM or SIGINT:
such a run is to end by itself with everything saved. Then every fault of FAULTS is made to happen.

lost       runs that could not go on, went on from before their last checkpoint, hung, or ended in a traceback
different  runs that ended with other metrics, weights or figures, in any byte, than the run in peace

The exit status is 1 if anything is lost or different, or a fault is not met as it should be.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from research.small_runs import KINDS, Kind, Training, last_step, outcome, preload, write_campaign

PROTOCOL = """
    each kind is trained in peace, and again under SIGKILL until its kills are used up: at random times, and amid the files of a
    checkpoint; metrics.jsonl, weights and figures are compared byte by byte
"""
HANGS = 120.0  # seconds after which processes that should have ended are said to hang


# -- kills ------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts of one kind of run. amid: kills that left a checkpoint half written, or written and not yet linked."""

    kind: str
    processes: int
    kills: int = 0
    amid: int = 0
    stops: int = 0
    resumes: int = 0
    runs: int = 0
    lost: int = 0
    different: int = 0
    seconds: float = 0.0

    def lose(self, why: str) -> None:
        self.lost += 1
        print(f"  {self.kind}: lost: {why}", flush=True)


def kill_again_and_again(name: str, kind: Kind, kills: int, draw: random.Random, folder: Path) -> Tally:
    """Train in peace, then with so many kills. Everything is written into the folder."""
    tally, start = Tally(name, kind.procs), time.monotonic()
    config, whole, broken = kind.write(folder), folder / "whole", folder / "broken"
    peace = Training(kind, [config, "--out", whole], folder / "whole.log")
    if peace.wait() != 0:
        raise SystemExit(f"{name} does not train: {peace.output()[-600:]}")
    seconds, expected, before = time.monotonic() - start, outcome(whole), 0
    while tally.kills < kills or broken.exists():
        tally.resumes += before > 0
        training, sent = Training(kind, [config, "--out", broken], folder / "broken.log"), 0
        if tally.kills < kills:
            wait_for_a_moment(training, broken, draw, 0.8 * seconds)
            sent = send_signal(training, draw, tally)
            tally.amid += sent == signal.SIGKILL and is_half_written(broken)
        training.wait()
        goes_on = judge(training, broken, sent, before, tally)
        before = last_step(broken)
        if goes_on and training.poll() == 0:
            tally.runs += 1
            if other := compare(outcome(broken), expected):
                tally.different += 1
                print(f"  {name}: different: {other}", flush=True)
        if not goes_on or training.poll() == 0:
            shutil.rmtree(broken, ignore_errors=True)
            before = 0
    tally.seconds = round(time.monotonic() - start, 1)
    return tally


def wait_for_a_moment(training: Training, folder: Path, draw: random.Random, seconds: float) -> None:
    """Wait for a time up to `seconds`, or for a folder of one of the next checkpoints and so many files in it."""
    while not training.log.exists() and training.poll() is None:
        time.sleep(0.002)  # until Python has begun with our code
    end, watches_files = time.monotonic() + draw.uniform(0.02, seconds), draw.random() < 0.6
    prefix, number, files = draw.choice((".writing-", "step-")), draw.randint(1, 4), draw.randint(0, 3)
    seen: set[Path] = set()
    while training.poll() is None:
        if not watches_files and time.monotonic() > end:
            return
        folders = [path for path in folder.glob("checkpoints/*") if path.name.startswith(prefix)]
        seen.update(folders)
        if watches_files and len(seen) >= number and any(len(list(path.glob("*"))) >= files for path in folders):
            return


def send_signal(training: Training, draw: random.Random, tally: Tally) -> int:
    """Send a signal to all processes of a training, or kill one of them, and wait for the end of all. Returns its number."""
    number, pids = draw.choice([signal.SIGKILL] * 8 + [signal.SIGTERM, signal.SIGINT]), training.pids
    victims = pids if number != signal.SIGKILL or draw.random() < 0.4 else [draw.choice(pids)]
    if training.poll() is not None:
        return 0
    training.send(number, victims)
    if training.wait(HANGS) is None:
        tally.lose(
            f"processes went on for {HANGS:g} s after {signal.Signals(number).name} to {len(victims)} of {len(pids)}"
        )
        training.send(signal.SIGKILL)
    tally.kills += number == signal.SIGKILL
    tally.stops += number != signal.SIGKILL
    return number


def is_half_written(folder: Path) -> bool:
    """Whether a checkpoint is there in part, or no link points to it."""
    checkpoints = folder / "checkpoints"
    linked = {os.readlink(link) for link in checkpoints.glob("*") if link.is_symlink()}
    steps = {path.name for path in checkpoints.glob("step-*")}
    return bool(steps - linked) or any(checkpoints.glob(".writing-*"))


def judge(training: Training, folder: Path, sent: int, before: int, tally: Tally) -> bool:
    """Whether the run may go on after this start of it. Faults are counted."""
    code, output, after = training.poll(), training.output(), last_step(folder)
    promised = re.search(r"stopped by SIG\w+ after step (\d+)", output)
    if "Traceback" in output and code != 0:  # with 0 Python has ignored a Ctrl-C, inside a package's __del__
        tally.lose(f"a traceback (code {code}): {output[-600:]}")
    elif after < before and not (folder / "result.json").exists():
        tally.lose(f"the last checkpoint is of step {after}, it was of step {before}")
    elif promised and int(promised[1]) != after:
        tally.lose(f"'{promised[0]}' was said, and the last checkpoint is of step {after}")
    elif "damaged" in output:
        tally.lose(f"a kill damaged a checkpoint: {output[-400:]}")
    elif code != 0 and not sent:
        tally.lose(f"it did not go on (code {code}): {output[-600:]}")
    else:
        return True
    return False


def compare(result: dict[str, Any], expected: dict[str, Any]) -> str:
    """The names of what differs."""
    return ", ".join(key for key in {**result, **expected} if result.get(key) != expected.get(key))


# -- other faults -----------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A fault was not met as it should be; the text says how."""


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


class Scene:
    """A kind of run with its data: trained in peace (`whole`) and stopped half-way (`half`)."""

    def __init__(self, kind: Kind, place: Path) -> None:
        self.kind, self.place, self.config = kind, place, kind.write(place)
        self.train(place / "whole")
        self.expected = outcome(place / "whole")
        training = self.start(place / "half")
        while not (place / "half" / "checkpoints" / "previous").exists() and training.poll() is None:
            time.sleep(0.002)
        expect(training.poll() is None, "the run to be stopped half-way ended before that")
        training.send(signal.SIGKILL)
        training.wait()

    def start(self, folder: Path, *keys: str, config: Path | None = None, **options: Any) -> Training:
        words = [config or self.config, *keys, "--out", folder]
        return Training(self.kind, words, folder.with_name(f"{folder.name}.log"), **options)

    def train(self, folder: Path, *keys: str, code: int = 0, words: str = "", **options: Any) -> str:
        """Train, or resume. Returns the line that holds the words; Failed without one, or for another status."""
        training = self.start(folder, *keys, **options)
        status, output = training.wait(300), training.output()
        expect(status == code and "Traceback" not in output, f"status {status} instead of {code}: {output[-600:]}")
        lines = [line for line in output.splitlines() if re.search(words, line)]
        expect(bool(lines) or not words, f"nothing like '{words}' was said, but: {output[-600:]}")
        return re.sub(r"/\S*/", "", lines[0] if lines else "").removeprefix("fullrank: ")

    def copy(self, name: str) -> Path:
        """A copy of the run that was stopped half-way."""
        folder = self.place / name
        shutil.rmtree(folder, ignore_errors=True)
        return shutil.copytree(self.place / "half", folder, symlinks=True)

    def finish(self, folder: Path, words: str = "") -> str:
        """Resume a run; Failed if it does not go on, or ends with anything else than the one in peace."""
        line = self.train(folder, words=words)
        other = compare(outcome(folder), self.expected)
        expect(not other, f"it went on and ended with other {other}")
        return line


def mount(options: str, place: Path) -> list[str]:
    """Words in front of a command: it runs where the mount was done first, and `place` is copied out at its end.

    The mount is done in a namespace of its own (`unshare`), which needs no rights.
    """
    script = f'mount {options} && "$@"; status=$?; cp -a {place}/. {place}.kept 2>/dev/null; exit $status'
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]


def full_disk(scene: Scene) -> str:
    """A disk that takes the files of a start, and one that takes two checkpoints and no third."""
    size = sum(path.stat().st_size for path in (scene.place / "whole/checkpoints/last/").rglob("*"))
    line, smallest = "", 64 << 10
    for room in (smallest, smallest + 5 * size // 2):
        disk = scene.place / f"disk-{room}"
        disk.mkdir(exist_ok=True)
        within = mount(f"-t tmpfs -o size={room} tmpfs {disk}", disk)
        line = scene.train(disk / "run", code=1, words=r"[Nn]o space left on", within=within)
        run = disk.with_name(f"{disk.name}.kept") / "run"
        expect((last_step(run) > 0) == (room > smallest), f"{last_step(run)} steps on {room} bytes")
        scene.finish(run)
    return line


def flip(path: Path) -> None:
    """Turn one bit over, at a place that depends on the name of the file."""
    content, draw = bytearray(path.read_bytes()), random.Random(path.name)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def damaged_checkpoint(scene: Scene) -> str:
    """Each file of the last checkpoint in turn."""
    line, last = "", scene.place / "half" / "checkpoints" / "last"
    for path in sorted(path for path in last.rglob("*") if path.is_file()):
        folder = scene.copy("damaged")
        flip(folder / "checkpoints" / "last" / path.relative_to(last))
        line = scene.finish(folder, r"last is damaged: .* going on from the checkpoint before it")
    return line


def be_impatient() -> None:
    """Let this process wait five seconds for others, not half an hour."""
    os.environ["FULLRANK_TIMEOUT"] = "5"


def failing_process(number: signal.Signals, scene: Scene) -> str:
    """One of two processes stands still, or dies: the other ends with a message, and the run goes on later."""
    folder = scene.copy("failing")
    lines = folder / "timing.jsonl"
    length, training = lines.stat().st_size, scene.start(folder, before=be_impatient)
    while lines.stat().st_size <= length and training.poll() is None:
        time.sleep(0.002)
    begin, (first, last) = time.monotonic(), training.pids
    training.send(number, [last])
    while first not in training.codes and time.monotonic() < begin + 60:
        training.poll()
    seconds = time.monotonic() - begin
    training.send(signal.SIGKILL)
    training.wait()
    expect(seconds < (60 if number == signal.SIGSTOP else 4), f"the other one went on for {seconds:.0f} s")
    expect("waited for another one" in training.output(), training.output()[-600:])
    scene.finish(folder)
    return f"the other one ended after {seconds:.0f} s"


def limit_memory() -> None:
    """Let this process have 256 MiB more than it has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def out_of_memory(scene: Scene) -> str:
    """Batches that do not fit, and a model that does not: the message says what to reduce."""
    wide, words = scene.place / "wide", "out of memory: .* the size of the model"
    scene.train(wide, "model.hidden_size=8192", code=1, words=words, before=limit_memory)
    keys = ("train.batch_size=60", "train.segment_length=90", "model.intermediate_size=65536")
    words = "out of memory: lower train.batch_size .now 60"
    return scene.train(scene.place / "large", *keys, code=1, words=words, before=limit_memory)


def let_clocks_jump() -> None:
    """The time of day goes back a day or forward two at every look; other clocks are 1,000 times as fast."""
    draw, day, steady, counter = random.Random(0), [time.time()], time.monotonic, time.perf_counter

    def time_of_day() -> float:
        day[0] += draw.choice((-86400.0, 172800.0))
        return day[0]

    time.time = time_of_day
    time.monotonic = lambda: 1000 * steady()
    time.perf_counter = lambda: 1000 * counter()


def jumping_clocks(scene: Scene) -> str:
    """Metrics and weights are the same, and without `train.save_every_steps` a checkpoint is made every 5 minutes."""
    scene.train(scene.place / "clocks", before=let_clocks_jump)
    scene.finish(scene.place / "clocks")
    settings = yaml.safe_load(scene.config.read_text(encoding="utf-8"))
    del settings["train"]["save_every_steps"]
    settings["eval"]["every_steps"] = 1000
    seldom = scene.place / "seldom.yaml"
    seldom.write_text(yaml.safe_dump(settings), encoding="utf-8")
    counts: list[int] = []
    for before in (int, let_clocks_jump):
        folder = scene.place / f"seldom-{len(counts)}"
        training, seen = scene.start(folder, config=seldom, before=before), set()
        while training.poll() is None:
            seen |= {path.name for path in folder.glob("checkpoints/step-*")}
        expect(training.poll() == 0, training.output()[-600:])
        counts.append(len(seen))
    words = f"at 1,000 times the pace {counts[1]} checkpoints, not {counts[0]}"
    expect(counts[0] == 1 < counts[1], words)
    return words


ALONE, TOGETHER = "memory, Skip-Retain, cross-head", "two processes, DDP"
FAULTS: dict[str, tuple[Callable[[Scene], str], str]] = {
    "full disk": (full_disk, ALONE),
    "bit-flipped checkpoint": (damaged_checkpoint, ALONE),
    "out of memory": (out_of_memory, ALONE),
    "clock jumps": (jumping_clocks, ALONE),
    "hanging process": (partial(failing_process, signal.SIGSTOP), TOGETHER),
    "dying process": (partial(failing_process, signal.SIGKILL), TOGETHER),
    "full disk, two processes": (full_disk, TOGETHER),
    "bit-flipped checkpoint, two processes": (damaged_checkpoint, TOGETHER),
}


def mistreat(place: Path, only: Sequence[str]) -> list[dict[str, object]]:
    """Make every fault happen whose name holds one of the words. Returns how each was met."""
    met: list[dict[str, object]] = []
    scenes: dict[str, Scene] = {}
    for name, (fault, kind) in FAULTS.items():
        if only and not any(word in name for word in only):
            continue
        start, good = time.monotonic(), True
        try:
            if kind not in scenes:
                scenes[kind] = Scene(KINDS[kind], place / str(len(scenes)))
            ending = fault(scenes[kind])
        except Failed as failed:
            ending, good = str(failed), False
        met.append({"fault": name, "ending": ending, "good": good})
        print(f"{'ok' if good else 'FAILED'}: {name}: {ending} ({time.monotonic() - start:.1f} s)", flush=True)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs, spread evenly over the kinds of runs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments, signals and victims")
    parser.add_argument("--kinds", default="", help="kinds of runs whose names hold one of these words (with commas)")
    parser.add_argument("--only", default="", help="faults whose names hold one of these words; none: no fault")
    parser.add_argument("--json", type=Path, help="file of figures, to which these are added")
    options = parser.parse_args()
    words, only = ([word for word in text.split(",") if word] for text in (options.kinds, options.only))
    kinds = {name: kind for name, kind in KINDS.items() if not words or any(word in name for word in words)}
    preload()
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        tallies = []
        for number, (name, kind) in enumerate(kinds.items()):
            kills = options.kills * (number + 1) // len(kinds) - options.kills * number // len(kinds)
            draw = random.Random(f"{options.seed} {name}")
            tally = kill_again_and_again(name, kind, kills, draw, Path(place) / str(number))
            print(tally, flush=True)
            tallies.append(tally)
        faults = mistreat(Path(place) / "faults", only)
    figures = {"kinds": [dataclasses.asdict(tally) for tally in tallies], "faults": faults}
    write_campaign(options.json, options.seed, figures, PROTOCOL)
    counts = {key: sum(getattr(tally, key) for tally in tallies) for key in ("kills", "resumes", "lost", "different")}
    failed = sum(not fault["good"] for fault in faults)
    words = [f"{count} {key}" for key, count in counts.items()]
    print(f"seed {options.seed}: {', '.join(words)}; {len(faults) - failed} of {len(faults)} faults met")
    sys.stdout.flush()
    os._exit(bool(counts["lost"] or counts["different"] or failed))  # Triton would report leaks of its own


if __name__ == "__main__":
    main()
