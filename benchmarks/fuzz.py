"""Is hostile input met with a clear message? Random configurations and mutated files, each in a process of its own.

    make fuzz                                            # 2,000 configurations, 10,000 files
    make fuzz ARGS="--configs 300 --files 0 --seed 7"
    make fuzz ARGS="--seed 1 --only config:17,file:4"    # these cases once more, with what they print

Every case is a function of the seed, its number and the schema. It runs a command of `fullrank` in a process forked from this
one, with limits of memory and time, and ends in one of these ways:

well     the command did its work; what it trained or measured is finite
stopped  it trained when its time was up, and SIGTERM ended it with everything saved
slow     it worked all the time until that was up, and a signal ended it: listed, for a person to look at
refused  exit status 2 or 1, and a message that names what is wrong
memory   it met its limit of memory, and said so
bug      a traceback, an error without a message of its own, a hang, a crash, a number that is not finite, a flood of warnings,
         or damaged weights or text whose figures were given without a word

The folders of bugs are kept, with the command that repeats them; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import collections
import gc
import importlib
import json
import os
import pkgutil
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

PROTOCOL = """
    each case is a command in a process forked from one that has imported torch, with limits of address space and time: a random
    configuration is trained for a few steps, or one file of a finished run, of its data or of a plan is mutated and read
"""
PRELOADED = (
    "torch._dynamo", "transformers.models.bert.modeling_bert", "datasets", "peft", "sacrebleu", "lxml.etree", "portalocker",
    "matplotlib.pyplot", "torch.profiler._cupti_monitor", "typer._click.decorators",
)  # fmt: skip
MEMORY = 3 << 30  # bytes of address space that a case may take, torch itself included
ENDINGS = ("well", "stopped", "slow", "refused", "memory", "bug")
LONGEST = 200  # lines that a refusal may have: one for each fault


@dataclass
class Case:
    """A command in a folder of its own.

    expected: what it prints of the untouched run, unless it says more; weights: those that it leaves there, likewise.
    """

    name: str
    folder: Path
    words: list[str]
    about: str = ""
    expected: tuple[str, str] | None = None
    weights: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Running:
    """A case whose process is under way."""

    case: Case
    pid: int
    begun: float
    asked: float | None = None
    worked: float = 0.0

    def late(self, seconds: float, now: float) -> bool:
        """It has had its time: seconds of its processor, or three times as many of the clock."""
        try:
            words = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            self.worked = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:  # ended since
            return False
        return self.worked > seconds or now - self.begun > 3 * seconds


@dataclass
class Tally:
    """Counts of the endings of one kind of cases."""

    kind: str
    endings: collections.Counter[str] = field(default_factory=collections.Counter)
    bugs: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def words(self) -> str:
        counts = ", ".join(f"{self.endings[name]} {name}" for name in ENDINGS)
        return f"{self.endings.total()} {self.kind}: {counts}, {self.seconds:.0f} seconds"


def start(case: Case, now: float = 0.0) -> Running:
    """Fork; the child runs `fullrank WORDS` in the folder of the case and never returns."""
    sys.stdout.flush()
    if pid := os.fork():
        return Running(case, pid, now)
    status = 70
    try:
        os.setsid()
        os.chdir(case.folder)
        out = [
            os.open(f"../{case.folder.name}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")
        ]
        for stream, handle in enumerate((os.open(os.devnull, os.O_RDONLY), *out)):
            os.dup2(handle, stream)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        from fullrank.cli import main as fullrank

        fullrank(case.words)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def said(case: Case, stream: str) -> str:
    """Output of the command."""
    file = case.folder.with_name(f"{case.folder.name}.{stream}")
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def not_finite(folder: Path) -> str:
    """The first figure of a run, or tensor of its model, that is not finite; empty if there is none."""
    import torch
    from safetensors.torch import load_file

    for file in [*folder.rglob("metrics.jsonl"), *folder.rglob("result.json")]:
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.name == "result.json":
            text = json.dumps({key: json.loads(text)[key] for key in ("final", "last") if key in json.loads(text)})
        if found := re.search(r'"\w+": *(null|NaN|-?Infinity)', text):
            return f"{file.name} has {found[0]}"
    for file in folder.rglob("model.safetensors"):
        if wrong := [name for name, tensor in load_file(file).items() if not torch.isfinite(tensor).all()]:
            return f"{file.parent.name}/{file.name}: {wrong[0]} is not finite"
    return ""


def verdict(case: Case, code: int, *, asked: bool, trains: bool) -> tuple[str, str]:
    """How a case ended, and why it is a bug if it is one."""
    out, err = said(case, "out"), said(case, "err")
    lines = [line for line in err.splitlines() if line.strip()]
    if "Traceback (most recent call last)" in err:
        return "bug", "a traceback"
    if code < 0:
        name = signal.Signals(-code).name
        return "bug", f"a hang, ended by {name}" if asked else f"a crash: {name}"
    if "(--debug shows where)" in err:
        return "bug", "an error without a message of its own"
    if sum("Warning" in line for line in lines) > 3 or len(lines) > LONGEST or len(err) > 20_000:
        return "bug", f"a flood of {len(lines)} lines"
    if asked and "stopped by SIGTERM" in err:
        return "stopped", ""
    if code == 0:
        if trains and (found := not_finite(case.folder)):
            return "bug", found
        if case.expected is not None and out != case.expected[0] and err == case.expected[1]:
            return "bug", "other figures than those of the untouched run, without a word"
        for name, content in case.weights.items():
            if not re.sub(r"Writing model shards.*", "", err).strip() and (case.folder / name).read_bytes() != content:
                return "bug", "other weights than those of the untouched run, without a word"
        return "well", ""
    if (
        "out of memory" in err or "Thread creation failed" in err
    ):  # the latter is said by OpenMP, which ends the process
        return "memory", ""
    if code in (1, 2) and any(line.startswith("fullrank") for line in lines):
        return "refused", ""
    if code == 2 and out.startswith('{\n  "valid": false'):
        return "refused", ""
    return "bug", f"exit status {code} without a message"


def campaign(
    kind: str, cases: Iterator[Case], keep: Path, *, seed: int, jobs: int, seconds: float, show: bool, minutes: float = 1e9,
) -> Tally:  # fmt: skip
    """Run the cases, so many at a time; each has so many seconds, and as many again to end after SIGTERM."""
    tally, running, left = Tally(kind), list[Running](), True
    now, looked = 0.0, time.monotonic()  # a clock that stands still while this machine, or all of its processes, do
    while left or running:
        now, looked = now + min(time.monotonic() - looked, 1.0), time.monotonic()
        left = left and now < minutes * 60
        while left and len(running) < jobs:
            if (case := next(cases, None)) is None:
                left = False
            else:
                running.append(start(case, now))
        for one in list(running):
            pid, status = os.waitpid(one.pid, os.WNOHANG)
            if pid:
                running.remove(one)
                settle(one, os.waitstatus_to_exitcode(status), tally, keep, seed=seed, seconds=seconds, show=show)
            elif one.asked is None and one.late(seconds, now):
                os.killpg(one.pid, signal.SIGTERM)
                one.asked = now
            elif one.asked is not None and now - one.asked > 3 * seconds:
                os.killpg(one.pid, signal.SIGKILL)
        time.sleep(0.002)
    tally.seconds = now
    return tally


def settle(one: Running, code: int, tally: Tally, keep: Path, *, seed: int, seconds: float, show: bool) -> None:
    """Count an ended case; the folder of a bug is kept, every other one removed."""
    case = one.case
    ending, why = verdict(case, code, asked=one.asked is not None, trains=tally.kind == "configurations")
    if why.startswith("a hang") and one.worked > seconds / 2:
        ending, show = "slow", True  # a person is to look whether it would ever have ended
    tally.endings[ending] += 1
    if ending == "bug":
        repeat = f'make fuzz ARGS="--seed {seed} --only {case.name}"'
        last = " | ".join(said(case, "err").splitlines()[-2:])[:500]
        tally.bugs.append({"case": case.name, "about": case.about, "why": why, "said": last})
        print(f"bug in {case.name}: {why}: fullrank {' '.join(case.words)}: {case.about}: {last}", flush=True)
        place = keep / f"{seed}-{case.name.replace(':', '-')}"
        shutil.rmtree(place, ignore_errors=True)
        keep.mkdir(parents=True, exist_ok=True)
        shutil.copytree(case.folder, place, symlinks=True, ignore=no_pipes)
        for stream in ("out", "err"):
            (place / f"said.{stream}").write_text(said(case, stream), encoding="utf-8")
        (place / "repeat.txt").write_text(
            f"{repeat}\nfullrank {' '.join(case.words)}\n{case.about}\n", encoding="utf-8"
        )
    elif show:
        print(
            f"{case.name}: {ending}: fullrank {' '.join(case.words)}: {case.about}",
            said(case, "err"),
            sep="\n",
            flush=True,
        )
    shutil.rmtree(case.folder, ignore_errors=True)
    for stream in ("out", "err"):
        case.folder.with_name(f"{case.folder.name}.{stream}").unlink(missing_ok=True)


def no_pipes(folder: str, names: Sequence[str]) -> list[str]:
    """Names of what cannot be copied: pipes, and sparse files without end."""
    paths = {name: Path(folder, name) for name in names}
    return [
        name
        for name, path in paths.items()
        if not path.is_symlink() and not path.is_dir() and (not path.is_file() or path.stat().st_size > 1 << 26)
    ]


def preload(folders: Sequence[str]) -> None:
    """Import what any command imports, so that no case has to."""
    for module in pkgutil.walk_packages(folders, "fullrank."):
        if not any(part in module.name for part in ("__main__", "triton", "portable", "lm_eval")):
            importlib.import_module(module.name)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # so that no case copies all that was imported


def numbers(kind: str, first: int, count: int, only: list[str]) -> Iterator[int]:
    """The numbers of the cases of a kind: all of them from the first, or those asked for."""
    if not only:
        yield from range(first, first + count)
    for name in only:
        if name.partition(":")[0] == kind:
            yield int(name.partition(":")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=2000, help="random configurations")
    parser.add_argument("--files", type=int, default=10_000, help="mutated files")
    parser.add_argument("--seed", type=int, default=1, help="seed of all of them")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each kind")
    parser.add_argument("--only", default="", help="only these cases (config:17,file:4), with what they print")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time; a core each")
    parser.add_argument("--seconds", type=float, default=20.0, help="the longest that a case may take")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="no case of a kind begins later; those until then count"
    )
    parser.add_argument("--keep", type=Path, default=Path("runs/fuzz"), help="where the folders of bugs are kept")
    parser.add_argument("--place", type=Path, help="where cases are made; a folder in /tmp if not given")
    parser.add_argument("--json", type=Path, help="file of figures, to which these are added")
    given = parser.parse_args()

    import tempfile

    only = [name for name in given.only.split(",") if name]
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=given.place) as made:
        place = Path(made)
        from fullrank.kernels.native.build import library

        library()  # compiled once, here, and not under the limits of a case
        os.environ |= {
            "HOME": str(place), "TMPDIR": str(place), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
        }  # fmt: skip
        import fullrank
        import fuzz_configs
        import fuzz_files
        from fullrank.experiments.run import environment
        from fullrank.training.device import choose_device

        preload(fullrank.__path__)
        print(f"seed {given.seed}: {given.configs} configurations, {given.files} mutated files", flush=True)
        kinds: dict[str, tuple[str, int, Callable[[Path], Callable[[int, int], Case]]]] = {
            "configurations": ("config", given.configs, fuzz_configs.cases),
            "mutated files": ("file", given.files, fuzz_files.cases),
        }
        tallies: list[Tally] = []
        for kind, (short, count, prepare) in kinds.items():
            chosen = list(numbers(short, given.first, count, only))
            if not chosen:
                continue
            (place / short).mkdir()
            make: Any = prepare(place / short)
            tallies.append(
                campaign(
                    kind, (make(given.seed, number) for number in chosen), given.keep, seed=given.seed, jobs=given.jobs,
                    seconds=given.seconds, show=bool(only), minutes=given.minutes,
                )
            )  # fmt: skip
            print(f"seed {given.seed}: {tallies[-1].words()}", flush=True)
        if given.json:
            others = json.loads(given.json.read_text(encoding="utf-8"))["campaigns"] if given.json.exists() else []
            campaigned = {
                "seed": given.seed,
                **environment(choose_device("cpu"), "fp32"),
                "kinds": [
                    {"seed": given.seed, "kind": one.kind, "first": given.first, "cases": one.endings.total(),
                     **{name: one.endings[name] for name in ENDINGS}, "seconds": round(one.seconds)}
                    for one in tallies
                ],
                "bugs": [bug for one in tallies for bug in one.bugs],
            }  # fmt: skip
            content = {"campaigns": [*others, campaigned], "protocol": " ".join(PROTOCOL.split())}
            given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()
    os._exit(any(one.bugs for one in tallies))  # Triton would report leaks of its own


if __name__ == "__main__":
    main()
