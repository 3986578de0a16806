"""Measuring a language model: a text becomes passages by its protocol, and passages are read side by side.

A block is a passage whose every token counts, a window one whose beginning is only read, and a stream one that a model with
memory reads in segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fullrank.core.decoder import LanguageModel
from fullrank.core.draws import evaluating
from fullrank.core.encoder import MaskedLanguageModel
from fullrank.core.errors import InputError
from fullrank.core.output import Tempered
from fullrank.core.registry import with_parts
from fullrank.data.padded_batches import batches_by_length
from fullrank.evaluation.perplexity import Evaluation, EvaluationProtocol, Tally
from fullrank.training.device import device_of
from fullrank.training.distributed import all_reduce, rank, world_size


def measure(model: Any, ids: np.ndarray, protocol: EvaluationProtocol, *, batch_size: int, start_id: int) -> Evaluation:
    """Summed nll of the text `ids` under the model in evaluation mode, read as `protocol` says; the mode is restored.

    Where that is no next-token perplexity, also that of the last position of every block or window, alone.

    batch_size: blocks or windows at a time; streams are as many as the protocol says.
    In the precision around the call: while training that of training, for final figures fp32.
    Raises InputError where the model cannot read so many tokens (`check_length`).
    """
    tally = Tally(device_of(model), sums=all_reduce)
    batches = make_batches(model, ids, protocol, batch_size=batch_size, start_id=start_id)
    with evaluating(model):
        changed = apply_protocol(model, protocol)
        if model.config.sees_future and protocol.kind != "memory":
            result = _score_padded(changed, batches, tally)
            return replace(result, last_position=None) if protocol.next_token else result
        for batch in batches:
            for states in read_states(changed, batch, protocol.segment_length):
                tally.add(changed.output.nll(states.hidden, states.targets))
    return tally.total()


def apply_protocol(model: LanguageModel, protocol: EvaluationProtocol) -> LanguageModel:
    """The model with the memory, the clamp and the temperature of a protocol; it shares all parameters."""
    changed = model.with_memory(
        protocol.memory_length, same_length=protocol.same_length, clamp_length=protocol.clamp_length
    )
    return divide_logits(changed, protocol.temperature)


def divide_logits(model: LanguageModel, temperature: float) -> LanguageModel:
    """The model with its logits divided by a temperature; ConfigError for an output layer that has none."""
    return model if temperature == 1 else with_parts(model, output=Tempered(model.output, temperature))


def check_length(model: LanguageModel, protocol: EvaluationProtocol, tokens: int) -> None:
    """InputError if the model has no positions for what is read in one go: a block, a window, or a whole stream."""
    limit = model.max_length
    if limit is None:
        return
    if protocol.streams is None:
        check_block(limit, min(tokens, protocol.segment_length))
    elif -(-tokens // protocol.streams) > limit:
        raise InputError(
            f"a stream of {-(-tokens // protocol.streams):,} tokens is longer than the {limit:,} positions of this model "
            "(model.max_position_embeddings), and positions go on through the memory; measure it in more streams "
            "(eval.batch_size or --batch-size) or without memory (eval.memory_length or --memory-length 0)"
        )


def check_block(limit: int | None, longest: int) -> None:
    """InputError if a block or window of `longest` tokens is longer than a model of `limit` positions can read."""
    if limit is not None and longest > limit:
        raise InputError(
            f"a block or window of {longest:,} tokens is longer than the {limit:,} positions of this model "
            "(model.max_position_embeddings); shorten it (eval.segment_length or --segment-length)"
        )


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


class States(NamedTuple):
    """Inputs (1, T, E) of the output layer and targets (1, T) of the tokens that count; rows (T,): their passages."""

    hidden: Tensor
    targets: Tensor
    rows: Tensor


def passages(ids: Sequence[int] | np.ndarray, protocol: EvaluationProtocol, start_id: int) -> list[Passage]:
    """A whole text as `protocol` reads it: blocks, overlapping windows, or streams; every token counts once.

    The first token follows `start_id`, the first of a block or stream the token before it.
    """
    text = np.concatenate([np.asarray([start_id]), np.asarray(ids, dtype=np.int64)])
    tokens = len(ids)
    context, stride = protocol.context or 0, protocol.stride or protocol.segment_length
    if protocol.streams is not None:
        stride = max(-(-tokens // protocol.streams), 1)
    parts = []
    for scored in range(0, tokens, stride):
        start = max(scored - context, 0)
        parts.append(Passage(text[start : min(scored + stride, tokens) + 1], scored - start))
    return parts


def make_batches(
    model: LanguageModel, ids: np.ndarray, protocol: EvaluationProtocol, *, batch_size: int, start_id: int
) -> list[list[Passage]]:
    """The passages of a text that are read side by side; of several processes, those of this one.

    Raises InputError where the model cannot read so many tokens (`check_length`).
    """
    check_length(model, protocol, len(ids))
    parts = passages(ids, protocol, start_id)
    if protocol.kind == "memory":  # streams are shared, else batches
        return [own] if (own := parts[rank() :: world_size()]) else []
    batches = [parts[start : start + batch_size] for start in range(0, len(parts), batch_size)]
    return batches[rank() :: world_size()]


def _pad(batch: Sequence[Passage], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """ids (B, N + 1) with padding on the right, which (B, N) of their inputs are tokens, and which targets count."""
    longest = max(passage.inputs for passage in batch)
    ids = torch.zeros(len(batch), longest + 1, dtype=torch.int64)
    is_token, counts = torch.zeros(2, len(batch), longest, dtype=torch.bool)
    for row, passage in enumerate(batch):
        ids[row, : len(passage.ids)] = torch.from_numpy(passage.ids)
        is_token[row, : passage.inputs] = True
        counts[row, passage.unscored : passage.inputs] = True
    return ids.to(device), is_token.to(device), counts.to(device)


def read_states(model: LanguageModel, batch: Sequence[Passage], segment_length: int) -> Iterator[States]:
    """The states of the targets that count, of passages read side by side.

    A model with memory reads them in segments, and each segment remembers the ones before it; one without reads all at once.
    """
    ids, _, counts = _pad(batch, device_of(model))
    longest = counts.shape[1]
    step = segment_length if model.memory_length else longest
    memory = None
    for start in range(0, longest, step):
        here = slice(start, min(start + step, longest))
        read = model.hidden(ids[:, :-1][:, here], memory)
        memory = read.memory
        of_segment = counts[:, here]
        if of_segment.any():
            targets = ids[:, 1:][:, here][of_segment]
            yield States(read.hidden[of_segment][None], targets[None], of_segment.nonzero()[:, 0])


def _score_padded(model: LanguageModel, batches: Sequence[Sequence[Passage]], tally: Tally) -> Evaluation:
    """Blocks or windows of a model whose tokens see later ones: those of padding are masked, and last positions are counted.

    The last target of a row is the only one that the model does not read in the same row.
    """
    lasts = Tally(device_of(model), sums=tally.sums)
    for batch in batches:
        ids, is_token, counts = _pad(batch, device_of(model))
        mask = None if is_token.all() else is_token
        per_token = model.nll(ids[:, :-1], ids[:, 1:], attention_mask=mask).per_token
        tally.add(per_token[counts])
        lasts.add(per_token.gather(1, is_token.sum(1, keepdim=True) - 1))
    return replace(tally.total(), last_position=lasts.total())


@dataclass(frozen=True)
class Score:
    """nll: nats summed over the targets that count. greedy: whether each of them was the model's first choice."""

    nll: float
    greedy: bool


def ending(text: Sequence[int], scored: int, longest: int | None) -> list[Passage]:
    """The end of a text, from token `scored` on, after as much of what precedes it as `longest` inputs hold (None: all).

    Longer ends are cut from the right: each piece but the first holds `longest` tokens, and all count once.
    """
    ids, pieces = np.asarray(text, dtype=np.int64), []
    end = len(ids) - 1
    while end >= scored:
        start = 0 if longest is None else max(end - longest, 0)
        pieces.append(Passage(ids[start : end + 1], max(scored - start - 1, 0)))
        end = start
    return pieces


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

    Without `greedy` the vocabulary layer makes no logits, and that flag of the scores says nothing.
    report: called with the number of passages that each batch has finished.
    """
    scores: dict[int, Score] = {}
    for batch in batches_by_length([text.inputs for text in texts], batch_size):
        nats, missed = torch.zeros(2, len(batch), dtype=torch.float64, device=device_of(model))
        with torch.no_grad():
            for states in read_states(model, [texts[i] for i in batch], segment_length):
                nats.index_add_(0, states.rows, model.output.nll(states.hidden, states.targets)[0].double())
                if greedy:
                    wrong = choose_first(model, states.hidden[0]) != states.targets[0]
                    missed.index_add_(0, states.rows, wrong.double())
        for i, nll, miss in zip(batch, nats.tolist(), missed.tolist(), strict=True):
            scores[i] = Score(nll, miss == 0)
        if report is not None:
            report(len(batch))
    return [scores[i] for i in range(len(texts))]


def choose_first(model: LanguageModel | MaskedLanguageModel, hidden: Tensor) -> Tensor:
    """The most probable token after each of hidden (T, E), (T,); a few tokens at a time, to save memory."""
    assert model.config.vocab_size is not None
    rows = max(_LOGITS // model.config.vocab_size, 1)
    return torch.cat([model.output(some[None])[0].argmax(-1) for some in hidden.split(rows)])
