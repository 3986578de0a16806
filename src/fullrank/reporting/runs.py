"""Run folders read into records: every fault becomes a sentence, and runs that differ only in their seed form a row."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from fullrank.config.data import PAIR_CORPORA
from fullrank.config.finetune import finetunes
from fullrank.config.load import flatten, read_yaml
from fullrank.config.recipe import load
from fullrank.core.errors import InputError
from fullrank.core.section import CountOrZero
from fullrank.files import as_record, plain_size, read_json, sha256_of, visible
from fullrank.seal import DamagedError, check_run, read_record

SPLITS = ("valid", "test")
RUN_FILES = ("config.yaml", "metrics.jsonl", "result.json")
TRANSLATIONS = "translations"  # the folder with <split>.txt and <split>.reference.txt
TRANSLATION, LANGUAGE_MODELING, MASKED_MODELING = "translation", "language_modeling", "masked_modeling"

# two runs that differ only in where they ran and how they were watched are seeds of one row
CIRCUMSTANCES = {
    "train.seed", "train.device", "train.threads", "train.track", "train.log_every_steps", "train.save_every_steps",
    "train.keep_checkpoints", "train.keep_model", "eval.test", "eval.sample", "eval.keep_log_probabilities",
    "eval.dynamic", "eval.dynamic.rate", "eval.dynamic.decay",
    "data.cache", "data.dir",
}  # fmt: skip
_MEASURED_ON = {  # what decides if two figures compare, in words
    "name": "corpus", "label": "label", "vocabulary": "vocabulary", "valid": "validation tokens", "test": "test tokens",
    "fingerprint": "vocabulary fingerprint", "valid sha256": "validation text", "test sha256": "test text",
    "valid pairs": "validation pairs", "test pairs": "test pairs", "valid references": "validation references",
    "test references": "test references", "signature": "BLEU signature",
    "valid source": "validation text", "test source": "test text",
}  # fmt: skip
_SEED_SUFFIX = re.compile(r"[-_./ ]+(seed|s)[-_ ]?\d+$", re.IGNORECASE)


class Figures(TypedDict):
    """Final figures of a split; other keys are words and details."""

    nll: NotRequired[float | None]
    perplexity: NotRequired[float | None]
    perplexity_per_word: NotRequired[float | None]
    tokens: NotRequired[CountOrZero | None]
    bleu: NotRequired[float | None]
    chrf: NotRequired[float | None]
    accuracy: NotRequired[float | None]
    f1: NotRequired[float | None]
    exact_match: NotRequired[float | None]
    matthews_correlation: NotRequired[float | None]
    pearson: NotRequired[float | None]
    spearman: NotRequired[float | None]


class Protocol(TypedDict):
    """How a split was measured."""

    words: NotRequired[str | None]
    settings: NotRequired[dict[str, Any] | None]


class Origin(TypedDict):
    """The run whose training another run measures again."""

    recipe: str
    row: NotRequired[str | None]
    environment: NotRequired[dict[str, Any] | None]


class Result(TypedDict):
    """The content of result.json, as far as it is read. Earlier versions wrote fewer keys."""

    name: NotRequired[str | None]
    kind: NotRequired[str | None]
    task: NotRequired[str | None]
    title: NotRequired[str | None]
    recipe: NotRequired[str | None]
    row: NotRequired[str | None]
    scale: NotRequired[str | None]
    kernel: NotRequired[str | None]
    seed: NotRequired[int | None]
    paper: NotRequired[dict[str, Any] | None]
    training: NotRequired[Origin | None]
    corpus: NotRequired[dict[str, Any] | None]
    parameters: NotRequired[dict[str, Any] | None]
    protocol: NotRequired[str | None]
    protocol_settings: NotRequired[dict[str, Any] | None]
    protocols: NotRequired[dict[str, Protocol] | None]
    final: NotRequired[dict[str, Figures]]
    last: NotRequired[dict[str, Figures] | None]
    best: NotRequired[dict[str, Any] | None]
    metrics: NotRequired[list[str] | None]
    sha256: NotRequired[dict[str, str | None] | None]
    environment: NotRequired[dict[str, Any] | None]
    ms_per_step: NotRequired[dict[str, float | None] | float | None]
    steps: NotRequired[CountOrZero | None]
    epochs: NotRequired[float | None]
    tokens_seen: NotRequired[CountOrZero | None]
    tokens_per_second: NotRequired[float | None]
    wall_seconds: NotRequired[float | None]
    peak_memory_mib: NotRequired[float | None]


class Line(TypedDict):
    """A line of metrics.jsonl or timing.jsonl."""

    step: NotRequired[CountOrZero]
    split: NotRequired[str]
    nll: NotRequired[float | None]
    ppl: NotRequired[float | None]
    lr: NotRequired[float | None]
    tokens: NotRequired[CountOrZero | None]
    seconds: NotRequired[float | None]
    tokens_per_second: NotRequired[float | None]
    peak_memory_mib: NotRequired[float | None]


class SpectrumOfLayer(TypedDict):
    """Figures of the heads of a layer, before or after mixing."""

    effective_rank: NotRequired[list[float]]
    curves: NotRequired[list[list[float]]]


class Layer(TypedDict):
    """Figures of a layer."""

    before: NotRequired[SpectrumOfLayer]
    after: SpectrumOfLayer


class Spectrum(TypedDict):
    """analysis/spectrum.json in a run folder, as far as it is read."""

    text: NotRequired[str]
    texts: NotRequired[int]
    segment_length: NotRequired[int]
    layers: list[Layer]


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> float | None:
    """`value` as a finite float, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def integer(value: Any) -> int | None:
    """`value` as an int if it is a whole number, else None."""
    finite = number(value)
    return int(value) if finite is not None and finite.is_integer() else None


@dataclass(frozen=True)
class RunRecord:
    """One run folder. `result` is None until the run has finished; `problems` says what is missing or damaged.

    `identity` is run.json, written when a run begins (name, recipe, row, scale, paper); `vocabulary` is vocabulary.json,
    `spectrum` analysis/spectrum.json.
    `metrics` and `timing` hold the readable lines of the two files, in file order.
    """

    folder: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    timing: Sequence[Mapping[str, Any]] = ()
    result: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: Mapping[str, Any] = field(default_factory=dict)
    spectrum: Mapping[str, Any] | None = None

    def get(self, *keys: str) -> Any:
        """A value of the result, by its nested keys; None if any of them is missing."""
        value: Any = self.result
        for key in keys:
            value = mapping(value).get(key)
        return value

    def final(self, split: str, key: str, checkpoint: str = "final") -> float | None:
        """A final figure; dots in `key` lead to nested ones."""
        return number(self.get(checkpoint, split, *key.split(".")))

    def origin(self, key: str) -> str:
        """`recipe`, `row` or `scale` of the run; empty if there is none."""
        return str(self.get(key) or self.identity.get(key) or "")

    @property
    def corpus(self) -> Mapping[str, Any]:
        return mapping(self.get("corpus"))

    @property
    def paper(self) -> Mapping[str, Any]:
        """The recipe's statement of the paper's figures of this row."""
        return mapping(self.get("paper") or self.identity.get("paper"))

    @property
    def finetunes(self) -> bool:
        """Fine-tuning of a pretrained encoder: its figures are scores of a task, not of a text."""
        return self.get("kind") == "finetuning" or finetunes(self.config)

    @property
    def task(self) -> str:
        """`translation`, `masked_modeling` or `language_modeling`: as recorded, else by the configuration.

        Of fine-tuning `glue/cola`, `squad` and so on.
        """
        data = str(mapping(self.config.get("data")).get("name"))
        if self.finetunes:
            return str(self.get("task") or data)
        masked = mapping(self.config.get("train")).get("objective") == "masked"
        configured = TRANSLATION if data in PAIR_CORPORA else MASKED_MODELING if masked else LANGUAGE_MODELING
        return str(self.get("task") or self.identity.get("task") or configured)

    @property
    def seed(self) -> int | None:
        seed = self.get("seed")
        return integer(seed if seed is not None else mapping(self.config.get("train")).get("seed"))

    @property
    def tokens(self) -> str:
        """`word`, `byte`, `character` or `bpe`; empty if not recorded."""
        kind = self.get("corpus", "details", "settings", "kind") or self.vocabulary.get("kind")
        return str(kind or mapping(self.config.get("data")).get("tokens") or "")

    @property
    def sees_future(self) -> bool:
        """Tokens of the model attend to later ones, so its validation figures while training are no perplexities."""
        model = mapping(self.config.get("model"))
        decoder = mapping(mapping(model.get("decoder")).get("attention")) if self.task == TRANSLATION else {}
        return (decoder or mapping(model.get("attention"))).get("causal") == "as_published"

    @property
    def next_token(self) -> bool:
        """Final figures are of next tokens; where that is not recorded, the configuration decides."""
        settings = [mapping(one).get("settings") for one in mapping(self.get("protocols")).values()]
        recorded = [mapping(one).get("next_token") for one in settings or [self.get("protocol_settings")]]
        if all(isinstance(known, bool) for known in recorded):
            return all(recorded)
        return not self.sees_future and self.task != MASKED_MODELING

    @property
    def protocols_differ(self) -> bool:
        """Validation and test figures were measured by different protocols."""
        return len({str(mapping(one).get("words")) for one in mapping(self.get("protocols")).values()}) > 1

    @property
    def other_splits(self) -> tuple[str, ...]:
        """Splits with final figures besides validation and test, such as second test sets of translations."""
        return tuple(str(split) for split in mapping(self.get("final")) if split not in SPLITS)

    @property
    def ms_per_step(self) -> dict[str, float]:
        """Milliseconds per training step, by phase."""
        recorded = self.get("ms_per_step")
        phases = recorded if isinstance(recorded, Mapping) else {"train": recorded}
        return {str(phase): value for phase, raw in phases.items() if (value := number(raw)) is not None}

    @cached_property
    def references(self) -> Mapping[str, str]:
        """sha256 of the reference translations that the run has kept, by split."""
        digests = {}
        for path in sorted((self.folder / TRANSLATIONS).glob("*.reference.txt")):
            try:
                digests[path.name.removesuffix(".reference.txt")] = sha256_of(path)
            except (OSError, ValueError):
                continue
        return digests


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed: a row of a comparison or an arm of fine-tuning. `slot` is its colour."""

    name: str
    slot: int
    runs: tuple[RunRecord, ...]

    @property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def finished(self) -> bool:
        return self.runs[0].result is not None

    def get(self, *keys: str) -> Any:
        """A value of the first run's result, by its nested keys; None if any of them is missing."""
        return self.runs[0].get(*keys)


# -- reading ----------------------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """True for a folder with at least one of the files by which a run is known."""
    return folder.is_dir() and any((folder / name).is_file() for name in RUN_FILES)


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in its sub-folders (two levels down), sorted by path."""
    if is_run(folder):
        return [folder]
    below = [*folder.glob("*/"), *folder.glob("*/*/")] if folder.is_dir() else []
    return sorted({path for path in below if is_run(path)})


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Records of several folders in the order given; a folder given twice counts once."""
    return [read_run(folder) for folder in {Path(folder).resolve(): Path(folder) for folder in folders}.values()]


def read_run(folder: Path) -> RunRecord:
    """Record of a run folder; InputError if the folder is not a run at all."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give run folders (each holds {', '.join(RUN_FILES)})")
    if not is_run(folder):
        inside = find_runs(folder)
        hint = f"; it holds runs: {', '.join(str(path) for path in inside[:4])}" if inside else ""
        raise InputError(f"{folder}: not a run folder, it has none of {', '.join(RUN_FILES)}{hint}")
    problems: list[str] = []
    config = _read(folder / "config.yaml", read_yaml, problems) or {}
    metrics, timing = (_read_lines(folder / name, problems) for name in ("metrics.jsonl", "timing.jsonl"))
    result = _read(
        folder / "result.json", partial(read_json, kind=Result), problems, "no result.json: the run has not finished"
    )
    # written when a run began: whatever is wrong with them, the rest of the folder says more
    identity, vocabulary = (_read(folder / name, read_json, []) or {} for name in ("run.json", "vocabulary.json"))
    analysed = folder / "analysis" / "spectrum.json"
    spectrum = _read(analysed, partial(read_json, kind=Spectrum), problems) if analysed.exists() else None
    problems += _broken_seals(folder)
    name = str(mapping(result).get("name") or identity.get("name") or folder.name or folder.resolve().name)
    record = RunRecord(
        folder, visible(name), config, metrics, timing, result, tuple(problems), identity, vocabulary, spectrum
    )
    return record if result is None else _without_unusable_result(record)


def _broken_seals(folder: Path) -> list[str]:
    """Changes in a run folder after its training began."""
    try:
        state = read_record(folder / "checkpoints" / "last").state
        check_run(folder)
        plain_size(folder / "metrics.jsonl")
        written = (folder / "metrics.jsonl").read_bytes()[: state.get("metrics_bytes", 0)]
    except InputError as error:
        return [str(error)]
    except (DamagedError, OSError, ValueError):  # without checkpoints nothing is sealed
        return []
    sealed = state.get("metrics_sha256") or None
    changed = sealed is not None and hashlib.sha256(written).hexdigest() != sealed
    return ["metrics.jsonl: its lines are not those that the training wrote"] if changed else []


def _without_unusable_result(record: RunRecord) -> RunRecord:
    """A result without any final figure is no result: the run diverged or the file is not ours."""
    if record.finetunes:
        usable, figure = bool(scores_of(record)), "score"
    else:
        values = [record.final(split, key) for split in SPLITS for key in ("perplexity", "bleu")]
        usable = any(value is not None and value > 0 for value in values)
        figure = "perplexity or BLEU" if record.task == TRANSLATION else "perplexity"
    if usable:
        return record
    problem = f"result.json holds no finite {figure} under `final`: the run diverged or the file is damaged"
    return dataclasses.replace(record, result=None, problems=(*record.problems, problem))


def scores_of(record: RunRecord) -> dict[tuple[str, str], float]:
    """Scores of fine-tuning in points (x 100), by split and metric; the headline of the first split comes first."""
    metrics = record.get("metrics")
    scores = {}
    for split, values in mapping(record.get("final")).items():
        for metric in map(str, metrics) if isinstance(metrics, list) else ():
            if (value := number(mapping(values).get(metric))) is not None:
                scores[str(split), metric] = 100 * value
    return scores


def _read_lines(path: Path, problems: list[str]) -> list[Mapping[str, Any]]:
    """The JSON objects of a file with one per line; unreadable lines are counted, not fatal."""
    lines: list[Mapping[str, Any]] = []
    damaged: dict[int, str] = {}
    text = _read(path, Path.read_bytes, problems) or b""
    for index, line in enumerate(text.split(b"\n"), start=1):
        if line.strip():
            try:
                lines.append(as_record(Line, line, path.name))
            except InputError as error:
                damaged[index] = str(error).removeprefix(f"{path.name}: ")
    if damaged:
        first, fault = next(iter(damaged.items()))
        where = f"line {first}" if len(damaged) == 1 else f"{len(damaged)} lines, the first is line {first},"
        problems.append(f"{path.name}: {where} cannot be read and was left out: {fault}")
    return lines


def _read(path: Path, parse: Callable[[Path], Any], problems: list[str], missing: str = "") -> Any:
    """Content of a file; None, with a sentence in `problems`, if it is missing or damaged."""
    if not path.is_file():
        problems.append(missing or f"{path.name} is missing")
        return None
    try:
        return parse(path)
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})")
    except InputError as error:
        problems.append(str(error).replace(str(path), path.name))
    return None


def recipe_notes(records: Sequence[RunRecord]) -> dict[str, str]:
    """Notes of the recipes of runs, by recipe; none of a recipe that is no longer there."""
    notes = {}
    for name in dict.fromkeys(record.origin("recipe") for record in records):
        with contextlib.suppress(InputError):
            notes[name] = load(name).notes
    return {name: text for name, text in notes.items() if text}


# -- rows -------------------------------------------------------------------------------------------------------------


def source_texts(record: RunRecord) -> dict[str, Any]:
    """Checksums, ranges and case of the texts of a language model's splits, whatever its tokens; empty if not recorded."""
    details, texts = mapping(record.corpus.get("details")), dict[str, Any]()
    lowercase = mapping(details.get("settings")).get("lowercase")
    for source in map(mapping, details.get("sources") or ()):
        if source.get("split") in SPLITS and source.get("sha256"):
            part = (source["sha256"], source.get("start"), source.get("end"), lowercase)
            texts.setdefault(f"{source['split']} source", []).append(part)
    return texts


def measured_on(record: RunRecord, *, in_bits: bool = False) -> dict[str, Any]:
    """Identity of the text behind a figure: corpus, splits and vocabulary, as far as recorded.

    BLEU is of text, however a vocabulary cuts it: there pairs, reference translations and signature decide. So are figures
    in bits: there the texts themselves decide where they are recorded.
    """
    if in_bits and (texts := source_texts(record)):
        return texts
    if record.finetunes:
        return {f"{split} sha256": digest for split, digest in mapping(record.get("sha256")).items()}
    corpus = record.corpus
    if record.task == TRANSLATION:
        signatures = (record.get("final", split, "bleu_signature") for split in SPLITS)
        values = {"signature": next((without_version(str(one)) for one in signatures if one), None)}
        by_split = {" pairs": corpus.get("pairs"), " references": record.references}
    else:
        values = {key: corpus.get(key) for key in ("vocabulary", "fingerprint")}
        by_split = {"": corpus.get("tokens"), " sha256": corpus.get("sha256")}
    values |= {key: corpus.get(key) for key in ("name", "label")}
    # another training text makes another model, not another measurement
    values |= {split + ending: mapping(one).get(split) for ending, one in by_split.items() for split in SPLITS}
    return {key: value for key, value in values.items() if value is not None}


def without_version(signature: str) -> str:
    """A signature of sacreBLEU without its version, which alone makes no other measurement."""
    return re.sub(r"\|version:[^|]*", "", signature)


def differences_of_text(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Names of the fields in which two texts differ; a field that only one of them records decides nothing."""
    if bool(first) != bool(second):
        return ["corpus (not recorded in every run)"]
    return [word for key, word in _MEASURED_ON.items() if key in first and key in second and first[key] != second[key]]


def texts_of_rows(rows: Sequence[Sequence[RunRecord]], *, in_bits: bool = False) -> list[int]:
    """For each row the number of the text it was measured on; figures compare where the numbers are equal."""
    texts, distinct = [measured_on(row[0], in_bits=in_bits) for row in rows], list[dict[str, Any]]()
    for text in texts:
        if all(differences_of_text(other, text) for other in distinct):
            distinct.append(text)
    return [[bool(differences_of_text(other, text)) for other in distinct].index(False) for text in texts]


def group_by_seed(records: Sequence[RunRecord]) -> list[tuple[RunRecord, ...]]:
    """Runs gathered into rows, in order of first appearance.

    A second run with the same seed (or none recorded) is no independent sample and opens a row of its own, so that a
    spread is always over different seeds. So does a run with other reference translations.
    """

    def separate(other: RunRecord, record: RunRecord) -> bool:
        same_seed = other.seed == record.seed or record.seed is None
        return same_seed or bool(differences_of_text(measured_on(other), measured_on(record)))

    rows: list[tuple[str, list[RunRecord]]] = []
    for record in records:
        key = _row_key(record)
        fitting = [row for other, row in rows if other == key and not any(separate(run, record) for run in row)]
        if fitting:
            fitting[0].append(record)
        else:
            rows.append((key, [record]))
    return [tuple(row) for _, row in rows]


def _settings(record: RunRecord) -> dict[str, Any]:
    """The settings that make a row, flat."""
    return {key: value for key, value in flatten(record.config).items() if key not in CIRCUMSTANCES}


def _row_key(record: RunRecord) -> str:
    """Equal for runs that differ only in their seed."""
    settings = _settings(record)
    origin = [record.origin(key) for key in ("recipe", "row", "scale")]
    name = "" if settings else _without_seed(record.name)
    # a run that has not kept its references is a seed of the row all the same
    text = {key: value for key, value in measured_on(record).items() if not key.endswith(" references")}
    return json.dumps([origin, name, settings, text], sort_keys=True, default=str)


# settings that make a row, in words; those of a plain Transformer need none, others are stages of one's own
_MECHANISMS = {
    "attention.kind": {
        "weighted": "",
        "multilinear": "multi-linear attention: sums over pairs of tokens in place of attention weights",
    },
    "attention.score": {
        "dot_product": "",
        "relative": "scores of content and distance (Transformer-XL)",
        "dense_synthesizer": "each query makes its scores without keys (dense synthesizer)",
        "random_synthesizer": "scores are learned parameters, the same for every text (random synthesizer)",
    },
    "attention.mix": {
        "none": "",
        "position_independent": "Mixhead A: heads exchange attention weights by one learned matrix",
        "position_wise": "Mixhead B: each query decides how heads exchange attention weights",
        "random": "heads exchange attention weights by a fixed random matrix",
        "average": "every head uses the mean of all heads' attention weights",
    },
    "attention.gate": {"none": "", "head": "each query scales the output of each head (output gates)"},
    "normalize": {"softmax": "", "sigsoftmax": "sigsoftmax in place of softmax"},
    "output.kind": {"softmax": "", "adaptive": "adaptive softmax: rare words have smaller vectors",
                    "mixture_of_softmaxes": "a mixture of {mixtures} softmaxes in place of one"},
}  # fmt: skip


def mechanism_words(config: Mapping[str, Any]) -> str:
    """The mechanisms of a configuration: `Mixhead B: each query decides ..; sigsoftmax in place of softmax`."""
    model = {**mapping(config.get("model"))}
    if isinstance(entries := model.get("layers"), list):
        model["layers"] = dict(enumerate(entries))
    settings = {key.removesuffix(".name"): value for key, value in flatten(model).items()}
    words = dict.fromkeys(
        known.get(value, f"{ending.replace('.kind', '').rpartition('.')[2]}: {value} (a stage of your own)").format(
            mixtures=settings.get(key.replace("kind", "mixtures"))
        )
        for ending, known in _MECHANISMS.items()
        for key, value in settings.items()
        if key.endswith(ending) and isinstance(value, str)
    )
    words.pop("", None)
    if beta := max((float(value or 0) for key, value in settings.items() if key.endswith("cross_head")), default=0.0):
        words[f"keys and values of heads change places in training with probability {beta:g}"] = None
    if any(value is True for key, value in settings.items() if key.endswith("attention.value_residual")):
        words["values take a learned share of the first layer's values (value residuals)"] = None
    if taught := mapping(mapping(config.get("train")).get("distill")):
        words[f"distilled from {Path(str(taught.get('run'))).name} with weight {taught.get('weight')}"] = None
    skips = [mapping(phase).get("skip") for phase in mapping(config.get("train")).get("phases") or ()]
    if any(mapping(skip).get("name", skip) not in (None, "none") for skip in skips):
        words["layers are skipped at random in a phase of training (Skip-Retain)"] = None
    return "; ".join(words) or "plain multi-head attention and one softmax over the vocabulary"


def row_names(rows: Sequence[Sequence[RunRecord]]) -> list[str]:
    """A distinct name for each row, then scale, recipe and folder as needed.

    It is its row in the recipe, else the name that all its runs share, else the settings in which it differs from the others.
    """
    names = [row[0].origin("row") or _shared_name(row) or _differing_settings(row, rows) for row in rows]
    for more in (
        lambda run: run.origin("scale"), lambda run: run.origin("recipe"), lambda run: "/".join(run.folder.parts[-2:]),
    ):  # fmt: skip
        names = [
            f"{name} · {more(row[0])}" if names.count(name) > 1 and more(row[0]) not in name else name
            for name, row in zip(names, rows, strict=True)
        ]
    return numbered(names)


def _shared_name(row: Sequence[RunRecord]) -> str:
    """The name of a single run, or the one that all seeds of a row have; empty if there is none."""
    names = {_without_seed(run.name) if len(row) > 1 else run.name for run in row}
    return names.pop() if len(names) == 1 else ""


def _differing_settings(row: Sequence[RunRecord], rows: Sequence[Sequence[RunRecord]]) -> str:
    """`position_wise (2 seeds)`: the settings that not all rows share; the first run's name where they are many or none."""
    others = [_settings(other[0]) for other in rows]
    settings = {key: value for key, value in _settings(row[0]).items() if any(o.get(key) != value for o in others)}
    words = [
        str(value) if key.endswith((".mix", ".score", ".normalize", ".kind", ".name")) else f"{key}={value}"
        for key, value in settings.items()
    ]
    return f"{', '.join(words) if 0 < len(words) <= 3 else row[0].name} ({len(row)} seeds)"


def numbered(names: Sequence[str]) -> list[str]:
    """Equal names made distinct by `(2)`, `(3)` ..."""
    used: list[str] = []
    for name in names:
        copies = (name if copy == 1 else f"{name} ({copy})" for copy in range(1, len(names) + 2))
        used.append(next(distinct for distinct in copies if distinct not in used))
    return used


def _without_seed(name: str) -> str:
    return _SEED_SUFFIX.sub("", name) or name
