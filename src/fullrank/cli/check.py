"""The verb `check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fullrank.cli.options import Checkpoint, Json, Overrides, Row, Scale
from fullrank.cli.output import print_json, say

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.checking import Finding, Report


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Examples:  [cyan]fullrank check mixhead/table1-vanilla --row b[/cyan]   "
        "[cyan]fullrank check runs/mine --json[/cyan]   [cyan]fullrank check gpt2 --text book.txt[/cyan]",
    )(check)


def check(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A recipe, a YAML file, a run folder, a saved model, or a Hugging Face model (folder or hub name).",
        ),
    ],
    overrides: Overrides = None,
    row: Row = None,
    scale: Scale = None,
    full: Annotated[
        bool, typer.Option("--full", help="A configuration in its own sizes, not made small; can take long.")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="For the last-position test of a trained model; a run has its own."
        ),
    ] = None,
    checkpoint: Checkpoint = "best",
    json: Json = False,
) -> None:
    """Looks for leaks from the future, and for two ways to compute the same that disagree.

    Names the layer that leaks. Every check says what it looked at, the largest difference, its tolerance and why.
    Exit status 1 if one fails.
    """
    from fullrank.experiments.check import Choice, check_named

    report = check_named(name, Choice(row, scale, tuple(overrides or ()), full, text, checkpoint), say)
    if json:
        print_json(report.as_dict())
    else:
        _print(report)
    if not report.passes:
        raise typer.Exit(1)


_STYLES = {"passes": "green", "fails": "bold red", "not applicable": "dim"}


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    about = report.description
    row = f", row {about['row']}, scale {about['scale']}" if about.get("row") else ""
    print(f"{about['name']}{row}: {about['source']}, {about['parameters']:,} parameters")
    print(f"texts of {about['length']} random tokens, vocabulary {about['vocab_size']:,}, {about['precision']}")
    if report.shrunk:
        print(f"made small for the check (--full: as it is): {'; '.join(report.shrunk)}")
    console = Console(highlight=False)
    table = _table(report)
    wide = console.measure(table, options=console.options.update(max_width=1000)).maximum
    (console if wide <= console.width else Console(width=wide, highlight=False)).print(table)
    for finding in report.findings:
        line = Text(finding.check, style=_STYLES[finding.verdict]).append(f": {_words(finding)}", style="default")
        console.print(line, soft_wrap=True)
    print()
    failed = [finding.check for finding in report.failures]
    if report.layers:
        why = f" ({about['sees_future']})" if about.get("sees_future") else ""
        console.print(Text(f"sees the future: {', '.join(report.layers)}{why}", style="bold red"), soft_wrap=True)
    if failed:
        console.print(Text(f"fails: {'; '.join(failed)}", style="bold red"), soft_wrap=True)
    else:
        verdicts = [finding.verdict for finding in report.findings]
        print(f"{verdicts.count('passes')} checks pass, {verdicts.count('not applicable')} are not applicable")


def _words(finding: Finding) -> str:
    if finding.verdict == "not applicable":
        return finding.reason
    parts = [finding.looked_at, f"tolerance: {finding.reason}" if finding.reason else "", finding.remark]
    if finding.layers:
        parts.append(f"the layer that leaks: {', '.join(finding.layers)}")
    return "; ".join(part for part in parts if part)


def _table(report: Report) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("check", "verdict", "largest\ndifference", "tolerance"):
        justify: Literal["left", "right"] = "left" if heading in ("check", "verdict") else "right"
        table.add_column(heading, justify=justify, no_wrap=True, vertical="bottom")
    for finding in report.findings:
        table.add_row(
            Text(finding.check),
            Text(finding.verdict, style=_STYLES[finding.verdict]),
            _figure(finding.difference),
            _figure(finding.tolerance),
        )
    return table


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.1e}"
