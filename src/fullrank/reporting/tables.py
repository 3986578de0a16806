"""Tables as plain data, shown alike by the page and the terminal; and all tables of a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fullrank.reporting import format
from fullrank.reporting.compare import MARK, Comparison, Row, Stats
from fullrank.reporting.format import MISSING, Stat, over_runs
from fullrank.reporting.measure import (
    ACCURACY,
    BITS_PER_BYTE,
    BITS_PER_CHARACTER,
    BLEU,
    CHRF,
    LAST_POSITION,
    MASKED_PERPLEXITY,
    MEASURES,
    PERPLEXITY,
    SCORES,
    TOKENISED_BLEU,
    WITHOUT_SOS,
    Measure,
)
from fullrank.reporting.runs import SPLITS, integer, number
from fullrank.reporting.summary import LAST_POSITION_TITLE, NOT_NEXT_TOKEN, SPLIT_WORDS
from fullrank.reporting.translations import Differences, interval


@dataclass(frozen=True)
class Cell:
    """Text of a cell, with smaller lines below it. A name has the colour of its row (`slot`) and badges (text, title)."""

    text: str
    below: tuple[str, ...] = ()
    strong: bool = False
    quiet: bool = False
    slot: int | None = None
    badges: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Column:
    """Heading of a column. `group` stands above neighbouring columns that share it; `terminal`: a shorter heading there;
    `below`: a smaller line. `only`: shown on the page or the terminal alone."""

    heading: str
    group: str = ""
    terminal: str = ""
    below: str = ""
    left: bool = False
    only: Literal["", "page", "terminal"] = ""


@dataclass(frozen=True)
class Table:
    """A table; the first cell of every row is its name. `foot` are rows set apart. `lines_below`: the terminal shows them."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    foot: tuple[tuple[Cell, ...], ...] = ()
    note: str = ""
    show_caption: bool = False
    lines_below: bool = False


def name_of(name: str, slot: int, badges: Sequence[tuple[str, str]] = (), below: Sequence[str] = ()) -> Cell:
    """The first cell of a row."""
    return Cell(name, tuple(below), slot=slot, badges=tuple(badges))


def texts(*values: str) -> tuple[Cell, ...]:
    """Plain cells."""
    return tuple(map(Cell, values))


def plain_table(caption: str, heads: Sequence[str], rows: Iterable[tuple[str, int, Sequence[str | Cell]]]) -> Table:
    """A table of texts; a row is its name, its colour and what stands under each heading. Words stand at the left."""
    words = ("split", "folder", "encoder", "attention")
    columns = [Column("model", left=True), *(Column(head, left=head in words) for head in heads)]
    body = [
        (name_of(name, slot), *(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells))
        for name, slot, cells in rows
    ]
    return Table(caption, tuple(columns), tuple(body))


# -- the rows compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Figures:
    """A column of figures: the paper's, ours (by which rows are judged), of the last checkpoint, or in another measure.

    `whose` tells columns of a split apart: `paper`, `ours, best` ..; empty for a single column.
    """

    split: str
    measure: Measure
    kind: Literal["paper", "judged", "last", "other"]
    whose: str = ""

    def stat(self, row: Row) -> Stat | None:
        if self.kind == "judged":
            return row.figures.get(self.split)
        if self.kind == "last":
            return row.last.get(self.split)
        if self.measure is PERPLEXITY:  # beside BLEU: none where the decoder sees later tokens
            return row.perplexity.get(self.split) if all(run.next_token for run in row.runs) else None
        return row.scores.get(self.measure.key, {}).get(self.split)

    def cell(self, row: Row, measure: Measure) -> Cell:
        if self.kind == "paper":
            return Cell(self.measure.stated(self.measure.of_paper(row.paper, self.split)), quiet=True)
        text = row.mark(self.measure.spread(self.stat(row)))
        if self.kind != "judged":
            return Cell(text)
        change = row.difference.get(self.split)
        return Cell(text, () if change is None else (measure.show_difference(change),), strong=self.split in row.best)

    def unigram(self, row: Row) -> str:
        return self.measure.show(row.unigram.get(self.split)) if self.kind == "judged" else ""


def _figure_columns(compared: Comparison) -> list[_Figures]:
    """For each split the paper's figure, where there is one, and ours; then chrF, perplexity or accuracy beside them."""
    columns = []
    measure, paper = compared.measure, compared.paper_measure
    for split in SPLITS:
        if paper is not None:
            columns.append(_Figures(split, paper, "paper", "paper"))
        if paper is TOKENISED_BLEU and any(paper.key in row.scores for row in compared.rows):
            columns.append(_Figures(split, paper, "other", "ours"))
        columns.append(_Figures(split, measure, "judged", "ours, best" if compared.shows_last else "ours"))
        if compared.shows_last:
            columns.append(_Figures(split, measure, "last", "ours, last"))
    beside = {BLEU: (CHRF, PERPLEXITY), MASKED_PERPLEXITY: (ACCURACY,)}.get(measure, ())
    others = [_Figures(compared.split, other, "other") for other in beside]
    return columns + [column for column in others if any(column.stat(row) is not None for row in compared.rows)]


def comparison_table(compared: Comparison, title: str = "Rows compared") -> Table:
    """Rows with parameters, figures (the paper's beside ours) and speed; beneath them word frequencies alone."""
    figures, rows = _figure_columns(compared), compared.rows
    alone = len([column for column in figures if column.whose]) == len(SPLITS)  # nothing but ours
    columns = [
        Column("model", left=True),
        *([Column("n", only="page")] if compared.several_seeds else []),
        Column("total", "parameters", "params"),
        Column("over first", "parameters", "+params"),
        *(_heading(column, alone) for column in figures),
        Column("tokens/s", "speed", "tokens/s"),
        Column("ms/step", "speed", only="page"),
        Column("wall time", "speed", only="page"),
    ]
    seeds = compared.several_seeds
    body = [
        (
            name_of(
                row.name,
                slot,
                _badges(compared, row),
                [] if compared.comparable else [row.label or "text not recorded"],
            ),
            *(texts(str(len(row.runs))) if seeds else ()),
            Cell(format.count(row.parameters)),
            Cell("first" if row is rows[0] else format.extra(row.extra_parameters), quiet=row is rows[0]),
            *(column.cell(row, compared.measure) for column in figures),
            Cell(format.count(_mean(row.over_runs("tokens_per_second")))),
            _by_phase({phase: stat.mean for phase, stat in row.ms_per_step.items()}),
            Cell(format.duration(_mean(row.over_runs("wall_seconds")))),
        )
        for slot, row in enumerate(rows)
    ]
    by_text = {row.text: row for row in reversed(rows) if row.unigram}
    foot = [
        (
            Cell("unigram", ("same vocabulary" if compared.comparable else row.label,), quiet=True),
            *texts("", "", *([""] if seeds else [])),
            *(Cell(column.unigram(row), quiet=True) for column in figures),
            *texts("", "", ""),
        )
        for _, row in sorted(by_text.items())
    ]
    return Table(title, tuple(columns), tuple(body), tuple(foot))


def _heading(column: _Figures, alone: bool) -> Column:
    split, measure = SPLIT_WORDS[column.split], column.measure
    name = f"{column.split} {measure.short}"
    if alone or not column.whose:
        return Column(f"{split} {measure.words}", terminal=name)
    whose = column.whose + (f", {measure.short}" if measure is TOKENISED_BLEU else "")
    return Column(whose, f"{split} {measure.words}", f"{name}\n{column.whose}")


def _badges(compared: Comparison, row: Row) -> list[tuple[str, str]]:
    mark = compared.protocol_mark(row)
    slice_ = [("slice", row.label)] if row.is_slice else []
    return slice_ + ([(f"protocol {mark}", row.protocol)] if mark else [])


def _by_phase(steps: Mapping[str, float]) -> Cell:
    """Milliseconds per step: a number, or a line for each phase with its name."""
    if len(steps) < 2:
        return Cell(format.milliseconds(next(iter(steps.values()), None)))
    first, *others = (f"{phase} {format.milliseconds(value)}" for phase, value in steps.items())
    return Cell(first, tuple(others))


def _mean(stat: Stat | None) -> float | None:
    return None if stat is None else stat.mean


def notes_of(compared: Comparison) -> list[str]:
    """How to read the table of rows."""
    measure = compared.measure
    notes = [f"{measure.title}: {measure.comparative} is better; the {measure.extreme} of comparable rows is set bold."]
    if any(row.difference for row in compared.rows):
        whose, unit = "their" if measure.in_bits else "its", ", in points" if measure.higher else ""
        notes.append(f"Beneath {measure.article or 'the '}{measure.words}: {whose} difference to the first row{unit}.")
    if measure is BLEU:
        notes.append("Perplexity is per target token.")
    if compared.several_seeds:
        notes.append(
            "Rows with several seeds (n) show mean ± sample standard deviation; the mean is that of the runs' "
            f"{measure.plural}. Speeds and times are means."
        )
    if compared.paper_measure is not None:
        notes.append("“Paper” is the published figure, as the recipe states it.")
    if any(row.marked for row in compared.rows):
        notes.append(f"{MARK} {NOT_NEXT_TOKEN}; such a figure compares with no other, and is never set bold.")
    if measure is BITS_PER_BYTE and compared.states(BITS_PER_CHARACTER):
        notes.append(
            "The paper calls its figure bits per character; where the corpus is bytes (enwik8), a character is a byte."
        )
    return notes


# -- what stands beneath it ---------------------------------------------------------------------------------------------


def other_figures(compared: Comparison) -> list[Table]:
    """Perplexity without <sos>, and at last positions of rows whose other figures are no next-token perplexities."""
    tables = []
    if any(row.without_sos for row in compared.rows):
        caption = f"{WITHOUT_SOS.words.capitalize()}, as tokens are usually counted"
        found = [(slot, row, row.without_sos) for slot, row in enumerate(compared.rows)]
        tables.append(_by_checkpoint(caption, compared, found, WITHOUT_SOS))
    if last := [(slot, row, row.last_position) for slot, row in enumerate(compared.rows) if row.last_position]:
        tables.append(_by_checkpoint(LAST_POSITION_TITLE, compared, last, LAST_POSITION))
    return tables


def _by_checkpoint(
    caption: str, compared: Comparison, rows: Sequence[tuple[int, Row, Mapping[str, Stats]]], measure: Measure
) -> Table:
    checkpoints = {"final": ", best", "last": ", last"} if compared.shows_last else {"final": ""}
    places = [(split, checkpoint) for split in SPLITS for checkpoint in checkpoints]
    heads = [f"{split} {measure.short}{checkpoints[checkpoint]}" for split, checkpoint in places]
    body = []
    for slot, row, stats in rows:
        figures = [measure.spread(stats.get(checkpoint, {}).get(split)) for split, checkpoint in places]
        body.append((row.name, slot, figures if measure is LAST_POSITION else list(map(row.mark, figures))))
    return dataclasses.replace(plain_table(caption, heads, body), show_caption=True)


def differences_tables(compared: Comparison) -> list[Table]:
    """Every row against its baseline on resampled test sets; bold where the interval over sentences leaves out 0."""
    slots = {row.name: slot for slot, row in enumerate(compared.rows)}
    return [_differences_table(tested, slots) for tested in compared.differences]


def _differences_table(tested: Differences, slots: Mapping[str, int]) -> Table:
    several = len(tested.baselines) > 1
    split, first = SPLIT_WORDS.get(tested.split, tested.split).capitalize(), tested.rows[0]
    if tested.split not in SPLITS:
        split = tested.split
    against = "every row against its baseline" if several else (
        f"against {first.baseline}, {_mean_and_runs(first.baseline_score, first.baseline_runs)}")  # fmt: skip
    heads = [
        Column("model", left=True), Column("BLEU"), *([Column("against")] if several else []), Column("difference"),
        Column("95 % interval over sentences", terminal="95 % over\nsentences"), Column("p"),
        Column("samples ahead", terminal="samples\nahead"), Column("95 % interval over seeds", terminal="95 % over\nseeds"),
    ]  # fmt: skip
    body = [
        (
            name_of(row.row, slots[row.row]),
            Cell(_mean_and_runs(row.score, row.runs)),
            *(texts(f"{row.baseline} {_mean_and_runs(row.baseline_score, row.baseline_runs)}") if several else ()),
            Cell(format.points(row.difference), strong=row.decided),
            *texts(
                interval(row.low, row.high), f"{row.p_value:.3f}", f"{row.ahead:.0%}",
                interval(row.seeds_low, row.seeds_high),
            ),
        )
        for row in tested.rows
    ]  # fmt: skip
    title = f"{split} BLEU{', ' if several else ' '}{against}"
    return Table(title, tuple(heads), tuple(body), show_caption=True)


def _mean_and_runs(score: float, runs: int) -> str:
    return BLEU.show(score) + (f" (n = {runs})" if runs > 1 else "")


def differences_notes(compared: Comparison) -> list[str]:
    """How tables of differences were made, and what they do not say."""
    if not (tests := compared.differences):
        return []
    sizes = format.listed(f"{tested.sentences:,} {tested.split} sentences" for tested in tests)
    left_out = dict.fromkeys(sentence for tested in tests for sentence in tested.left_out)
    return [
        "A difference is set bold where its interval over sentences leaves out 0. "
        f"Paired bootstrap (Koehn 2004): {tests[0].samples:,} samples of the {sizes}, the same for all rows, seed "
        f"{tests[0].seed}; of a row with several runs (n) the mean of their BLEU.",
        "The interval over sentences and p are about these very models on other sentences like these. The interval over seeds "
        "(Welch) is about training again; two runs a row leave it wide.",
        *(f"Left out: {sentence}." for sentence in left_out),
    ]


def every_score(compared: Comparison) -> Table:
    """Of translations, on every split: BLEU, chrF, perplexity, and their length for their references."""
    measures = [score for score in SCORES if any(score.key in row.scores for row in compared.rows)]
    heads = ["split", *(score.words for score in measures), PERPLEXITY.words, "length ratio"]
    body = []
    for split in (*SPLITS, *dict.fromkeys(split for run in compared.runs for split in run.other_splits)):
        for slot, row in enumerate(compared.rows):
            scores = [score.spread(over_runs(score.final(run, split) for run in row.runs)) for score in measures]
            perplexity = over_runs(PERPLEXITY.final(run, split) if run.next_token else None for run in row.runs)
            ratio = over_runs(run.final(split, "length_ratio") for run in row.runs)
            figures = [PERPLEXITY.spread(perplexity), format.spread(ratio, lambda value: f"{value:.3f}")]
            body.append((row.name, slot, [split, *scores, *figures]))
    note = "Length ratio: words of the translations over words of the references."
    return dataclasses.replace(plain_table("Every figure of the translations", heads, body), note=note)


def rest_of_paper(rows: Sequence[Row]) -> Table | None:
    """Statements of the recipe about the paper besides figures; None if they are parameters at most."""
    figures = {split + ending for measure in MEASURES for ending in measure.paper for split in SPLITS} | {"metric"}
    keys = list(dict.fromkeys(str(key) for row in rows for key in row.paper if key not in figures))
    if set(keys) <= {"parameters", "extra_parameters"}:
        return None
    body = [
        (row.name, slot, [format.stated(row.paper.get(key), format.plain) for key in keys])
        for slot, row in enumerate(rows)
    ]
    return plain_table("What else the paper states", list(map(format.readable, keys)), body)


def single_runs(compared: Comparison) -> Table:
    """Every finished run."""
    heads = ["best at step", "steps", "tokens seen", "tokens/s", "ms/step", "wall time", "peak memory", "folder"]
    measure = compared.measure
    body: list[tuple[str, int, list[str | Cell]]] = []
    for slot, row in enumerate(compared.rows):
        for run in row.runs:
            memory = number(run.of("peak_memory_mib"))
            body.append((row.name, slot, [
                MISSING if run.seed is None else str(run.seed),
                *(row.mark(measure.show(measure.final(run, split))) for split in SPLITS),
                format.count(integer(run.of("best", "step"))),
                format.count(integer(run.of("steps"))),
                format.count(integer(run.of("tokens_seen"))),
                format.count(number(run.of("tokens_per_second"))),
                _by_phase(run.ms_per_step),
                format.duration(number(run.of("wall_seconds"))),
                MISSING if memory is None else f"{memory:,.0f} MiB",
                str(run.folder),
            ]))  # fmt: skip
    return plain_table(f"Single runs ({len(body)})", ["seed", *SPLIT_WORDS.values(), *heads], body)


def parts_of_parameters(rows: Sequence[Row]) -> list[dict[str, int]]:
    """Parameters of each part of each row, without the total; nested parts have dotted names."""

    def collect(parts: Mapping[str, object], prefix: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, value in parts.items():
            if isinstance(value, Mapping):
                sizes |= collect(value, f"{prefix}{name}.")
            elif (size := integer(value)) is not None and f"{prefix}{name}" != "total":
                sizes[f"{prefix}{name}"] = size
        return sizes

    return [
        collect(recorded if isinstance(recorded := row.runs[0].of("parameters"), Mapping) else {}, "") for row in rows
    ]


def parameters_table(rows: Sequence[Row], names: Sequence[str]) -> Table:
    """Exact parameters by part."""
    body = [
        (row.name, slot, [*(format.count(sizes.get(name)) for name in names), format.count(row.parameters)])
        for slot, (row, sizes) in enumerate(zip(rows, parts_of_parameters(rows), strict=True))
    ]
    return plain_table("Parameters by part", [*map(format.readable, names), "total"], body)
