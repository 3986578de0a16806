"""Runs of one task compared as plain data: a row for each setting, over its seeds. Page, terminal and JSON show it.

Translations are also compared on resampled test sets, from the files `translations/<split>.txt` that runs have kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import SEED, against_first, bootstrap_interval
from fullrank.evaluation.tasks import Metric, check_pairs, metric_named
from fullrank.reporting import figures, runs
from fullrank.reporting.figures import BLEU, MISSING, PERPLEXITY, SCORES, TOKENISED_BLEU, Measure, Stat
from fullrank.reporting.runs import SPLITS, RunGroup, RunRecord, integer, number, read_run

MARK = "†"  # at a figure that is no next-token perplexity
SAMPLES = 1000  # resampled test sets
_ROUNDING = 0.005  # BLEU of kept translations and of the result agree to the digits shown
Stats = Mapping[str, Stat]  # by split


@dataclass(frozen=True)
class Row(RunGroup):
    """One row of a comparison.

    text: number of the text and vocabulary it was measured on; figures compare only where it is equal.
    part: the part of a table that it belongs to (its backbone), within which rows are compared; empty where there are none.
    difference: to the first row where the two compare, a share, or points for scores; best: the splits in which no comparable
    row has a better mean.
    """

    text: int
    measure: Measure
    part: str = ""
    extra_parameters: int | None = None
    difference: Mapping[str, float] = dataclasses.field(default_factory=dict)
    best: tuple[str, ...] = ()

    @cached_property
    def figures(self) -> Stats:
        """By split, in the measure of the comparison."""
        return self.measure.over_runs(self.runs)

    @cached_property
    def last(self) -> Stats:
        """Figures of the last checkpoint instead of the best."""
        return self.measure.over_runs(self.runs, "last")

    @property
    def comparable_figures(self) -> Stats:
        return {} if self.marked else self.figures

    @cached_property
    def unigram(self) -> Mapping[str, float]:
        return self.measure.unigrams(self.runs[0])

    @property
    def undertrained(self) -> bool:
        """Some figure is above that of word frequencies alone."""
        figures, unigram = self.comparable_figures, self.unigram
        return any(figures[split].mean > unigram[split] for split in figures.keys() & unigram.keys())

    def stats(self, measure: Measure) -> Stats:
        """Another figure, by split."""
        return measure.over_runs(self.runs)

    def by_checkpoint(self, measure: Measure) -> dict[str, Stats]:
        """Another figure by checkpoint (`final`, `last`) and split, where there are any."""
        stats = {checkpoint: measure.over_runs(self.runs, checkpoint) for checkpoint in ("final", "last")}
        return {checkpoint: by_split for checkpoint, by_split in stats.items() if by_split}

    def over_runs(self, key: str) -> Stat | None:
        """A number of the results, over the runs."""
        return figures.over_runs(number(run.get(key)) for run in self.runs)

    @property
    def ms_per_step(self) -> dict[str, Stat]:
        """Milliseconds per training step, by phase."""
        steps = [run.ms_per_step for run in self.runs]
        stats = {phase: figures.over_runs(one.get(phase) for one in steps) for one in steps for phase in one}
        return {phase: stat for phase, stat in stats.items() if stat is not None}

    @property
    def parameters(self) -> int | None:
        return integer(self.get("parameters", "total"))

    @property
    def paper(self) -> Mapping[str, Any]:
        return self.runs[0].paper

    @property
    def label(self) -> str:
        """Label of the text, which says so if it is a slice; empty if not recorded."""
        return str(self.runs[0].corpus.get("label") or self.runs[0].corpus.get("name") or "")

    @property
    def is_slice(self) -> bool:
        """The text is a part of the published corpus."""
        return bool(self.runs[0].corpus.get("is_slice"))

    @property
    def protocol(self) -> str:
        """Evaluation of the row, in words."""
        return " and ".join(dict.fromkeys(str(run.get("protocol") or "not recorded") for run in self.runs))

    @property
    def shown_protocol(self) -> str:
        """`protocol` without the remark that the mark at the figures stands for."""
        return self.protocol.removesuffix(f"; {NOT_NEXT_TOKEN}")

    @property
    def next_token(self) -> bool:
        return self.measure.higher or all(run.next_token for run in self.runs)

    @property
    def marked(self) -> bool:
        """True if figures look like next-token perplexities and are none: they compare with no other row."""
        return not self.next_token and self.runs[0].task != runs.MASKED_MODELING

    def mark(self, text: str) -> str:
        """A figure as text, with the mark where it is no next-token perplexity."""
        return f"{text} {MARK}" if self.marked and text != MISSING else text


def signatures(runs: Sequence[RunRecord]) -> dict[str, tuple[str, ...]]:
    """sacreBLEU's signatures of the scores of runs, each once, by the key of the measure."""
    signed = {
        score.key: [run.get("final", split, f"{score.key}_signature") for run in runs for split in SPLITS]
        for score in SCORES
    }
    return {key: tuple(dict.fromkeys(str(way) for way in ways if way)) for key, ways in signed.items() if any(ways)}


@dataclass(frozen=True)
class Comparison:
    """Finished rows in the order given (the first is the one that others are compared with), and unfinished runs.

    `left_out` are runs of another task than the first: translations, next tokens and masked ones have no common figure.
    """

    rows: tuple[Row, ...]
    unfinished: tuple[RunRecord, ...]
    measure: Measure
    left_out: tuple[RunRecord, ...]

    @property
    def runs(self) -> list[RunRecord]:
        """Every finished run."""
        return [run for row in self.rows for run in row.runs]

    @property
    def notes(self) -> dict[str, str]:
        """What the recipes say of the figures, by recipe."""
        return runs.recipe_notes([*self.runs, *self.unfinished])

    @property
    def task(self) -> str:
        return (*self.runs, *self.unfinished)[0].task

    @property
    def groups(self) -> list[list[Row]]:
        """Rows that were measured on the same text and belong to the same part of a table, for each text and part."""
        keys = dict.fromkeys((row.text, row.part) for row in self.rows)
        return [[row for row in self.rows if (row.text, row.part) == key] for key in keys]

    @property
    def comparable(self) -> bool:
        """Every row was measured on the same text with the same vocabulary."""
        return len({row.text for row in self.rows}) <= 1

    def is_first(self, row: Row) -> bool:
        """The row that those of its part are compared with."""
        return row is next(other for other in self.rows if other.part == row.part)

    @property
    def several_seeds(self) -> bool:
        return any(len(row.runs) > 1 for row in self.rows)

    @property
    def split(self) -> str:
        """The split by which rows are judged."""
        return compared_split(self.rows)

    @property
    def protocols(self) -> tuple[str, ...]:
        """Protocols of evaluation, each once, in the order of the rows."""
        return tuple(dict.fromkeys(row.shown_protocol for row in self.rows))

    def protocol_mark(self, row: Row) -> str:
        """`[1]`, `[2]` .. by the row's protocol; empty where all rows have the same."""
        return f"[{self.protocols.index(row.shown_protocol) + 1}]" if len(self.protocols) > 1 else ""

    @property
    def paper_measure(self) -> Measure | None:
        """The measure of the paper's figures beside ours: the comparison's, or tokenised BLEU beside BLEU."""
        kinds = (BLEU, TOKENISED_BLEU) if self.measure is BLEU else (self.measure,)
        return next((measure for measure in kinds if self.states(measure)), None)

    def states(self, measure: Measure) -> bool:
        """A row has figures of a paper in this measure."""
        return any(measure.paper_figure(row.paper, split) is not None for row in self.rows for split in SPLITS)

    @property
    def paper_is_last(self) -> bool:
        """The paper's figures are of the last checkpoint, as a recipe states with `checkpoint: last`."""
        return any(row.paper.get("checkpoint") == "last" for row in self.rows)

    @property
    def shows_last(self) -> bool:
        """The last checkpoint has a column: it is the paper's, and not everywhere our best."""
        return self.paper_is_last and any(row.last and row.last != row.figures for row in self.rows)

    @cached_property
    def differences(self) -> tuple[Differences, ...]:
        """Rows against their baselines on resampled test sets; empty without translations.

        Of the test split (else of validation, where translations of it were kept), then of further test sets.
        """
        if self.measure is not BLEU:
            return ()
        either = (differences(self.rows, split) for split in reversed(SPLITS))
        others = dict.fromkeys(split for run in self.runs for split in run.references if split not in SPLITS)
        tested = (next(filter(None, either), None), *(differences(self.rows, split) for split in others))
        return tuple(filter(None, tested))

    def as_json(self) -> dict[str, Any]:
        """The comparison by its keys in a JSON document; numbers in full precision.

        `measure` of a row is the key under which the compared figures stand (beside `perplexity`), and `difference_in` says
        if `difference` is a share or points. `significance` has an entry for each split of which translations were
        resampled. `other_splits` of a row has its scores on further test sets.
        """
        return {
            "comparable": self.comparable,
            "rows": [_row_as_json(row) for row in self.rows],
            "unfinished": [_run_as_json(run) for run in self.unfinished],
            "left_out": [{"folder": str(run.folder), "name": run.name, "task": run.task} for run in self.left_out],
            "significance": self.differences,
            "notes": self.notes,
        }


def compared_split(rows: Sequence[Row]) -> str:
    """`test` if any row has it, else `valid`."""
    return "test" if any("test" in row.figures for row in rows) else "valid"


def best_row(rows: Sequence[Row], measure: Measure, split: str) -> Row | None:
    """The row with the best mean; None if no row compares, or one is undertrained."""
    if any(row.undertrained for row in rows):
        return None
    measured = [row for row in rows if split in row.comparable_figures]
    best = measure.best([row.figures[split].mean for row in measured]) if measured else None
    return next((row for row in measured if row.figures[split].mean == best), None)


def compare(records: Sequence[RunRecord], table: str | None = None) -> Comparison:
    """Comparison of runs. The first run says if translation, language or masked language models are compared.

    table: the table of several recipes that they belong to; rows are compared within each recipe.
    """
    same_task = [record for record in records if record.task == records[0].task]
    finished = [record for record in same_task if record.result is not None]
    measure, groups = figures.choose(finished or same_task), runs.group_by_seed(finished)
    parts = [_part(group[0], table) if table is not None else "" for group in groups]
    names = runs.row_names(groups)
    if table is not None:
        names = runs.numbered([f"{part} {group[0].origin('row')}" for part, group in zip(parts, groups, strict=True)])
    rows = [
        Row(name, slot, group, text, measure, part)
        for slot, (name, group, text, part) in enumerate(
            zip(names, groups, runs.texts_of_rows(groups), parts, strict=True)
        )
    ]
    return Comparison(
        tuple(_with_neighbours(row, rows, measure) for row in rows),
        tuple(record for record in same_task if record.result is None),
        measure,
        tuple(record for record in records if record.task != records[0].task),
    )


def _part(run: RunRecord, table: str) -> str:
    """`vanilla` of mixhead/table1-vanilla; `table4` of mixhead/table4 itself."""
    recipe = run.origin("recipe")
    return recipe.removeprefix(f"{table}-") if recipe.startswith(f"{table}-") else Path(recipe).stem


def _with_neighbours(row: Row, rows: Sequence[Row], measure: Measure) -> Row:
    """The row with what follows from the others: extra parameters, differences to the first, where it is best."""
    rows = [other for other in rows if other.part == row.part]
    first, best = rows[0], []
    difference: dict[str, float] = {}
    for split, stat in row.comparable_figures.items():
        base = first.comparable_figures.get(split)
        if row is not first and base is not None and row.text == first.text:
            change = measure.difference(stat.mean, base.mean)
            difference |= {} if change is None else {split: change}
        rivals = [other.comparable_figures.get(split) for other in rows if other.text == row.text]
        means = [rival.mean for rival in rivals if rival is not None]
        trained = not any(other.undertrained for other in rows if other.text == row.text)
        if trained and len(means) > 1 and measure.show(stat.mean) == measure.show(measure.best(means)):
            best.append(split)
    known = row.parameters is not None and first.parameters is not None
    extra = (row.parameters or 0) - (first.parameters or 0) if known else None
    return dataclasses.replace(row, extra_parameters=extra, difference=difference, best=tuple(best))


# -- JSON -------------------------------------------------------------------------------------------------------------


def _run_as_json(run: RunRecord) -> dict[str, Any]:
    return {"folder": str(run.folder), "name": run.name, "seed": run.seed, "problems": run.problems}


def _row_as_json(row: Row) -> dict[str, Any]:
    measure, others = row.measure, [one for one in figures.MEASURES if one is not PERPLEXITY and row.stats(one)]
    values: dict[str, Any] = {}
    for one in others:
        values[one.key] = row.stats(one)
        if one.in_bits:
            values[f"unigram_{one.key}"] = one.unigrams(row.runs[0])
    values |= {f"{key}_signature": ways for key, ways in signatures(row.runs).items()}
    other_splits: dict[str, dict[str, Stat]] = {split: {} for run in row.runs for split in run.other_splits}
    for split, scores in other_splits.items():
        for one in (PERPLEXITY, *SCORES):
            if stat := figures.over_runs(one.final(run, split) for run in row.runs):
                scores[one.key] = stat
    return {
        "name": row.name,
        "task": row.runs[0].task,
        "corpus": row.label,
        "is_slice": row.is_slice,
        "text": row.text,
        "recipe": row.runs[0].origin("recipe") or None,
        "protocol": row.protocol,
        "protocols": row.get("protocols"),
        "training": row.get("training"),
        "parameters": row.parameters,
        "extra_parameters": row.extra_parameters,
        "measure": measure.key,
        "perplexity": row.stats(PERPLEXITY),
        **values,
        "last": {measure.key: row.last} if row.last else None,
        "next_token": row.next_token,
        "remark": None if row.next_token else NOT_NEXT_TOKEN if row.marked else MASKED_TOKEN,
        figures.WITHOUT_SOS.key: row.by_checkpoint(figures.WITHOUT_SOS) or None,
        "last_position": row.by_checkpoint(figures.LAST_POSITION) or None,
        "difference": row.difference,
        "difference_in": "points" if measure.higher else "share",
        "best": row.best,
        "other_splits": other_splits,
        "paper": row.paper or None,
        "unigram_perplexity": PERPLEXITY.unigrams(row.runs[0]),
        "ms_per_step": row.ms_per_step,
        **{key: row.over_runs(key) for key in ("tokens_per_second", "wall_seconds", "peak_memory_mib")},
        "runs": [
            _run_as_json(run)
            | {one.key: {split: one.final(run, split) for split in SPLITS} for one in (PERPLEXITY, *others)}
            for run in row.runs
        ],
    }


# -- translations on resampled test sets ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A row against its baseline on resampled test sets, means over the runs of each.

    low, high: 95 % interval of `difference` over sentences, for these very models; seeds_low, seeds_high: over seeds, by
    Welch, None where a row has one run. ahead: the share of the samples in which the row is above its baseline.
    """

    row: str
    score: float
    runs: int
    baseline: str
    baseline_score: float
    baseline_runs: int
    difference: float
    low: float
    high: float
    p_value: float
    ahead: float
    seeds_low: float | None
    seeds_high: float | None

    @property
    def decided(self) -> bool:
        """The interval over sentences leaves out 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Differences:
    """All rows that could be compared with their baselines on a split; `left_out` says why other runs could not."""

    split: str
    samples: int
    seed: int
    sentences: int
    rows: tuple[Difference, ...]
    left_out: tuple[str, ...]


def differences(rows: Sequence[Row], split: str) -> Differences | None:
    """Paired bootstrap of BLEU of every row with its baseline (`baseline_of`); None where nothing can be compared.

    Only rows that were measured on the same text are compared. A run whose translations are missing, or do not have the
    BLEU that its result states, is left out.
    """
    base = next((run for row in rows for run in row.runs if split in run.references), None)
    if base is None or len(rows) < 2:
        return None
    metric = metric_named(BLEU.key, lowercase=_in_lower_case(base, split))
    left_out: list[str] = []
    counts: dict[str, list[np.ndarray]] = {row.name: [] for row in rows}
    for row in rows:
        for run in row.runs:
            try:
                counts[row.name].append(_checked_counts(run, base, split, metric))
            except InputError as error:
                left_out.append(f"{row.name}, {run.folder if run.seed is None else f'seed {run.seed}'}: {error}")
    texts, parts = {row.name: row.text for row in rows if counts[row.name]}, {row.name: row.part for row in rows}
    baselines = {name: baseline_of(name, [one for one in counts if parts[one] == parts[name]]) for name in texts}
    compared = [name for name, other in baselines.items() if other != name and texts.get(other) == texts[name]]
    sentences = len(counts[compared[0]][0]) if compared else 0
    if sentences < 2:
        return None
    tested: dict[str, Difference] = {}
    for baseline in dict.fromkeys(baselines[name] for name in compared):
        names = [name for name in compared if baselines[name] == baseline]
        pairs = against_first([counts[name] for name in (baseline, *names)], metric, samples=SAMPLES, seed=SEED)
        for name, pair in zip(names, pairs, strict=True):
            tested[name] = Difference(
                name, pair["b"], len(counts[name]), baseline, pair["a"], len(counts[baseline]),
                pair["difference"], pair["low"], pair["high"], pair["p_value"], pair["wins"]["b"] / SAMPLES,
                pair["seeds"]["low"], pair["seeds"]["high"],
            )  # fmt: skip
    return Differences(split, SAMPLES, SEED, sentences, tuple(tested[name] for name in compared), tuple(left_out))


def baseline_of(name: str, names: Sequence[str]) -> str:
    """The row that a row is compared with: `h64-plain` for `h64-a-cross` (longest prefix), else the first row."""
    parts = name.split("-")
    for end in range(len(parts), 0, -1):
        if (baseline := "-".join([*parts[:end], "plain"])) in names and baseline != name:
            return baseline
    prefix = name.removesuffix("plain")
    has_others = any(other.startswith(prefix) and other != name for other in names)
    return name if parts[-1] == "plain" and len(parts) > 1 and has_others else names[0]


def _in_lower_case(record: RunRecord, split: str) -> bool:
    """The run's BLEU ignores case, as its signature says."""
    return "case:lc" in str(record.get("final", split, "bleu_signature") or "").split("|")


def _checked_counts(run: RunRecord, base: RunRecord, split: str, metric: Metric) -> np.ndarray:
    """Counts (S, F) of n-grams in a run's translations; InputError if they cannot be compared with those of `base`."""
    if split not in run.references:
        raise InputError(f"it has kept no translations of the {split} split")
    if run.references[split] != base.references[split]:
        raise InputError(f"its {split} references are not those of {base.folder}")
    if _in_lower_case(run, split) != _in_lower_case(base, split):
        raise InputError(f"case counts in only one of its BLEU and that of {base.folder}")
    counts = metric.statistics(*translations(run.folder, split))
    stated, score = BLEU.final(run, split), float(metric.score(counts.sum(axis=0)))
    if stated is not None and abs(score - stated) > _ROUNDING:
        raise InputError(f"its translations have a BLEU of {BLEU.show(score)}, its result says {BLEU.show(stated)}")
    return counts


def translations(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """Detokenised hypotheses and references that a run has kept of a split, a line each.

    InputError if a file is missing or the two have different numbers of lines.
    """
    path, reference = (folder / runs.TRANSLATIONS / f"{split}{ending}" for ending in (".txt", ".reference.txt"))
    for file in (path, reference):
        if not file.is_file():
            kept = sorted(other.name for other in path.parent.glob("*.txt")) if path.parent.is_dir() else []
            there = f"; there are {', '.join(kept)}" if kept else ""
            raise InputError(f"{file}: no such file{there}. Only a finished translation run keeps its translations")
    hypotheses, references = _lines(path), _lines(reference)
    try:
        check_pairs(hypotheses, references)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return hypotheses, references


def _lines(path: Path) -> list[str]:
    """Only \\n ends a line: a translation may hold other characters that Python counts as ends."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error
    return text.removesuffix("\n").split("\n") if text else []


def compare_runs(
    folders: Sequence[Path], split: str = "test", samples: int = SAMPLES, seed: int = SEED, metric: str = "bleu"
) -> dict[str, Any]:
    """Paired bootstrap of the runs in `folders` with the first of them, on the translations they have kept of a split.

    `runs` has for each folder its score with its own interval, `against_first` for each folder after the first the result of
    `evaluation.statistics.against_first` (a: the first, b: this one). Case is ignored where the signatures say so.
    Raises InputError for fewer than two folders, for runs without translations, and where their references differ.
    """
    if len(folders) < 2:
        raise InputError(f"at least two runs are compared, given {len(folders)}")
    records = [read_run(Path(folder)) for folder in folders]
    kept = [translations(record.folder, split) for record in records]
    references = kept[0][1]
    for record, (_, other) in zip(records, kept, strict=True):
        if other != references:
            raise InputError(
                f"{record.folder} and {records[0].folder} were not scored on the same {split} references "
                f"({len(other):,} and {len(references):,} lines): their translations do not compare"
            )
    cases = [_in_lower_case(record, split) for record in records]
    if len(set(cases)) > 1:
        raise InputError(f"{records[cases.index(True)].folder}: its BLEU ignores case, that of the others does not")
    measure = metric_named(metric, lowercase=cases[0])
    counts = [measure.statistics(hypotheses, references) for hypotheses, _ in kept]
    resampling: dict[str, Any] = {"samples": samples, "seed": seed}
    pairs = against_first([[one] for one in counts], measure, **resampling)
    return {
        "split": split, "metric": metric, "lowercase": cases[0], **resampling, "sentences": len(references),
        "runs": [
            {"folder": str(record.folder), "name": record.name, **bootstrap_interval(one, measure, **resampling)}
            for record, one in zip(records, counts, strict=True)
        ],
        "against_first": [
            {"folder": str(record.folder), "first": str(records[0].folder)}
            | {key: value for key, value in pair.items() if key != "seeds"}
            for record, pair in zip(records[1:], pairs, strict=True)
        ],
    }  # fmt: skip
