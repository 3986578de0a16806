"""Run folders, whose faults become sentences in `problems`, and the measures in which runs are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from fullrank.config.load import flatten, is_of_task, read_yaml
from fullrank.config.run import has_pairs
from fullrank.core.errors import InputError
from fullrank.files import parse_mapping, read_json, sha256_of
from fullrank.records import Record, declaration_from_dict
from fullrank.render.blocks import format_value
from fullrank.seal import check_run, is_run

SPLITS = ("valid", "test")
TRANSLATIONS = "translations"  # the folder with <split>.txt and <split>.reference.txt
PRETRAINED = "pretrained"  # tokens: those of a pretrained model
TRANSLATION = "translation"
LANGUAGE_MODELING = "language_modeling"
MASKED_MODELING = "masked_modeling"


def mapping(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> float | None:
    """Return `value` as a finite float, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def integer(value: Any) -> int | None:
    """Return `value` as an int if it is a whole number, else None."""
    finite = number(value)
    if finite is not None and finite.is_integer():
        return int(value)
    return None


@dataclass(frozen=True)
class Run:
    """One run folder. `result` is None until the run has finished; `problems` says what is missing or damaged.

    identity: run.json, which is written when a run begins. metrics, timing: the readable lines of the two files.
    """

    folder: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    timing: Sequence[Mapping[str, Any]] = ()
    result: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def settings(self) -> dict[str, Any]:
        return flatten(self.config)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return {**self.identity, **(self.result or {})}

    def get(self, key: str) -> Any:
        """Return a value of the result, else of run.json, by its dotted key; None where it is missing."""
        value: Any = self._facts
        for name in key.split("."):
            value = mapping(value).get(name)
        return value

    def get_mapping(self, key: str) -> Mapping[str, Any]:
        """Return a mapping of the result by its dotted key; empty where it is missing."""
        return mapping(self.get(key))

    def final(self, split: str, key: str, checkpoint: str = "final") -> float | None:
        """Return a figure of a split, else None.

        Args:
            split: `valid` or `test`; of fine-tuning such as `dev`.
            key: its dotted key.
            checkpoint: `final` for the best one, `last` for that of the last step, `before` for the model before
                training.
        """
        return number(self.get(f"{checkpoint}.{split}.{key}"))

    @property
    def label(self) -> str:
        """Label of the text, which says so if it is a slice; empty if not recorded."""
        return self.get("corpus.label") or self.get("corpus.name") or ""

    @property
    def is_slice(self) -> bool:
        """True if its text, or its examples of a split, are a part of the published ones."""
        return self.get("corpus.is_slice") or any(self.get_mapping("slice").values())

    @property
    def finetunes(self) -> bool:
        """True if it is fine-tuned on a task: its figures are scores of the task, not of a text."""
        return is_of_task(self.config)

    @property
    def task(self) -> str:
        """`translation`, `masked_modeling` or `language_modeling`; of fine-tuning `glue/cola`, `squad` and so on."""
        data = str(self.settings.get("data.name"))
        if self.finetunes:
            return self.get("task") or data  # which says if its examples were invented
        if has_pairs(data):
            return TRANSLATION
        return MASKED_MODELING if self.settings.get("train.objective") == "masked" else LANGUAGE_MODELING

    @property
    def seed(self) -> int | None:
        return integer(self.settings.get("train.seed"))

    @property
    def kind(self) -> str:
        return "fine-tuning" if self.finetunes else self.task

    @property
    def tokens(self) -> str:
        """`word`, `byte`, `character`, `bpe` or `pretrained`; empty if not recorded."""
        return self.get("corpus.details.settings.kind") or self.settings.get("data.tokens") or ""

    @property
    def next_token(self) -> bool:
        """True if final figures are of next tokens."""
        protocols = self.get_mapping("protocols").values()
        return all(mapping(protocol.get("settings")).get("next_token", True) for protocol in protocols)

    @property
    def ms_per_step(self) -> dict[str, float]:
        milliseconds = {phase: number(value) for phase, value in self.get_mapping("ms_per_step").items()}
        return {phase: value for phase, value in milliseconds.items() if value is not None}

    def read_curve(self, split: str, key: str) -> dict[float, float]:
        """Read the values of the lines of a split by their steps; the last one where a step has several."""
        values = {}
        for line in (*self.timing, *self.metrics):
            step = number(line.get("step"))
            value = number(line.get(key))
            if step is not None and value is not None and line.get("split", "train") == split:
                values[step] = value
        return values

    @property
    def metric_names(self) -> list[str]:
        """Names of the scores of fine-tuning, the headline first."""
        return self.get("metrics") or []

    @property
    def has_figures(self) -> bool:
        """True if the result has any final figure."""
        names = self.metric_names if self.finetunes else ["perplexity", "bleu"]
        values = [self.final(split, name) for split in self.get_mapping("final") for name in names]
        return any(value is not None and (value > 0 or self.finetunes) for value in values)

    @property
    def bleu_signature(self) -> str | None:
        signatures = [self.get(f"final.{split}.bleu_signature") for split in SPLITS]
        return next((signature for signature in signatures if signature), None)

    @cached_property
    def references(self) -> Mapping[str, str]:
        paths = sorted((self.folder / TRANSLATIONS).glob("*.reference.txt"))
        return {path.name.removesuffix(".reference.txt"): sha256_of(path) for path in paths}

    @cached_property
    def analyses(self) -> Sequence[dict[str, Any]]:
        """Measurements that `fullrank analyze` kept in the folder: records with their tables and plots."""
        analyses = []
        for path in sorted((self.folder / "analysis").glob("*.json")):
            with contextlib.suppress(InputError, KeyError, TypeError):  # of another version
                content = read_json(path)
                content["records"] = [Record(**record) for record in content["records"]]
                for kind in ("tables", "plots"):
                    content[kind] = [declaration_from_dict(declared) for declared in content[kind]]
                analyses.append(content)
        return analyses


def find_runs(folder: Path) -> list[Path]:
    """Find the runs in a folder: itself if it is one, else those in its sub-folders (two levels down), sorted by path."""
    if is_run(folder):
        return [folder]
    below = [*folder.glob("*/"), *folder.glob("*/*/")] if folder.is_dir() else []
    return sorted({path for path in below if is_run(path)})


def read_run(folder: Path) -> Run:
    """Read a run folder; InputError if the folder is not a run at all."""
    if not is_run(folder):
        inside = ", ".join(str(path) for path in find_runs(folder)[:4])
        raise InputError(f"{folder}: not a run folder" + (f"; it holds runs: {inside}" if inside else ""))
    problems: list[str] = []
    config = _read(folder / "config.yaml", read_yaml, problems)
    metrics = _read(folder / "metrics.jsonl", partial(_read_lines, problems), problems)
    timing = _read(folder / "timing.jsonl", partial(_read_lines, problems), problems)
    result = _read(folder / "result.json", read_json, problems)
    identity = _read(folder / "run.json", read_json, [])
    try:
        check_run(folder)
    except InputError as error:
        problems.append(str(error))
    name = str({**identity, **result}.get("name") or folder.resolve().name)
    run = Run(
        folder,
        name,
        config,
        metrics or (),
        timing or (),
        result or None,
        tuple(problems),
        identity,
    )
    if result and not run.has_figures:
        problem = "result.json holds no finite figure under `final`: the run diverged or the file is damaged"
        return dataclasses.replace(run, result=None, problems=(*problems, problem))
    return run


def _read(path: Path, parse: Callable[[Path], Any], problems: list[str]) -> Any:
    """Read a file; an empty mapping, with a sentence in `problems`, if it is missing or damaged."""
    try:
        return parse(path)
    except (InputError, OSError) as error:
        ending = ": the run has not finished" if path.name == "result.json" else ""
        missing = f"{path.name} is missing{ending}"
        problems.append(str(error).replace(str(path), path.name) if path.exists() else missing)
    return {}


def _read_lines(problems: list[str], path: Path) -> list[Mapping[str, Any]]:
    lines: list[Mapping[str, Any]] = []
    damaged = 0
    for line in path.read_bytes().split(b"\n"):
        try:
            if line.strip():
                lines.append(parse_mapping(line, path))
        except InputError:
            damaged += 1
    if damaged:
        problems.append(f"{path.name}: {damaged} unreadable lines were left out")
    return lines


# -- measures ----------------------------------------------------------------------------------------------------------

# metrics of the GLUE server's table where they are not accuracy
_SERVER_METRICS = {"glue/cola": "matthews_correlation", "glue/mrpc": "f1", "glue/qqp": "f1", "glue/stsb": "spearman"}
_METRIC_WORDS = {"f1": "F1", "matthews_correlation": "Matthews correlation"}


@dataclass(frozen=True)
class Measure:
    """A figure of a run.

    key: its name in `final.<split>` of a result and in records; words, short: names for readers.
    kind: of a `score` higher is better, else lower.
    paper: endings of the keys, after the split, under which a recipe states a paper's figure; the first that exists counts.
    scale: figures are this many times those of the result.
    """

    key: str
    words: str
    short: str
    kind: Literal["perplexity", "bits", "score", "other"] = "perplexity"
    paper: tuple[str, ...] = ()
    scale: float = 1.0

    @property
    def higher(self) -> bool:
        return self.kind == "score"

    @property
    def extreme(self) -> Literal["lowest", "highest"]:
        return "highest" if self.higher else "lowest"

    @property
    def format(self) -> str:
        return ",.3f" if self.kind == "bits" else ",.2f"

    @property
    def difference_format(self) -> str:
        """Points of scores, else shares in percent."""
        return "+.2f" if self.higher else "+.2%"

    @property
    def unit(self) -> str | None:
        """The unit of records."""
        if self.scale != 1:
            return "x 100"
        return self.words if self.kind == "bits" else None

    def value(self, run: Run, split: str, checkpoint: str = "final") -> float | None:
        """Return the figure of a finished run.

        Args:
            run: a run, finished or not.
            split: `valid` or `test`; of fine-tuning such as `dev`.
            checkpoint: as in `Run.final`.

        Returns:
            The figure; None where the run has none, and for a perplexity or bits of 0 or less.
        """
        value = run.final(split, self.key, checkpoint)
        if value is None or (value <= 0 and self.kind in ("perplexity", "bits")):
            return None
        return self.scale * value

    def compare(self, value: float, base: float) -> float:
        """Compare a figure with a base above zero: points more for scores, else the share more."""
        return value - base if self.higher else value / base - 1

    def find_paper(self, run: Run, split: str) -> tuple[float, float | None, str] | None:
        """Find the paper's figure as the recipe states it: mean, deviation, and its source where that is the test server.

        In fine-tuning `{matthews_correlation: 59.8}` is of the development split. `[59.8, 1.2]` has a deviation, too.
        `test` and `test_mismatched` are scores of the GLUE server, which stand beside ours of `dev` and `dev_mismatched`.
        """
        paper = run.get_mapping("paper")
        source = ""
        if self.scale == 1:
            keys = [split + ending for ending in self.paper]
            published = next((paper[key] for key in keys if key in paper), None)
        else:
            figures = paper if split == "dev" else mapping(paper.get(split))
            published = figures.get(self.key)
            if published is None and self.key == _SERVER_METRICS.get(run.task, "accuracy"):
                published = paper.get(split.replace("dev", "test", 1))
                source = "test server"
        if not isinstance(published, list) or len(published) != 2:
            published = [published, None]
        mean, deviation = map(number, published)
        return None if mean is None else (mean, deviation, source)

    def show_difference(self, difference: float) -> str:
        """Write a difference with its sign: `−3.10%`, `+0.62 points`."""
        text = format_value(difference, self.difference_format)
        return f"{text} points" if self.higher else text


PERPLEXITY = Measure("perplexity", "perplexity", "ppl", paper=("",))
# published "bits per character" of enwik8 count bytes
_PAPER_BITS = ("_bits_per_byte", "_bits_per_character")
BITS_PER_BYTE = Measure("bits_per_byte", "bits per byte", "bits/byte", "bits", _PAPER_BITS)
BITS_PER_CHARACTER = Measure("bits_per_character", "bits per character", "bits/char", "bits", _PAPER_BITS[1:])
BLEU = Measure("bleu", "BLEU", "BLEU", "score", ("_bleu",))  # sacreBLEU's, of detokenised text
# as fairseq-generate printed it; papers on IWSLT14 state this one
TOKENISED_BLEU = Measure("tokenised_bleu", "tokenised BLEU", "tokenised BLEU", "score", ("_tokenised_bleu",))
CHRF = Measure("chrf", "chrF", "chrF", "score")
# the model reads most of the text, so its perplexity compares with no other
MASKED_PERPLEXITY = Measure("perplexity", "masked-token perplexity", "masked ppl")
ACCURACY = Measure("accuracy_percent", "accuracy in %", "accuracy in %", "score")
# of text with a token <sos> before every line: only the other tokens are counted, as is usual
WITHOUT_SOS = Measure("perplexity_without_sos", "perplexity without <sos>", "ppl without <sos>")
# of a model whose tokens see later ones: the only targets that it does not read
LAST_POSITION = Measure("last_position.perplexity", "perplexity at last positions", "ppl at last positions")
LENGTH_RATIO = Measure("length_ratio", "length ratio", "length ratio", "other")
LOSS = Measure("loss", "loss", "loss", "other")
COUNTING = {
    "unigram": "word frequencies",
    "fourgram": "4-grams",
}  # models that only count words, or words after three others
MEASURES = (PERPLEXITY, BITS_PER_BYTE, BITS_PER_CHARACTER, BLEU, TOKENISED_BLEU, CHRF, ACCURACY)
FURTHER = (TOKENISED_BLEU, CHRF, ACCURACY, WITHOUT_SOS, LAST_POSITION)  # shown beside those by which rows are judged


def read_counted(run: Run, split: str, model: str) -> float | None:
    """Read the recorded perplexity of a model that only counts.

    Args:
        run: the run, on whose text it was measured.
        split: `valid` or `test`.
        model: a key of `COUNTING`.

    Returns:
        Perplexity; None where none above 0 is recorded.
    """
    counted = number(run.get(f"corpus.{model}_perplexity.{split}"))
    return counted if counted is not None and counted > 0 else None


def list_measures(run: Run) -> list[Measure]:
    """List every measure that a run may have figures of; of fine-tuning its metrics, in points."""
    if not run.finetunes:
        return [*MEASURES, WITHOUT_SOS, LAST_POSITION, LENGTH_RATIO]
    return [*map(find_metric, run.metric_names), LOSS]


def find_metric(name: str) -> Measure:
    """Find the measure of a metric of fine-tuning, in points."""
    words = _METRIC_WORDS.get(name, name.replace("_", " "))
    return Measure(name, words, words.removesuffix(" correlation"), "score", scale=100.0)


def choose_measure(runs: Sequence[Run]) -> Measure:
    """Choose the measure in which runs of one task are compared.

    Fine-tuning: its first metric. Masked tokens: their own perplexity. Translations: BLEU. Bits where all runs read bytes or
    characters, or where the paper states bits for one of them: per character if all read characters, else per byte. Otherwise
    perplexity. It is perplexity, too, where no split has the measure of all finished runs.
    """
    if not runs:
        return PERPLEXITY
    if runs[0].finetunes:
        return find_metric([*runs[0].metric_names, "accuracy"][0])
    if runs[0].task == MASKED_MODELING:
        return MASKED_PERPLEXITY
    kinds = {run.tokens for run in runs}
    measure = PERPLEXITY
    if runs[0].task == TRANSLATION:
        measure = BLEU
    elif kinds <= {"byte", "character"} or any(
        BITS_PER_BYTE.find_paper(run, split) for run in runs for split in SPLITS
    ):
        measure = BITS_PER_CHARACTER if kinds == {"character"} else BITS_PER_BYTE
    finished = [run for run in runs if run.result is not None]
    for split in SPLITS:
        if all(measure.value(run, split) is not None for run in finished):
            return measure
    return PERPLEXITY
