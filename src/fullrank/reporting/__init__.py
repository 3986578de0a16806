"""Reports: run folders in, a comparison out - as one HTML page, as a table on the terminal, as JSON.

`results` reads, `grouping` and `table` compare, `summary` says what the figures carry, `page` draws. Runs of fine-tuning,
which have scores of tasks, have all that of their own in `finetuning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullrank.reporting import finetuning
from fullrank.reporting.results import RunRecord, find_runs, finetuned, read_run, read_runs
from fullrank.reporting.summary import Summary, summarise
from fullrank.reporting.table import Comparison, Row, comparison
from fullrank.reporting.terminal import print_table
from fullrank.reporting.to_json import as_json
from fullrank.reporting.translations import compare_runs

__all__ = [
    "Comparison",
    "Row",
    "RunRecord",
    "Summary",
    "as_json",
    "compare_runs",
    "comparison",
    "find_runs",
    "finetuned",
    "print_table",
    "read_run",
    "read_runs",
    "summarise",
    "write_report",
]


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Writes the page that compares run folders and returns its path; see `fullrank.reporting.page`.

    Runs of fine-tuning have a page of their own (`fullrank.reporting.finetuning.page`); InputError for both kinds at once.
    """
    if finetuned(folders):
        return finetuning.write_page(finetuning.summary([Path(folder) for folder in folders]), out, title)
    from fullrank.reporting import page  # matplotlib takes a second to import: only who draws pays for it

    return page.write_report(folders, out, title)
