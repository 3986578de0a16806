"""Verbs that connect with other software: export and bench."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from fullrank.cli.app import verb
from fullrank.cli.options import Checkpoint, Json
from fullrank.cli.output import tell
from fullrank.core.errors import InputError


@verb(
    "fullrank export runs/demo/b --to hf exported/b",
    "fullrank export runs/demo/b --checkpoint last --to hf exported/b-last",
)
def export(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, or one that model.save wrote.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must be new or empty.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf: a folder of Hugging Face.")] = "hf",
    checkpoint: Checkpoint = "best",
    json: Json = False,
) -> None:
    """Write a trained model as a folder that Hugging Face's `from_pretrained` reads, also without this package."""
    if to != "hf":
        raise InputError(f"--to: hf, given '{to}'")
    from fullrank.hf.export import export_run

    folder = export_run(run, out, checkpoint)
    files = sorted(file.name for file in folder.iterdir())
    content = {"from": str(run), "to": to, "folder": str(folder), "files": files, "checkpoint": checkpoint}
    lines = [
        f"{folder}: {', '.join(files)}",
        "  Check README.md, the model card, and state a licence there before you publish it.",
    ]
    tell(content, lines, json=json)


BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"  # beside src/; not part of an installed package


@verb("fullrank bench", "fullrank bench mixing --plot mixing.png", "fullrank bench relative --lengths 128,512 --json")
def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A benchmark (--list); all of them in small, if not given.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the benchmarks.")] = False,
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="N,N,..", help="Tokens of a text; the benchmark's own.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=2, max=10_000, help="Number of timings of every candidate.")
    ] = None,
    heads: Annotated[int | None, typer.Option("--heads", min=1, max=1024, help="Attention heads; 8.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", min=1, max=4096, help="Size of a head; 64.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, max=2**20, help="Texts in a batch.")] = None,
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
    """Measure mechanisms against their peers, interleaved in one run: ratios of time and of peak memory.

    A ratio is ours / peer, the median over rounds of two times of the same round; below 1 ours is faster, or needs less.
    Growth: the exponent p of cost = c n^p over the upper half of the lengths.
    Peers that are not installed are skipped by name, with the command that installs them.
    Without a name, everything in small: short lengths and few rounds, a few minutes on a CPU.
    """
    if not (BENCHMARKS / "bench.py").is_file():
        raise InputError(
            "bench: the benchmarks are in the folder benchmarks/ of the source of fullrank, not in the installed package; "
            "get the source and run `pip install -e .` in it"
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    importlib.import_module("bench").bench(
        name, listing=listing, lengths=lengths, rounds=rounds, heads=heads, head_dim=head_dim, batch=batch, dtype=dtype,
        device=device, threads=threads, compiled=compiled, plot=plot, json=json,
    )  # fmt: skip
