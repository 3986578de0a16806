"""Reports of finished runs: a comparison as one HTML page, as a table on the terminal, as JSON.

`runs` reads run folders; `compare` sets rows side by side, `finetuning` arms over seeds; `tables` and `summary` show both
kinds alike on the page and the terminal. `report(folders)` is the way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullrank.core.errors import InputError
from fullrank.reporting import compare, finetuning
from fullrank.reporting.compare import Comparison, compare_runs
from fullrank.reporting.finetuning import Tuning
from fullrank.reporting.runs import find_runs, read_runs

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Report", "compare_runs", "find_runs", "report"]


class Report:
    """Finished runs compared: the same content as page, table and JSON."""

    def __init__(self, content: Comparison | Tuning) -> None:
        self.content = content

    def as_json(self) -> dict[str, Any]:
        """Plain objects for one JSON document, numbers in full precision."""
        if isinstance(self.content, Tuning):
            return finetuning.as_json(self.content)
        return compare.as_json(self.content)

    def print(self, console: Console | None = None) -> None:
        """Print the tables and what has to be said about them."""
        from fullrank.reporting import summary

        summary.print_report(self.content, console)

    def page(self, title: str | None = None) -> str:
        """One self-contained HTML page. Equal runs give equal bytes."""
        from fullrank.reporting import page

        return page.render(self.content, title)

    def write(self, out: Path, title: str | None = None) -> Path:
        """Write the page to `out`, or to `report.html` in the folder `out`, and return its path.

        An older report is replaced; any other file of that name is an InputError. RunError if it cannot be written.
        """
        from fullrank.reporting import page

        return page.write(Path(out), self.page(title))


def report(folders: Sequence[Path]) -> Report:
    """The report of run folders; the first one's row is the one that others are compared with.

    Raises InputError for none at all, for a folder that is no run, and for runs of fine-tuning among others. A run that is
    unfinished or damaged is listed in the report, never an error.
    """
    if not folders:
        raise InputError("no run folders given; name at least one, for example runs/demo/plain")
    records = read_runs(folders)
    tuned = [record for record in records if record.finetunes]
    if tuned and len(tuned) < len(records):
        other = next(record for record in records if not record.finetunes)
        raise InputError(
            f"{tuned[0].folder} is a run of fine-tuning and {other.folder} is not: no figure of theirs compares; "
            "make a report of each kind"
        )
    return Report(finetuning.compare(records) if tuned else compare.compare(records))
