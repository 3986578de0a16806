"""Models and configurations made ready for `fullrank analyze`: their text, the rank of their log-probabilities, their reach."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.analysis import LayerReach, LogProbRank, Reach, context, rank
from fullrank.config.recipe import Resolved
from fullrank.config.run import RunConfig
from fullrank.config.training import PhaseConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.encoder import Encoder
from fullrank.core.errors import InputError, suggest
from fullrank.data import load_tokenizer
from fullrank.data.files import Section, lines, pieces
from fullrank.evaluation.perplexity import final_protocol, masked_protocol
from fullrank.experiments.models import Kind, load_causal, load_ours, location_of, model_kind
from fullrank.experiments.objective import skip_schedule
from fullrank.experiments.run import corpus_of
from fullrank.experiments.run_folder import open_run
from fullrank.experiments.task import Say
from fullrank.experiments.translate import load_languages
from fullrank.training.device import choose_device

SPLIT, LENGTH = "valid", 128  # the text of a run; tokens of a segment where nothing else says
QUANTILES = (0.5, 0.9, 0.99)
_AT_ONCE, _LOGITS = 1024, 1 << 25  # tokens that a model reads in one pass, and the most logits that it makes of them
_CHARACTERS = 1 << 14  # that a Hugging Face tokenizer is given at a time
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
class OpenedModel:
    """A model with weights, and a text for it.

    max_length: the most tokens it reads, None: any number. text: the name of the text, None: there is none. ids: its token
    ids, some at a time. start_id: stands before the first one. bos_id opens, eos_id closes every segment of a model of Hugging
    Face; mask_id and marks: its <mask>, and the ids that are no words.
    """

    model: Any
    max_length: int | None
    vocab_size: int
    text: str | None
    ids: Iterable[list[int]]
    start_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    mask_id: int | None = None
    marks: tuple[int, ...] = ()
    inputs: Any = None  # of a model type: what it is called with, where token ids do not do


@dataclass(frozen=True)
class ModelText:
    """A trained model that reads its text in segments of `length` tokens; name: as given, or its last part."""

    name: str
    given: str
    kind: Kind
    opened: OpenedModel
    length: int

    @property
    def source(self) -> str:
        """run, saved model or Hugging Face."""
        return self.kind.replace("Face model", "Face")

    @property
    def folder(self) -> Path:
        return Path(self.given).expanduser()

    def as_dict(self) -> dict[str, Any]:
        """The JSON that says where the figures of a model come from."""
        about = {"model": self.name, "source": self.source, "text": self.opened.text}
        return {**about, "segment_length": self.length}

    def segments(self, length: int | None = None) -> Iterator[Tensor]:
        """Token ids in segments of `length`, several in a batch, the rest of the text last."""
        opened, length = self.opened, length or self.length
        opening, closing = ([] if mark is None else [mark] for mark in (opened.bos_id, opened.eos_id))
        own = max(1, length - len(opening) - len(closing))
        rows = max(1, min(_AT_ONCE, _LOGITS // opened.vocab_size) // length)
        left = [] if opened.start_id is None else [opened.start_id]
        for ids in opened.ids:
            left += ids
            while len(left) >= own * rows:
                yield torch.tensor([opening + left[i * own : (i + 1) * own] + closing for i in range(rows)])
                left = left[own * rows :]
        while left:
            yield torch.tensor([opening + left[:own] + closing])
            left = left[own:]

    def rows(self, most: int | None, length: int | None = None) -> list[Tensor]:
        """The first `most` whole segments (1, N); None: all of them."""
        rows = (row for batch in self.segments(length) for row in batch.split(1))
        return list(itertools.islice((row for row in rows if row.shape[1] == (length or self.length)), most))


def open_with_text(
    name: str, kind: Kind, *, text: Path | None, checkpoint: str, dtype: torch.dtype, say: Say, causal: bool = True
) -> OpenedModel:
    """Any trained model `name`, with the file `text`; else a run's valid split.

    dtype: of a Hugging Face model; one of ours stays as it is saved. causal: a language model; else also an encoder with or
    without a vocabulary layer, and of a model that reads two sequences its encoder.
    """
    if kind == "Python function" and text is not None:
        raise InputError(
            f"--text: {name} gives a model without a tokenizer; in Python give token ids (fullrank.check, text=)"
        )
    folder = Path(name).expanduser()
    label, ids, start = None if text is None else str(text), iter(list[list[int]]()), None
    if kind in ("Hugging Face model", "Python function"):
        if kind == "Hugging Face model" and not Path(location_of(name)).is_dir() and not name.startswith("hf:"):
            say(f"{name}: no such folder, file or recipe; looking for it on the Hugging Face hub")
        loaded = load_causal(name, dtype, tokenizer=text is not None, as_saved=not causal)
        if text is None:
            return OpenedModel(loaded.model, loaded.max_length, 0, None, ids, inputs=loaded.inputs)
        vocab_size, words = loaded.model.config.get_text_config().vocab_size, loaded.tokenizer
        ids = _encoded_lines(words, text)
        opened = OpenedModel(loaded.model, loaded.max_length, vocab_size, label, ids, bos_id=words.bos_token_id)
        if causal or words.cls_token_id is None or _predicts_next(loaded.model):
            return opened
        return dataclasses.replace(
            opened,
            bos_id=words.cls_token_id,
            eos_id=words.sep_token_id,
            mask_id=words.mask_token_id,
            marks=tuple(words.all_special_ids),
        )
    model: Any = LanguageModel.load(folder, checkpoint) if causal else load_ours(folder, checkpoint)
    if isinstance(model, Encoder):
        label, ids = _source_side(folder, text, say)
    elif text is not None:
        tokenizer = load_tokenizer(folder)
        start = tokenizer.start_id
        ids = map(tokenizer.encode, pieces(Section(text), exact=tokenizer.kind == "byte", key="--text"))
    elif kind == "run":
        corpus = corpus_of(folder, SPLIT, say)
        label, start, tokens = f"{corpus.label}, {SPLIT}", corpus.tokenizer.start_id, corpus.ids(SPLIT)
        ids = (tokens[i : i + _TOKENS].tolist() for i in range(0, len(tokens), _TOKENS))
    assert model.config.vocab_size is not None
    return OpenedModel(model, model.max_length, model.config.vocab_size, label, ids, start_id=start)


def _predicts_next(model: Any) -> bool:
    """The model is of a causal class of transformers; its tokenizer may have been made for another."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _source_side(folder: Path, text: Path | None, say: Say) -> tuple[str, Iterator[list[int]]]:
    """Sentences that the encoder of a translation run reads, each with its <eos>: of a file, else of the run's valid split."""
    if text is not None:
        language, _ = load_languages(folder)
        return str(text), ([*language.encode(line), language.eos_id] for line in lines(text, "--text"))
    corpus = corpus_of(folder, SPLIT, say)
    pairs, label = corpus.pairs(SPLIT), f"{corpus.label}, {SPLIT}, source"
    return label, ([*pairs.source(i).tolist(), pairs.source_eos_id] for i in range(len(pairs)))


def _encoded_lines(tokenizer: Any, text: Path) -> Iterator[list[int]]:
    """Token ids of a text file by a tokenizer of Hugging Face, some lines at a time, without special tokens."""
    waiting = ""
    for piece in pieces(Section(text), exact=False, key="--text"):
        for line in io.StringIO(piece, newline="\n"):
            waiting += line
            if len(waiting) >= _CHARACTERS:
                yield tokenizer(waiting, add_special_tokens=False, verbose=False).input_ids
                waiting = ""
    if waiting:
        yield tokenizer(waiting, add_special_tokens=False, verbose=False).input_ids


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
    """The rank of each model after `contexts` contexts of its text; the errors of `open_models`."""
    return [
        ModelRank(read, rank(read.opened.model.double(), read.segments(), contexts=contexts))
        for read in open_models(names, reading, dtype=torch.float64, causal=True)
    ]


def open_models(
    names: list[str], reading: Reading, *, dtype: torch.dtype = torch.float32, causal: bool = False
) -> Iterator[ModelText]:
    """Each model once, on its device, with its text; dtype and causal as for `open_with_text`.

    Raises InputError for a name without a model, for a text that is missing, and where transformers is.
    """
    names = list(dict.fromkeys(names))
    kinds = [_kind_with_weights(name, reading.text) for name in names]  # all of them, before any is read
    last = [Path(name).name if Path(name).is_dir() else name for name in names]
    labels = last if len(set(last)) == len(last) else names  # last parts of folders, where they tell the models apart
    for name, kind, label in zip(names, kinds, labels, strict=True):
        opened = open_with_text(
            name, kind, text=reading.text, checkpoint=reading.checkpoint, dtype=dtype, say=reading.say, causal=causal
        )
        usual, longest, length = LENGTH, opened.max_length, reading.segment_length
        if kind == "run":
            run, _ = open_run(Path(name).expanduser())
            if not run.translates:
                usual = (masked_protocol(run) if run.masks else final_protocol(run)).segment_length
        if longest is not None and length is not None and length > longest:
            raise InputError(f"--segment-length: {length}, but {name} reads at most {longest} tokens; shorten it")
        opened.model.to(choose_device(reading.device, "--device"))
        yield ModelText(label, name, kind, opened, length or min(usual, longest or usual))


def _kind_with_weights(name: str, text: Path | None) -> Kind:
    """InputError for a configuration, and where a text has to be named."""
    kind = model_kind(name)
    if kind == "configuration":
        raise InputError(
            f"{name}: a configuration, which has no weights; give a run folder, a saved model or a Hugging Face model"
        )
    if kind != "run" and text is None:
        raise InputError(f"{name}: not a run of fullrank, so no text of its own; give one with --text FILE")
    return kind


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
