"""`fullrank analyze rank`: the rank of the log-probabilities of runs, saved models and Hugging Face's models."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.analysis import LogProbRank, rank
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.data import Tokenizer, load_tokenizer
from fullrank.data.files import Section, pieces
from fullrank.evaluation.protocol import final_protocol
from fullrank.experiments.evaluate import corpus_of
from fullrank.experiments.models import load_causal, model_kind
from fullrank.experiments.run_folder import open_run
from fullrank.experiments.task import Say
from fullrank.training.device import choose_device

SPLIT, LENGTH = "valid", 128  # the text of a run; tokens of a segment where nothing else says
_AT_ONCE, _LOGITS = 1024, 1 << 25  # tokens that a model reads in one pass, and the most logits that it makes of them
_PIECE = 1 << 14  # characters that a Hugging Face tokenizer is given at a time


@dataclass(frozen=True)
class Reading:
    """What is read and how: a text file (None: the run's own), contexts, tokens of a segment, checkpoint, device."""

    text: Path | None = None
    contexts: int | None = None
    segment_length: int | None = None
    checkpoint: str = "best"
    device: str = "auto"


@dataclass(frozen=True)
class FoundRank:
    """name: as given, or its last part. source: run, saved model or Hugging Face. text: what was read, in words."""

    name: str
    source: str
    text: str
    segment_length: int
    figures: LogProbRank

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the figures mean."""
        return tuple(_remarks(self.figures))


def find_ranks(names: list[str], reading: Reading, say: Say = print) -> tuple[list[FoundRank], tuple[str, ...]]:
    """The rank of each model, and what has to be said of all of them together.

    Raises InputError for what is no model, for a text that is missing, and where transformers is.
    """
    names = list(dict.fromkeys(names))
    for name in names:
        _kind(name, reading)  # before any of them is read
    found = [_find(name, label, reading, say) for name, label in zip(names, _labels(names), strict=True)]
    remarks = []
    if len({one.figures.contexts for one in found}) > 1:
        remarks.append(
            "The models were read after unequal numbers of contexts; give --contexts to compare their ranks."
        )
    return found, tuple(remarks)


def as_dict(found: FoundRank) -> dict[str, Any]:
    """What the verb prints of one model with `--json`."""
    figures, layer = found.figures, found.figures.layer
    return {
        "model": found.name,
        "source": found.source,
        "text": found.text,
        "segment_length": found.segment_length,
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
        "remarks": list(found.remarks),
    }


# -- what is read -----------------------------------------------------------------------------------------------------


def _kind(name: str, reading: Reading) -> str:
    """run, saved model or Hugging Face; InputError for a configuration, and where a text has to be named."""
    kind = model_kind(name)
    if kind == "configuration":
        raise InputError(
            f"{name}: a configuration, which has no weights; give a run folder, a saved model or a Hugging Face model"
        )
    if kind != "run" and reading.text is None:
        raise InputError(f"{name}: not a run of fullrank, so no text of its own; give one with --text FILE")
    return kind.removesuffix(" model") if kind == "Hugging Face model" else kind


def _labels(names: list[str]) -> list[str]:
    """The last parts of folders where they tell the models apart."""
    last = [Path(name).name if Path(name).is_dir() else name for name in names]
    return last if len(set(last)) == len(last) else names


def _find(name: str, label: str, reading: Reading, say: Say) -> FoundRank:
    kind = _kind(name, reading)
    device = choose_device(reading.device, "--device")
    read: Iterable[list[int]]
    text = str(reading.text)
    if kind == "Hugging Face":
        if not Path(name).expanduser().is_dir():
            say(f"{name}: no such folder; looking for it on the Hugging Face hub")
        loaded = load_causal(name, torch.float64)
        model, longest, usual, first = loaded.model, loaded.max_length, LENGTH, loaded.tokenizer.bos_token_id
        assert reading.text is not None
        read = encoded(loaded.tokenizer, reading.text)
        vocabulary = loaded.model.config.get_text_config().vocab_size
    else:
        folder, first = Path(name).expanduser(), None
        model = LanguageModel.load(folder, reading.checkpoint).double()
        longest, vocabulary = model.max_length, model.config.vocab_size
        usual = final_protocol(open_run(folder)[0]).segment_length if kind == "run" else LENGTH
        if reading.text is None:
            corpus = corpus_of(folder, SPLIT, say)
            ids = corpus.ids(SPLIT)
            text, start = f"{corpus.label}, {SPLIT}", corpus.tokenizer.start_id
            read = (ids[i : i + (1 << 16)].tolist() for i in range(0, len(ids), 1 << 16))
        else:
            tokenizer = load_tokenizer(folder)
            start = tokenizer.start_id
            read = map(tokenizer.encode, own_pieces(reading.text, tokenizer))
        read = itertools.chain([[start]], read)
    length = _length(name, reading.segment_length, usual, longest)
    segments = _segments(read, length, first, min(_AT_ONCE, _LOGITS // vocabulary))
    figures = rank(model.to(device), segments, contexts=reading.contexts)
    return FoundRank(label, kind, text, length, figures)


def _length(name: str, given: int | None, usual: int, longest: int | None) -> int:
    if longest is None:
        return given or usual
    if given is not None and given > longest:
        raise InputError(f"--segment-length: {given}, but {name} reads at most {longest} tokens; shorten it")
    return given or min(usual, longest)


def own_pieces(text: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """A text file in pieces for a tokenizer of ours."""
    return pieces(Section(text), exact=tokenizer.kind == "byte", key="--text")


def encoded(tokenizer: Any, text: Path) -> Iterator[list[int]]:
    """Token ids of a text file by a tokenizer of Hugging Face, some lines at a time, without special tokens."""
    lines: list[str] = []
    size = 0
    for piece in pieces(Section(text), exact=False, key="--text"):
        for line in piece.splitlines(keepends=True):
            lines.append(line)
            size += len(line)
            if size >= _PIECE:
                yield tokenizer("".join(lines), add_special_tokens=False, verbose=False).input_ids
                lines, size = [], 0
    if lines:
        yield tokenizer("".join(lines), add_special_tokens=False, verbose=False).input_ids


def _segments(read: Iterable[list[int]], length: int, first: int | None, at_once: int) -> Iterator[Tensor]:
    """Token ids in segments of `length`, several in a batch of `at_once` tokens, the rest of the text last.

    `first` opens every segment.
    """
    begin = [] if first is None else [first]
    own = max(1, length - len(begin))
    rows = max(1, at_once // length)
    left: list[int] = []
    for ids in read:
        left += ids
        while len(left) >= own * rows:
            yield torch.tensor([begin + left[i * own : (i + 1) * own] for i in range(rows)])
            left = left[own * rows :]
    while left:
        yield torch.tensor([begin + left[:own]])
        left = left[own:]


# -- what it means ----------------------------------------------------------------------------------------------------


def _remarks(figures: LogProbRank) -> Iterator[str]:
    layer, bound = figures.layer, f"{figures.layer.in_words} = {figures.layer.bound:,}"
    if layer.exempt is not None:
        yield f"The bound of a single softmax, {bound}, does not hold here: {layer.exempt}."
    elif figures.rank <= layer.bound:
        yield (
            f"The softmax bottleneck: however many contexts are read, the rank stays at or below {bound}, as log p is linear "
            f"in the {layer.hidden_size:,} hidden dimensions but for its normaliser."
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
            f"{figures.contexts:,} contexts and {figures.columns:,} words are too few to show a rank above {bound}; read more "
            "(--contexts, a longer --text)."
        )
    elif figures.full:
        yield f"The rank is the highest that {figures.contexts:,} contexts and {figures.columns:,} words can show."
    if figures.contexts < figures.wanted:
        yield f"The text has {figures.contexts:,} different contexts of the {figures.wanted:,} that were asked for."
    if figures.columns < figures.vocab_size:
        yield (
            f"Looked at were {figures.columns:,} words, drawn from {figures.vocab_size:,}, over all of which probabilities are "
            "normalised; all of them would take too much memory."
        )
    if figures.eps > 1e-15:
        yield f"The model hands its logits over in a lower precision (rounding {figures.eps:.1e}); so is the tolerance."
