"""Is hostile input met with a clear message? Random configurations and damaged files, each in a process of its own.

    make fuzz                                            # 2,000 configurations, 10,000 files
    make fuzz ARGS="--configs 300 --files 0 --seed 7"
    make fuzz ARGS="--seed 1 --only config:17,file:4"    # these cases once more, with what they print

Every case is a function of the seed, its number and the schema. It runs a command of `fullrank` in a process forked from this
one, with limits of memory and time, and ends in one of these ways:

well     the command did its work; what it trained or measured is finite
stopped  it trained when its time was up, and SIGTERM ended it with everything saved
refused  exit status 2 or 1, and a message that names what is wrong
memory   it met its limit of memory, and said so
bug      a traceback, an error without a message of its own, a hang, a crash, a number that is not finite, a flood of warnings,
         or damaged weights or text whose figures were given without a word

The folders of bugs are kept; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fullrank.config.load import build_any
from fullrank.config.schema import finetune_schema, json_schema
from fullrank.core.errors import FullRankError
from research import RESEARCH
from research.small_runs import KINDS, Kind, Settings, fork, preload, write_campaign

PROTOCOL = """
    each case is a command in a process forked from one that has imported torch, with limits of address space and time: a random
    configuration is trained for a few steps, or one file of a finished run or of its data is damaged and read
"""
MEMORY = 3 << 30  # bytes of address space that a case may take, torch itself included
ENDINGS = ("well", "stopped", "refused", "memory", "bug")
LONGEST = 200  # lines that a refusal may have: one for each fault
OUT_OF_MEMORY = ("out of memory", "Thread creation failed")  # the latter is said by OpenMP
ALONE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
ALONE |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
Maker = Callable[[int, int], "Case"]  # from the seed and the number of a case


# -- a case and its ending --------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A command in a folder of its own. expected: what it prints of the untouched run, unless it says more."""

    name: str
    folder: Path
    words: list[str]
    about: str = ""
    expected: tuple[str, str] | None = None

    def file(self, stream: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{stream}")

    def read(self, stream: str) -> str:
        return self.file(stream).read_text(encoding="utf-8", errors="replace") if self.file(stream).exists() else ""


def start(case: Case) -> int:
    """Start the command of a case, with limits of memory. Returns its process."""

    def limit() -> None:
        os.chdir(case.folder)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))

    return fork(case.words, case.file("out"), case.file("err"), limit)


def run_case(case: Case, seconds: float, trains: bool) -> tuple[str, str]:
    """Run a case, with SIGTERM after so many seconds, and SIGKILL later. Returns its ending, and why."""
    pid, started, signals = start(case), time.monotonic(), [signal.SIGKILL, signal.SIGTERM]
    ended, status = 0, 0
    while not ended:
        time.sleep(0.005)
        ended, status = os.waitpid(pid, os.WNOHANG)
        is_late = time.monotonic() - started > seconds * (1 if len(signals) == 2 else 4)
        if not ended and signals and is_late:
            os.killpg(pid, signals.pop())
    return judge(case, os.waitstatus_to_exitcode(status), was_stopped=len(signals) < 2, trains=trains)


def find_not_finite(folder: Path) -> str:
    """The first figure of a run, or tensor of its model, that is not finite; empty if there is none."""
    import torch
    from safetensors.torch import load_file

    for file in [*folder.rglob("metrics.jsonl"), *folder.rglob("result.json")]:
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.name == "result.json":
            text = json.dumps({key: value for key, value in json.loads(text).items() if key in ("final", "last")})
        if found := re.search(r'"\w+": *(null|NaN|-?Infinity)', text):
            return f"{file.name} has {found[0]}"
    for file in folder.rglob("model.safetensors"):
        for name, tensor in load_file(file).items():
            if not torch.isfinite(tensor).all():
                return f"{file.parent.name}/{file.name}: {name} is not finite"
    return ""


def judge(case: Case, code: int, *, was_stopped: bool, trains: bool) -> tuple[str, str]:
    """How a case ended, and why it is a bug if it is one."""
    out, err = case.read("out"), case.read("err")
    lines = [line for line in err.splitlines() if line.strip()]
    if "Traceback (most recent call last)" in err:
        return "bug", "a traceback"
    if code < 0:
        name = signal.Signals(-code).name
        return "bug", f"a hang, ended by {name}" if was_stopped else f"a crash: {name}"
    if "(--debug shows where)" in err:
        return "bug", "an error without a message of its own"
    if sum("Warning" in line for line in lines) > 3 or len(lines) > LONGEST or len(err) > 20_000:
        return "bug", f"a flood of {len(lines)} lines"
    if was_stopped and "stopped by SIGTERM" in err:
        return "stopped", ""
    if code == 0:
        wrong = find_not_finite(case.folder) if trains else ""
        if case.expected is not None and out != case.expected[0] and err == case.expected[1]:
            wrong = "other figures than those of the untouched run, without a word"
        return ("bug", wrong) if wrong else ("well", "")
    if any(words in err for words in OUT_OF_MEMORY):
        return "memory", ""
    is_told = any(line.startswith("fullrank") for line in lines) or out.startswith('{\n  "valid": false')
    return ("refused", "") if code in (1, 2) and is_told else ("bug", f"exit status {code} without a message")


# -- random configurations, drawn from the JSON schema of all four tasks ----------------------------------------------

# values that no key, or hardly any, is made for
HOSTILE: list[Any] = [
    *(None, True, 0, -1, 2**31, 2**63, -(10**19), 0.0, -0.5, 1e-300, float("nan"), float("inf")),
    *("", " ", "nan", "1e400", "../../../..", "/dev/zero", "/proc/self/mem", "none", "\u202e\u0007", "\ud7ff"),
    *([], [[]], [-1, 2], ["a", None], {}, {"name": "none"}, {"kind": "x"}, {"": 1}, {"a": {"b": {"c": []}}}, {1: 2}),
    *("9" * 5000, "a" * 300, [1] * 1000),
]
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31]
LARGE = [64, 1000, 65_536, 10**6, 2**30, 2**31 - 1]
NUMBERS = [1e-300, 1e-8, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.9, 0.999999, 1.0, 1.5, 2.0, 10.0, 1e4, 1e30, 1e300]
WORDS = ["cpu", "cuda:7", "de", "train.txt", "train", "en.codes", ".", "none", "linear", "listed", "random", "cola"]
CORPORA = ["text", "parallel", "builtin", "synthetic-translation", "ptb", "enwik8", "glue/cola", "squad"]
TASKS = {"plain": json_schema, "masked": json_schema, "translation": json_schema, "fine-tuning": finetune_schema}
ALIASES = "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{p}, *{p}, *{p}]\n" for p, c in pairwise("abcdefghijklmnopq"))
BOMBS = [
    "[" * 100_000,
    "{a: " * 5000 + "1" + "}" * 5000,
    ALIASES,
    "model: &m {attention: *m}\n",
    "model: {hidden_size: " + "9" * 10**6 + "}\n",
    "model: !!python/object/apply:os.system ['true']\n",
    "data: {name: 2024-02-30}\ntrain: {steps: 2024-01-01}\n",
    "\ufeffmodel: {hidden_size: 8}\n---\nmodel: {}\n",
    "model:\n\thidden_size: 8\n",
    "<<: [{model: {hidden_size: 8}}, 3]\n",
]


def resolve(schema: Settings, whole: Settings) -> Settings:
    """The definition that a part of a schema refers to, or the part itself."""
    reference = str(schema.get("$ref", "")).rpartition("/")[2]
    return whole["$defs"][reference] if reference else schema


def draw_value(draw: random.Random, schema: Settings, whole: Settings) -> Any:
    """A value of about the type of a key, mostly one that is allowed."""
    schema = resolve(schema, whole)
    if "anyOf" in schema:
        return draw_value(draw, draw.choice(schema["anyOf"]), whole)
    if "enum" in schema:
        return draw.choice(schema["enum"])
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            names = [name for name in properties if draw.random() < 0.2] or [draw.choice(WORDS)]
            return {name: draw_value(draw, properties.get(name, {}), whole) for name in names}
        case "array":
            return [draw_value(draw, schema.get("items", {}), whole) for _ in range(draw.choice([0, 1, 2, 2, 3, 5]))]
        case "boolean":
            is_slow = schema.get("title") in ("Compile", "Cuda Graphs")  # minutes each, or never on a CPU
            return draw.random() < (0.03 if is_slow else 0.5)
        case "integer":
            return draw.choice(LARGE if draw.random() < 0.1 else SIZES)
        case "number":
            return draw.choice(NUMBERS)
        case "null":
            return None
    return draw.choice(CORPORA if schema.get("title") == "Name" else WORDS)


Key = tuple[str, ...]


def list_keys(schema: Settings, whole: Settings, before: Key = ()) -> list[tuple[Key, Settings]]:
    """Every key of a configuration with its schema, leaves and sections."""
    keys: list[tuple[Key, Settings]] = []
    for name, inner in resolve(schema, whole).get("properties", {}).items():
        keys += [((*before, name), inner), *list_keys(inner, whole, (*before, name))]
    return keys


def set_key(settings: Settings, path: tuple[str, ...], value: Any) -> Settings:
    """A copy of the settings with a key set, all the way down."""
    settings = copy.deepcopy(settings)
    section = settings
    for name in path[:-1]:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[path[-1]] = value
    return settings


def is_refused(settings: Settings) -> bool:
    """A check that fails in another way than by a refusal is a bug, which training is to show."""
    try:
        build_any(settings)
    except Exception as error:
        return isinstance(error, FullRankError)
    return False


def make_configurations(place: Path) -> Maker:
    """Write the data of every task. Returns the maker of a case."""
    bases: dict[str, Settings] = {}
    for task in TASKS:
        base = yaml.safe_load(KINDS[task].write(place / "data" / task).read_text(encoding="utf-8"))
        base["train"] |= {"steps": 1 if task == "fine-tuning" else 2, "save_every_steps": 1, "log_every_steps": 1}
        base["eval"] |= {"every_steps": 2}
        bases[task] = base
    schemas = {task: make() for task, make in TASKS.items()}
    keys = {task: list_keys(schema, schema) for task, schema in schemas.items()}

    def make(seed: int, number: int) -> Case:
        draw = random.Random(f"{seed} config {number}")
        task = draw.choices(list(TASKS), [6, 3, 3, 2])[0]
        settings, changed = bases[task], []
        for _ in range(draw.choice([1, 2, 4, 8, 16, 32])):
            path, schema = draw.choice(keys[task])
            candidate = set_key(settings, path, draw_value(draw, schema, schemas[task]))
            if draw.random() < 0.02 or not is_refused(candidate):
                settings = candidate
                changed.append(".".join(path))
        if draw.random() < 0.3:
            path = draw.choice(keys[task])[0]
            settings = set_key(settings, path, draw.choice(HOSTILE))
            changed.append(f"{'.'.join(path)}!")
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        if draw.random() < 0.04:
            text = draw.choice([text, ""]) + draw.choice(BOMBS)
        folder = place / str(number)
        folder.mkdir()
        (folder / "config.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        words = ["train", "config.yaml", "--out", "run", "--quiet"]
        return Case(f"config:{number}", folder, words, f"{task}: {', '.join(changed)}")

    return make


# -- damaged files ----------------------------------------------------------------------------------------------------

# weight, pattern of the files that are damaged, command
READ = r"""
4  run/.*|config.yaml   eval run --split test --json
4  run/.*|config.yaml   train run --quiet
3  run/.*|config.yaml   report run
2  run/.*               info run
2  run/.*               config show run
1  run/.*               average run
4  TEXTS|config.yaml|glue/.*|encoder/.*  train config.yaml --out new --quiet
4  TEXTS|glue/.*|encoder/.*  eval run --split test --json
4  config.yaml          config validate config.yaml
2  config.yaml          info config.yaml
2  recipe.yaml          recipes show recipe.yaml
2  recipe.yaml          reproduce recipe.yaml --scale tiny --list
"""
USED = r"""
3  run/.*               generate run --prompt aAb --max-new-tokens 5 --seed 1
1  run/.*               export run --to hf out
1  run/.*               analyze mixing run
1  run/.*               analyze heads run --texts 2
1  run/.*               check run
1  train.txt            init train.txt --minutes 0.01 --size tiny --force
3  TEXTS  data prepare text data.tokens=character --to cache data.train=train.txt data.valid=valid.txt data.test=test.txt
"""
TRANSLATED = r"""
2  run/.*               translate run --input test.de --beam 1
3  TEXTS                data prepare parallel data.train=train data.source=de data.target=en data.tokens=word --to cache
"""
TUNED = "2  glue/.*  data prepare glue/cola --from glue\n"
RECIPE = RESEARCH.parent / "src" / "fullrank" / "recipes" / "mos" / "table2.yaml"
TEXTS = r"(train|valid|test)\..*|cache/.*"
# what figures of a model depend on: if it is damaged, they are to be the same, or the command is to say why not
WEIGHED = r"run/(checkpoints|model)/.*|run/(vocabulary|tokenizer|codes|config|run\.json).*|test\..*|glue/.*|encoder/.*"
PRINTS_FIGURES = ("eval", "generate", "translate")


CHARACTERS = {"data.tokens": "character", "train.keep_checkpoints": 2}
SUBWORDS = {"data.tokens": "bpe", "data.max_vocabulary": 270}
SCENES = {  # the run that is trained, the commands that read it, the weight of their cases
    "characters": (Kind(KINDS["memory, Skip-Retain, cross-head"].task, CHARACTERS), READ + USED, 4),
    "subwords": (Kind(KINDS["masked"].task, SUBWORDS), READ + USED, 2),
    "pairs": (KINDS["translation"], READ + TRANSLATED, 2),
    "labels": (KINDS["fine-tuning"], READ + TUNED, 1),
}


def build_scene(name: str, kind: Kind, place: Path) -> Path:
    """The untouched folder of a scene, with paths that hold in every copy of it."""
    folder, here = place / f"untouched-{name}", Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        kind.write(Path("."))
    finally:
        os.chdir(here)
    settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    for phase in settings["train"].get("phases") or [settings["train"]]:
        phase["steps"] = 4
    settings["train"]["save_every_steps"], settings["eval"]["every_steps"] = 2, 4
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    shutil.copy(RECIPE, folder / "recipe.yaml")
    if run(folder, ["train", "config.yaml", "--out", "run", "--quiet"]) is None:
        raise SystemExit(f"{name}: the run of this scene does not train")
    return folder


def run(folder: Path, words: list[str]) -> tuple[str, str] | None:
    """Output of a command in an untouched folder, stdout and stderr; None if it fails."""
    case = Case("untouched", folder, words)
    _, status = os.waitpid(start(case), 0)
    printed = case.read("out"), case.read("err")
    for stream in ("out", "err"):
        case.file(stream).unlink()
    return None if status else printed


def damage_value(draw: random.Random, content: bytes) -> bytes:
    """Replace a value of a JSON or YAML file by a hostile one."""
    text = content.decode("utf-8", errors="surrogateescape")
    values = list(re.finditer(r'(?<=[:\[,-] )("[^"]*"|[^\s,\]}{"]+)', text)) or list(re.finditer("$", text))
    value = draw.choice(values)
    text = text[: value.start()] + json.dumps(draw.choice(HOSTILE)) + text[value.end() :]
    return text.encode("utf-8", errors="surrogateescape")


def damage_file(draw: random.Random, path: Path, others: list[Path]) -> str:
    """Damage a file in place; in which way."""
    content = path.read_bytes()
    first = draw.randrange(len(content) + 1)
    last = min(len(content), first + draw.choice([1, 8, 100, 10**9]))
    before, middle, after = content[:first], content[first:last], content[last:]
    ways = {
        "bit": before + bytes(byte ^ 1 << draw.randrange(8) for byte in middle[:1]) + middle[1:] + after,
        "noise": before + draw.randbytes(len(middle)) + after,
        "truncated": before,
        "removed": before + after,
        "not UTF-8": before + b"\xff\xfe" + middle + after,
        "another file": draw.choice(others).read_bytes(),
        "long line": before + b"x" * 200_000 + middle + after,
    }
    way = draw.choice([*ways, "gone", "folder", "pipe", "endless"])
    if path.suffix in (".json", ".jsonl", ".yaml") and draw.random() < 0.7:
        path.write_bytes(damage_value(draw, content) if draw.random() < 0.95 else draw.choice(BOMBS).encode())
        return "value"
    if way in ways:
        path.write_bytes(ways[way])
        return way
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "pipe":
        os.mkfifo(path)
    elif way == "endless":
        path.symlink_to("/dev/zero")
    return way


def make_files(place: Path) -> Maker:
    """Train the runs of every scene. Returns the maker of a case."""
    untouched = {name: build_scene(name, kind, place) for name, (kind, _, _) in SCENES.items()}
    printed: dict[tuple[str, ...], tuple[str, str] | None] = {}

    def print_untouched(name: str, words: list[str]) -> tuple[str, str] | None:
        """Output of a command on the untouched run; None if it prints no figures."""
        key = (name, *words)
        if key not in printed and words[0] in PRINTS_FIGURES:
            reference = shutil.copytree(untouched[name], place / "reference", symlinks=True)
            printed[key] = run(reference, words)
            shutil.rmtree(reference)
        return printed.get(key)

    def make(seed: int, number: int) -> Case:
        draw = random.Random(f"{seed} file {number}")
        name = draw.choices(list(SCENES), [weight for _, _, weight in SCENES.values()])[0]
        commands = [line.replace("TEXTS", TEXTS).split() for line in SCENES[name][1].splitlines() if line]
        _, pattern, *words = draw.choices(commands, [int(weight) for weight, *_ in commands])[0]
        paths = sorted(path for path in untouched[name].rglob("*") if path.is_file() and not path.is_symlink())
        names = [str(path.relative_to(untouched[name])) for path in paths]
        file = draw.choice([name for name in names if re.fullmatch(pattern, name)])
        expected = print_untouched(name, words) if re.fullmatch(WEIGHED, file) and file not in words else None
        folder = shutil.copytree(untouched[name], place / str(number), symlinks=True)
        if words[:2] == ["train", "run"] and draw.random() < 0.7 and file != "run/result.json":
            (folder / "run" / "result.json").unlink(missing_ok=True)  # a run that has not ended
        others = [folder / name for name in names if (folder / name).is_file()]
        way = damage_file(draw, folder / file, others)
        return Case(f"file:{number}", folder, words, f"{name}: {file}: {way}", expected)

    return make


# -- the command ------------------------------------------------------------------------------------------------------

KINDS_OF_CASES = {"config": ("configurations", make_configurations), "file": ("mutated files", make_files)}


def run_cases(kind: str, numbers: Sequence[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the cases of a kind, so many at a time, in processes that this one forks. Returns how each ended."""
    place = (options.keep / kind).resolve()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    make = KINDS_OF_CASES[kind][1](place)

    def run_number(number: int) -> dict[str, Any]:
        case = make(options.seed, number)
        ending, why = run_case(case, options.seconds, trains=kind == "config")
        if ending == "bug" or options.only:
            words = f"{case.name}: {ending}: {why}: fullrank {' '.join(case.words)}: {case.about}"
            print(words, case.read("err")[-1000:], sep="\n", flush=True)
        if ending != "bug":
            shutil.rmtree(case.folder)
            case.file("out").unlink()
            case.file("err").unlink()
        return {"seed": options.seed, "case": case.name, "about": case.about, "ending": ending, "why": why}

    with ThreadPoolExecutor(options.jobs) as pool:  # the cases themselves are processes
        return list(pool.map(run_number, numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=2000, help="random configurations")
    parser.add_argument("--files", type=int, default=10_000, help="damaged files")
    parser.add_argument("--seed", type=int, default=1, help="seed of all of them")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each kind")
    parser.add_argument("--only", default="", help="only these cases, as in config:17,file:4")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time; a core each")
    parser.add_argument("--seconds", type=float, default=60.0, help="the longest that a case may take")
    parser.add_argument("--keep", type=Path, default=Path("runs/fuzz"), help="where the folders of bugs are kept")
    parser.add_argument("--json", type=Path, help="file of figures, to which these are added")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    os.environ |= dict.fromkeys(("HOME", "TMPDIR"), str(options.keep.resolve())) | ALONE
    preload()
    only = [words.partition(":") for words in options.only.split(",") if words]
    rows, bugs = [], []
    for kind, count in (("config", options.configs), ("file", options.files)):
        numbers = [int(number) for name, _, number in only if name == kind]
        if not only:
            numbers = list(range(options.first, options.first + count))
        begin = time.monotonic()
        cases = run_cases(kind, numbers, options) if numbers else []
        counts = Counter(case["ending"] for case in cases)
        row = {"seed": options.seed, "kind": KINDS_OF_CASES[kind][0], "first": options.first, "cases": len(cases)}
        row |= {ending: counts[ending] for ending in ENDINGS} | {"seconds": round(time.monotonic() - begin)}
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
        bugs += [case for case in cases if case["ending"] == "bug"]
    write_campaign(options.json, options.seed, {"kinds": rows, "bugs": bugs}, PROTOCOL)
    os._exit(bool(bugs))  # Triton would report leaks of its own


if __name__ == "__main__":
    main()
