"""Runs of fine-tuning, over seeds: a table on the terminal, JSON, one HTML page.

`arms` gathers runs, `comparing` sets them against their baselines, the others show what it finds.
"""

from __future__ import annotations

from pathlib import Path

from fullrank.reporting.finetuning.comparing import Against, Arm, Figure, Paper, Summary, TaskSummary, summary
from fullrank.reporting.finetuning.terminal import print_summary
from fullrank.reporting.finetuning.to_json import as_json

__all__ = [
    "Against",
    "Arm",
    "Figure",
    "Paper",
    "Summary",
    "TaskSummary",
    "as_json",
    "print_summary",
    "summary",
    "write_page",
]


def write_page(found: Summary, path: Path, title: str | None = None) -> Path:
    """Writes the page and returns its path; see `fullrank.reporting.finetuning.page`."""
    from fullrank.reporting.finetuning import page  # matplotlib takes a second to import: only who draws pays for it

    return page.write_page(found, path, title)
