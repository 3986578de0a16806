"""The verb `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fullrank.cli.options import Json
from fullrank.cli.output import print_json, say, show
from fullrank.core.errors import InputError, suggest

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.bench.candidates import Settings, Suite
    from fullrank.bench.running import Outcome, Row

_QUICK_ROUNDS = 3
_LONGEST = 2**20


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Examples:  [cyan]fullrank bench[/cyan]   [cyan]fullrank bench mixing --plot mixing.png[/cyan]   "
        "[cyan]fullrank bench relative --lengths 128,512 --json[/cyan]",
    )(bench)


def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A benchmark (--list); all of them in small, if not given.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Say which benchmarks there are.")] = False,
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="N,N,..", help="Tokens of a text; the benchmark's own.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=2, max=10_000, help="How often everything is timed.")
    ] = None,
    heads: Annotated[int | None, typer.Option("--heads", min=1, max=1024, help="Attention heads; 8.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", min=1, max=4096, help="Size of a head; 64.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, max=2**20, help="Texts at a time.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, bf16 or, on a GPU, fp16.")] = "fp32",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:0.")] = "cpu",
    threads: Annotated[
        int, typer.Option("--threads", min=1, max=1024, help="With one, the clock is CPU time; with more, wall-clock time.")
    ] = 1,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Measure torch.compile's peers; by default of a named benchmark."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw time and memory against length.")
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Mechanisms against their peers, interleaved in one run: ratios of time and of peak memory.

    A ratio is ours / peer, the median over rounds of two times of the same round; below 1 ours is faster, or needs less.
    Growth: the exponent p of cost = c n^p over the upper half of the lengths.
    Peers that are not there are skipped by name; pip install 'fullrank\\[bench]' brings them.
    Without a name, everything in small: short lengths and few rounds, a few minutes on a CPU.
    """
    given = {"heads": heads, "head_dim": head_dim, "batch": batch}
    wanted = None if lengths is None else _lengths(lengths)
    if plot is not None:
        _check_plot(plot)
    if dtype not in ("fp32", "bf16", "fp16"):
        raise InputError(f"--dtype: '{dtype}' is not a precision; {suggest(dtype, ('fp32', 'bf16', 'fp16'))}")
    from fullrank.bench.suites import SUITES, suite_of

    if listing:
        _list(list(SUITES.values()), json)
        return
    suites = list(SUITES.values()) if name is None else [suite_of(name)]
    _check_options(name, suites[0], {**given, "lengths": wanted})
    settings = _settings(given, dtype, device, name is not None if compiled is None else compiled)
    outcomes = _run(suites, settings, wanted, rounds, threads, quick=name is None, quiet=json)
    if plot is not None:
        from fullrank.bench.figure import write_figure

        write_figure(outcomes, plot)
    if json:
        print_json(_document(outcomes, settings, threads, plot))
    elif plot is not None:
        print(plot)


def _lengths(text: str) -> list[int]:
    words = [word.strip().replace("_", "") for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 2 <= int(word) <= _LONGEST for word in words):
        raise InputError(
            f"--lengths: '{text}' is not a list of lengths; give whole numbers from 2 to {_LONGEST:,}, such as 512,1024"
        )
    return sorted({int(word) for word in words})


def _check_plot(plot: Path) -> None:
    """Before anything is measured."""
    if plot.suffix.lower() != ".png" or plot.is_dir():
        raise InputError(f"--plot {plot}: give the name of a file that ends in .png")
    try:
        plot.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--plot {plot}: its folder cannot be made ({error.strerror})") from error


def _check_options(name: str | None, suite: Suite, given: dict[str, Any]) -> None:
    """Options that the benchmark does not heed are refused."""
    for key in (key for key, value in given.items() if value is not None):
        option = f"--{key.replace('_', '-')}"
        if name is None:
            raise InputError(
                f"{option}: say which benchmark, such as `fullrank bench mixing {option} ..`; --list names them"
            )
        if key != "lengths" and key not in suite.takes:
            raise InputError(f"{option}: the benchmark '{name}' has no such size; leave it out")


def _settings(given: dict[str, int | None], dtype: str, device: str, compiled: bool) -> Settings:
    from fullrank.bench.candidates import Settings
    from fullrank.training.device import choose_device

    where = choose_device(device, "--device")
    if dtype == "fp16" and where.type == "cpu":
        raise InputError("--dtype fp16: a CPU computes it number by number; give bf16, or --device cuda")
    return Settings(
        heads=given["heads"] or 8,
        head_dim=given["head_dim"] or 64,
        batch=given["batch"],
        dtype=dtype,
        device=str(where),
        compile=compiled,
    )


def _run(
    suites: list[Suite],
    settings: Settings,
    lengths: list[int] | None,
    rounds: int | None,
    threads: int,
    *,
    quick: bool,
    quiet: bool,
) -> list[Outcome]:
    """Every benchmark, each printed when it is done."""
    import torch

    from fullrank.bench.running import run

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = []
    try:
        if quick and not quiet:
            print("the quick set: short lengths, few rounds; `fullrank bench NAME` measures one benchmark in full")
        for suite in suites:
            count = rounds or (_QUICK_ROUNDS if quick else suite.rounds)
            outcome = run(suite, settings, lengths or (suite.quick if quick else suite.lengths), count, say)
            found.append(outcome)
            if not quiet:
                _print(outcome, threads)
    finally:
        torch.set_num_threads(before)
    return found


def _document(outcomes: list[Outcome], settings: Settings, threads: int, plot: Path | None) -> dict[str, Any]:
    from fullrank.bench import memory
    from fullrank.bench.harness import INTERLEAVED, rounded
    from fullrank.bench.machine import environment

    content = {
        "benchmarks": [outcome.as_dict() for outcome in outcomes],
        "protocol": f"{INTERLEAVED}; {memory.PROTOCOL}",
        "environment": {**environment(settings.where), "threads": threads},
        "files": [] if plot is None else [str(plot)],
    }
    return dict(rounded(content))


def _list(suites: list[Suite], json: bool) -> None:
    if json:
        print_json([{"name": one.name, "about": one.about, "lengths": list(one.lengths)} for one in suites])
        return
    for one in suites:
        print(f"{one.name:<12} {one.about}\n{'':<12} lengths {', '.join(f'{length:,}' for length in one.lengths)}")


def _print(outcome: Outcome, threads: int) -> None:
    settings = outcome.settings
    clock = "GPU events" if settings.where.type == "cuda" else "CPU time" if threads == 1 else "wall-clock time"
    counted = f"{threads} thread{'s' if threads > 1 else ''}"
    print(f"\n{outcome.suite.name}: {outcome.suite.about}")
    print(f"{settings.dtype}, {settings.device}, {counted}, {clock}, {outcome.rounds} rounds; ratios are ours / peer")
    show(_table(outcome.rows))
    if outcome.suite.each_length:
        show(_each_length(outcome))
    if outcome.growth():
        show(_growth(outcome))
    for name, reason in outcome.skipped.items():
        print(f"{name}: {reason}")


def _new(*headings: str, words: int) -> Table:
    """A table whose first `words` columns are text and whose others are figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if i < words else "right"
        table.add_column(heading, justify=justify, no_wrap=True, vertical="bottom")
    return table


def _table(rows: list[Row]) -> Table:
    from rich.text import Text

    headings = ("ms", "time", "quartiles", "MiB", "memory")
    table = _new("mechanism", "kernel", "shape", "pass", "against", *headings, words=5)
    for row in rows:
        figures = {figure.name: figure for figure in row.figures}
        last = ""
        for one in row.against:
            first = one.mechanism != last
            own, last = figures[one.mechanism], one.mechanism
            style = "green" if one.time.high < 1 else "red" if one.time.low > 1 else ""
            table.add_row(
                *((Text(one.mechanism), ", ".join(own.kernels), row.shape, row.what) if first else ("", "", "", "")),
                Text(one.peer),
                _ms(own.seconds) if first else "",
                Text(f"{one.time.middle:.2f}", style=style),
                Text(f"{one.time.low:.2f}-{one.time.high:.2f}", style="dim"),
                _mib(own.memory_mib) if first else "",
                "" if one.memory is None else f"{one.memory:.2f}",
            )
    return table


def _growth(outcome: Outcome) -> Table:
    from rich.text import Text

    table = _new("growth with n", "pass", "lengths", "time ~ n^", "memory ~ n^", words=2)
    for one in outcome.growth():
        table.add_row(
            Text(one.name), one.what, f"{one.lengths[0]:,} - {one.lengths[-1]:,}", _power(one.time), _power(one.memory)
        )
    return table


def _each_length(outcome: Outcome) -> Table:
    from rich.text import Text

    table = _new("cost by length", "pass", "n", "ns / n²", "KiB / n", words=2)
    for name, _, what, points in outcome.lines():
        for i, (length, figure) in enumerate(points):
            mib = figure.memory_mib
            table.add_row(
                *((Text(name), what) if i == 0 else ("", "")),
                f"{length:,}",
                f"{1e9 * figure.seconds / length**2:,.1f}",
                "" if mib is None else f"{1024 * mib / length:,.2f}",
            )
    return table


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _power(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
