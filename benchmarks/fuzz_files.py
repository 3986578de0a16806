"""Mutated files, for `fuzz.py`: one file of a run, of its data, or of a plan is damaged, and a command reads it."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fault_runs import KINDS, Kind
from fullrank.files import digest
from fuzz import ROOT, Case, said, start
from fuzz_configs import BOMBS, HOSTILE

TRAIN = ["train", "run", "--quiet"]
# what figures of a model depend on: if it is damaged, they are to be the same, or the command is to say why not
WEIGHED = re.compile(
    r"run/checkpoints/.*|run/(vocabulary|tokenizer|codes|config|run\.json).*|run/model/.*|test\.(txt|de|en)|glue/.*|encoder/.*"
)


TEXTS = r"(train|valid|test)\..*|cache/.*"
# weight, pattern of the files that are damaged, command
READ = r"""
4  run/.*|config.yaml   eval run --split test --json
4  run/.*|config.yaml   train run --quiet
3  run/.*|config.yaml   report run
2  run/.*               info run
1  run/.*               config show run
1  run/.*               config validate run
1  run/.*               average run
2  run/.*               ledger add run --ledger l.jsonl
4  TEXTS|config.yaml|glue/.*|encoder/.*  train config.yaml --out new --quiet
4  TEXTS|glue/.*|encoder/.*  eval run --split test --json
4  config.yaml          config validate config.yaml
2  config.yaml          info config.yaml
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
1  test.de              translate run --input test.de --beam 1
3  TEXTS                data prepare parallel data.train=train data.source=de data.target=en data.tokens=word --to cache
"""
TUNED = r"""
2  glue/.*              data prepare glue/cola --from glue
"""
PAPERS = r"""
6  results/.*           ledger pages results
6  results/.*           ledger pages results --check --json
6  results/(plan.yaml|ledger.jsonl)  queue results/plan.yaml --list
4  recipe.yaml          config validate recipe.yaml
4  recipe.yaml          recipes show recipe.yaml
3  recipe.yaml          info recipe.yaml --scale tiny
2  recipe.yaml          reproduce recipe.yaml --scale tiny --list
3  .*\.yaml             config validate words.yaml
3  words.yaml           config show words.yaml
"""


@dataclass(frozen=True)
class Scene:
    """A folder with everything, and its commands; kind: the run that is trained there."""

    commands: str
    kind: Kind | None = None
    weight: int = 1

    def parsed(self) -> list[tuple[int, str, list[str]]]:
        """The commands: weight, pattern and words."""
        lines = [line.replace("TEXTS", TEXTS).split() for line in self.commands.splitlines() if line]
        return [(int(weight), pattern, words) for weight, pattern, *words in lines]


STRANGE = [b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\0", b"\xe2\x80\xa8"]
CHARACTERS = {"data.tokens": "character", "train.keep_checkpoints": 2}
SCENES = {
    "characters": Scene(READ + USED, Kind(KINDS["memory, Skip-Retain, cross-head"].task, CHARACTERS), 4),
    "bpe": Scene(READ + USED, Kind(KINDS["masked"].task, {"data.tokens": "bpe", "data.max_vocabulary": 270}), 2),
    "pairs": Scene(READ + TRANSLATED, KINDS["translation"], 2),
    "labels": Scene(READ + TUNED, KINDS["fine-tuning"], 1),
    "papers": Scene(PAPERS, weight=3),
}


def build(name: str, scene: Scene, place: Path) -> Path:
    """The untouched folder of a scene, with paths that hold in every copy of it."""
    folder = place / f"untouched-{name}"
    folder.mkdir()
    if scene.kind is None:
        results = ROOT / "docs" / "results"
        (folder / "results").mkdir()
        (folder / "results" / "claims").mkdir()
        shutil.copy(results / "claims" / "mos.yaml", folder / "results" / "claims")
        about = yaml.safe_load((results / "benchmarks.yaml").read_text(encoding="utf-8"))
        kept = {name: about[name] for name in ("memory.json", "relative.json")}
        (folder / "results" / "benchmarks.yaml").write_text(yaml.safe_dump(kept), encoding="utf-8")
        for name in kept:
            shutil.copy(results / name, folder / "results")
        entry = {
            "table": "mos/table1-ptb",
            "rows": ["plain"],
            "seeds": [1, 2],
            "scale": "tiny",
            "set": {"train.steps": 3},
        }
        (folder / "results" / "plan.yaml").write_text(yaml.safe_dump({"trainings": [entry]}), encoding="utf-8")
        lines = (results / "ledger.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "results" / "ledger.jsonl").write_text(
            "".join(line for line in lines if '"mos/' in line), encoding="utf-8"
        )
        shutil.copy(ROOT / "src/fullrank/recipes/mos/table2.yaml", folder / "recipe.yaml")
        shutil.copy(ROOT / "examples" / "words.yaml", folder)
        return folder
    here = Path.cwd()
    os.chdir(folder)
    try:
        scene.kind.write(Path("."))
    finally:
        os.chdir(here)
    settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    for part in settings["train"].get("phases") or [settings["train"]]:
        part["steps"] = 4
    settings["train"]["save_every_steps"], settings["eval"]["every_steps"] = 2, 4
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    run(folder, ["train", "config.yaml", "--out", "run", "--quiet"])
    return folder


def run(folder: Path, words: list[str]) -> tuple[str, str]:
    """Output of a command in an untouched folder, stdout and stderr."""
    case = Case("untouched", folder, words)
    _, status = os.waitpid(start(case).pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{folder.name}: fullrank {' '.join(words)}: {said(case, 'err')[-2000:]}")
    return said(case, "out"), said(case, "err")


def hostile_leaf(draw: random.Random, content: Any) -> Any:
    """`content` with a leaf, a key or a whole part of it replaced, removed or repeated."""
    if isinstance(content, dict) and content and draw.random() < 0.9:
        key = draw.choice(list(content))
        way = draw.random()
        if way < 0.7:
            return content | {key: hostile_leaf(draw, content[key])}
        if way < 0.8:
            return {k: v for k, v in content.items() if k != key}
        if way < 0.9:
            return content | {key: content[draw.choice(list(content))]}
        return {(f"{k}x" if k == key else k): v for k, v in content.items()}
    if isinstance(content, list) and content and draw.random() < 0.9:
        place = draw.randrange(len(content))
        way = draw.random()
        if way < 0.8:
            return [*content[:place], hostile_leaf(draw, content[place]), *content[place + 1 :]]
        return content[:place] + (content[place + 1 :] if way < 0.9 else [content[place], *content[place:]])
    if isinstance(content, int | float) and not isinstance(content, bool) and draw.random() < 0.4:
        return draw.choice([content + 1, -content, content * 1000, content / 2, str(content)])
    return draw.choice(HOSTILE)


def structured(draw: random.Random, path: Path) -> bool:
    """Change a value of a JSON, JSON lines or YAML file; False if it is none."""
    text = path.read_text(encoding="utf-8", errors="strict")
    if path.suffix in (".yaml", ".yml"):
        content = yaml.safe_load(text)
        for _ in range(draw.choice([1, 1, 2, 4])):
            content = hostile_leaf(draw, content)
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        path.write_text(draw.choice(BOMBS)(draw) if draw.random() < 0.1 else text, encoding="utf-8")
        return True
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        place = draw.randrange(len(lines)) if lines else 0
        lines[place : place + 1] = [json.dumps(hostile_leaf(draw, json.loads(lines[place])))] if lines else ["[]"]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return True
    try:
        content = json.loads(text)
    except ValueError:
        return False
    for _ in range(draw.choice([1, 1, 2, 4])):
        content = hostile_leaf(draw, content)
    path.write_text("[" * 100_000 if draw.random() < 0.05 else json.dumps(content), encoding="utf-8")
    return True


def sealed_again(draw: random.Random, path: Path) -> bool:
    """Change the content of a record that has a checksum and compute that anew, as a stranger would; False if it has none."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    place = draw.randrange(len(lines)) if lines else 0
    record = json.loads(lines[place]) if lines else None
    if not isinstance(record, dict) or not record.keys() & {"sha256", "id"}:
        return False
    if "content" in record:  # checkpoint.json
        content = hostile_leaf(draw, record["content"])
        lines[place] = json.dumps({"sha256": digest(content), "content": content})
    else:  # a line of a ledger; a vocabulary or a prepared text
        content = hostile_leaf(draw, {key: value for key, value in record.items() if key not in ("sha256", "id")})
        seal = {"id": digest(content)[:16]} if "id" in record else {"sha256": digest(content)}
        lines[place] = json.dumps({**seal, **content} if isinstance(content, dict) else content)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return True


def bytes_of(draw: random.Random, content: bytes, other: bytes) -> tuple[str, bytes]:
    """Bytes changed in one of many ways, and which."""
    a, b = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    b = min(b, a + draw.choice([1, 8, 100, 10**9]))
    at = draw.choice([a, min(a, 8), min(a, 200)])  # headers are at the beginning
    ways: dict[str, Callable[[], bytes]] = {
        "bit": lambda: content[:at] + bytes(byte ^ 1 << draw.randrange(8) for byte in content[at : at + 1]) + content[at + 1 :],
        "noise": lambda: content[:at] + draw.randbytes(b - a) + content[at + b - a :],
        "truncated": lambda: content[:at],
        "empty": lambda: b"",
        "removed": lambda: content[:a] + content[b:],
        "repeated": lambda: content[:b] + content[a:],
        "swapped": lambda: content[b:] + content[a:b] + content[:a],
        "twice": lambda: content + content,
        "zeros": lambda: content[:a] + bytes(b - a) + content[b:],
        "not UTF-8": lambda: content[:a] + draw.choice(STRANGE) + content[a:],
        "another file": lambda: other,
        "long line": lambda: content[:a] + b"x" * 200_000 + content[a:],
    }  # fmt: skip
    way = draw.choice(list(ways))
    return way, ways[way]()


def mutate(draw: random.Random, path: Path, others: list[Path], *, pipe: bool) -> str:
    """Damage a file in place; in which way. pipe: a command that waits for a pipe in its place would be wrong."""
    content = path.read_bytes()
    if draw.random() < 0.12:
        path.unlink()
        ways = ["gone", "folder", "dangling link", "link to itself", "endless", "pipe", "link to another", "huge"]
        way = draw.choices(ways, [6, 6, 6, 6, 6, 6 * pipe, 6, 1])[0]
        if way == "folder":
            path.mkdir()
        elif way == "pipe":
            os.mkfifo(path)
        elif way == "huge":
            with path.open("wb") as file:
                file.truncate(1 << 29)
        elif way != "gone":
            targets = {"dangling link": "nowhere", "link to itself": path.name, "endless": "/dev/zero"}
            path.symlink_to(targets.get(way) or draw.choice(others).resolve())
        return way
    if path.suffix in (".json", ".jsonl") and draw.random() < 0.3 and sealed_again(draw, path):
        return "sealed again"
    if path.suffix in (".json", ".jsonl", ".yaml") and draw.random() < 0.7 and structured(draw, path):
        return "value"
    way, changed = bytes_of(draw, content, draw.choice(others).read_bytes())
    path.write_bytes(changed)
    return way


def cases(place: Path) -> Callable[[int, int], Case]:
    """Train the runs of every scene in `place`; the maker of a case from the seed and its number."""
    untouched = {name: build(name, scene, place) for name, scene in SCENES.items()}
    files = {
        name: sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        for name, folder in untouched.items()
    }
    printed: dict[tuple[str, str], tuple[str, str] | None] = {}

    def expected(name: str, words: list[str]) -> tuple[str, str] | None:
        """Output in the untouched folder of a command that reads weights and writes none."""
        if words[0] not in ("eval", "generate", "translate") and words[:2] != ["analyze", "heads"]:
            return None
        if (key := (name, " ".join(words))) not in printed:
            copy = place / "reference"
            shutil.copytree(untouched[name], copy, symlinks=True)
            try:
                printed[key] = run(copy, words)
            except SystemExit:  # a masked model does not generate
                printed[key] = None
            shutil.rmtree(copy)
        return printed[key]

    @functools.cache
    def weights(name: str) -> dict[str, bytes]:
        """The last weights of the untouched run."""
        files = [f"run/{part}/model.safetensors" for part in ("checkpoints/last", "model")]
        return {file: (untouched[name] / file).read_bytes() for file in files if (untouched[name] / file).exists()}

    def make(seed: int, number: int) -> Case:
        draw = random.Random(f"{seed} file {number}")
        name = draw.choices(list(SCENES), [scene.weight for scene in SCENES.values()])[0]
        commands = SCENES[name].parsed()
        _, pattern, words = draw.choices(commands, [weight for weight, _, _ in commands])[0]
        file = draw.choice([path for path in files[name] if re.fullmatch(pattern, str(path))])
        weighed = WEIGHED.fullmatch(str(file)) is not None
        lines = (
            words[0] == "translate" and file.name in words
        )  # other lines are other translations, and a pipe brings some
        before = expected(name, words) if weighed and not lines else None
        folder = place / str(number)
        shutil.copytree(untouched[name], folder, symlinks=True)
        cut = words == TRAIN and draw.random() < 0.7 and file.name != "result.json"
        if cut:
            (folder / "run" / "result.json").unlink(missing_ok=True)
        others = [folder / path for path in files[name] if (folder / path).is_file()]
        way = mutate(draw, folder / file, others, pipe=not lines)
        about = f"{name}{' (unfinished)' if cut else ''}: {file}: {way}"
        return Case(f"file:{number}", folder, words, about, before, weights(name) if cut and weighed else {})

    return make
