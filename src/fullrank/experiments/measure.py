"""Measuring a language model on a text: blocks, sliding windows, or streams with memory. Every token is scored once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.masked import MaskedLanguageModel
from fullrank.data import Batch, Blocks, Streams, Windows
from fullrank.evaluation.perplexity import Evaluation, Tally, evaluate_blocks
from fullrank.evaluation.protocol import EvaluationProtocol


def measure(
    model: nn.Module,
    ids: np.ndarray,
    protocol: EvaluationProtocol,
    *,
    batch_size: int,
    start_id: int,
    device: torch.device,
) -> Evaluation:
    """Summed nll of the text `ids` under the model in evaluation mode, read as `protocol` says; the mode is restored.

    Where that is no next-token perplexity, also that of the last position of every block or window, alone.

    batch_size: blocks or windows at a time; streams are as many as the protocol says.
    In the precision around the call: while training that of training, for final figures fp32.
    Raises InputError where the model cannot read so many tokens (`check_length`).
    """
    assert isinstance(model, LanguageModel)
    check_length(model, protocol, len(ids))
    match protocol.kind:
        case "blocks":
            source: Blocks | Streams | Windows = Blocks(
                ids, batch_size=batch_size, segment_length=protocol.segment_length, start_id=start_id
            )
            score = _score_padded if model.config.sees_future else _score_rows
        case "window":
            assert protocol.context is not None
            assert protocol.stride is not None
            context, stride = protocol.context, protocol.stride
            source = Windows(ids, batch_size=batch_size, context=context, stride=stride, start_id=start_id)
            score = _score_padded if model.config.sees_future else _score_ends
        case "memory":
            assert protocol.streams is not None
            source = Streams(
                ids,
                batch_size=protocol.streams,
                segment_length=protocol.segment_length,
                start_id=start_id,
                remainder="keep",
            )
            score = _score_streams
    batches = (source.batch(0, index) for index in range(source.batches_per_epoch))
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            result = score(_with_memory(model, protocol), batches, device)
    finally:
        model.train(training)
    return replace(result, last_position=None) if protocol.next_token else result


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


def _score_rows(model: LanguageModel, batches: Iterable[Batch], device: torch.device) -> Evaluation:
    return evaluate_blocks(lambda inputs, targets: model.nll(inputs, targets).per_token, batches, device=device)


def _score_ends(model: LanguageModel, batches: Iterable[Batch], device: torch.device) -> Evaluation:
    """Windows: the vocabulary layer reads only the hidden states of targets that count."""
    tally = Tally(device)
    for batch in batches:
        batch = batch.to(device)
        assert batch.weights is not None
        hidden = model.hidden(batch.inputs).hidden  # (B, N, E)
        counts = batch.weights != 0
        targets = batch.targets[counts][None]  # (1, T)
        tally.add(model.output.nll(hidden[counts][None], targets), targets)
    return tally.total()


def _score_padded(model: LanguageModel, batches: Iterable[Batch], device: torch.device) -> Evaluation:
    """Blocks or windows of a model whose tokens see later ones: those of padding are masked, and last positions are counted.

    The last target of a row is the only one that the model does not read in the same row.
    """
    tally, lasts = Tally(device), Tally(device)
    for batch in batches:
        batch = batch.to(device)
        weights = torch.ones_like(batch.targets) if batch.weights is None else batch.weights
        mask = (weights != 0).flip(1).cummax(1).values.flip(1)  # weights are 0 in what is read again, too
        per_token = model.nll(batch.inputs, batch.targets, attention_mask=None if mask.all() else mask).per_token
        tally.add(per_token, batch.targets, weights)
        end = mask.sum(1, keepdim=True) - 1  # (B, 1)
        lasts.add(per_token.gather(1, end), batch.targets.gather(1, end))
    return replace(tally.total(), last_position=lasts.total())


def _score_streams(model: LanguageModel, batches: Iterable[Batch], device: torch.device) -> Evaluation:
    """Streams: what a segment leaves in memory is read by the next."""
    tally, memory = Tally(device), None
    for batch in batches:
        batch = _without_padded_columns(batch).to(device)
        found = model.nll(batch.inputs, batch.targets, memory=memory)
        memory = found.memory
        tally.add(found.per_token, batch.targets, batch.weights)
    return tally.total()


def _without_padded_columns(batch: Batch) -> Batch:
    """Without the columns at the end that are padding in every row: they would take positions that a model may lack."""
    if batch.weights is None:
        return batch
    last = int(batch.weights.any(0).sum())
    return Batch(batch.inputs[:, :last], batch.targets[:, :last], batch.weights[:, :last])


def _with_memory(model: LanguageModel, protocol: EvaluationProtocol) -> LanguageModel:
    return model.with_memory(
        protocol.memory_length, same_length=protocol.same_length, clamp_length=protocol.clamp_length
    )
