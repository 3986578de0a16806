"""Train the rows of a plan, most wanted first, and add each finished run to the ledger.

    python -m research.train research/plan.yaml --from CORPORA --out RUNS
    python -m research.train research/plan.yaml --list

Each training is `fullrank train` in a process of its own, with one thread and low priority. Ctrl-C and SIGTERM stop it
with everything saved. Started again, it goes on: a row that the ledger has
is not trained again, and a run that was stopped is resumed. To use several cores, start it several times.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.load import flatten, lay, merge, read_yaml, resolve_any, select_rows, tables
from fullrank.core.errors import FullRankError, InputError, RunError
from fullrank.experiments.run_folder import default_folder
from fullrank.training.device import lock_folder
from research import LEDGER, build
from research.ledger import Row, add_runs, differences, identity_of, read_ledger, setting_of

NICENESS = 10
LONGEST_SETTINGS = 90  # letters in the name of a folder; file systems allow 255 bytes in all
LAST_LINES = 6  # that are shown of a training that failed
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of a plan: rows of a table (None: all), each trained with every seed and these settings."""

    table: str
    rows: list[str] | None = None
    seeds: list[int] = field(default_factory=lambda: [1])
    scale: str | None = None
    set: dict[str, Any] = field(default_factory=dict)
    decides: str = ""


@dataclass(frozen=True)
class Training:
    """One training: its folder, and the command that trains it, or goes on with it. setting: as of `ledger.setting_of`."""

    name: str
    setting: str
    seed: int
    folder: Path
    command: list[str]
    is_recorded: bool

    @property
    def state(self) -> str:
        if self.is_recorded:
            return "recorded"
        if (self.folder / "result.json").exists():
            return "finished"
        return "begun" if (self.folder / "checkpoints").exists() else "open"


def read_plan(path: Path) -> list[Entry]:
    """Read the entries of a plan; the settings of an entry override those of the whole plan.

    Raises InputError for unknown keys, and for a plan without trainings.
    """
    content = read_yaml(path)
    if set(content) - {"set", "trainings"} or not content.get("trainings"):
        raise InputError(f"{path}: keys are set and trainings, and at least one training; given {', '.join(content)}")
    below = merge({}, content.get("set") or {})
    entries = []
    for raw in content["trainings"]:
        entry = build(Entry, raw, str(path))
        entries.append(replace(entry, set=flatten(lay(below, entry.set))))
    return entries


def plan_trainings(entries: Sequence[Entry], corpora: Path | None, out: Path, ledger: Sequence[Row]) -> list[Training]:
    """List the trainings in the order of the plan: of a recipe all rows of a seed, then the next seed.

    Args:
        entries: those of the plan.
        corpora: folder with a subfolder for each corpus; None: they are downloaded.
        out: folder of the run folders.
        ledger: rows of the trainings that are recorded.

    Returns:
        The trainings.

    Raises:
        InputError: something cannot be trained; nothing is begun.
    """
    recorded = {identity_of(row) for row in ledger}
    trainings: dict[Path, Training] = {}
    for entry in entries:
        for recipe, names in select_rows(tables(entry.table), entry.rows).items():
            for seed, row in itertools.product(entry.seeds, names or [None]):  # type: ignore[list-item]
                training = plan_training(entry, recipe, row, seed, corpora, out, recorded)
                trainings.setdefault(training.folder, training)
    return list(trainings.values())


def plan_training(
    entry: Entry, recipe: str, row: str | None, seed: int, corpora: Path | None, out: Path, recorded: set[str]
) -> Training:
    """Plan the training of one row with one seed.

    Args:
        entry: entry of the plan.
        recipe: name of the recipe.
        row: row of the recipe; None without.
        seed: seed of the training.
        corpora: folder with a subfolder for each corpus; None: they are downloaded.
        out: folder of the run folders.
        recorded: identities of the trainings in the ledger.

    Returns:
        The training.

    Raises:
        InputError: it cannot be trained.
    """
    settings = [f"{name}={json.dumps(value)}" for name, value in entry.set.items()]
    words = [*settings, f"train.seed={seed}", "train.threads=1"]
    resolved = resolve_any(recipe, row, entry.scale, words)
    scale = resolved.scale
    usual = default_folder(resolved).relative_to("runs")
    folder = out / name_folder(usual, entry.set, seed)
    if corpora and reads_corpus(resolved.config):
        words.append(f"data.dir={json.dumps(str(corpora.resolve()))}")
    command = [sys.executable, "-m", "fullrank", "train", recipe, *words, "--out", str(folder)]
    if row is not None:
        command += ["--row", row, "--scale", str(scale)]
    changed = differences(resolved.config, recipe, row, scale)
    identity = identity_of({"recipe": recipe, "row": row, "scale": scale, "settings": changed, "seed": seed})
    setting = setting_of(recipe, row, scale, changed)
    return Training(f"{recipe} {row} seed {seed}", setting, seed, folder, command, identity in recorded)


def name_folder(usual: Path, settings: dict[str, Any], seed: int) -> Path:
    """Name the folder of a run by its settings: `b-small-learning_rate=0.002-seed1`, or a checksum of many settings.

    Args:
        usual: the usual folder.
        settings: those of the plan.
        seed: seed of the training.

    Returns:
        The folder.
    """
    words = "".join(f"{name.rpartition('.')[2]}={value}-" for name, value in settings.items())
    if len(words) > LONGEST_SETTINGS:
        words = f"{zlib.crc32(words.encode()):08x}-"
    ending = f"seed{seed}"
    beginning = usual.name.removesuffix(ending)
    return usual.with_name(beginning + re.sub(r"[^\w.+=-]+", "_", words) + ending)


def reads_corpus(config: Any) -> bool:
    """Return whether a run reads a corpus of a folder.

    It does not if it reads an invented text, or files that its configuration names.
    """
    if isinstance(config, FinetuneConfig):
        return not config.data.invented
    return config.data.name not in ("text", "parallel")


def lower_priority(process: int) -> None:
    """Lower the priority of the session of a process, where that is possible.

    Linux shares the processor between sessions before it looks at niceness.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(NICENESS))


def train(training: Training, ledger: Path) -> str:
    """Train in a process of its own, add the run to the ledger, and return `finished`, `failed` or `stopped`.

    From then on SIGINT and SIGTERM of this process stop the training.
    """
    process = subprocess.Popen(
        training.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env={**os.environ, **ONE_THREAD},
    )  # fmt: skip
    lower_priority(process.pid)
    stops: list[int] = []

    def stop(number: int, frame: object) -> None:
        stops.append(number)
        process.terminate()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    print(f"{time.strftime('%H:%M')} {training.name}: {training.folder}, process {process.pid}", flush=True)
    output, _ = process.communicate()
    if process.returncode == 0:
        add_runs(ledger, [training.folder])
    elif not stops:
        lines = output.decode("utf-8", errors="replace").splitlines()[-LAST_LINES:]
        print(f"failed: {training.name}, exit status {process.returncode}", *lines, sep="\n  ", flush=True)
    if stops:
        return "stopped"
    return "failed" if process.returncode else "finished"


def is_locked(folder: Path) -> bool:
    """Return whether a process trains in `folder`."""
    if not (folder / ".lock").is_file():
        return False
    try:
        with lock_folder(folder):
            return False
    except RunError:
        return True


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="tables, rows, seeds and settings to be trained")
    parser.add_argument("--from", dest="corpora", type=Path, help="a folder that holds corpora in subfolders")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the run folders")
    parser.add_argument("--ledger", type=Path, default=LEDGER)
    parser.add_argument("--list", action="store_true", help="only list what is finished and what is not")
    options = parser.parse_args()
    os.nice(NICENESS)
    outcomes = []
    try:
        trainings = plan_trainings(read_plan(options.plan), options.corpora, options.out, read_ledger(options.ledger))
        for training in trainings:
            if options.list:
                print(f"{training.state:<9} {training.name}  {training.folder}")
            elif training.state != "recorded" and not is_locked(training.folder):
                outcomes.append(train(training, options.ledger))
                if outcomes[-1] == "stopped":
                    break
    except FullRankError as error:
        sys.exit(f"research.train: {error}")
    sys.exit(int(outcomes != ["finished"] * len(outcomes)))


if __name__ == "__main__":
    main()
