"""Measuring a language model: a text in blocks, sliding windows, or streams with memory; or many passages side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.masked import MaskedLanguageModel
from fullrank.core.output import Tempered
from fullrank.core.stage import with_parts
from fullrank.data import Batch, Blocks, Share, Streams, Windows
from fullrank.decoding.sample import evaluating
from fullrank.evaluation.perplexity import Evaluation, EvaluationProtocol, Tally
from fullrank.training.device import device_of
from fullrank.training.distributed import count, own_share, rank, summed


def measure(
    model: nn.Module,
    ids: np.ndarray,
    protocol: EvaluationProtocol,
    *,
    batch_size: int,
    start_id: int,
    device: torch.device,
    kept: list[Tensor] | None = None,
) -> Evaluation:
    """Summed nll of the text `ids` under the model in evaluation mode, read as `protocol` says; the mode is restored.

    Where that is no next-token perplexity, also that of the last position of every block or window, alone. A protocol with
    `dynamic` is measured by `dynamic.measure_dynamically`.

    batch_size: blocks or windows at a time; streams are as many as the protocol says.
    kept: a list that gets the nats of every token, in the order in which they are read.
    In the precision around the call: while training that of training, for final figures fp32.
    Raises InputError where the model cannot read so many tokens (`check_length`).
    """
    assert isinstance(model, LanguageModel)
    alone = kept is not None  # each of several processes reads everything, in the order of the text
    batches = batches_of(model, ids, protocol, batch_size=batch_size, start_id=start_id, alone=alone)
    tally = Tally(device, kept) if alone else Tally(device, sums=summed)
    with evaluating(model):
        changed = as_read(model, protocol)
        if model.config.sees_future and protocol.kind != "memory":
            result = _score_padded(changed, batches, tally, device)
            return replace(result, last_position=None) if protocol.next_token else result
        for hidden, targets in scored_states(changed, batches, device):
            tally.add(changed.output.nll(hidden, targets), targets)
    return tally.total()


def as_read(model: LanguageModel, protocol: EvaluationProtocol) -> LanguageModel:
    """The model with the memory, the clamp and the temperature of a protocol; it shares all parameters."""
    changed = model.with_memory(
        protocol.memory_length, same_length=protocol.same_length, clamp_length=protocol.clamp_length
    )
    return tempered(changed, protocol.temperature)


def tempered(model: LanguageModel, temperature: float) -> LanguageModel:
    """The model with its logits divided by a temperature; ConfigError for an output layer that has none."""
    return model if temperature == 1 else with_parts(model, output=Tempered(model.output, temperature))


def best_temperature(
    model: LanguageModel, ids: np.ndarray, protocol: EvaluationProtocol, *, batch_size: int, start_id: int
) -> float:
    """The temperature that gives the text `ids` the least nll: of the tenths from 0.4 to 2, then of the hundredths around it.

    The layers read the text twice; only the output layer is computed for every temperature.
    """
    best, device = 1.2, device_of(model)
    for step, each_side in ((0.1, 8), (0.01, 9)):
        tallies = {round(best + step * k, 2): Tally(device, sums=summed) for k in range(-each_side, each_side + 1)}
        batches = batches_of(model, ids, protocol, batch_size=batch_size, start_id=start_id)
        with evaluating(model):
            for hidden, targets in scored_states(as_read(model, protocol), batches, device):
                for temperature, tally in tallies.items():
                    tally.add(tempered(model, temperature).output.nll(hidden, targets), targets)
        best = min(tallies, key=lambda temperature: tallies[temperature].total().nll)
    return best


def batches_of(
    model: LanguageModel,
    ids: np.ndarray,
    protocol: EvaluationProtocol,
    *,
    batch_size: int,
    start_id: int,
    alone: bool = False,
) -> Iterator[Batch]:
    """The batches of a text in the order in which `protocol` reads them; of several processes, those of this one.

    alone: all of them. Raises InputError where the model cannot read so many tokens (`check_length`).
    """
    check_length(model, protocol, len(ids))
    source: Blocks | Streams | Windows
    share = Share() if alone else Share(rank(), count())
    length = protocol.segment_length
    match protocol.kind:
        case "blocks":
            source = Blocks(ids, batch_size=batch_size, segment_length=length, start_id=start_id)
        case "window":
            assert protocol.context is not None
            assert protocol.stride is not None
            context, stride = protocol.context, protocol.stride
            source = Windows(ids, batch_size=batch_size, context=context, stride=stride, start_id=start_id)
        case "memory":
            assert protocol.streams is not None
            streams = protocol.streams
            source = Streams(
                ids, batch_size=streams, segment_length=length, start_id=start_id, remainder="keep", share=share
            )
    number = source.batches_per_epoch
    whole = alone or protocol.kind == "memory"  # streams are shared, else batches
    return (source.batch(0, index) for index in (range(number) if whole else own_share(number)))


def check_length(model: LanguageModel, protocol: EvaluationProtocol, tokens: int) -> None:
    """InputError if the model has no positions for what is read in one go: a block, a window, or a whole stream."""
    limit = model.max_length
    if limit is None:
        return
    if protocol.kind == "memory":
        assert protocol.streams is not None
        longest = -(-tokens // protocol.streams)
        if longest > limit:
            raise InputError(
                f"a stream of {longest:,} tokens is longer than the {limit:,} positions of this model "
                "(model.max_position_embeddings), and positions go on through the memory; measure it in more streams "
                "(eval.batch_size or --batch-size) or without memory (eval.memory_length or --memory-length 0)"
            )
    else:
        check_block(limit, min(tokens, protocol.segment_length), "block" if protocol.kind == "blocks" else "window")


def check_block(limit: int | None, longest: int, what: str = "block") -> None:
    """InputError if a block (or window) of `longest` tokens is longer than a model of `limit` positions can read."""
    if limit is not None and longest > limit:
        raise InputError(
            f"a {what} of {longest:,} tokens is longer than the {limit:,} "
            "positions of this model (model.max_position_embeddings); shorten it (eval.segment_length or --segment-length)"
        )


def check_training_length(model: LanguageModel | MaskedLanguageModel, segment_length: int, tokens: int) -> None:
    """InputError if the model has no positions for a segment of training, or for the whole text where that is shorter."""
    if model.max_length is not None and min(segment_length, tokens) > model.max_length:
        raise InputError(
            f"train.segment_length: {segment_length:,} tokens are more than the {model.max_length:,} positions of this model; "
            "lower it, or raise model.max_position_embeddings"
        )


def scored_states(
    model: LanguageModel, batches: Iterable[Batch], device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs of the output layer (1, T, E) and targets (1, T) of all tokens of a batch that count, batch by batch.

    What a segment leaves in memory is read by the next.
    """
    memory = None
    for batch in batches:
        if batch.part is not None and batch.tokens == 0:  # the streams of this process have ended
            continue
        if batch.weights is not None:
            # columns that are padding in every row would take positions that a model may lack
            last = int(batch.weights.any(0).nonzero().max()) + 1
            batch = Batch(batch.inputs[:, :last], batch.targets[:, :last], batch.weights[:, :last])
        batch = batch.to(device)
        read = model.hidden(batch.inputs, memory)
        memory = read.memory
        if batch.weights is None:
            yield read.hidden, batch.targets
        else:
            counts = batch.weights != 0
            yield read.hidden[counts][None], batch.targets[counts][None]


def _score_padded(model: LanguageModel, batches: Iterable[Batch], tally: Tally, device: torch.device) -> Evaluation:
    """Blocks or windows of a model whose tokens see later ones: those of padding are masked, and last positions are counted.

    The last target of a row is the only one that the model does not read in the same row.
    """
    lasts = Tally(device, sums=tally.sums)
    for batch in batches:
        batch = batch.to(device)
        weights = torch.ones_like(batch.targets) if batch.weights is None else batch.weights
        mask = (weights != 0).flip(1).cummax(1).values.flip(1)  # weights are 0 in what is read again, too
        per_token = model.nll(batch.inputs, batch.targets, attention_mask=None if mask.all() else mask).per_token
        tally.add(per_token, batch.targets, weights)
        end = mask.sum(1, keepdim=True) - 1  # (B, 1)
        lasts.add(per_token.gather(1, end), batch.targets.gather(1, end))
    return replace(tally.total(), last_position=lasts.total())


# -- many passages ---------------------------------------------------------------------------------------------------

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


def batches_by_length(
    lengths: Sequence[int], batch_size: int, *, equal: bool = False, usual: int | None = None
) -> Iterator[list[int]]:
    """Indices of texts of like lengths, the longest first, at most `batch_size` of them.

    equal: of the same length, so that there is no padding. usual: fewer of texts that are longer than so many tokens.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        longest = lengths[order[0]]
        most = batch_size if usual is None else max(1, min(batch_size, batch_size * usual // longest))
        batch = [i for i in order[:most] if not equal or lengths[i] == longest]
        yield batch
        order = order[len(batch) :]


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
    parts = []
    for scored in range(0, tokens, stride):
        start = max(scored - context, 0)
        parts.append(Passage(text[start : min(scored + stride, tokens) + 1], scored - start))
    return parts


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

    A model with memory reads them in segments and remembers what came before in its passage; one without reads each at
    once. Without `greedy` the vocabulary layer makes no logits, and that flag of the scores says nothing.
    report: called with the number of passages that each batch has finished.
    """
    results: dict[int, Score] = {}
    with torch.no_grad():
        for batch in batches_by_length([text.inputs for text in texts], batch_size):
            scores = _score_batch(model, [texts[i] for i in batch], segment_length, greedy)
            results.update(zip(batch, scores, strict=True))
            if report is not None:
                report(len(batch))
    return [results[i] for i in range(len(texts))]


def _score_batch(model: LanguageModel, texts: Sequence[Passage], segment_length: int, greedy: bool) -> list[Score]:
    device = next(model.parameters()).device
    longest = max(text.inputs for text in texts)
    ids = torch.zeros(
        len(texts), longest + 1, dtype=torch.int64
    )  # padded on the right, which earlier tokens do not see
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
            missed.index_add_(0, of, (first_choice(model, hidden) != targets).double())
    return [Score(nll, miss == 0) for nll, miss in zip(nats.tolist(), missed.tolist(), strict=True)]


def first_choice(model: LanguageModel | MaskedLanguageModel, hidden: Tensor) -> Tensor:
    """The most probable token after each of hidden (T, E), (T,); a few tokens at a time, to save memory."""
    assert model.config.vocab_size is not None
    rows = max(_LOGITS // model.config.vocab_size, 1)
    return torch.cat([model.output(some[None])[0].argmax(-1) for some in hidden.split(rows)])
