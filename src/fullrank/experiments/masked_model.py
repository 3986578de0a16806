"""Masked language models: a configuration becomes corpus, encoder and training, and ends in figures of masked tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.config.run import RunConfig, TrainConfig
from fullrank.core.errors import InputError
from fullrank.core.masked import MaskedLanguageModel
from fullrank.data import Corpus, MaskedBatch, MaskedBatches, Masking, masked_blocks, unigram_nats
from fullrank.data.tokenizers import MASK
from fullrank.evaluation.perplexity import MaskedEvaluation, masked_figures
from fullrank.evaluation.protocol import MaskedProtocol, masked_protocol
from fullrank.experiments.language_model import MEASURED, describe, prepare_text, training_batches
from fullrank.experiments.measure import check_block, check_training_length
from fullrank.experiments.task import (
    EvaluationRequest,
    Measured,
    Parts,
    Prepared,
    Say,
    penalized,
    trace_for,
    trained_entries,
)
from fullrank.training.optimizer import parameter_groups
from fullrank.training.values import EvaluationResult, FitResult, Loss, TrainingPosition

_SCRATCH = 1 << 24  # logits held at a time while hits are counted


class MaskedModelTask:
    """The task of masked language models (`task.TextTask`)."""

    def check(self, config: RunConfig) -> None:
        masked_protocol(config)

    def prepare(
        self, config: RunConfig, identity: Mapping[str, Any], allow_slice: bool, say: Say
    ) -> Prepared[RunConfig, Corpus]:
        return prepare_text(config, identity, allow_slice, say)

    def parts(self, config: RunConfig, corpus: Corpus, folder: Path, device: torch.device) -> Parts:
        options, batch_size = config.train, config.eval.batch_size
        model = MaskedLanguageModel(config.model).to(device)
        masking, protocol = masking_of(config, corpus, model), masked_protocol(config)
        watched = corpus.ids("valid")[: config.eval.max_tokens]
        check_training_length(model, options.segment_length, corpus.splits["train"].tokens)
        for ids in (watched, corpus.ids("test")):
            _check_measurable(model.max_length, masking, protocol, ids)
        unigram = {split: unigram_of_masked(corpus, split, masking, protocol) for split in MEASURED}

        def evaluate(model: nn.Module) -> EvaluationResult:
            assert isinstance(model, MaskedLanguageModel)
            result = measure_masked(model, watched, masking, protocol, batch_size, device)
            return EvaluationResult(result.nll, result.tokens, result.scores)

        def measured(checkpoint: str) -> dict[str, Any]:
            saved = MaskedLanguageModel.load(folder, checkpoint).to(device)
            return {
                split: masked_figures(measure_masked(saved, corpus.ids(split), masking, protocol, batch_size, device))
                for split in MEASURED
            }

        def result(done: FitResult) -> dict[str, Any]:
            return trained_entries(
                config,
                model,
                done,
                measured,
                evaluation={"protocol": protocol.in_words(), "next_token": False},
                entries={
                    "task": "masked_modeling",
                    "protocol": protocol.in_words(),
                    "protocol_settings": dataclasses.asdict(protocol),
                    "mask": {"token": MASK, "id": masking.mask_id},
                    "corpus": describe(corpus, unigram),
                },
            )

        return Parts(
            model,
            MaskedObjective(model, options),
            MaskedBatches(training_batches(config, corpus), masking, seed=options.seed),
            evaluate,
            options,
            config.eval,
            parameter_groups(model, options.weight_decay),
            result,
        )

    def measure(
        self, config: RunConfig, corpus: Corpus, folder: Path, request: EvaluationRequest, device: torch.device
    ) -> Measured:
        protocol = masked_protocol(config, request.flags)
        batch_size = (request.flags and request.flags.batch_size) or config.eval.batch_size
        model = MaskedLanguageModel.load(folder, request.checkpoint).to(device)
        masking = masking_of(config, corpus, model)
        result = measure_masked(model, corpus.ids(request.split), masking, protocol, batch_size, device)
        figures = {**masked_figures(result), "remark": config.remark}
        return Measured(figures, protocol.in_words(), dataclasses.asdict(protocol))


class MaskedObjective:
    """Mean nll of the masked tokens, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20."""

    def __init__(self, model: MaskedLanguageModel, options: TrainConfig) -> None:
        self.model, self.options = model, options
        self.device = next(model.parameters()).device

    def __call__(self, batch: MaskedBatch, carry: Mapping[str, Tensor], position: TrainingPosition) -> Loss:
        options = self.options
        if batch.tokens == 0:  # no token was masked
            return Loss(torch.zeros((), device=self.device), 0.0, 0, read=batch.read)
        trace = trace_for(options)
        batch = batch.to(self.device)
        value, nll, _ = self.model.loss_parts(
            batch.inputs,
            batch.targets,
            attention_mask=batch.attention_mask,
            at=batch.at,
            label_smoothing=options.label_smoothing,
            trace=trace,
            padded_right=True,
        )
        return Loss(penalized(value, trace, options), nll * batch.tokens, batch.tokens, read=batch.read)


def masking_of(config: RunConfig, corpus: Corpus, model: MaskedLanguageModel) -> Masking:
    """The masking of the corpus for `model`."""
    train = config.train
    return Masking.of(
        corpus.tokenizer,
        model.mask_id,
        probability=train.mlm_probability,
        replaced=train.mask_replace_prob,
        drawn=train.random_replace_prob,
    )


def _blocks(ids: np.ndarray, masking: Masking, protocol: MaskedProtocol, batch_size: int) -> Iterator[MaskedBatch]:
    """The masked blocks of a text, as the protocol says."""
    length, seed = protocol.segment_length, protocol.mask_seed
    return masked_blocks(ids, masking, batch_size=batch_size, segment_length=length, seed=seed)


def _check_measurable(limit: int | None, masking: Masking, protocol: MaskedProtocol, ids: np.ndarray) -> None:
    """Raises InputError where nothing could be measured: before training, not after it."""
    check_block(limit, min(len(ids), protocol.segment_length))
    if not any(batch.tokens for batch in _blocks(ids, masking, protocol, 1)):
        raise InputError(
            f"no token of the {len(ids):,} to be measured is asked for; raise train.mlm_probability (now "
            f"{masking.probability}), choose another eval.mask_seed, or give more text"
        )


def unigram_of_masked(corpus: Corpus, split: str, masking: Masking, protocol: MaskedProtocol) -> float:
    """Perplexity of word frequencies at the masked tokens: the baseline of a model that reads nothing."""
    nats = unigram_nats(corpus, masking.marks.tolist())
    targets = [batch.targets.numpy() for batch in _blocks(corpus.ids(split), masking, protocol, 64)]
    return math.exp(float(nats[np.concatenate(targets)].mean()))


def measure_masked(
    model: MaskedLanguageModel,
    ids: np.ndarray,
    masking: Masking,
    protocol: MaskedProtocol,
    batch_size: int,
    device: torch.device,
) -> MaskedEvaluation:
    """Summed nll and hits at the masked tokens of the text `ids`, in evaluation mode; the mode is restored.

    In the precision around the call: while training that of training, for final figures fp32.
    """
    check_block(model.max_length, min(len(ids), protocol.segment_length))
    nats = torch.zeros((), dtype=torch.float64, device=device)
    hits = torch.zeros((), dtype=torch.int64, device=device)
    tokens, training = 0, model.training
    model.eval()
    with torch.no_grad():
        for batch in _blocks(ids, masking, protocol, batch_size):
            if batch.tokens:
                batch = batch.to(device)
                hidden = model.hidden(batch.inputs, batch.attention_mask, padded_right=True).flatten(0, 1)[batch.at]
                nats += model.output.nll(hidden[None], batch.targets[None]).double().sum()
                hits += _hits(model, hidden, batch.targets)
                tokens += batch.tokens
    model.train(training)
    return MaskedEvaluation(nats.item(), tokens, int(hits))


def _hits(model: MaskedLanguageModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """The number of targets (T,) that are the likeliest word after hidden (T, E); a few tokens at a time, to save memory."""
    rows_at_once = max(1, _SCRATCH // (model.config.vocab_size or 1))
    parts = zip(hidden.split(rows_at_once), targets.split(rows_at_once), strict=True)
    return torch.stack([(model.output(rows[None])[0].argmax(-1) == wanted).sum() for rows, wanted in parts]).sum()
