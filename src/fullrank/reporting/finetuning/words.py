"""The figures of fine-tuning as people read them, the same on the page and on the terminal."""

from __future__ import annotations

from fullrank.evaluation.statistics import SAMPLES, SEED, Interval
from fullrank.reporting import format
from fullrank.reporting.finetuning.arms import attention_of, attention_words, encoder_of, metric_words, numbers_of
from fullrank.reporting.finetuning.comparing import Against, Arm, Figure, Paper, Summary, TaskSummary, points_words
from fullrank.reporting.results import integer, mapping, number

UNKNOWN = "unknown"


def ours(figure: Figure) -> str:
    """Mean ± sample standard deviation; the mean alone where there is one seed."""
    return format.spread(figure.stat, format.score)


def papers(paper: Paper | None) -> str:
    """`59.85 ± 1.23`, `52.6 (server)`."""
    if paper is None:
        return ""
    digits = format.score if paper.deviation is not None else _as_stated
    spread = f" ± {format.score(paper.deviation)}" if paper.deviation is not None else ""
    return f"{digits(paper.mean)}{spread}{' (server)' if paper.server else ''}"


def _as_stated(value: float) -> str:
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def difference(against: Against) -> str:
    """`+0.62`, in points."""
    return format.signed_points(against.difference)


def interval(found: Interval | None) -> str:
    """`−0.10 to +1.30`, in points."""
    if found is None:
        return UNKNOWN
    return f"{format.signed_points(found.low)} to {format.signed_points(found.high)}"


def change(percent: float | None) -> str:
    """`−30.5 %`."""
    return UNKNOWN if percent is None else f"{_signed(percent)} %"


def change_interval(found: Interval | None) -> str:
    """`−71.2 to +130 %`."""
    return UNKNOWN if found is None else f"{_signed(found.low)} to {_signed(found.high)} %"


def _signed(percent: float) -> str:
    size = f"{abs(percent):.1f}" if abs(percent) < 99.95 else f"{abs(percent):,.0f}"
    return size if float(size.replace(",", "")) == 0 else f"{'−' if percent < 0 else '+'}{size}"


def p_value(p: float | None) -> str:
    """`0.231`."""
    return UNKNOWN if p is None else "below 0.001" if p < 0.001 else f"{p:.3f}"


def heading(task: TaskSummary, key: tuple[str, str]) -> str:
    """`glue/cola, dev, 1,043 examples: Matthews correlation x 100`."""
    split, metric = key
    return f"{task.task}, {split}, {task.examples(split)}: {points_words(metric)}"


def sentence(task: TaskSummary, arm: Arm) -> str:
    """What the headline score says of an arm against its baseline."""
    key = next((key for key in task.keys if key in arm.figures), None)
    figure = None if key is None else arm.figures[key]
    if figure is None or figure.against is None:
        return ""
    against = figure.against
    beginning = (
        f"{task.task}: {metric_words(figure.metric)} of {arm.name} is {format.score(figure.stat.mean)}, "
        f"{difference(against)} to {against.baseline}"
    )
    if against.interval is None:
        return f"{beginning}; whether that is more than chance cannot be told from so few seeds."
    kind = "paired over seeds" if against.paired else "Welch"
    verdict = "more than the choice of seeds" if against.decided else "not decided by these seeds"
    return f"{beginning} (95 % {interval(against.interval)}, {kind}): {verdict}."


def deviation_sentence(task: TaskSummary, arm: Arm) -> str:
    """What it says of the deviation over seeds; empty where nothing can be said."""
    key = next((key for key in task.keys if key in arm.figures), None)
    against = None if key is None else arm.figures[key].against
    if against is None or against.change is None or against.f_interval is None:
        return ""
    decided = against.f_interval.low > 0 or against.f_interval.high < 0
    verdict = "" if decided else ", so these seeds do not decide whether it rises or falls"
    return (
        f"{task.task}: its deviation over seeds changed by {change(against.change)} against {against.baseline} "
        f"(95 % {change_interval(against.f_interval)}){verdict}."
    )


def sentences(found: Summary) -> list[str]:
    """Both of every arm that has a baseline."""
    said = [
        text
        for task in found.tasks
        for arm in task.arms
        for text in (sentence(task, arm), deviation_sentence(task, arm))
    ]
    return [text for text in said if text]


def how(found: Summary) -> list[str]:
    """How the figures were made, and what they do not say: a sentence each."""
    if not any(task.compares for task in found.tasks):
        return []
    said = [
        "Mean ± sample standard deviation (n − 1) over n seeds. Differences are of means, with 95 % intervals over seeds: "
        "Welch's for independent seeds; paired (Student) where both arms have the same seeds.",
        "Deviation: 100 (s / s of the baseline − 1) as in Skip Cross-head, Table 4. Its first interval is from the F "
        f"distribution, exact for normal scores; the second from {SAMPLES:,} samples of the seeds (percentiles, seed {SEED}), "
        "too narrow for few seeds.",
    ]
    if any(f.paper and f.paper.server for task in found.tasks for arm in task.arms for f in arm.figures.values()):
        said.append(
            "“Server” are scores of the GLUE test server: of other examples than ours, not to be set beside them."
        )
    return said


def protocol(task: TaskSummary) -> list[str]:
    """How its figures were made, each way once: `development split, fp32 ...; the last checkpoint; trained on ...`."""
    said = dict.fromkeys(
        f"{arm.result.get('protocol') or UNKNOWN}; the {arm.result.get('checkpoint') or UNKNOWN} checkpoint; trained on "
        f"{task.examples('train', arm)}"
        for arm in task.arms
    )
    return [f"{task.task}: {line}" for line in said]


def details(arm: Arm) -> dict[str, str]:
    """What an arm is: words for each heading."""
    result, run = arm.result, arm.runs[0]
    parameters = mapping(result.get("parameters"))
    train = mapping(run.config.get("train"))
    mixing = integer(parameters.get("mixing"))
    rate = number(train.get("mixing_learning_rate")) or number(train.get("learning_rate"))
    return {
        "encoder": encoder_of(run),
        "attention": attention_words(run) if attention_of(run) else "its own",
        "mixing parameters": format.count(mixing),
        "mixing learning rate": f"{rate:g}" if mixing and rate is not None else "",
        "steps": _numbers(numbers_of(arm.runs, "steps")),
        "epochs": _epochs(arm),
        "seeds": seeds_words(arm.seeds),
    }


def _numbers(values: list[int]) -> str:
    return format.listed([format.count(value) for value in values]) or UNKNOWN


def _epochs(arm: Arm) -> str:
    found = {round(value, 2) for run in arm.runs if (value := number(mapping(run.result).get("epochs"))) is not None}
    return format.listed([f"{value:g}" for value in sorted(found)]) or UNKNOWN


def seeds_words(seeds: tuple[int | None, ...]) -> str:
    """`1–5, 7`."""
    known = format.ranges(seed for seed in seeds if seed is not None)
    return ", ".join([*([known] if known else []), *([UNKNOWN] if None in seeds else [])])
