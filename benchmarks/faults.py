"""Is anything lost, or different, where machines fail? Trainings in processes of their own, killed and mistreated.

    make faults                                  # 200 kills of all kinds of runs, then every other fault
    make faults ARGS="--kills 30 --seed 7"
    make faults ARGS="--kills 0 --only clock,disk"            # faults whose names hold one of these words
    make faults ARGS="--config FILE --from DATA --kills 5"    # runs of this configuration instead

Each kind (`fault_runs.KINDS`) is trained once in peace. The same run is then trained in another folder, where it is killed by
SIGKILL and started again until it ends, and again from the beginning until all its kills are used up: after a random time,
amid the files of a checkpoint, between its files and its links. Of several processes all are killed, or one. A fifth
of the signals is SIGTERM or SIGINT: such a run is to end by itself with everything saved. Then the faults of
`fault_scenes.FAULTS` are made to happen.

lost       runs that could not go on, went on from before their last checkpoint, hung, or ended in a traceback
different  runs that ended with other metrics, weights or figures, in any byte, than the run in peace

Runs of one process are forked from one that has imported torch; all others are `python -m fullrank`. The exit status is 1 if
anything is lost or different, or a fault is not met as it should be.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import forked  # noqa: E402
from fault_runs import KINDS, Kind, Training, ended, last_step, outcome  # noqa: E402
from fault_scenes import FAULTS, Failed, Scene  # noqa: E402
from fullrank.experiments.run import environment  # noqa: E402
from fullrank.training.device import choose_device  # noqa: E402

COUNTS = ("kills", "amid", "stops", "resumes", "runs", "lost", "different", "seconds")
PROTOCOL = """
    each kind is trained in peace, and again under SIGKILL until its kills are used up: at random times, amid the files of a
    checkpoint, between files and links; metrics.jsonl, weights and figures are compared byte by byte
"""
HANGS = 120.0  # seconds after which processes that should have ended are said to hang


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
    told: list[str] = field(default_factory=list)

    def words(self) -> str:
        return f"{self.kind}: " + ", ".join(f"{getattr(self, key):g} {key}" for key in COUNTS)

    def lose(self, why: str) -> None:
        self.lost += 1
        self.tell(f"lost: {why}")

    def tell(self, text: str) -> None:
        self.told.append(text)
        print(f"  {self.kind}: {text}", flush=True)


def half_written(folder: Path) -> bool:
    """A checkpoint is there in part, or no link points to it."""
    checkpoints = folder / "checkpoints"
    linked = {os.readlink(link) for link in checkpoints.glob("*") if link.is_symlink()}
    steps = {path.name for path in checkpoints.glob("step-*")}
    return bool(steps - linked) or any(checkpoints.glob(".writing-*"))


def await_moment(training: Training, folder: Path, draw: random.Random, seconds: float) -> None:
    """Wait for a random moment, or the end: a time up to `seconds`, or so many files of one of the next checkpoints."""
    checkpoints, known = folder / "checkpoints", set[str]()
    while not training.log.exists() and training.poll() is None:
        time.sleep(0.002)  # until Python has begun with our code
    begun, until = time.monotonic(), draw.uniform(0.02, seconds)
    which, number, files = (
        draw.choice(("time", "time", "files", "files", "links")),
        draw.randint(1, 4),
        draw.randint(0, 3),
    )
    while training.poll() is None:
        if which == "time":
            if time.monotonic() - begun > until:
                return
            time.sleep(0.002)
            continue
        try:
            names = {
                name
                for name in os.listdir(checkpoints)
                if name.startswith(".writing-" if which == "files" else "step-")
            }
            known |= names
            if len(known) >= number and (which == "links" or any(count_files(checkpoints / n) >= files for n in names)):
                return
        except OSError:  # not there yet, or renamed between two looks
            continue


def count_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def end(training: Training, draw: random.Random, tally: Tally, launched: bool) -> int:
    """Send a signal to all processes of a training, or to one of them, and wait for the end of all; its number."""
    number = draw.choice([signal.SIGKILL] * 8 + [signal.SIGTERM, signal.SIGINT])
    everyone = training.processes()
    victims = everyone if number != signal.SIGKILL or draw.random() < 0.4 else [draw.choice(everyone)]
    if number != signal.SIGKILL and launched:
        victims = victims[:1]  # which hands it on
    if training.poll() is not None:
        return 0
    if not sum(send(pid, number) for pid in victims):
        return 0
    if not ended(everyone, HANGS):
        tally.lose(
            f"processes went on for {HANGS:g} s after {signal.Signals(number).name} to {len(victims)} of {len(everyone)}"
        )
    tally.kills += number == signal.SIGKILL
    tally.stops += number != signal.SIGKILL
    return number


def send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def judge(training: Training, folder: Path, sent: int, before: int, tally: Tally) -> bool:
    """True if the run may go on after this start of it; faults are counted."""
    code, said, after = training.poll(), training.said(), last_step(folder)
    promised = re.search(r"stopped by SIG\w+ after step (\d+)", said)
    if "Traceback" in said and code != 0:  # with 0 Python has ignored a Ctrl-C, inside a package's __del__
        tally.lose(f"a traceback (code {code}): {said[-600:]}")
    elif after < before and not (folder / "result.json").exists():
        tally.lose(f"the last checkpoint is of step {after}, it was of step {before}")
    elif promised and int(promised[1]) != after:
        tally.lose(f"'{promised[0]}' was said, and the last checkpoint is of step {after}")
    elif "damaged" in said:
        tally.lose(f"a kill damaged a checkpoint: {said[-400:]}")
    elif code != 0 and not sent:
        tally.lose(f"it did not go on (code {code}): {said[-600:]}")
    else:
        return True
    return False


def campaign(name: str, kind: Kind, kills: int, draw: random.Random, folder: Path, words: list[str]) -> Tally:
    """Train `kind` in peace, then with so many kills; everything is written into `folder`."""
    tally, begun = Tally(name, kind.procs), time.monotonic()
    config, whole, broken = kind.write(folder), folder / "whole", folder / "broken"
    peace = Training(kind, [config, *words, "--out", whole], folder / "whole.log")
    if peace.wait() != 0:
        raise SystemExit(f"{name} does not train: {peace.said()[-600:]}")
    seconds, expected, before = time.monotonic() - begun, outcome(whole), 0
    while tally.kills < kills or broken.exists():
        tally.resumes += before > 0
        training, sent = Training(kind, [config, *words, "--out", broken], folder / "broken.log"), 0
        if tally.kills < kills:
            await_moment(training, broken, draw, 0.8 * seconds)
            sent = end(training, draw, tally, kind.launched)
            tally.amid += sent == signal.SIGKILL and half_written(broken)
        training.wait()
        goes_on = judge(training, broken, sent, before, tally)
        before = last_step(broken)
        if goes_on and training.poll() == 0:
            tally.runs += 1
            if other := [key for key, value in outcome(broken).items() if expected.get(key) != value]:
                tally.different += 1
                tally.tell(f"different: {', '.join(other)}")
        if not goes_on or training.poll() == 0:
            shutil.rmtree(broken, ignore_errors=True)
            before = 0
    tally.seconds = round(time.monotonic() - begun, 1)
    return tally


def mistreat(place: Path, only: list[str]) -> list[dict[str, object]]:
    """Make every fault happen whose name holds one of the words; how each was met."""
    met: list[dict[str, object]] = []
    scenes: dict[str, Scene] = {}
    for name, (fault, kind) in FAULTS.items():
        if only and not any(word in name for word in only):
            continue
        begun, good = time.monotonic(), True
        try:
            scene = scenes.get(kind) or scenes.setdefault(kind, Scene(KINDS[kind], place / str(len(scenes))))
            ending = fault(scene)
        except Failed as failed:
            ending, good = str(failed), False
        met.append({"fault": name, "ending": ending, "good": good})
        print(f"{'ok' if good else 'FAILED'}: {name}: {ending} ({time.monotonic() - begun:.1f} s)", flush=True)
    return met


def write(file: Path | None, campaign: dict[str, Any]) -> None:
    """Write the figures of a campaign, so far, into `file` beside those of campaigns with another seed or commit."""
    if file is None:
        return
    others = json.loads(file.read_text(encoding="utf-8"))["campaigns"] if file.exists() else []
    others = [other for other in others if (other["seed"], other["commit"]) != (campaign["seed"], campaign["commit"])]
    content = {"campaigns": [*others, campaign], "protocol": " ".join(PROTOCOL.split())}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs, spread evenly over the kinds of runs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments, signals and victims")
    parser.add_argument("--kinds", default="", help="kinds of runs whose names hold one of these words (with commas)")
    parser.add_argument("--only", default="", help="faults whose names hold one of these words; none: no fault")
    parser.add_argument("--config", type=Path, help="a configuration whose run takes the place of all kinds")
    parser.add_argument("--from", dest="source", help="the folder that holds its corpus")
    parser.add_argument("--json", type=Path, help="file of figures, to which these are added")
    given = parser.parse_args()
    names, only = ([word for word in text.split(",") if word] for text in (given.kinds, given.only))
    kinds = {name: kind for name, kind in KINDS.items() if not names or any(word in name for word in names)}
    if given.config:
        kinds = {given.config.stem: Kind(lambda _: yaml.safe_load(given.config.read_text(encoding="utf-8")))}
    words = ["--from", given.source] if given.source else []
    forked.preload("torch._dynamo", "fullrank.hf.inject", "transformers.models.bert.modeling_bert")
    forked.start("--version").join()  # torch is imported here, and in no run
    print(f"seed {given.seed}: {given.kills} kills of {len(kinds)} kinds of runs", flush=True)
    total = Tally("all", max(kind.procs for kind in kinds.values()))
    found: dict[str, Any] = {"seed": given.seed, **environment(choose_device("cpu"), "fp32"), "kinds": [], "faults": []}
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        shares = [0.0, *itertools.accumulate(kind.share for kind in kinds.values())]
        ends = [round(given.kills * share / shares[-1]) for share in shares]
        for number, (name, kind) in enumerate(kinds.items()):
            draw = random.Random(f"{given.seed} {name}")
            tally = campaign(name, kind, ends[number + 1] - ends[number], draw, Path(place) / str(number), words)
            print(tally.words(), flush=True)
            for key in COUNTS:
                setattr(total, key, round(getattr(total, key) + getattr(tally, key), 1))
            found["kinds"].append(dataclasses.asdict(tally))
            write(given.json, found)
        found["kinds"].append(dataclasses.asdict(total))
        found["faults"] = mistreat(Path(place) / "faults", only)
    write(given.json, found)
    failed = sum(not fault["good"] for fault in found["faults"])
    print(total.words())
    print(f"seed {given.seed}: {total.kills} kills, {total.resumes} resumes, {total.lost} lost, {total.different} different; "
          f"{len(found['faults']) - failed} of {len(found['faults'])} faults met")  # fmt: skip
    sys.exit(1 if total.lost or total.different or failed else 0)


if __name__ == "__main__":
    main()
