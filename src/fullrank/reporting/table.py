"""The comparison of runs as plain data, for the page, the terminal and JSON alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.core.errors import InputError
from fullrank.reporting import format
from fullrank.reporting.grouping import row_names, seeds_of_rows, texts_of_rows
from fullrank.reporting.measure import (
    ACCURACY,
    BLEU,
    LAST_POSITION,
    PERPLEXITY,
    SCORES,
    TOKENISED_BLEU,
    WITHOUT_SOS,
    Measure,
    choose,
    paper_of,
)
from fullrank.reporting.results import (
    LANGUAGE_MODELING,
    MASKED_MODELING,
    SPLITS,
    TRANSLATION,
    RunRecord,
    integer,
    mapping,
    number,
    read_runs,
)
from fullrank.reporting.stats import Stat, over_runs

MARK = "†"  # at a figure that is no next-token perplexity


@dataclass(frozen=True)
class Row:
    """One row of the comparison: the finished runs that differ only in their seed.

    `text` numbers the text and vocabulary of the measurement: figures compare only where it is equal.
    `signatures` of a score, by its key: those of all runs; more than one where they were not computed alike.
    `protocol` says how it was measured; where rows differ in it, their names are marked (`Comparison.mark`).
    `figures` are in the measure of the comparison, by split, and so are `difference` (to the first row, where the two
    compare: a share, of BLEU in points), `best` (the splits in which no comparable row has a better mean) and `unigram`;
    `perplexity` is perplexity always, and `scores` has BLEU and the like by their keys. `last` is as `figures`, of the last
    checkpoint instead of the best; `without_sos` is, for both (`final` and `last`), perplexity without the tokens `<sos>`,
    where there are any. `ms_per_step` is by phase of training.
    `next_token` False: its figures are no next-token perplexities. Where they should be, they are `marked`, compare with none
    and are best of none; `last_position`, as `without_sos`, has those of the last positions of segments, which are.
    Those of masked tokens have a measure of their own and compare with each other.
    """

    name: str
    runs: tuple[RunRecord, ...]
    text: int
    protocol: str
    parameters: int | None
    extra_parameters: int | None
    figures: Mapping[str, Stat]
    perplexity: Mapping[str, Stat]
    scores: Mapping[str, Mapping[str, Stat]]
    signatures: Mapping[str, tuple[str, ...]]
    last: Mapping[str, Stat]
    without_sos: Mapping[str, Mapping[str, Stat]]
    next_token: bool
    last_position: Mapping[str, Mapping[str, Stat]]
    difference: Mapping[str, float]
    best: tuple[str, ...]
    tokens_per_second: Stat | None
    ms_per_step: Mapping[str, Stat]
    wall_seconds: Stat | None
    peak_memory_mib: Stat | None
    paper: Mapping[str, Any]
    unigram: Mapping[str, float]

    @property
    def label(self) -> str:
        """The label of the text, which says so if it is a slice; empty if not recorded."""
        corpus = mapping(mapping(self.runs[0].result).get("corpus"))
        return str(corpus.get("label") or corpus.get("name") or "")

    @property
    def reading(self) -> str:
        """`protocol` without what a mark at the figures says."""
        return self.protocol.removesuffix(f"; {NOT_NEXT_TOKEN}")

    @property
    def marked(self) -> bool:
        """Whether its figures pass for next-token perplexities and are none."""
        return not self.next_token and self.runs[0].task != MASKED_MODELING

    @property
    def judged(self) -> Row:
        """The row as it is compared: without its figures where they are no next-token perplexities but pass for such."""
        return dataclasses.replace(self, figures={}) if self.marked else self

    def shown(self, text: str) -> str:
        """A figure as text (or the name beside it), with the mark where it is no next-token perplexity."""
        return f"{text} {MARK}" if self.marked and text != format.MISSING else text

    @property
    def is_slice(self) -> bool:
        """Whether the text is a part of the published corpus."""
        return bool(mapping(mapping(self.runs[0].result).get("corpus")).get("is_slice"))


@dataclass(frozen=True)
class Comparison:
    """Finished rows in the order given (the first is what the others are compared with), and runs not finished.

    `measure` is that of every figure of it: chosen by the finished runs, or by the others where none has finished.
    `left_out` are runs of another task than the first: translations, next tokens and masked ones have no figure in common.
    """

    rows: tuple[Row, ...]
    unfinished: tuple[RunRecord, ...]
    measure: Measure = PERPLEXITY
    left_out: tuple[RunRecord, ...] = ()

    @property
    def task(self) -> str:
        """That of its runs."""
        runs = (*(row.runs[0] for row in self.rows), *self.unfinished)
        return runs[0].task if runs else LANGUAGE_MODELING

    @property
    def translates(self) -> bool:
        """Whether its runs are translation models."""
        return self.task == TRANSLATION

    @property
    def comparable(self) -> bool:
        """Whether every row was measured on the same text with the same vocabulary."""
        return len({row.text for row in self.rows}) <= 1

    @property
    def protocols(self) -> tuple[str, ...]:
        """How the rows were measured, each way once, in the order of the rows."""
        return tuple(dict.fromkeys(row.reading for row in self.rows))

    def mark(self, row: Row) -> str:
        """`[1]`, `[2]` .. by the place of the row's protocol among `protocols`; empty where all rows have the same."""
        return f"[{self.protocols.index(row.reading) + 1}]" if len(self.protocols) > 1 else ""

    @property
    def paper_measure(self) -> Measure | None:
        """In what the paper's figures stand beside ours: the measure of the comparison, or tokenised BLEU beside BLEU."""
        kinds = (BLEU, TOKENISED_BLEU) if self.measure is BLEU else (self.measure,)
        return next((measure for measure in kinds if self.states(measure)), None)

    @property
    def has_paper(self) -> bool:
        """Whether a row has figures of a paper that stand beside ours."""
        return self.paper_measure is not None

    @property
    def signatures(self) -> Mapping[str, tuple[str, ...]]:
        """How scores were computed, by the key of the measure: each way once, in the order of the rows."""
        found: dict[str, dict[str, None]] = {}
        for row in self.rows:
            for key, ways in row.signatures.items():
                found.setdefault(key, {}).update(dict.fromkeys(ways))
        return {key: tuple(ways) for key, ways in found.items()}

    @property
    def paper_is_last(self) -> bool:
        """Whether the paper's figures are of the last checkpoint, as a recipe states with `checkpoint: last`."""
        return any(row.paper.get("checkpoint") == "last" for row in self.rows)

    @property
    def shows_last(self) -> bool:
        """Whether the last checkpoint has a column of its own: it is the paper's, and not everywhere our best."""
        return self.paper_is_last and any(row.last and row.last != row.figures for row in self.rows)

    @property
    def last_is_best(self) -> bool:
        """Whether the last checkpoint of every row is recorded, and is the best."""
        return all(row.last and row.last == row.figures for row in self.rows)

    @property
    def counts_sos(self) -> bool:
        """Whether `<sos>` is among the tokens of a row."""
        return any(row.without_sos for row in self.rows)

    @property
    def marked(self) -> tuple[Row, ...]:
        """The rows whose figures pass for next-token perplexities and are none."""
        return tuple(row for row in self.rows if row.marked)

    def states(self, measure: Measure) -> bool:
        """Whether a row has figures of a paper in this measure."""
        return any(measure.of_paper(row.paper, split) is not None for row in self.rows for split in SPLITS)


def comparison(runs: Sequence[Path | RunRecord]) -> Comparison:
    """Compares run folders (or records read before). Means over seeds are means of the figures, never of losses.

    The first run says whether translation, language or masked language models are compared; others are left out, by name.
    Raises InputError for a folder that is no run; an unfinished or damaged run is listed, never an error.
    """
    if not runs:
        raise InputError("no run folders given; name at least one, for example runs/demo/plain")
    records = [run for run in runs if isinstance(run, RunRecord)]
    if len(records) != len(runs):
        records = read_runs([run.folder if isinstance(run, RunRecord) else Path(run) for run in runs])
    if (tuned := next((record for record in records if record.finetunes), None)) is not None:
        raise InputError(
            f"{tuned.folder}: a run of fine-tuning, which has no figure in common with others; see `fullrank report`"
        )
    left_out = tuple(record for record in records if record.task != records[0].task)
    records = [record for record in records if record.task == records[0].task]
    finished = [record for record in records if record.result is not None]
    measure = choose(finished or records)
    groups = seeds_of_rows(finished)
    drafts = [_row(*parts, measure) for parts in zip(row_names(groups), groups, texts_of_rows(groups), strict=True)]
    rows = tuple(_compared(row, drafts, measure) for row in drafts)
    return Comparison(rows, tuple(record for record in records if record.result is None), measure, left_out)


def parameters_by_part(record: RunRecord) -> dict[str, int]:
    """Parameters of each part as recorded, without the total; nested parts carry dotted names."""
    found: dict[str, int] = {}

    def collect(parts: Mapping[str, Any], prefix: str) -> None:
        for name, value in parts.items():
            if isinstance(value, Mapping):
                collect(value, f"{prefix}{name}.")
            elif (size := integer(value)) is not None and prefix + str(name) != "total":
                found[f"{prefix}{name}"] = size

    collect(mapping(mapping(record.result).get("parameters")), "")
    return found


def total_parameters(record: RunRecord) -> int | None:
    """The total number of parameters as recorded."""
    return integer(mapping(mapping(record.result).get("parameters")).get("total"))


def ms_per_step(record: RunRecord) -> dict[str, float]:
    """Milliseconds per training step, by phase."""
    found = mapping(record.result).get("ms_per_step")
    phases = found if isinstance(found, Mapping) else {"train": found}
    return {str(phase): value for phase, raw in phases.items() if (value := number(raw)) is not None}


def over_seeds(runs: Sequence[RunRecord], measure: Measure, checkpoint: str = "final") -> dict[str, Stat]:
    """A figure over the runs of a row, by split."""
    found = {split: over_runs(measure.final(run, split, checkpoint) for run in runs) for split in SPLITS}
    return {split: stat for split, stat in found.items() if stat is not None}


def _over_checkpoints(runs: Sequence[RunRecord], measure: Measure) -> dict[str, dict[str, Stat]]:
    return {name: found for name in ("final", "last") if (found := over_seeds(runs, measure, name))}


def unigram_of(run: RunRecord, measure: Measure) -> dict[str, float]:
    """The figures of word frequencies alone, by split."""
    return {split: value for split in SPLITS if (value := measure.unigram(run, split)) is not None}


def _signatures(runs: Sequence[RunRecord]) -> dict[str, tuple[str, ...]]:
    """How sacreBLEU computed the scores of runs, by the key of the measure."""
    finals = [mapping(mapping(mapping(run.result).get("final")).get(split)) for run in runs for split in SPLITS]
    ways = {
        score.key: tuple(dict.fromkeys(str(way) for final in finals if (way := final.get(f"{score.key}_signature"))))
        for score in SCORES
    }
    return {key: found for key, found in ways.items() if found}


def _row(name: str, runs: tuple[RunRecord, ...], text: int, measure: Measure) -> Row:
    results = [mapping(run.result) for run in runs]
    phases = dict.fromkeys(phase for run in runs for phase in ms_per_step(run))
    speeds = {phase: over_runs(ms_per_step(run).get(phase) for run in runs) for phase in phases}
    return Row(
        name=name,
        runs=runs,
        text=text,
        protocol=" and ".join(dict.fromkeys(str(result.get("protocol") or "not recorded") for result in results)),
        parameters=total_parameters(runs[0]),
        extra_parameters=None,
        figures=over_seeds(runs, measure),
        perplexity=over_seeds(runs, PERPLEXITY),
        scores={score.key: found for score in (*SCORES, ACCURACY) if (found := over_seeds(runs, score))},
        signatures=_signatures(runs),
        last=over_seeds(runs, measure, "last"),
        without_sos=_over_checkpoints(runs, WITHOUT_SOS),
        next_token=measure.higher or all(run.next_token for run in runs),
        last_position=_over_checkpoints(runs, LAST_POSITION),
        difference={},
        best=(),
        tokens_per_second=over_runs(number(result.get("tokens_per_second")) for result in results),
        ms_per_step={phase: stat for phase, stat in speeds.items() if stat is not None},
        wall_seconds=over_runs(number(result.get("wall_seconds")) for result in results),
        peak_memory_mib=over_runs(number(result.get("peak_memory_mib")) for result in results),
        paper=dict(paper_of(runs[0])),
        unigram=unigram_of(runs[0], measure),
    )


def _compared(row: Row, rows: Sequence[Row], measure: Measure) -> Row:
    """The row with what follows from its neighbours: extra parameters, differences, where it is best."""
    first = rows[0]
    extra = None
    if row.parameters is not None and first.parameters is not None:
        extra = row.parameters - first.parameters
    difference: dict[str, float] = {}
    best: list[str] = []
    judged = [other.judged for other in rows if other.text == row.text]
    for split, stat in row.judged.figures.items():
        base = first.judged.figures.get(split)
        if row is not first and base is not None and row.text == first.text:
            change = measure.difference(stat.mean, base.mean)
            difference |= {} if change is None else {split: change}
        rivals = [other.figures[split].mean for other in judged if split in other.figures]
        if len(rivals) > 1 and measure.show(stat.mean) == measure.show(measure.best(rivals)):
            best.append(split)
    return dataclasses.replace(row, extra_parameters=extra, difference=difference, best=tuple(best))
