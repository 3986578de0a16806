"""Measurements: functions that give records, with the table and the plots that show them declared beside each.

    @measurement("confidence", needs={"logits"}, table=Table(rows="position"), plot=Lines(x="position"))
    def measure_confidence(model, text):
        yield Record({"position": 0}, "confidence", 0.7, "probability")

A measurement is known by its name as soon as its module is imported: `fullrank analyze` runs it, prints its table, keeps its
records in the run folder, and `fullrank report` shows them. This module imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, TypeVar

from fullrank.core.errors import InputError, suggest

Label = str | int | float | bool | None
Interval = tuple[float, float]
Function = TypeVar("Function", bound=Callable[..., Iterable["Record"]])


@dataclass(frozen=True)
class Record:
    """One measured number.

    Attributes:
        labels: what it is a number of (row, seed, split, layer, head, position).
        measure: its name.
        value: the number; None where there is none.
        unit: nats, tokens, ...; None where there is none.
        interval: ends of its 95 % interval; None without.
        protocol: how it was measured.
        note: a sentence for the reader.
    """

    labels: Mapping[str, Label]
    measure: str
    value: float | None
    unit: str | None = None
    interval: Interval | None = None
    protocol: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        """Turn numbers of numpy and torch into plain ones."""
        value = _to_plain(self.value)
        labels = {key: _to_plain(label) for key, label in self.labels.items()}
        interval = None if self.interval is None else tuple(map(_to_plain, self.interval))
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise InputError(f"Record: value is a number or None, given {type(value).__name__} {value!r}")
        for key, label in labels.items():
            if not isinstance(label, Label):
                raise InputError(f"Record: label {key} is a word or a number, given {type(label).__name__} {label!r}")
        if interval is not None and len(interval) != 2:
            raise InputError(f"Record: interval has two ends, given {interval}")
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "interval", interval)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, from which `Record(**values)` makes it again."""
        return dict(vars(self))

    def with_labels(self, **labels: Label) -> Record:
        """Return the record with further labels in front of its own."""
        return dataclasses.replace(self, labels={**labels, **self.labels})

    def has(self, labels: Mapping[str, Label]) -> bool:
        """Return whether all of `labels` are labels of this record."""
        return labels.items() <= self.labels.items()


def _to_plain(value: Any) -> Any:
    try:
        return value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # several numbers
        return value


# -- declarations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of a table: records of one measure.

    Attributes:
        measure: that of its records.
        heading: what stands above it; empty for the measure.
        where: labels that a record must have.
        format: of its values (`.2f`, `,d`, `+.3f`).
        deviation: the measure that stands behind `±`.
        best: emphasise the lowest or highest value.
        interval: show the interval of a value below it.
        group: stands above neighbouring columns that share it.
        page_only: the terminal leaves it out.
    """

    measure: str
    heading: str = ""
    where: Mapping[str, Label] = field(default_factory=dict)
    format: str = ""
    deviation: str = ""
    best: Literal["", "lowest", "highest"] = ""
    interval: bool = True
    group: str = ""
    page_only: bool = False


@dataclass(frozen=True)
class Table:
    """A table of records: a line for each value of the labels `rows`, a column for each measure.

    A record stands in declared columns if every label of it is a row or chosen by the column; else further labels become rows.

    Attributes:
        rows: one label, or several.
        columns: a label, each value of which becomes a column; or the columns themselves; None: one for each measure.
        title: stands above it.
        format: of all values, where a column says nothing.
        measure: with a label as columns, the measure shown in them.
    """

    rows: str | tuple[str, ...]
    columns: str | tuple[Column, ...] | None = None
    title: str = ""
    format: str = ""
    measure: str = ""


@dataclass(frozen=True)
class Lines:
    """Lines of y over the label x.

    Attributes:
        x: a label.
        y: `value`, or a measure.
        where: labels that a record must have.
        series: labels, with a line for each of their values; None: all labels but x and band.
        band: a label over which lines are averaged, in a band of ± one deviation.
        title: stands above the plot.
        subtitle: a sentence about it.
        x_title: that of the axis; empty for the label.
        y_title: that of the axis; empty for the measure.
        y_scale: `linear` or `log`.
        from_zero: let the y axis begin at zero.
        marks: (`x` or `y`, measure): its values are dashed lines from edge to edge.
    """

    x: str
    y: str = "value"
    where: Mapping[str, Label] = field(default_factory=dict)
    series: tuple[str, ...] | None = None
    band: str = ""
    title: str = ""
    subtitle: str = ""
    x_title: str = ""
    y_title: str = ""
    y_scale: Literal["linear", "log"] = "linear"
    from_zero: bool = False
    marks: tuple[tuple[Literal["x", "y"], str], ...] = ()


@dataclass(frozen=True)
class HeatMap:
    """A cell for each pair of the labels x and y, one panel for each value of `panels` (labels; None: all that differ)."""

    x: str
    y: str
    measure: str
    panels: tuple[str, ...] | None = None
    where: Mapping[str, Label] = field(default_factory=dict)
    title: str = ""
    subtitle: str = ""


Plot = Lines | HeatMap
_DECLARATIONS = {kind.__name__: kind for kind in (Table, Lines, HeatMap)}


def declaration_to_dict(declared: Table | Plot) -> dict[str, Any]:
    """Write a table or plot as plain values for JSON, from which `declaration_from_dict` makes it again."""
    return {"kind": type(declared).__name__, **dataclasses.asdict(declared)}


def declaration_from_dict(content: Mapping[str, Any]) -> Any:
    """Make the table or plot from the values of `declaration_to_dict`."""
    values = {key: _to_tuples(value) for key, value in content.items() if key != "kind"}
    if isinstance(values.get("columns"), tuple):
        values["columns"] = tuple(Column(**column) for column in values["columns"])
    return _DECLARATIONS[content["kind"]](**values)


def _to_tuples(value: Any) -> Any:
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


# -- measurements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """A function (LoadedModel, Text, **options) -> records, with all that is declared beside it."""

    name: str
    function: Callable[..., Iterable[Record]]
    needs: frozenset[str]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...]
    texts: int | None
    compare: Callable[[list[Record], list[Record]], Iterable[Record]] | None

    @property
    def help(self) -> str:
        """The docstring of the function, without its sections `Args` and so on."""
        docstring = inspect.getdoc(self.function) or ""
        return re.split(r"\n+(?:Args|Returns|Yields|Raises):\n", docstring)[0]

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Keyword-only parameters of the function: they become options of the command line."""
        parameters = inspect.signature(self.function, eval_str=True).parameters
        return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


CAPABILITIES = {  # what a model may have, in words
    "logits": "logits",
    "hidden": "hidden states",
    "attention": "attention weights",
    "step": "step with a cache",
    "output_matrix": "single output matrix",
    "tokenizer": "tokenizer",
}
_BUILTIN = {
    "spectrum": "singular values of attention weights, before and after the mixing of heads",
    "heads": "each head ablated in turn: what a model loses without it",
    "mixing": "how far mixing matrices are from plain attention",
    "rank": "the rank of log-probabilities, and its bound",
    "context": "perplexity by tokens of context",
}
_known: dict[str, Measurement] = {}


def measurement(
    name: str,
    *,
    needs: Iterable[str] = (),
    table: Table | Sequence[Table] = (),
    plot: Plot | Sequence[Plot] = (),
    texts: int | None = None,
    compare: Callable[[list[Record], list[Record]], Iterable[Record]] | None = None,
) -> Callable[[Function], Function]:
    """Make a function a measurement, which `fullrank analyze NAME` runs.

    Args:
        name: what the command line calls it, NAME.
        needs: methods of `LoadedModel` that it calls; a model that lacks one is refused before anything is read.
        table: how its records are shown; several are shown one after another.
        plot: how its records are drawn; several are drawn one after another.
        texts: how many segments of a text it reads where `--texts` says nothing; None: all of them.
        compare: gives further records of every model after the first: called with the records of the first and with its own.
            None: there are none.

    Returns:
        A decorator, which leaves the function as it is.

    Raises:
        InputError: the name is taken, or no model has what it needs.
    """
    needs = frozenset(needs)
    if unknown := sorted(needs - CAPABILITIES.keys()):
        raise InputError(f"measurement {name}: needs {', '.join(unknown)}; a model can have {', '.join(CAPABILITIES)}")

    def register(function: Function) -> Function:
        owner = f"fullrank.analysis.{name}" if name in _BUILTIN else function.__module__
        if name in _known:  # a module may be read anew
            owner = _known[name].function.__module__
        if owner != function.__module__:
            raise InputError(f"measurement {name}: the name is taken by {owner}; choose another")
        tables = (table,) if isinstance(table, Table) else tuple(table)
        plots = (plot,) if isinstance(plot, Plot) else tuple(plot)
        _known[name] = Measurement(name, function, needs, tables, plots, texts, compare)
        return function

    return register


def describe_measurements() -> dict[str, str]:
    """Describe each built-in measurement, and each that imported modules have registered, by name: a line about each."""
    return _BUILTIN | {
        name: measurement.help.partition("\n")[0] for name, measurement in _known.items() if name not in _BUILTIN
    }


def find_measurement(name: str) -> Measurement:
    """Find the measurement of this name; a built-in one is imported. InputError for an unknown name."""
    if name not in _known and name in _BUILTIN:
        importlib.import_module(f"fullrank.analysis.{name}")
    if name not in _known:
        raise InputError(
            f"analyze {name}: no such measurement; {suggest(name, describe_measurements())}, or name the module that has it "
            "with --import MODULE"
        )
    return _known[name]


def check_records(name: str, records: Iterable[Record]) -> list[Record]:
    """Return the records of a measurement as a list; InputError where something else was given, or no record at all."""
    checked = list(records) if isinstance(records, Iterable) else [records]
    for record in checked:
        if not isinstance(record, Record):
            raise InputError(f"measurement {name}: gave {type(record).__name__}; it has to yield fullrank.Record")
    if not checked:
        raise InputError(f"measurement {name}: gave no record; is the text long enough for it?")
    return checked


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return whether a value is a number that can be drawn."""
    return value is not None and math.isfinite(value)
