"""Many texts scored side by side, each by itself: what `measure` does for one, with the same figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fullrank.config.run import RunConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.evaluation.protocol import EvaluationProtocol
from fullrank.experiments.run_folder import open_run

_LOGITS = 1 << 24  # numbers in a block of logits


@dataclass(frozen=True)
class Passage:
    """Tokens that are read from the first to the last but one, and predicted from the second to the last.

    ids (N + 1,): inputs ids[:-1], targets ids[1:]. The first `unscored` targets are only read.
    """

    ids: np.ndarray
    unscored: int = 0

    @property
    def inputs(self) -> int:
        """N."""
        return len(self.ids) - 1


@dataclass(frozen=True)
class Score:
    """nll: nats summed over the targets that count. greedy: whether each of them was the model's first choice."""

    nll: float
    greedy: bool


def open_causal(folder: Path) -> RunConfig:
    """The configuration of the run in `folder`; InputError unless it predicts the next token."""
    config, _ = open_run(folder)
    if config.data.has_pairs:
        raise InputError(f"{folder}: a translation run, which lm-eval cannot ask; `fullrank eval` measures its BLEU")
    if config.masks:
        raise InputError(
            f"{folder}: names masked tokens from the text on both sides of them (train.objective: masked), and lm-eval asks "
            "for the probability of a text read from left to right; train with train.objective: causal"
        )
    if config.model.sees_future:
        raise InputError(
            f"{folder}: its tokens see later ones (model.attention.causal: as_published), so what it gives a text is no "
            "probability; train with model.attention.causal: masked"
        )
    return config


def passages(ids: Sequence[int] | np.ndarray, protocol: EvaluationProtocol, start_id: int) -> list[Passage]:
    """A whole text as `protocol` reads it: blocks, overlapping windows, or streams; every token counts once.

    The first token follows `start_id`, the first of a block or stream the token before it, as in `measure`.
    """
    text = np.concatenate([np.asarray([start_id]), np.asarray(ids, dtype=np.int64)])
    tokens = len(ids)
    if protocol.kind == "memory":
        assert protocol.streams is not None
        context, stride = 0, max(-(-tokens // protocol.streams), 1)
    else:
        context = protocol.context or 0
        stride = protocol.stride or protocol.segment_length
    found = []
    for scored in range(0, tokens, stride):
        start = max(scored - context, 0)
        found.append(Passage(text[start : min(scored + stride, tokens) + 1], scored - start))
    return found


def ending(text: Sequence[int], scored: int, longest: int | None) -> list[Passage]:
    """The end of a text, from token `scored` on, after as much of what precedes it as `longest` inputs hold (None: all).

    Longer ends are cut from the right: each piece but the first holds `longest` tokens, and all count once.
    """
    ids, found = np.asarray(text, dtype=np.int64), []
    end = len(ids) - 1
    while end >= scored:
        start = 0 if longest is None else max(end - longest, 0)
        found.append(Passage(ids[start : end + 1], max(scored - start - 1, 0)))
        end = start
    return found


def score(
    model: LanguageModel,
    texts: Sequence[Passage],
    *,
    segment_length: int,
    batch_size: int,
    greedy: bool = False,
    report: Callable[[int], None] | None = None,
) -> list[Score]:
    """The score of every passage, in the order given; passages of like length are read side by side.

    A model with memory reads them in segments and remembers what came before in its passage; one without reads each at
    once. Without `greedy` the vocabulary layer makes no logits, and that flag of the scores says nothing.
    report: told how many passages each batch has finished.
    """
    found: dict[int, Score] = {}
    order = sorted(range(len(texts)), key=lambda i: -texts[i].inputs)
    with torch.no_grad():
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            scores = _score_batch(model, [texts[i] for i in batch], segment_length, greedy)
            found.update(zip(batch, scores, strict=True))
            if report is not None:
                report(len(batch))
    return [found[i] for i in range(len(texts))]


def _score_batch(model: LanguageModel, texts: Sequence[Passage], segment_length: int, greedy: bool) -> list[Score]:
    device = next(model.parameters()).device
    longest = max(text.inputs for text in texts)
    ids = torch.zeros(len(texts), longest + 1, dtype=torch.int64)  # padded on the right, where nobody looks back from
    counts = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.from_numpy(text.ids)
        counts[row, text.unscored : text.inputs] = True
    ids, counts = ids.to(device), counts.to(device)
    nats = torch.zeros(len(texts), dtype=torch.float64, device=device)
    missed = torch.zeros(len(texts), dtype=torch.float64, device=device)
    memory = None
    step = segment_length if model.memory_length else longest
    for start in range(0, longest, step):
        here = slice(start, min(start + step, longest))
        read = model.hidden(ids[:, :-1][:, here], memory)
        memory = read.memory
        of = counts[:, here].nonzero()[:, 0]  # (T,): the rows of the targets that count
        if not len(of):
            continue
        hidden, targets = read.hidden[counts[:, here]], ids[:, 1:][:, here][counts[:, here]]  # (T, E), (T,)
        nats.index_add_(0, of, model.output.nll(hidden[None], targets[None])[0].double())
        if greedy:
            missed.index_add_(0, of, (_first_choice(model, hidden) != targets).double())
    return [Score(nll, miss == 0) for nll, miss in zip(nats.tolist(), missed.tolist(), strict=True)]


def _first_choice(model: LanguageModel, hidden: Tensor) -> Tensor:
    """The most probable token after each of hidden (T, E), (T,)."""
    assert model.config.vocab_size is not None
    rows = max(_LOGITS // model.config.vocab_size, 1)
    return torch.cat([model.output(some[None])[0].argmax(-1) for some in hidden.split(rows)])
