"""Runs of fine-tuning in words and as tables, for the page and the terminal alike."""

from __future__ import annotations

from collections.abc import Sequence

from fullrank.evaluation.statistics import SAMPLES, SEED, Interval
from fullrank.reporting import format
from fullrank.reporting.finetuning import (
    UNKNOWN,
    Arm,
    Figure,
    Key,
    Paper,
    Task,
    Tuning,
    attention_words,
    counts_words,
    distinct_numbers,
    encoder_of,
)
from fullrank.reporting.format import MISSING, Stat, over_runs
from fullrank.reporting.runs import integer, mapping, number, scores_of
from fullrank.reporting.summary import Summary
from fullrank.reporting.tables import Cell, Column, Table, name_of, plain_table, texts

_METRICS = {
    "matthews_correlation": "Matthews correlation",
    "f1": "F1",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
}


def metric_words(metric: str) -> str:
    """Name of a score."""
    return _METRICS.get(metric, format.readable(metric))


def caption_of(task: Task, key: Key) -> str:
    """`glue/cola, dev, 1,043 examples: Matthews correlation x 100`."""
    split, metric = key
    return f"{task.name}, {split}, {task.examples(split)}: {metric_words(metric)} x 100"


def summarize(found: Tuning) -> Summary:
    """Every arm against its baseline; unequal terms are warnings, other remarks and how figures were made are cautions."""
    sentences = [
        sentence
        for task in found.tasks
        for arm in task.arms
        for sentence in (_difference_sentence(task, arm), _deviation_sentence(task, arm))
        if sentence
    ] or [
        f"{task.name}: {metric_words(key[1])} x 100 of {arm.name}, {key[0]}: {ours(figure)}."
        for task in found.tasks
        for key in task.keys[:1]
        for _, arm, figure in task.figures(key)
    ]
    remarks = [f"{task.name}: {remark}" for task in found.tasks for remark in task.remarks]
    warnings = [remark for remark in remarks if "Not equal terms" in remark]
    cautions = [remark for remark in remarks if remark not in warnings] + _how(found)
    headline, *others = sentences or ["No run has finished."]
    return Summary(headline, tuple(others), tuple(warnings), tuple(cautions))


def _difference_sentence(task: Task, arm: Arm) -> str:
    """The headline score of an arm against its baseline."""
    key, figure = task.headline(arm) or (None, None)
    if key is None or figure is None or (against := figure.against) is None:
        return ""
    beginning = (
        f"{task.name}: {metric_words(key[1])} of {arm.name} is {format.score(figure.stat.mean)}, "
        f"{format.points(against.difference)} to {against.baseline}"
    )
    if against.interval is None:
        return f"{beginning}; whether that is more than chance cannot be told from so few seeds."
    kind = "paired over seeds" if against.paired else "Welch"
    verdict = "more than the choice of seeds" if against.decided else "not decided by these seeds"
    return f"{beginning} (95 % {_interval(against.interval)}, {kind}): {verdict}."


def _deviation_sentence(task: Task, arm: Arm) -> str:
    """The deviation over seeds against the baseline's; empty where nothing can be said."""
    _, figure = task.headline(arm) or (None, None)
    against = None if figure is None else figure.against
    if against is None or against.change is None or against.f_interval is None:
        return ""
    decided = against.f_interval.low > 0 or against.f_interval.high < 0
    verdict = "" if decided else ", so these seeds do not decide whether it rises or falls"
    return (
        f"{task.name}: its deviation over seeds changed by {_change(against.change)} against {against.baseline} "
        f"(95 % {_change_interval(against.f_interval)}){verdict}."
    )


def _how(found: Tuning) -> list[str]:
    """How the figures were made, and what they do not say."""
    if not any(task.compares for task in found.tasks):
        return []
    figures = [figure for task in found.tasks for arm in task.arms for figure in arm.figures.values()]
    server = "“Server” are scores of the GLUE test server: of other examples than ours, not to be set beside them."
    return [
        "Mean ± sample standard deviation (n − 1) over n seeds. Differences are of means, with 95 % intervals over seeds: "
        "Welch's for independent seeds; paired (Student) where both arms have the same seeds.",
        "Deviation: 100 (s / s of the baseline − 1) as in Skip Cross-head, Table 4. Its first interval is from the F "
        f"distribution, exact for normal scores; the second from {SAMPLES:,} samples of the seeds (percentiles, seed {SEED}), "
        "too narrow for few seeds.",
        *([server] if any(figure.paper and figure.paper.server for figure in figures) else []),
    ]


def protocol_lines(task: Task) -> list[str]:
    """How the figures of a task were made, each way once."""
    return list(dict.fromkeys(
        f"{task.name}: {arm.result.get('protocol') or UNKNOWN}; the {arm.result.get('checkpoint') or UNKNOWN} checkpoint; "
        f"trained on {task.examples('train', arm)}"
        for arm in task.arms
    ))  # fmt: skip


def ours(figure: Figure) -> str:
    return format.spread(figure.stat, format.score)


def _papers(paper: Paper | None) -> Cell:
    """`59.85 ± 1.23`, `52.6` of the server."""
    if paper is None:
        return Cell("")
    mean = f"{paper.mean:.1f}" if round(paper.mean, 1) == paper.mean else f"{paper.mean:g}"
    shown = mean if paper.deviation is None else format.spread(Stat(paper.mean, paper.deviation, 2), format.score)
    return Cell(shown, ("(server)",) if paper.server else (), quiet=True)


def _interval(interval: Interval | None) -> str:
    return UNKNOWN if interval is None else f"{format.points(interval.low)} to {format.points(interval.high)}"


def _change(percent: float | None) -> str:
    """`−30.5 %`."""
    return UNKNOWN if percent is None else f"{_signed(percent)} %"


def _change_interval(interval: Interval | None) -> str:
    """`−71.2 to +130 %`."""
    return UNKNOWN if interval is None else f"{_signed(interval.low)} to {_signed(interval.high)} %"


def _signed(percent: float) -> str:
    return format.signed(percent < 0, f"{abs(percent):.1f}" if abs(percent) < 99.95 else f"{abs(percent):,.0f}")


def scores_table(task: Task, key: Key) -> Table:
    """A score of every arm, beside the paper's, against its baseline."""
    figures = task.figures(key)
    paper = any(figure.paper for _, _, figure in figures)
    columns = [Column("arm", left=True), Column("n"), Column("ours"), *([Column("paper")] if paper else [])]
    if task.compares:
        columns += [
            Column("difference", below="95 % interval"),
            Column("change of deviation", below="95 % interval"),
            Column("p of equal deviations", terminal="p of equal\ndeviations", below="Brown-Forsythe", only="page"),
        ]
    rows = [
        (
            name_of(arm.name, slot),
            *texts(str(figure.stat.count), ours(figure)),
            *([_papers(figure.paper)] if paper else []),
            *(_against_cells(figure) if task.compares else ()),
        )
        for slot, arm, figure in figures
    ]
    return Table(caption_of(task, key), tuple(columns), tuple(rows), show_caption=True, lines_below=True)


def _against_cells(figure: Figure) -> tuple[Cell, ...]:
    against = figure.against
    if against is None:
        return (Cell("baseline", quiet=True), *texts("", ""))
    intervals: list[str] = ["interval unknown"]
    if against.interval is not None:
        intervals = [f"{_interval(against.welch)} Welch"]
        intervals.append(f"{_interval(against.paired)} paired" if against.pairs else "other seeds, not paired")
    changes: list[str] = []
    if against.change is not None:
        changes = [f"{_change_interval(against.f_interval)} by F", f"{_change_interval(against.bootstrap)} bootstrap"]
    if figure.papers_change is not None:
        changes.append(f"{_change(figure.papers_change)} in the paper")
    p = UNKNOWN if against.p is None else "below 0.001" if against.p < 0.001 else f"{against.p:.3f}"
    return (
        Cell(format.points(against.difference), tuple(intervals), strong=bool(against.decided)),
        Cell(_change(against.change), tuple(changes)),
        Cell(p),
    )


def arms_table(task: Task) -> Table:
    """What the arms are."""
    heads = ["encoder", "attention", "mixing parameters", "mixing learning rate", "steps", "epochs", "seeds", "time"]
    rows = []
    for slot, arm in enumerate(task.arms):
        run = arm.runs[0]
        train = mapping(run.config.get("train"))
        mixing = integer(run.of("parameters", "mixing"))
        rate = number(train.get("mixing_learning_rate")) or number(train.get("learning_rate"))
        epochs = sorted({round(value, 2) for run in arm.runs if (value := number(run.of("epochs"))) is not None})
        seconds = over_runs(number(run.of("wall_seconds")) for run in arm.runs)
        rows.append((
            name_of(arm.name, slot),
            *texts(
                encoder_of(run), attention_words(run) or "its own", format.count(mixing),
                f"{rate:g}" if mixing and rate is not None else "", counts_words(distinct_numbers(arm.runs, "steps")),
                format.listed(f"{value:g}" for value in epochs) or UNKNOWN, seeds_words(arm.seeds),
                "" if seconds is None else format.duration(seconds.mean),
            ),
        ))  # fmt: skip
    columns = [Column(head, terminal=head.replace(" ", "\n"), left=head in ("encoder", "attention")) for head in heads]
    return Table("The arms", (Column("arm", left=True), *columns), tuple(rows), show_caption=True, lines_below=True)


def seeds_words(seeds: Sequence[int | None]) -> str:
    """`1–5, 7`."""
    known = format.ranges(seed for seed in seeds if seed is not None)
    return ", ".join([*([known] if known else []), *([UNKNOWN] if None in seeds else [])])


def single_runs(task: Task) -> Table:
    """Every finished run of a task."""
    scores = [f"{split} {metric_words(metric)}" for split, metric in task.keys]
    rows = []
    for slot, arm in enumerate(task.arms):
        for run in arm.runs:
            values, loss = scores_of(run), run.final(task.keys[0][0], "loss")
            rows.append((arm.name, slot, [
                MISSING if run.seed is None else str(run.seed),
                *(format.score(values.get(key)) for key in task.keys),
                MISSING if loss is None else f"{loss:.4f}",
                format.count(integer(run.of("steps"))),
                format.milliseconds(next(iter(run.ms_per_step.values()), None)),
                format.duration(number(run.of("wall_seconds"))),
                str(run.folder),
            ]))  # fmt: skip
    return plain_table("Single runs", ["seed", *scores, "loss", "steps", "ms/step", "wall time", "folder"], rows)
