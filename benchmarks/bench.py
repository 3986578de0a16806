"""`fullrank bench`: checks its options, measures suite by suite, prints tables or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from candidates import BOTH, Settings, Suite
from fullrank.cli.app import print_json, say
from fullrank.core.errors import InputError, suggest
from fullrank.training.device import choose_device
from machine import environment
from measure import MEMORY_PROTOCOL, Outcome, measure
from suites import SUITES, suite_of
from timing import INTERLEAVED, rounded

_QUICK_ROUNDS = 3
_MAX_LENGTH = 2**20


app = typer.Typer(add_completion=False, rich_markup_mode="rich")
Size = Annotated[int | None, typer.Option(min=1, max=2**20, metavar="N", help="The benchmark's own if not given.")]


@app.command()
def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A benchmark (--list); all of them in small, if not given.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the benchmarks.")] = False,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N,..", help="Tokens of a text; the benchmark's own.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=2, max=10_000, help="Number of timings of every candidate.")] = None,
    heads: Size = None,
    head_dim: Size = None,
    batch: Size = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or, on a GPU, fp16.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")] = "cpu",
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="With one, the clock is CPU time; with more, wall-clock time.")
    ] = 1,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Measure torch.compile's peers; by default of a named benchmark."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw time and memory against length.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")] = False,
) -> None:
    """Measure mechanisms against their peers, interleaved in one run: ratios of time and of peak memory.

    A ratio is ours / peer, the median over rounds of two times of the same round; below 1 ours is faster, or needs less.
    Growth: the exponent p of cost = c n^p over the upper half of the lengths.
    Peers that are not installed are skipped by name, with the command that installs them.
    Without a name, everything in small: short lengths and few rounds, a few minutes on a CPU.
    """
    chosen_lengths = None if lengths is None else _lengths(lengths)
    if plot is not None:
        _check_plot(plot)
    if dtype not in ("fp32", "bf16", "fp16"):
        raise InputError(f"--dtype: '{dtype}' is not a precision; {suggest(dtype, ('fp32', 'bf16', 'fp16'))}")
    if listing:
        _list(json)
        return
    suites = list(SUITES.values()) if name is None else [suite_of(name)]
    sizes = {"heads": heads, "head_dim": head_dim, "batch": batch}
    _refuse_without_effect(name, suites[0], {**sizes, "lengths": chosen_lengths})
    where = choose_device(device, "--device")
    if dtype == "fp16" and where.type == "cpu":
        raise InputError("--dtype fp16: a CPU computes it number by number; give bf16, or --device cuda")
    quick = name is None
    settings = Settings(
        heads=heads or 8,
        head_dim=head_dim or 64,
        batch=batch,
        dtype=dtype,
        device=str(where),
        compile=not quick if compiled is None else compiled,
    )
    outcomes = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if quick and not json:
            print("the quick set: short lengths, few rounds; `fullrank bench NAME` measures one benchmark in full")
        for suite in suites:
            count = rounds or (_QUICK_ROUNDS if quick else suite.rounds)
            tokens = chosen_lengths or (suite.quick if quick else suite.lengths)
            outcomes.append(measure(suite, settings, tokens, count, say))
            if not json:
                _print(outcomes[-1], threads)
    finally:
        torch.set_num_threads(before)
    if plot is not None:
        from drawing import write_figure

        write_figure(outcomes, plot)
    if json:
        print_json(_document(outcomes, settings, threads, plot))
    elif plot is not None:
        print(plot)


def _lengths(text: str) -> list[int]:
    words = [word.strip().replace("_", "") for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 2 <= int(word) <= _MAX_LENGTH for word in words):
        raise InputError(
            f"--lengths: '{text}' is not a list of lengths; give whole numbers from 2 to {_MAX_LENGTH:,}, such as 512,1024"
        )
    return sorted({int(word) for word in words})


def _check_plot(plot: Path) -> None:
    """Refuse a path that cannot be written, before anything is measured."""
    if plot.suffix.lower() != ".png" or plot.is_dir():
        raise InputError(f"--plot {plot}: give the name of a file that ends in .png")
    try:
        plot.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--plot {plot}: its folder cannot be made ({error.strerror})") from error


def _refuse_without_effect(name: str | None, suite: Suite, options: dict[str, Any]) -> None:
    """InputError for an option that the benchmark would not use."""
    for key in (key for key, value in options.items() if value is not None):
        option = f"--{key.replace('_', '-')}"
        if name is None:
            raise InputError(
                f"{option}: say which benchmark, such as `fullrank bench mixing {option} ..`; --list names them"
            )
        if key != "lengths" and key not in suite.takes:
            raise InputError(f"{option}: the benchmark '{name}' has no such size; leave it out")


def _document(outcomes: list[Outcome], settings: Settings, threads: int, plot: Path | None) -> dict[str, Any]:
    content = {
        "benchmarks": [outcome.as_dict() for outcome in outcomes],
        "protocol": f"{INTERLEAVED}; {MEMORY_PROTOCOL}",
        "environment": {**environment(settings.torch_device), "threads": threads},
        "files": [] if plot is None else [str(plot)],
    }
    return dict(rounded(content))


def _list(json: bool) -> None:
    if json:
        print_json([{"name": one.name, "about": one.about, "lengths": list(one.lengths)} for one in SUITES.values()])
        return
    for one in SUITES.values():
        print(f"{one.name:<12} {one.about}\n{'':<12} lengths {', '.join(f'{length:,}' for length in one.lengths)}")


def _print(outcome: Outcome, threads: int) -> None:
    settings = outcome.settings
    clock = "GPU events" if settings.torch_device.type == "cuda" else "CPU time" if threads == 1 else "wall-clock time"
    counted = f"{threads} thread{'s' if threads > 1 else ''}"
    print(f"\n{outcome.suite.name}: {outcome.suite.about}")
    print(f"{settings.dtype}, {settings.device}, {counted}, {clock}, {outcome.rounds} rounds; ratios are ours / peer")
    show(_ratios(outcome))
    if outcome.suite.each_length:
        show(_by_length(outcome))
    if outcome.growth():
        show(_growth(outcome))
    for name, reason in outcome.skipped.items():
        print(f"{name}: {reason}")
    if line := summarize(outcome):
        print(line)


def summarize(outcome: Outcome) -> str:
    """One line to compare machines by: the processor, and each mechanism over its first peer, forward and backward."""
    ratios: dict[tuple[str, str], list[str]] = {}
    rows = [row for row in outcome.rows if row.what == BOTH]
    for row in rows:
        first: dict[str, str] = {}
        for one in row.against:
            if first.setdefault(one.mechanism, one.peer) == one.peer:
                ratios.setdefault((one.mechanism, one.peer), []).append(f"{one.time.middle:.2f}")
    if not ratios:
        return ""
    machine = environment(outcome.settings.torch_device)
    parts = [f"{mechanism} / {peer} {', '.join(values)}" for (mechanism, peer), values in ratios.items()]
    lengths = ", ".join(f"{row.length:,}" for row in rows)
    processor = machine.get("gpu", f"{machine['cpu']} ({machine['cpu_capability']})")
    return f"to compare: {processor}; {outcome.suite.name}, {BOTH}, n {lengths}: {'; '.join(parts)}"


def show(table: Table) -> None:
    """A table at its own width, also where the terminal is narrower: no figure is cut off."""
    console = Console(highlight=False)
    wide = console.measure(table, options=console.options.update(max_width=1000)).maximum
    Console(width=max(wide, console.width), highlight=False).print(table, soft_wrap=True)


def _new_table(*headings: str, words: int) -> Table:
    """A table whose first `words` columns are text and whose others are figures."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if i < words else "right"
        table.add_column(heading, justify=justify, no_wrap=True, vertical="bottom")
    return table


def _ratios(outcome: Outcome) -> Table:
    headings = ("ms", "time", "quartiles", "MiB", "memory")
    table = _new_table("mechanism", "kernel", "shape", "pass", "against", *headings, words=5)
    for row in outcome.rows:
        figures = {figure.name: figure for figure in row.figures}
        last = ""
        for one in row.against:
            own, first, last = figures[one.mechanism], one.mechanism != last, one.mechanism
            style = "green" if one.time.high < 1 else "red" if one.time.low > 1 else ""
            table.add_row(
                *((Text(one.mechanism), ", ".join(own.kernels), row.shape, row.what) if first else ("", "", "", "")),
                Text(one.peer),
                _milliseconds(own.seconds) if first else "",
                Text(f"{one.time.middle:.2f}", style=style),
                Text(f"{one.time.low:.2f}-{one.time.high:.2f}", style="dim"),
                "" if own.memory_mib is None or not first else f"{own.memory_mib:,.1f}",
                "" if one.memory is None else f"{one.memory:.2f}",
            )
    return table


def _growth(outcome: Outcome) -> Table:
    table = _new_table("growth with n", "pass", "lengths", "time ~ n^", "memory ~ n^", words=2)
    for one in outcome.growth():
        powers = ("" if power is None else f"{power:.2f}" for power in (one.time, one.memory))
        table.add_row(Text(one.name), one.what, f"{one.lengths[0]:,} - {one.lengths[-1]:,}", *powers)
    return table


def _by_length(outcome: Outcome) -> Table:
    table = _new_table("cost by length", "pass", "n", "ns / n²", "KiB / n", words=2)
    for line in outcome.lines():
        for i, (length, figure) in enumerate(line.points):
            mib = figure.memory_mib
            table.add_row(
                *((Text(line.name), line.what) if i == 0 else ("", "")),
                f"{length:,}",
                f"{1e9 * figure.seconds / length**2:,.1f}",
                "" if mib is None else f"{1024 * mib / length:,.2f}",
            )
    return table


def _milliseconds(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
