"""The verb analyze: the papers' analyses of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fullrank.cli.app import app, examples, verb
from fullrank.cli.options import Checkpoint, Config, Device, Json, Number, Overrides, Row, Scale
from fullrank.cli.output import exclude, say, table_of, tell
from fullrank.core.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from fullrank.analysis import AttentionSpectrum, Heads
    from fullrank.experiments.analyze import ModelRank, PhaseReach
    from fullrank.experiments.analyze_attention import Checkpoints, ModelFigures

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A run folder, a folder of a saved model, or a Hugging Face model (folder or hub name)."
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL", help="Run folders, folders of saved models, or Hugging Face models (folder or hub name)."
    ),
]
ModelText = Annotated[
    Path | None, typer.Option("--text", metavar="FILE", help="Text to read; a run's own valid split if not given.")
]
Texts = Annotated[int, Number("--texts", help="Segments of the text that are read.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Draw the figure into this folder, PNG and SVG.")
]
SegmentLength = Annotated[
    int | None, Number("--segment-length", min=2, help="Tokens read at a time; as evaluated, or 128.")
]


Figures = TypeVar("Figures")


def _drawn(
    name: str,
    found: list[ModelFigures[Figures]],
    draw: Callable[[dict[str, Figures], Path], list[Path]],
    out: Path | None,
) -> dict[str, Any]:
    """Draw all models into `out`, if given, and each run into RUN/analysis with its JSON, for its report; the JSON of all."""
    files = [] if out is None else draw({one.read.name: one.figures for one in found}, out)
    for one in found:
        if one.read.kind == "run":
            files += draw({one.read.name: one.figures}, one.keep(name))
    return {"models": [one.as_dict() for one in found], "files": [str(file) for file in files]}


analyze = typer.Typer(
    no_args_is_help=True,
    help="The papers' analyses.",
    epilog=examples("fullrank analyze context runs/mine --out figures"),
)


app.add_typer(analyze, name="analyze")


@verb(
    "fullrank analyze context my.yaml model.memory_length=256 --json",
    "fullrank analyze context runs/mine --phase skip_retain --drifting 4000 --out figures",
    group=analyze,
)
def context(
    name: Config,
    overrides: Overrides = None,
    row: Row = None,
    scale: Scale = None,
    phase: Annotated[
        str | None, typer.Option("--phase", metavar="NAME", help="A phase of train.phases; the first that skips.")
    ] = None,
    drifting: Annotated[
        int | None,
        typer.Option(
            "--drifting", metavar="STEPS", min=0, max=10**12,
            help="Add the positions that the released code assumes after STEPS steps (gaps: drifting).",
        ),
    ] = None,
    out: Out = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Reach of each layer's memory under Skip-Retain: its exact distribution, beside the paper's Eq. 6.

    Layers are counted from 0; the reach is in tokens before the first query of a segment.
    """
    from fullrank.config.recipe import resolve
    from fullrank.experiments.analyze import phase_reach

    reach = phase_reach(resolve(name, row, scale, overrides or []), phase)
    files: list[Path] = []
    if out is not None:
        from fullrank.analysis.plots import write_context

        files = write_context(reach.reach, out, reach.title)
    sizes = f"memory of {reach.reach.memory_length:,} tokens, segments of {reach.reach.segment_length:,}"
    content = {**reach.as_dict(drifting), "files": [str(file) for file in files]}
    tell(content, [reach.title, sizes, _reach_table(reach, drifting), *reach.remarks(), *files], json=json)


def _reach_table(reach: PhaseReach, drifting: int | None) -> Table:
    from fullrank.experiments.analyze import QUANTILES

    shares = ("median" if share == 0.5 else f"{100 * share:g} %" for share in QUANTILES)
    headings = ["layer", "rests", "mean\nreach", "standard\ndeviation", *shares, "nearest\n(mean)"]
    rows = [
        [
            str(layer.layer),
            f"{100 * layer.probability:.1f} %",
            f"{layer.mean:,.1f}",
            f"{layer.deviation:,.1f}",
            *(f"{layer.reach.quantile(share):,}" for share in QUANTILES),
            f"{layer.nearest_mean:,.1f}",
        ]
        for layer in reach.reach.layers
    ]
    if drifting is not None:
        headings.append(f"drifting label\nat {drifting:,} steps")
        for layer, row in zip(reach.reach.layers, rows, strict=True):
            row.append(f"{layer.drifting(drifting).tokens:,.0f}")
    return table_of(headings, rows)


@verb(
    "fullrank analyze rank runs/plain runs/mixture --out figures",
    "fullrank analyze rank gpt2 --text book.txt --contexts 2000 --json",
    group=analyze,
)
def rank(
    names: Models,
    text: ModelText = None,
    contexts: Annotated[
        int | None, Number("--contexts", min=2, help="Number of contexts; 2 (d + 2) + 32 if not given.")
    ] = None,
    segment_length: SegmentLength = None,
    checkpoint: Checkpoint = "best",
    out: Out = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """The softmax bottleneck: the rank of log p(word | context) over many contexts, and its bound.

    A softmax over d hidden dimensions has rank d + 1 at most, d + 2 with an output bias;
    a mixture of softmaxes, sigsoftmax and a soft-cap on the logits are exempt.
    In double precision; a singular value counts above s_max max(shape) eps.
    Effective rank: exp(entropy) of the singular values as shares of their sum.
    """
    from fullrank.experiments.analyze import Reading, measure_ranks

    ranks = measure_ranks(names, Reading(text, segment_length, checkpoint, device, say), contexts=contexts)
    together = []
    if len({one.figures.contexts for one in ranks}) > 1:
        together.append(
            "The models were read after unequal numbers of contexts; give --contexts to compare their ranks."
        )
    files: list[Path] = []
    if out is not None:
        from fullrank.analysis.plots import write_rank

        files = write_rank({one.read.name: one.figures for one in ranks}, out)
    models = [one.as_dict() for one in ranks]
    content = {"models": models, "remarks": together, "files": [str(file) for file in files]}
    lines: list[str] = []
    for one in ranks:
        read = one.read
        lines += [f"{read.name} ({read.opened.text}, segments of {read.length:,}):", *one.remarks()]
    tell(content, [_rank_table(ranks), *lines, *together, *files], json=json)


def _rank_table(ranks: list[ModelRank]) -> Table:
    rows = []
    for one in ranks:
        figures, layer = one.figures, one.figures.layer
        words = "" if figures.columns == figures.vocab_size else f" of {figures.vocab_size:,}"
        rows.append(
            [
                one.read.name,
                layer.kind,
                f"{layer.hidden_size:,}",
                f"{layer.bound:,}" if layer.exempt is None else f"exempt ({layer.bound:,})",
                f"{figures.rank:,}",
                f"{figures.effective_rank:,.2f}",
                f"{figures.contexts:,}",
                f"{figures.columns:,}{words}",
            ]
        )
    headings = ("model", "output", "d", "bound", "rank", "effective\nrank", "contexts", "words")
    return table_of(headings, rows, left=2)


@verb(
    "fullrank analyze spectrum runs/plain runs/b --out figures",
    "fullrank analyze spectrum gpt2 --text book.txt --segment-length 512 --json",
    group=analyze,
)
def spectrum(
    names: Models,
    text: ModelText = None,
    texts: Texts = 16,
    segment_length: SegmentLength = None,
    checkpoint: Checkpoint = "best",
    out: Out = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """The low-rank bottleneck: singular values of the attention weights, before and after mixing (Mixhead Fig. 1, 3).

    Effective rank: exp(entropy) of the singular values as shares of their sum. Stable rank: sum of their squares over the
    largest square. Means over texts, and in the table over heads; --json has each head and the whole curves.
    """
    from fullrank.analysis.plots import write_spectrum
    from fullrank.experiments.analyze import Reading
    from fullrank.experiments.analyze_attention import measure_spectra

    found = measure_spectra(names, Reading(text, segment_length, checkpoint, device, say), texts)
    content = _drawn("spectrum", found, write_spectrum, out)
    lines = [f"{one.in_words}, weights {one.figures.weights}" for one in found]
    tell(content, [_spectra_table(found), *lines, *content["files"]], json=json)


def _spectra_table(found: list[ModelFigures[AttentionSpectrum]]) -> Table:
    rows = [
        [
            one.read.name if number == 0 else "",
            str(number),
            f"{layer.before.effective_rank.mean():.1f}",
            f"{layer.after.effective_rank.mean():.1f}" if layer.after is not layer.before else "",
            f"{layer.before.stable_rank.mean():.2f}",
            f"{layer.after.stable_rank.mean():.2f}" if layer.after is not layer.before else "",
        ]
        for one in found
        for number, layer in enumerate(one.figures.layers)
    ]
    headings = ("model", "layer", "effective\nrank", "after\nmixing", "stable\nrank", "after\nmixing")
    return table_of(headings, rows, left=1)


@verb(
    "fullrank analyze heads runs/plain --against runs/cross_head --out figures",
    "fullrank analyze heads runs/plain --prune 0.25 --out smaller",
    group=analyze,
)
def heads(
    name: Model,
    text: ModelText = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="A second model, whose deviation is compared.")
    ] = None,
    prune: Annotated[
        float | None,
        typer.Option(
            "--prune", metavar="N", help="Save a model without the N least important heads (below 1: a share) in --out."
        ),
    ] = None,
    texts: Texts = 16,
    segment_length: SegmentLength = None,
    checkpoint: Checkpoint = "best",
    out: Out = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Each head ablated in turn: the change of perplexity by layer and head (Skip Cross-head Table 3).

    A head is ablated where heads are merged: its output is zero; other heads go on reading its weights where they are mixed.
    Bold: perplexity falls without the head. Deviation: over the heads of a layer. Similarity: mean linear CKA of the outputs
    of two heads. --json has 95 % intervals over segments. An encoder predicts masked tokens, 15 % of each segment.
    Of a run of GLUE it is the change of the task's metric on the development split.
    """
    from fullrank.analysis.plots import write_heads
    from fullrank.experiments.analyze import Reading
    from fullrank.experiments.analyze_attention import finetunes, measure_heads, measure_task_heads, prune_heads

    if finetunes(name):
        exclude(
            "MODEL (a fine-tuned run)", "reads its own development split",
            {"--text": text, "--against": against, "--prune": prune, "--segment-length": segment_length, "--out": out},
        )  # fmt: skip
        tuned = measure_task_heads(name, device=device, say=say)
        tell(tuned, [_task_table(tuned)], json=json)
        return
    if prune is not None and out is None:
        raise InputError("--prune: give --out DIR, where the smaller model is saved")
    found = measure_heads(name, against, Reading(text, segment_length, checkpoint, device, say), texts)
    content = _drawn("heads", found, write_heads, out)
    lines = [*map(_heads_line, found), *content["files"]]
    if prune is not None and out is not None:
        content["pruned"] = pruned = prune_heads(found[0], prune, out / "pruned")
        lines.append(_pruned_line(pruned))
    tell(content, [_heads_table(found), *lines], json=json)


def _pruned_line(pruned: dict[str, Any]) -> str:
    heads = ", ".join(f"layer {layer}: {' '.join(map(str, gone))}" for layer, gone in pruned["heads"].items())
    figures = "; ".join(
        f"{key} {pruned[key]['before']:{form}} -> {pruned[key]['after']:{form}}"
        for key, form in (("parameters", ",d"), ("perplexity", ".3f"), ("seconds", ".3f"))
    )
    return f"without {heads}: {figures}; {pruned['folder']}"


def _change(value: float, *, bold: bool) -> Text:
    from rich.text import Text

    return Text(f"{value:+.3f}", style="bold" if bold else "")


def _task_table(content: dict[str, Any]) -> Table:
    layers = [layer["change"] for layer in content["layers"]]
    rows: list[list[str | Text]] = [
        [str(number), *(_change(value, bold=value > 0) for value in layer)] for number, layer in enumerate(layers)
    ]
    title = f"{content['metric']} {content['value']:.3f}\n({content['examples']:,} examples)\nlayer"
    return table_of((title, *(f"H{i}" for i in range(max(map(len, layers))))), rows)


def _heads_table(found: list[ModelFigures[Heads]]) -> Table:
    most = max(len(layer.change) for one in found for layer in one.figures.layers)
    rows: list[list[str | Text]] = []
    for number in range(len(found[0].figures.layers)):
        for one in found:
            layer, percent = one.figures.layers[number], one.content["layers"][number]["deviation_change_percent"]
            rows.append(
                [
                    one.read.name,
                    str(number),
                    *(_change(value, bold=value < 0) for value in layer.change),
                    *[""] * (most - len(layer.change)),
                    "" if layer.deviation is None else f"{layer.deviation:.3f}",
                    *([] if len(found) < 2 else ["" if percent is None else f"{percent:+.1f}"]),
                    "" if layer.redundancy is None else f"{layer.redundancy:.2f}",
                ]
            )
    against = ["% of\nchange"] * (len(found) > 1)
    headings = ("model", "layer", *(f"H{i}" for i in range(most)), "deviation", *against, "similarity")
    return table_of(headings, rows, left=1)


def _heads_line(one: ModelFigures[Heads]) -> str:
    figures = one.figures
    ends = [ends for layer in figures.layers for ends in layer.intervals]
    unsure = sum(interval is None or interval.low <= 0 <= interval.high for interval in ends)
    return (
        f"{one.in_words}, weights {figures.weights}; perplexity {figures.perplexity:.3f} ({figures.objective}); the "
        f"interval of {unsure} of {len(ends)} changes includes 0"
    )


@verb(
    "fullrank analyze mixing runs/a runs/b --out figures",
    "fullrank analyze mixing injected --text book.txt --json",
    group=analyze,
)
def mixing(
    names: Models,
    text: ModelText = None,
    texts: Texts = 16,
    segment_length: SegmentLength = None,
    out: Out = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Mixing matrices M: how far they are from plain attention, by layer and over training (Mixhead §3).

    Distance: ||M - I||. Orthogonality: ||M'M - I||^2 (Eq. 16). Variation: standard deviation over positions of the text, of a
    mixing that depends on the query; distance and orthogonality are then means over positions.
    A run is read at every checkpoint that it has kept (train.keep_checkpoints), the best and the last one.
    """
    from fullrank.analysis.plots import write_mixing
    from fullrank.experiments.analyze import Reading
    from fullrank.experiments.analyze_attention import measure_mixing

    found = measure_mixing(names, Reading(text, segment_length, device=device, say=say), texts)
    content = _drawn("mixing", found, write_mixing, out)
    tell(content, [_mixing_table(found), *(one.in_words for one in found), *content["files"]], json=json)


def _mixing_table(found: list[ModelFigures[Checkpoints]]) -> Table:
    rows = [
        [
            one.read.name,
            checkpoint,
            "" if step is None else f"{step:,}",
            str(layer.layer),
            f"{layer.distance:.3f}",
            f"{layer.orthogonality:.3f}",
            "" if layer.variation is None else f"{layer.variation:.3f}",
        ]
        for one in found
        for checkpoint, step, layers in one.figures
        for layer in layers
    ]
    headings = ("model", "checkpoint", "step", "layer", "distance", "orthogonality", "variation")
    return table_of(headings, rows, left=2)
