"""Tables as plain data, shown alike by the page and the terminal; all tables of reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fullrank.config.load import flatten
from fullrank.evaluation.statistics import Interval
from fullrank.reporting import figures, finetuning
from fullrank.reporting.compare import Comparison
from fullrank.reporting.figures import BLEU, LAST_POSITION, MISSING, PERPLEXITY, TOKENISED_BLEU, Measure, Stat
from fullrank.reporting.finetuning import SERVER, UNKNOWN, Arm, Figure, Key, Paper, Task
from fullrank.reporting.resampled import Difference, Differences
from fullrank.reporting.rows import Row
from fullrank.reporting.runs import SPLITS, RunGroup, RunRecord, integer, mapping, number, scores_of

SPLIT_WORDS = {"valid": "validation", "test": "test"}
LAST_POSITION_TITLE = "Perplexity at the last position of every segment, the only one whose target is not read"
_WORDS = ("model", "arm", "Key", "split", "folder")  # columns that are not numbers


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
    `below`: a smaller line. `words`: not a column of numbers. `page_only`: not on the terminal."""

    heading: str
    group: str = ""
    terminal: str = ""
    below: str = ""
    words: bool = False
    page_only: bool = False

    @property
    def left(self) -> bool:
        return self.words or self.heading in _WORDS


@dataclass(frozen=True)
class Table:
    """A table; the first cell of every row is its name. `foot` are rows set apart. `lines_below`: the terminal shows them."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    foot: Sequence[Sequence[Cell]] = ()
    note: str = ""
    show_caption: bool = False
    lines_below: bool = False


# a row: each cell with its column, and all rows have the same columns
Cells = Iterable[tuple[Column | str, Cell | str]]


def table(caption: str, rows: Iterable[Cells], foot: Sequence[Mapping[Column, Cell]] = (), **options: Any) -> Table:
    """A table of at least one row, with the options of `Table`; `foot` has the cells that are not empty."""
    pairs = [list(row) for row in rows]
    columns = [column if isinstance(column, Column) else Column(column) for column, _ in pairs[0]]
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for _, cell in row] for row in pairs]
    feet = [[filled.get(column, Cell("")) for column in columns] for filled in foot]
    return Table(caption, columns, cells, feet, **options)


def _name(group: RunGroup) -> Cell:
    return Cell(group.name, slot=group.slot)


def _milliseconds(steps: Mapping[str, float]) -> Cell:
    """Milliseconds per step: a number, or a line for each phase with its name."""
    if len(steps) < 2:
        return Cell(figures.milliseconds(next(iter(steps.values()), None)))
    first, *others = (f"{phase} {figures.milliseconds(value)}" for phase, value in steps.items())
    return Cell(first, tuple(others))


# -- the rows compared ------------------------------------------------------------------------------------------------


def comparison_table(compared: Comparison) -> Table:
    """Rows with figures (the paper's beside ours), parameters and speed; beneath them word frequencies alone.

    What rows are judged by comes first: it is seen where there is room for little.
    """
    rows, measure, comparable = compared.rows, compared.measure, compared.comparable

    def mean(row: Row, key: str) -> float | None:
        stat = row.over_runs(key)
        return None if stat is None else stat.mean

    def cells(row: Row) -> Cells:
        mark = compared.protocol_mark(row)
        badges = [("slice", row.label)] * row.is_slice + [(f"protocol {mark}", row.protocol)] * bool(mark)
        badges += [("undertrained", f"{measure.words} above that of a unigram model")] * row.undertrained
        text = () if comparable else (row.label or "text not recorded",)
        yield "model", Cell(row.name, text, slot=row.slot, badges=tuple(badges))
        if compared.several_seeds:
            yield Column("n", page_only=True), str(len(row.runs))
        yield from _figures(compared, row)
        more = Cell("first", quiet=True) if compared.is_first(row) else figures.extra(row.extra_parameters)
        yield Column("total", "parameters", "params"), figures.count(row.parameters)
        yield Column("over first", "parameters", "+params"), more
        yield Column("tokens/s", "speed", "tokens/s"), figures.count(mean(row, "tokens_per_second"))
        steps = {phase: stat.mean for phase, stat in row.ms_per_step.items()}
        yield Column("ms/step", "speed", page_only=True), _milliseconds(steps)
        yield Column("wall time", "speed", page_only=True), figures.duration(mean(row, "wall_seconds"))

    unigrams = {(row.text, *map(measure.show, row.unigram.values())): row for row in reversed(rows) if row.unigram}
    one = comparable and len(unigrams) == 1
    foot = [
        {Column("model"): Cell("unigram", ("same vocabulary" if one else row.label,), quiet=True)}
        | {_ours(compared, split): Cell(measure.show(row.unigram.get(split)), quiet=True) for split in SPLITS}
        for _, row in sorted(unigrams.items())
    ]
    return table("Rows compared", map(cells, rows), foot, lines_below=True)


def _figures(compared: Comparison, row: Row) -> Cells:
    """For each split the paper's figure, where there is one, and ours; then chrF, perplexity or accuracy beside them."""
    measure, paper = compared.measure, compared.paper_measure
    tokenised = paper is TOKENISED_BLEU and any(row.stats(TOKENISED_BLEU) for row in compared.rows)
    for split in sorted(SPLITS, key=lambda split: split != compared.split):
        if paper is not None:
            stated = paper.stated(paper.paper_figure(row.paper, split))
            yield _heading(compared, split, paper, "paper"), Cell(stated, quiet=True)
        if tokenised:
            ours = TOKENISED_BLEU.spread(row.stats(TOKENISED_BLEU).get(split))
            yield _heading(compared, split, TOKENISED_BLEU, "ours"), ours
        change, text = row.difference.get(split), row.mark(measure.spread(row.figures.get(split)))
        below: tuple[str, ...] = () if change is None else (measure.show_difference(change),)
        below += (measure.show_interval(*ends),) if (ends := row.intervals.get(split)) else ()
        yield _ours(compared, split), Cell(text, below, strong=split in row.best)
        if compared.shows_last:
            yield _heading(compared, split, measure, "ours, last"), row.mark(measure.spread(row.last.get(split)))
    for other in {BLEU: (figures.CHRF, PERPLEXITY), figures.MASKED_PERPLEXITY: (figures.ACCURACY,)}.get(measure, ()):
        stats = {one.name: one.stats(other).get(compared.split) for one in compared.rows}
        if other is PERPLEXITY:  # none where the decoder sees later tokens
            stats |= {one.name: None for one in compared.rows if not all(run.next_token for run in one.runs)}
        if any(stats.values()):
            yield _heading(compared, compared.split, other), row.mark(other.spread(stats[row.name]))


def _ours(compared: Comparison, split: str) -> Column:
    """Column of our figures, in the measure of the comparison."""
    return _heading(compared, split, compared.measure, "ours, best" if compared.shows_last else "ours")


def _heading(compared: Comparison, split: str, measure: Measure, whose: str = "") -> Column:
    """`whose` tells columns of a split apart; where there are none but ours, the measure is the heading."""
    words, name = f"{SPLIT_WORDS[split]} {measure.words}", f"{split} {measure.short}"
    if not whose or (compared.paper_measure is None and not compared.shows_last):
        return Column(words, terminal=name)
    kind = f", {measure.short}" if measure is TOKENISED_BLEU else ""
    return Column(whose + kind, words, f"{name}\n{whose}")


def other_figures(compared: Comparison) -> Iterator[Table]:
    """Perplexity without <sos>, and at last positions of rows whose other figures are no next-token perplexities."""
    if any(row.by_checkpoint(figures.WITHOUT_SOS) for row in compared.rows):
        caption = f"{figures.WITHOUT_SOS.words.capitalize()}, as tokens are usually counted"
        yield _by_checkpoint(caption, compared, compared.rows, figures.WITHOUT_SOS)
    if rows := [row for row in compared.rows if row.by_checkpoint(LAST_POSITION)]:
        yield _by_checkpoint(LAST_POSITION_TITLE, compared, rows, LAST_POSITION)


def _by_checkpoint(caption: str, compared: Comparison, rows: Sequence[Row], measure: Measure) -> Table:
    checkpoints = {"final": ", best", "last": ", last"} if compared.shows_last else {"final": ""}

    def cells(row: Row) -> Cells:
        stats = row.by_checkpoint(measure)
        yield "model", _name(row)
        for split in SPLITS:
            for checkpoint, words in checkpoints.items():
                figure = measure.spread(stats.get(checkpoint, {}).get(split))
                yield f"{split} {measure.short}{words}", figure if measure is LAST_POSITION else row.mark(figure)

    return table(caption, map(cells, rows), show_caption=True)


def difference_table(compared: Comparison, tested: Differences) -> Table:
    """Every row against its baseline on resampled test sets; bold where the interval over sentences leaves out 0."""
    rows = {row.name: row for row in compared.rows}
    several = len({row.baseline for row in tested.rows}) > 1
    decimals = max(figures.decimals_of(row.difference, row.low, row.high) for row in tested.rows)

    def score(mean: float, runs: int) -> str:
        return figures.score(mean, decimals) + (f" (n = {runs})" if runs > 1 else "")

    def cells(row: Difference) -> Cells:
        yield "model", _name(rows[row.row])
        yield "BLEU", score(row.score, row.runs)
        if several:
            yield "against", f"{row.baseline} {score(row.baseline_score, row.baseline_runs)}"
        yield "difference", Cell(figures.points(row.difference, decimals), strong=row.decided)
        sentences = Column("95 % interval over sentences", terminal="95\u00a0%\u00a0over\nsentences")
        yield sentences, figures.interval(row.low, row.high, decimals)
        yield "p", f"{row.p_value:.3f}"
        yield Column("samples ahead", terminal="samples\nahead"), f"{row.ahead:.0%}"
        seeds = Column("95 % interval over seeds", terminal="95\u00a0%\u00a0over\nseeds")
        own = rows[row.row].against(rows[row.baseline], tested.split) if tested.split in SPLITS else None
        yield seeds, figures.interval(*(own or (row.seeds_low, row.seeds_high)))

    first = tested.rows[0]
    against = f" against {first.baseline}, {score(first.baseline_score, first.baseline_runs)}"
    split = SPLIT_WORDS[tested.split].capitalize() if tested.split in SPLITS else tested.split
    title = f"{split} BLEU{', every row against its baseline' if several else against}"
    return table(title, map(cells, tested.rows), show_caption=True)


def folded_tables(compared: Comparison) -> Iterator[Table]:
    """Tables that are closed until asked for: scores of every split, what else the paper states, single runs."""
    if compared.measure is BLEU:
        yield _scores_of_splits(compared)
    keys = {split + ending for measure in figures.MEASURES for ending in measure.paper for split in SPLITS} | {"metric"}
    others = list(dict.fromkeys(str(key) for row in compared.rows for key in row.paper if key not in keys))
    if not set(others) <= {"parameters", "extra_parameters"}:

        def cells(row: Row) -> Cells:
            yield "model", _name(row)
            for key in others:
                yield figures.readable(key), figures.stated(row.paper.get(key), figures.plain)

        yield table("What else the paper states", map(cells, compared.rows))
    yield _single_runs(compared)


def _scores_of_splits(compared: Comparison) -> Table:
    """Scores of translations on every split, and their length relative to the references."""
    measures = [score for score in figures.SCORES if any(row.stats(score) for row in compared.rows)]

    def cells(split: str, row: Row) -> Cells:
        yield "model", _name(row)
        yield "split", split
        for measure in measures:
            yield measure.words, measure.spread(figures.over_runs(measure.final(run, split) for run in row.runs))
        perplexity = figures.over_runs(PERPLEXITY.final(run, split) if run.next_token else None for run in row.runs)
        yield PERPLEXITY.words, PERPLEXITY.spread(perplexity)
        ratio = figures.over_runs(run.final(split, "length_ratio") for run in row.runs)
        yield "length ratio", figures.spread(ratio, lambda value: f"{value:.3f}")

    splits = (*SPLITS, *dict.fromkeys(split for run in compared.runs for split in run.other_splits))
    note = "Length ratio: words of the translations over words of the references."
    rows = [cells(split, row) for split in splits for row in compared.rows]
    return table("Every figure of the translations", rows, note=note)


def _single_runs(compared: Comparison) -> Table:
    """Every finished run."""

    def cells(row: Row, run: RunRecord) -> Cells:
        memory = number(run.get("peak_memory_mib"))
        yield "model", _name(row)
        yield "seed", MISSING if run.seed is None else str(run.seed)
        for split, words in SPLIT_WORDS.items():
            yield words, row.mark(compared.measure.show(compared.measure.final(run, split)))
        yield "best at step", figures.count(integer(run.get("best", "step")))
        yield "steps", figures.count(integer(run.get("steps")))
        yield "tokens seen", figures.count(integer(run.get("tokens_seen")))
        yield "tokens/s", figures.count(number(run.get("tokens_per_second")))
        yield "ms/step", _milliseconds(run.ms_per_step)
        yield "wall time", figures.duration(number(run.get("wall_seconds")))
        yield "peak memory", MISSING if memory is None else f"{memory:,.0f} MiB"
        yield "folder", str(run.folder)

    rows = [cells(row, run) for row in compared.rows for run in row.runs]
    return table(f"Single runs ({len(rows)})", rows)


def parts_of_parameters(row: Row) -> dict[str, int]:
    """Parameters of each part, without the total; nested parts have dotted names."""
    sizes = {key: integer(size) for key, size in flatten(mapping(row.get("parameters"))).items() if key != "total"}
    return {key: size for key, size in sizes.items() if size is not None}


def parameters_table(rows: Sequence[Row], names: Sequence[str]) -> Table:
    """Exact parameters by part."""

    def cells(row: Row) -> Cells:
        sizes = parts_of_parameters(row)
        yield "model", _name(row)
        yield from ((figures.readable(name), figures.count(sizes.get(name))) for name in names)
        yield "total", figures.count(row.parameters)

    return table("Parameters by part", map(cells, rows))


# -- fine-tuning ------------------------------------------------------------------------------------------------------


def scores_table(task: Task, key: Key) -> Table:
    """A score of every arm, beside the paper's, against its baseline."""
    arms = [arm for arm in task.arms if key in arm.figures]
    paper = any(arm.figures[key].paper for arm in arms)

    def cells(arm: Arm) -> Cells:
        figure = arm.figures[key]
        yield "arm", _name(arm)
        yield "n", str(figure.stat.count)
        yield "ours", figure.words
        if paper:
            yield "paper", _papers(figure.paper)
        if task.compares:
            yield from _against(figure)

    unknown = task.compares and not any(arm.figures[key].stat.count > 1 for arm in arms)
    note = "Unknown: at least two seeds in both arms are needed." if unknown else ""
    return table(task.caption(key), map(cells, arms), note=note, show_caption=True, lines_below=True)


def _papers(paper: Paper | None) -> Cell:
    """`59.85 ± 1.23`, `52.6` of the server."""
    if paper is None:
        return Cell("")
    mean = f"{paper.mean:.1f}" if round(paper.mean, 1) == paper.mean else f"{paper.mean:g}"
    if paper.deviation is not None:
        mean = figures.spread(Stat(paper.mean, paper.deviation, 2), figures.score)
    return Cell(mean, ("(server)",) if paper.of == SERVER else (), quiet=True)


def _against(figure: Figure) -> Cells:
    """An arm against its baseline: the difference of means, of deviations, and if deviations are equal."""
    columns = (
        Column("difference", below="95 % interval"),
        Column("change of deviation", below="95 % interval"),
        Column("p of equal deviations", terminal="p of equal\ndeviations", below="Brown-Forsythe", page_only=True),
    )
    if (against := figure.against) is None:
        return zip(columns, (Cell("baseline", quiet=True), Cell(""), Cell("")), strict=True)
    intervals, changes, decimals = ["interval unknown"], list[str](), against.decimals
    if against.interval is not None:
        paired = f"{interval_words(against.paired, decimals)} paired" if against.pairs else "other seeds, not paired"
        intervals = [f"{interval_words(against.welch, decimals)} Welch", paired]
    if against.deviation_change_percent is not None:
        by_f, bootstrap = map(change_words, (against.deviation_f_interval, against.deviation_bootstrap))
        changes = [f"{by_f} by F", f"{bootstrap} bootstrap"]
    if figure.paper is not None and figure.paper.deviation_change_percent is not None:
        changes.append(f"{change_words(figure.paper.deviation_change_percent)} in the paper")
    p = against.brown_forsythe_p
    return zip(columns, (
        Cell(figures.points(against.difference, decimals), tuple(intervals), strong=bool(against.decided)),
        Cell(change_words(against.deviation_change_percent), tuple(changes)),
        Cell(UNKNOWN if p is None else "below 0.001" if p < 0.001 else f"{p:.3f}"),
    ), strict=True)  # fmt: skip


def interval_words(interval: Interval | None, decimals: int = 2) -> str:
    """`−0.31 to +1.20`."""
    return UNKNOWN if interval is None else figures.interval(*interval, decimals)


def change_words(percent: float | Interval | None) -> str:
    """`−30.5 %`, and of an interval `−71.2 to +130 %`."""
    if percent is None:
        return UNKNOWN
    values = percent if isinstance(percent, Interval) else (percent,)
    sizes = [f"{abs(value):.1f}" if abs(value) < 99.95 else f"{abs(value):,.0f}" for value in values]
    return f"{' to '.join(figures.signed(value < 0, size) for value, size in zip(values, sizes, strict=True))} %"


def arms_table(task: Task) -> Table:
    """Settings of the arms."""

    def cells(arm: Arm) -> Iterator[tuple[str, Cell | str]]:
        run = arm.runs[0]
        train, mixing = mapping(run.config.get("train")), integer(run.get("parameters", "mixing"))
        rate = number(train.get("mixing_learning_rate")) or number(train.get("learning_rate"))
        epochs = sorted({round(value, 2) for run in arm.runs if (value := number(run.get("epochs"))) is not None})
        seconds = figures.over_runs(number(run.get("wall_seconds")) for run in arm.runs)
        yield "arm", _name(arm)
        yield "encoder", finetuning.encoder_of(run)
        yield "attention", finetuning.attention_words(run) or "its own"
        yield "mixing parameters", figures.count(mixing)
        yield "mixing learning rate", f"{rate:g}" if mixing and rate is not None else ""
        yield "steps", arm.numbers_words("steps")
        yield "epochs", figures.listed(f"{value:g}" for value in epochs) or UNKNOWN
        yield "seeds", arm.seeds_words
        yield "time", "" if seconds is None else figures.duration(seconds.mean)

    def broken(heading: str) -> Column:
        return Column(heading, terminal=heading.replace(" ", "\n"), words=heading in ("encoder", "attention"))

    rows = [[(broken(heading), cell) for heading, cell in cells(arm)] for arm in task.arms]
    return table("The arms", rows, show_caption=True, lines_below=True)


def tuning_runs(task: Task) -> Table:
    """Every finished run of a task."""

    def cells(arm: Arm, run: RunRecord) -> Cells:
        scores, loss = scores_of(run), run.final(task.keys[0][0], "loss")
        yield "model", _name(arm)
        yield "seed", MISSING if run.seed is None else str(run.seed)
        for split, metric in task.keys:
            yield f"{split} {finetuning.metric_words(metric)}", figures.score(scores.get((split, metric)))
        yield "loss", MISSING if loss is None else f"{loss:.4f}"
        yield "steps", figures.count(integer(run.get("steps")))
        yield "ms/step", _milliseconds(run.ms_per_step)
        yield "wall time", figures.duration(number(run.get("wall_seconds")))
        yield "folder", str(run.folder)

    return table("Single runs", [cells(arm, run) for arm in task.arms for run in arm.runs])


# -- on the terminal --------------------------------------------------------------------------------------------------


def print_table(table: Table, console: Console) -> None:
    """Print a table, narrow where it would not fit; on a terminal the last columns are left out where it still does not.

    A file takes lines of any length, a terminal breaks them inside words.
    """
    shown = [column for column in table.columns if not column.page_only]
    left_out: list[Column] = []
    for narrow in range(3):
        if _width(console, rich := _rich(table, shown, narrow)) <= console.width:
            break
    while console.is_terminal and _width(console, rich) > console.width and len(shown) > 2:
        left_out.insert(0, shown.pop())
        rich = _rich(table, shown, narrow)
    rich.width = _width(console, rich)  # its own, even where the console is narrower: no figure is cut off
    console.print(rich, soft_wrap=True)
    if left_out:
        names = figures.listed(" ".join((column.terminal or column.heading).split()) for column in left_out)
        console.print(Text(f"Left out in {console.width} columns: {names}; the page has them.", "dim"))


def _width(console: Console, table: RichTable) -> int:
    return console.measure(table, options=console.options.update(max_width=1000)).maximum


def _rich(table: Table, columns: Sequence[Column], narrow: int) -> RichTable:
    """Some columns of a table. `narrow` 1 breaks headings, 2 sets deviations beneath their means, and breaks intervals."""
    rich = RichTable(
        title=Text(table.caption) if table.show_caption else None,
        title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 0 if narrow and table.lines_below else 1, 0, 0) if narrow or table.lines_below else (0, 1),
    )  # fmt: skip
    shown = [index for index, column in enumerate(table.columns) if column in columns]
    for index in shown:
        column = table.columns[index]
        heading = column.terminal or column.heading
        heading = heading.replace(" ", "\n") if narrow and not column.below else heading
        below = f"\n{column.below}" if column.below and table.lines_below else ""
        rich.add_column(
            Text(heading + below),
            justify="left" if column.left else "right",
            no_wrap=not (column.left and table.lines_below),
            overflow="fold",
            max_width=18 if index == 0 and narrow and table.lines_below else None,
        )
    for row in (*table.rows, *table.foot):
        rich.add_row(*(_text(row[index], narrow > 1, table.lines_below) for index in shown))
    return rich


def _text(cell: Cell, broken: bool, lines_below: bool) -> Text:
    text, below = cell.text, cell.below
    if broken:
        text, below = text.replace(" ±", "\n±"), tuple(line.replace(" to ", " to\n") for line in below)
    if cell.badges:
        text += f" ({', '.join(badge for badge, _ in cell.badges)})"
    style = "bold green" if cell.strong else "dim" if cell.quiet else ""
    return Text("\n".join((text, *below)) if lines_below else text, style=style)
