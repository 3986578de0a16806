"""Reports of finished runs: a comparison as one HTML page, as a table on the terminal, as JSON.

`runs` reads run folders; `compare` sets rows side by side, `finetuning` arms over seeds; `tables` and `summary` show both
kinds alike on the page and the terminal. `report(folders)` is the way in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import Interval
from fullrank.files import write_own
from fullrank.reporting import compare, finetuning
from fullrank.reporting.compare import Comparison
from fullrank.reporting.finetuning import Tuning
from fullrank.reporting.resampled import compare_runs
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
        return _plain(self.content.as_json())

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
        from fullrank.reporting.page import BEGINNING

        out = Path(out) / "report.html" if Path(out).is_dir() else Path(out)
        write_own(out, self.page(title), BEGINNING, "a report")
        return out


def _plain(value: Any) -> Any:
    """Dataclasses and intervals as dictionaries, tuples as lists."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Interval):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def report(folders: Sequence[Path], table: str | None = None) -> Report:
    """The report of run folders; the first one's row is the one that others are compared with.

    table: a table of several recipes, in each of which the first row is the one that its others are compared with.

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
    return Report(finetuning.compare(records) if tuned else compare.compare(records, table))
