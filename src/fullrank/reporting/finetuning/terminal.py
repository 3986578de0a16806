"""Fine-tuning over seeds on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullrank.reporting import format
from fullrank.reporting.finetuning import words
from fullrank.reporting.finetuning.comparing import Arm, Figure, Summary, TaskSummary
from fullrank.reporting.results import mapping, number
from fullrank.reporting.terminal import Whole


def print_summary(found: Summary, console: Console | None = None) -> None:
    """A table for every score of every task, what the arms are, and what has to be said about them."""
    console = console or Console()
    for task in found.tasks:
        for key in task.keys:
            console.print(Whole(_scores(task, key)), crop=False, soft_wrap=True)
        console.print(Whole(_arms(task)), crop=False, soft_wrap=True)
        for line in words.protocol(task):
            console.print(Text(line, style="dim"))
    for sentence in words.sentences(found):
        console.print(Text(sentence, style="bold"))
    for task in found.tasks:
        for remark in task.remarks:
            console.print(Text(f"{task.task}: {remark}", style="yellow"))
    for sentence in words.how(found):
        console.print(Text(sentence, style="dim"))
    for run in found.unfinished:
        console.print(Text(f"not finished: {run.folder} ({'; '.join(run.problems)})", style="yellow"))


def _scores(task: TaskSummary, key: tuple[str, str]) -> Table:
    figures = task.figures(key)
    table = _table(words.heading(task, key))
    table.add_column("arm", max_width=18)
    heads = ["n", "ours"]
    paper = any(figure.paper for _, figure in figures)
    if paper:
        heads.append("paper")
    if task.compares:
        heads += ["difference\n95 % Welch\npaired", "change of deviation\n95 % by F\nbootstrap"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for arm, figure in figures:
        cells = [str(figure.stat.count), words.ours(figure)]
        if paper:
            cells.append(words.papers(figure.paper).replace(" (server)", "\n(server)"))
        if task.compares:
            cells += _against(figure)
        table.add_row(Text(arm.name), *map(Text, cells))
    return table


def _against(figure: Figure) -> list[str]:
    against = figure.against
    if against is None:
        return ["", ""]
    paired = words.interval(against.paired) if against.pairs else "other seeds"
    changes = [
        words.change(against.change)
        + (f" (paper {words.change(figure.papers_change)})" if figure.papers_change else ""),
        words.change_interval(against.f_interval),
        words.change_interval(against.bootstrap),
    ]
    return [
        "\n".join(_shortened([words.difference(against), words.interval(against.welch), paired])),
        "\n".join(_shortened(changes)),
    ]


def _shortened(lines: Sequence[str]) -> list[str]:
    """What is unknown is said once."""
    return [line for place, line in enumerate(lines) if line != words.UNKNOWN or words.UNKNOWN not in lines[:place]]


def _arms(task: TaskSummary) -> Table:
    table = _table()
    table.add_column("arm", max_width=18)
    found = [(arm, words.details(arm)) for arm in task.arms]
    heads = [head for head in found[0][1] if not head.startswith("mixing") or any(_mixes(arm) for arm in task.arms)]
    for head in heads:
        table.add_column(head.replace(" ", "\n"), justify="left" if head in ("encoder", "attention") else "right")
    table.add_column("time", justify="right", no_wrap=True)
    for arm, said in found:
        seconds = [number(mapping(run.result).get("wall_seconds")) for run in arm.runs]
        known = [value for value in seconds if value is not None]
        cells = [said[head] for head in heads]
        table.add_row(Text(arm.name), *map(Text, cells), format.duration(sum(known) / len(known)) if known else "")
    return table


def _mixes(arm: Arm) -> bool:
    return bool(mapping(arm.result.get("parameters")).get("mixing"))


def _table(title: str | None = None) -> Table:
    return Table(
        title=None if title is None else Text(title),
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
