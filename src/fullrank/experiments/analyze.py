"""Models and configurations made ready for `fullrank analyze`: their text, the rank of their log-probabilities, their reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fullrank.analysis import LayerReach, LogProbRank, Reach, context, rank
from fullrank.config.recipe import Resolved
from fullrank.config.run import RunConfig
from fullrank.config.training import PhaseConfig
from fullrank.core.encoder import Encoder
from fullrank.core.errors import InputError, suggest
from fullrank.evaluation.perplexity import final_protocol, masked_protocol
from fullrank.experiments.objective import skip_schedule
from fullrank.experiments.run import corpus_of
from fullrank.experiments.run_folder import open_run
from fullrank.experiments.task import Say
from fullrank.models import Kind, LoadedModel, model_kind, open_model
from fullrank.text import SEGMENT_LENGTH, Text, batch_tokens, fitting_length, read_file

SPLIT = "valid"  # the text of a run
QUANTILES = (0.5, 0.9, 0.99)
_TOKENS = 1 << 16  # of a prepared corpus at a time

# -- a trained model and a text ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Options of verbs that read a text.

    text: None is a run's own valid split. segment_length: None is as evaluated, or 128.
    """

    text: Path | None = None
    segment_length: int | None = None
    checkpoint: str = "best"
    device: str = "auto"
    say: Say = print


@dataclass(frozen=True)
class ModelText:
    """A trained model and its text."""

    model: LoadedModel
    text: Text

    @property
    def opened(self) -> Any:
        about = {"mask_id": self.model.mask_id, "marks": self.model.marks}
        return SimpleNamespace(model=self.model.module, text=self.text.name, **about)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def given(self) -> str:
        return str(self.model.folder or self.model.name)

    @property
    def kind(self) -> str:
        return self.model.source

    @property
    def source(self) -> str:
        return self.model.source

    @property
    def folder(self) -> Path:
        return self.model.folder or Path(self.model.name)

    @property
    def length(self) -> int:
        return self.text.segment_length

    def rows(self, most: int | None) -> list[Tensor]:
        return self.text.rows(most)

    def as_dict(self) -> dict[str, Any]:
        return describe(self.model, self.text)


def describe(model: LoadedModel, text: Text) -> dict[str, Any]:
    """The JSON that says where the figures of a model come from."""
    return {"model": model.name, "source": model.source, "text": text.name, "segment_length": text.segment_length}


def read_text(model: LoadedModel, reading: Reading) -> Text:
    """The text of a model: the file of `--text`, else the valid split of its run.

    Segments are as long as the run is evaluated with. Raises InputError where there is no text.
    """
    usual = SEGMENT_LENGTH
    if model.source == "run":
        assert model.folder is not None
        run, _ = open_run(model.folder)
        if not run.translates:
            usual = (masked_protocol(run) if run.masks else final_protocol(run)).segment_length
    length = fitting_length(model, reading.segment_length, usual)
    if reading.text is not None:
        return read_file(model, reading.text, length)
    if model.source != "run":
        raise InputError(f"{model.name}: not a run of fullrank, so no text of its own; give one with --text FILE")
    return read_split(model, length, reading.say)


def read_split(model: LoadedModel, segment_length: int, say: Say = print) -> Text:
    """The valid split of a run; of a translation run its source sentences, each with <eos>."""
    assert model.folder is not None
    corpus = corpus_of(model.folder, SPLIT, say)
    name, start = f"{corpus.label}, {SPLIT}", None
    if isinstance(model.own, Encoder):
        name, read = f"{name}, source", partial(_read_sentences, corpus.pairs(SPLIT))
    else:
        start, read = corpus.tokenizer.start_id, partial(_read_tokens, corpus.ids(SPLIT))
    return Text(name, read, segment_length, start_id=start, batch_tokens=batch_tokens(model))


def _read_tokens(tokens: Any) -> Iterator[Sequence[int]]:
    for start in range(0, len(tokens), _TOKENS):
        yield tokens[start : start + _TOKENS].tolist()


def _read_sentences(pairs: Any) -> Iterator[Sequence[int]]:
    for number in range(len(pairs)):
        yield [*pairs.source(number).tolist(), pairs.source_eos_id]


def open_all(
    names: Sequence[str], reading: Reading, *, dtype: torch.dtype | None = None, causal: bool = False
) -> Iterator[tuple[LoadedModel, Text]]:
    """Each model once, on its device, with its text; dtype and causal as for `open_model`.

    Folders are called by their last parts, where these tell the models apart.
    Raises InputError for a name without a model, and for a text that is missing.
    """
    names = list(dict.fromkeys(names))
    for name in names:  # all of them, before any is read
        check_named(name, reading)
    last = [Path(name).name if Path(name).is_dir() else name for name in names]
    for name, label in zip(names, last if len(set(last)) == len(last) else names, strict=True):
        model = open_model(name, checkpoint=reading.checkpoint, dtype=dtype, device=reading.device, causal=causal)
        model.name = label
        yield model, read_text(model, reading)


def open_models(names: Sequence[str], reading: Reading) -> Iterator[ModelText]:
    """`open_all`, each model and its text as one value."""
    for model, text in open_all(names, reading):
        yield ModelText(model, text)


def check_named(name: str, reading: Reading) -> None:
    """InputError for a configuration, and where a text has to be named; a note where the hub is asked."""
    kind = model_kind(name)
    if kind == "configuration":
        raise InputError(
            f"{name}: a configuration, which has no weights; give a run folder, a saved model or a Hugging Face model"
        )
    if kind != "run" and reading.text is None:
        raise InputError(f"{name}: not a run of fullrank, so no text of its own; give one with --text FILE")
    note_hub(name, kind, reading.say)


def note_hub(name: str, kind: Kind, say: Say) -> None:
    """Say that a model is looked for on the hub."""
    if kind == "Hugging Face model" and not name.startswith("hf:") and not Path(name).expanduser().is_dir():
        say(f"{name}: no such folder, file or recipe; looking for it on the Hugging Face hub")


# -- rank --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelRank:
    """The rank of one model's log-probabilities."""

    read: ModelText
    figures: LogProbRank

    def as_dict(self) -> dict[str, Any]:
        """The JSON of one model."""
        figures, layer = self.figures, self.figures.layer
        return {
            **self.read.as_dict(),
            "output": layer.kind,
            "d": layer.hidden_size,
            "bias": layer.bias,
            "bound": layer.bound,
            "bound_in_words": layer.in_words,
            "bound_applies": layer.exempt is None,
            "exempt": layer.exempt,
            "rank": figures.rank,
            "effective_rank": figures.effective_rank,
            "full": figures.full,
            "conclusive": figures.conclusive,
            "contexts": figures.contexts,
            "repeated_contexts": figures.repeats,
            "columns": figures.columns,
            "vocab_size": figures.vocab_size,
            "precision": "float64",
            "rounding": figures.eps,
            "tolerance": figures.tolerance,
            "singular_values": figures.singular_values.tolist(),
            "remarks": [*self.remarks()],
        }

    def remarks(self) -> Iterator[str]:
        """The meaning of the figures, in sentences."""
        figures, layer = self.figures, self.figures.layer
        bound = f"{layer.in_words} = {layer.bound:,}"
        if layer.exempt is not None:
            yield f"The bound of a single softmax, {bound}, does not hold here: {layer.exempt}."
        elif figures.rank <= layer.bound:
            yield (
                f"The softmax bottleneck: however many contexts are read, the rank stays at or below {bound}, as log p is "
                f"linear in the {layer.hidden_size:,} hidden dimensions but for its normaliser."
            )
        else:
            yield f"The rank is above {bound}, which such an output layer can exceed by rounding only."
        if layer.exempt is None and layer.normed and layer.bias and figures.rank == layer.bound - 1:
            yield (
                "It is one less, since the LayerNorm before the output layer leaves hidden states d - 1 dimensions around its "
                "bias, and the output bias adds no other."
            )
        if figures.vocab_size <= layer.bound:
            yield f"A vocabulary of {figures.vocab_size:,} words cannot have a higher rank: a softmax is no bottleneck for it."
        elif not figures.conclusive:
            yield (
                f"{figures.contexts:,} contexts and {figures.columns:,} words are too few to show a rank above {bound}; read "
                "more (--contexts, a longer --text)."
            )
        elif figures.full:
            yield f"The rank is the highest that {figures.contexts:,} contexts and {figures.columns:,} words can show."
        if figures.contexts < figures.wanted:
            yield f"The text has {figures.contexts:,} different contexts of the {figures.wanted:,} that were asked for."
        if figures.columns < figures.vocab_size:
            yield (
                f"Looked at were {figures.columns:,} words, drawn from {figures.vocab_size:,}, over all of which probabilities "
                "are normalised; all of them would take too much memory."
            )
        if figures.eps > 1e-15:
            yield f"The model hands its logits over in a lower precision (rounding {figures.eps:.1e}); so is the tolerance."


def measure_ranks(names: list[str], reading: Reading, *, contexts: int | None = None) -> list[ModelRank]:
    """The rank of each model after `contexts` contexts of its text; the errors of `open_all`."""
    ranks = []
    for model, text in open_all(names, reading, dtype=torch.float64, causal=True):
        model.require({"logits"}, "rank")
        ranks.append(ModelRank(ModelText(model, text), rank(model.module, text.segments(), contexts=contexts)))
    return ranks


# -- context -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseReach:
    """The reach of each layer's memory in a phase; phase: None where no phase skips a layer."""

    resolved: Resolved[RunConfig]
    phase: PhaseConfig | None
    reach: Reach

    @property
    def title(self) -> str:
        """The recipe, its row and scale, and the phase."""
        resolved = self.resolved
        row = f", row {resolved.row}, scale {resolved.scale}" if resolved.row else ""
        name = Path(resolved.recipe).name if Path(resolved.recipe).exists() else resolved.recipe
        return f"{name}{row}" + (f", phase {self.phase.name} (skip: {self.phase.skip})" if self.phase else "")

    def as_dict(self, drifting: int | None = None) -> dict[str, Any]:
        """The JSON of the verb; `drifting`: also the released code's labels after so many steps."""
        reach, phase, resolved = self.reach, self.phase, self.resolved
        return {
            "recipe": resolved.recipe,
            "row": resolved.row,
            "scale": resolved.scale,
            "phase": phase.name if phase else None,
            "skip": phase.skip if phase else "none",
            "p": phase.p if phase else None,
            "gaps": phase.gaps if phase else "true",
            "memory_length": reach.memory_length,
            "segment_length": reach.segment_length,
            "layers": [_layer(layer, drifting) for layer in reach.layers],
            "farthest": {"layers": [layer.layer for layer in reach.farthest], "mean": reach.farthest[0].mean},
            "resting_layers": reach.resting,
            "published": {
                "equation_6": reach.published,
                "short_form": reach.published_short if phase and phase.skip == "linear" else None,
                "sums_over_layers": True,
            },
            "remarks": [*self.remarks()],
        }

    def remarks(self) -> Iterator[str]:
        """Sentences about what the figures do not say themselves."""
        phase, reach, memory, segment = self.phase, self.reach, self.reach.memory_length, self.reach.segment_length
        if phase is None or not reach.resting:
            who = f"Phase '{phase.name}' lets no layer rest" if phase else "No phase (train.phases) lets a layer rest"
            yield f"{who}: every layer remembers the {memory:,} tokens before the segment, always."
        else:
            far = reach.farthest
            layers = f"layer {far[0].layer}" if len(far) == 1 else f"{len(far)} layers alike"
            short = f" (in short M (L - 3) / 2 = {reach.published_short:,.0f})" if phase.skip == "linear" else ""
            sizes = f", and takes memory and segment to be equal, here {memory:,} and {segment:,}"
            yield (
                f"The paper's Eq. 6 gives {reach.published:,.0f} tokens{short}: it adds p 2M over the {len(reach.layers)} "
                f"layers, which is the expected context of no layer{sizes if memory != segment else ''}; the farthest that a "
                f"layer's memory reaches is {far[0].mean:,.0f} tokens on average ({layers})."
            )
            yield f"At a step {reach.resting:.2f} of {len(reach.layers)} layers rest on average."
        if self.resolved.config.model.same_length:
            yield (
                f"model.same_length hides what is {memory:,} or more tokens before a query: what a layer remembers beyond "
                "that is not seen."
            )
        if phase is not None and phase.gaps == "drifting":
            yield (
                "gaps: drifting - the tokens that are remembered are these, but the model is told that they are farther away, "
                "and farther with every step (--drifting STEPS)."
            )


def phase_reach(resolved: Resolved[RunConfig], phase: str | None = None) -> PhaseReach:
    """The reach of each layer's memory in `phase`; if none is named, in the first phase that skips layers.

    Raises InputError for a model without memory, an unknown phase, and probabilities that give no reach.
    """
    run = resolved.config
    if run.model.sees_future:
        raise InputError(
            "model.attention.causal: as_published sees every token of its segment and can have no memory, so no layer "
            "reaches beyond it; analyse a 'masked' model with model.memory_length"
        )
    if not run.model.memory_length:
        raise InputError(
            "model.memory_length: 0, so no layer has a memory that could reach anywhere; set it to some tokens "
            "(model.memory_length=512)"
        )
    chosen, layers = _phase(run, phase), run.model.num_hidden_layers
    probabilities = skip_schedule(chosen, layers).probabilities if chosen else (0.0,) * layers
    try:
        reach = context(probabilities, memory_length=run.model.memory_length, segment_length=run.train.segment_length)
        for layer in reach.layers:
            layer.reach  # noqa: B018  # refuses here what has too many values
    except InputError as error:
        raise InputError(f"train.phases.{chosen.name}.p: {error}" if chosen else str(error)) from error
    return PhaseReach(resolved, chosen, reach)


def _phase(run: RunConfig, name: str | None) -> PhaseConfig | None:
    phases = {phase.name: phase for phase in run.train.phases}
    if name is None:
        layers = run.model.num_hidden_layers
        return next((phase for phase in phases.values() if any(skip_schedule(phase, layers).probabilities)), None)
    if not phases:
        raise InputError(f"--phase {name}: the configuration has no phases (train.phases)")
    if name not in phases:
        raise InputError(f"--phase {name}: the configuration has no such phase; {suggest(name, phases)}")
    return phases[name]


def _layer(layer: LayerReach, drifting: int | None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "layer": layer.layer,
        "probability": layer.probability,
        "mean": layer.mean,
        "deviation": layer.deviation,
        "quantiles": {f"{share:g}": layer.reach.quantile(share) for share in QUANTILES},
        "nearest_mean": layer.nearest_mean,
        "reach": {"tokens": layer.reach.tokens.tolist(), "probabilities": layer.reach.probabilities.tolist()},
        "nearest": {"tokens": layer.nearest.tokens.tolist(), "probabilities": layer.nearest.probabilities.tolist()},
    }
    if drifting is not None:
        content["drifting"] = dataclasses.asdict(layer.drifting(drifting))
    return content
