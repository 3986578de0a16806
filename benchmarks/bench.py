"""`fullrank bench`: checks its options, measures suite by suite, prints tables or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from candidates import BOTH, DTYPES, Settings, Suite
from fullrank.cli.app import print_json
from fullrank.core.errors import InputError, suggest
from fullrank.records import Lines, Record
from fullrank.render.blocks import Cell
from fullrank.render.figures import save_plots
from fullrank.training.device import choose_device
from machine import describe_machine, round_numbers
from measure import MEMORY_PROTOCOL, Outcome, measure
from suites import SUITES, find_suite
from tables import print_table
from timing import PROTOCOL

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
    dtype: Annotated[
        str, typer.Option(metavar="D,D,..", help="fp32, bf16 or, on a GPU, fp16; of several, all in the same rounds.")
    ] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")] = "cpu",
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="With one, the clock is CPU time; with more, wall-clock time.")
    ] = 1,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Measure torch.compile's peers; by default of a named benchmark."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="Draw time and memory against length.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")] = False,
) -> None:
    """Measure mechanisms against their peers, interleaved in one run: ratios of time and of peak memory.

    A ratio is ours / peer, the median over rounds of two times of the same round; below 1 ours is faster, or needs less.
    Growth: the exponent p of cost = c n^p over the upper half of the lengths.
    Peers that are not installed are skipped by name, with the command that installs them.
    Without a name, everything in small: short lengths and few rounds, a few minutes on a CPU.
    """
    chosen_lengths = None if lengths is None else _read_lengths(lengths)
    dtypes = list(dict.fromkeys(dtype.split(",")))
    for word in dtypes:
        if word not in DTYPES:
            raise InputError(f"--dtype: '{word}' is not a precision; {suggest(word, DTYPES)}")
    if listing:
        _list(json)
        return
    suites = [suite for suite in SUITES.values() if suite.quick] if name is None else [find_suite(name)]
    sizes = {"lengths": chosen_lengths, "heads": heads, "head_dim": head_dim, "batch": batch}
    _refuse_without_effect(name, suites[0], sizes)
    if plot is not None and not suites[0].lengths:
        raise InputError(
            f"--plot: the benchmark '{name}' has sizes of its own and no lengths to draw it over; leave it out"
        )
    where = choose_device(device, "--device")
    if "fp16" in dtypes and where.type == "cpu":
        raise InputError("--dtype fp16: a CPU computes it number by number; give bf16, or --device cuda")
    quick = name is None
    settings = Settings(
        heads=heads or 8,
        head_dim=head_dim or 64,
        batch=batch,
        dtype=dtypes[0],
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
            outcomes.append(measure(suite, settings, dtypes, tokens, count))
            if not json:
                _print(outcomes[-1], threads)
    finally:
        torch.set_num_threads(before)
    files = [] if plot is None else save_plots(PLOTS, _list_records(outcomes), plot, name or "bench")
    if json:
        content = {
            "benchmarks": [outcome.as_dict() for outcome in outcomes],
            "protocol": f"{PROTOCOL}; {MEMORY_PROTOCOL}",
            "environment": {**describe_machine(where), "threads": threads},
            "files": list(map(str, files)),
        }
        print_json(round_numbers(content))
    else:
        for file in files:
            print(file)


def _read_lengths(text: str) -> list[int]:
    words = [word.strip().replace("_", "") for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 2 <= int(word) <= _MAX_LENGTH for word in words):
        raise InputError(
            f"--lengths: '{text}' is not a list of lengths; give whole numbers from 2 to {_MAX_LENGTH:,}, such as 512,1024"
        )
    return sorted({int(word) for word in words})


def _refuse_without_effect(name: str | None, suite: Suite, options: Mapping[str, Any]) -> None:
    """Raise InputError for an option that the benchmark would not use."""
    takes = {*suite.takes, "lengths"} if suite.lengths else set()
    for key, value in options.items():
        if value is None:
            continue
        option = f"--{key.replace('_', '-')}"
        if name is None:
            raise InputError(
                f"{option}: say which benchmark, such as `fullrank bench mixing {option} ..`; --list names them"
            )
        if key not in takes:
            raise InputError(f"{option}: the benchmark '{name}' has no such size; leave it out")


def _list(json: bool) -> None:
    if json:
        keys = ("name", "about", "lengths")
        print_json([{key: getattr(suite, key) for key in keys} for suite in SUITES.values()])
        return
    for suite in SUITES.values():
        lengths = ", ".join(f"{length:,}" for length in suite.lengths)
        print(f"{suite.name:<15} {suite.about}\n{'':<15} {f'lengths {lengths}' if lengths else 'sizes of its own'}")


# -- plots and tables --------------------------------------------------------------------------------------------------

PLOTS = [Lines("length", measure, y_scale="log") for measure in ("ms", "MiB")]


def _list_records(outcomes: Sequence[Outcome]) -> list[Record]:
    records = []
    for outcome in outcomes:
        for row in outcome.rows:
            for figure in row.figures:
                labels = {
                    "benchmark": outcome.suite.name,
                    "candidate": figure.name,
                    "pass": row.what,
                    "length": row.length,
                }
                records.append(Record(labels, "ms", 1000 * figure.seconds))
                records.append(Record(labels, "MiB", figure.memory_mib))
    return records


def _print(outcome: Outcome, threads: int) -> None:
    settings = outcome.settings
    clock = "wall-clock time"
    if settings.torch_device.type == "cuda":
        clock = "GPU events"
    elif threads == 1:
        clock = "CPU time"
    counted = f"{threads} thread{'s' if threads > 1 else ''}"
    print(f"\n{outcome.suite.name}: {outcome.suite.about}")
    print(
        f"{', '.join(outcome.dtypes)}, {settings.device}, {counted}, {clock}, {outcome.rounds} rounds; "
        "ratios are ours / peer; bold where the quartiles lie below 1"
    )
    _print_ratios(outcome)
    if outcome.list_growth():
        _print_growth(outcome)
    for name, reason in outcome.skipped.items():
        print(f"{name}: {reason}")
    if line := summarize(outcome):
        print(line)


def summarize(outcome: Outcome) -> str:
    """Write one line to compare machines by: the processor, and each mechanism over its first peer, forward and backward."""
    ratios = {}
    rows = [row for row in outcome.rows if row.what == BOTH]
    for row in rows:
        first = {}
        for against in row.against:
            if first.setdefault(against.mechanism, against.peer) == against.peer:
                ratios.setdefault((against.mechanism, against.peer), []).append(f"{against.time.middle:.2f}")
    if not ratios:
        return ""
    machine = describe_machine(outcome.settings.torch_device)
    parts = [f"{mechanism} / {peer} {', '.join(values)}" for (mechanism, peer), values in ratios.items()]
    lengths = ", ".join(f"{row.length:,}" for row in rows)
    processor = machine.get("gpu", f"{machine['cpu']} ({machine['cpu_capability']})")
    return f"to compare: {processor}; {outcome.suite.name}, {BOTH}, n {lengths}: {'; '.join(parts)}"


def _print_ratios(outcome: Outcome) -> None:
    rows = []
    for row in outcome.rows:
        figures = {figure.name: figure for figure in row.figures}
        for against in row.against:
            figure = figures[against.mechanism]
            about = [against.mechanism, ", ".join(figure.kernels), row.shape, row.what, against.peer]
            time = Cell(f"{against.time.middle:.2f}", strong=against.time.high < 1)
            quartiles = f"{against.time.low:.2f}-{against.time.high:.2f}"
            speed = figure.tokens_per_second or figure.gflop_per_second
            others = [against.memory, 1000 * figure.seconds, figure.memory_mib, speed, figure.share_of_peak]
            rows.append([*about, time, quartiles, *map(_format, others)])
    numbers = ["time", "quartiles", "memory", "ms", "MiB", "tokens or GFLOP / s", "share of peak"]
    print_table(["mechanism", "kernel", "shape", "pass", "against"], numbers, rows)


def _print_growth(outcome: Outcome) -> None:
    rows = []
    for growth in outcome.list_growth():
        lengths = f"{growth.lengths[0]:,} - {growth.lengths[-1]:,}"
        rows.append([growth.name, growth.what, lengths, _format(growth.time), _format(growth.memory)])
    print_table(["growth with n", "pass"], ["lengths", "time ~ n^", "memory ~ n^"], rows)


def _format(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
