"""Masked language modelling: a configuration becomes corpus, encoder and training, and ends in figures of masked tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.core.masked import MaskedLanguageModel
from fullrank.data import Corpus, MaskedBatch, MaskedBatches, Masking, masked_blocks, unigram_nats
from fullrank.data.tokenizers import MASK
from fullrank.evaluation.perplexity import MaskedEvaluation, masked_figures
from fullrank.evaluation.protocol import Flags, MaskedProtocol, masked_protocol
from fullrank.experiments.language_modeling import corpus_of, describe, text_of, training_batches
from fullrank.experiments.masked_objective import MaskedObjective
from fullrank.experiments.measuring import check_block, check_training_length
from fullrank.experiments.run import Parts, Say, Text
from fullrank.experiments.run_folder import open_run
from fullrank.kernels import kernel
from fullrank.training.device import choose_device
from fullrank.training.values import EvaluationResult

_SCRATCH = 1 << 24  # logits held at a time while hits are counted


class MaskedModeling:
    """The task of masked language models."""

    def check(self, config: RunConfig) -> None:
        masked_protocol(config)

    def text(self, config: RunConfig, known: Mapping[str, Any], allow_slice: bool, say: Say) -> tuple[RunConfig, Text]:
        return text_of(config, known, allow_slice, say)

    def parts(self, config: RunConfig, corpus: Corpus, folder: Path, device: torch.device) -> Parts:
        options, judging = config.train, config.eval
        model = MaskedLanguageModel(config.model).to(device)
        masking, protocol = masking_of(config, corpus, model), masked_protocol(config)
        watched = corpus.ids("valid")[: judging.max_tokens]
        check_training_length(model, options.segment_length, corpus.splits["train"].tokens)
        for ids in (watched, corpus.ids("test")):
            _check(model.max_length, masking, protocol, ids)
        unigram = {split: unigram_of_masked(corpus, split, masking, protocol) for split in ("valid", "test")}

        def judge(model: nn.Module) -> EvaluationResult:
            assert isinstance(model, MaskedLanguageModel)
            found = measure_masked(model, watched, masking, protocol, judging.batch_size, device)
            return EvaluationResult(found.nll, found.tokens, found.scores)

        def measured(checkpoint: str) -> dict[str, Any]:
            saved = MaskedLanguageModel.load(folder, checkpoint).to(device)
            return {
                split: masked_figures(
                    measure_masked(saved, corpus.ids(split), masking, protocol, judging.batch_size, device)
                )
                for split in ("valid", "test")
            }

        return Parts(
            model,
            MaskedObjective(model, options),
            MaskedBatches(training_batches(config, corpus), masking, seed=options.seed),
            judge,
            measured,
            judged={"protocol": protocol.in_words(), "next_token": False},
            told={
                "task": "masked_modeling",
                "protocol": protocol.in_words(),
                "protocol_settings": dataclasses.asdict(protocol),
                "mask": {"token": MASK, "id": masking.mask_id},
                "corpus": describe(corpus, unigram),
            },
        )


def masking_of(config: RunConfig, corpus: Corpus, model: MaskedLanguageModel) -> Masking:
    """How tokens of the corpus are masked for `model`."""
    train = config.train
    return Masking.of(
        corpus.tokenizer,
        model.mask_id,
        probability=train.mlm_probability,
        replaced=train.mask_replace_prob,
        drawn=train.random_replace_prob,
    )


def _blocks(ids: np.ndarray, masking: Masking, protocol: MaskedProtocol, batch_size: int) -> Iterator[MaskedBatch]:
    """The text as the protocol says."""
    length, seed = protocol.segment_length, protocol.mask_seed
    return masked_blocks(ids, masking, batch_size=batch_size, segment_length=length, seed=seed)


def _check(limit: int | None, masking: Masking, protocol: MaskedProtocol, ids: np.ndarray) -> None:
    """InputError where nothing could be measured: found before training, not after it."""
    check_block(limit, min(len(ids), protocol.segment_length))
    if not any(batch.tokens for batch in _blocks(ids, masking, protocol, 1)):
        raise InputError(
            f"no token of the {len(ids):,} to be measured is asked for; raise train.mlm_probability (now "
            f"{masking.probability}), choose another eval.mask_seed, or give more text"
        )


def unigram_of_masked(corpus: Corpus, split: str, masking: Masking, protocol: MaskedProtocol) -> float:
    """Perplexity of word frequencies at the very tokens that are asked for: what naming them blindly costs."""
    nats = unigram_nats(corpus, masking.marks.tolist())
    asked = [batch.targets.numpy() for batch in _blocks(corpus.ids(split), masking, protocol, 64)]
    return math.exp(float(nats[np.concatenate(asked)].mean()))


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
    """How many targets (T,) are the likeliest word of hidden (T, E); a few tokens at a time, for all words are looked at."""
    some = max(1, _SCRATCH // (model.config.vocab_size or 1))
    parts = zip(hidden.split(some), targets.split(some), strict=True)
    return torch.stack([(model.output(rows[None])[0].argmax(-1) == wanted).sum() for rows, wanted in parts]).sum()


def evaluate(
    folder: Path,
    split: str,
    *,
    checkpoint: str = "best",
    flags: Flags | None = None,
    device_name: str = "auto",
    kernel_name: str = "auto",
    say: Say = print,
) -> dict[str, Any]:
    """Figures of the masked run in `folder` on `split`, by the protocol that it was measured by, or as `flags` say."""
    config, _ = open_run(folder)
    protocol, flags = masked_protocol(config, flags), flags or Flags()
    corpus = corpus_of(folder, split, say)
    device = choose_device(device_name, "--device")
    model = MaskedLanguageModel.load(folder, checkpoint).to(device)
    masking, batch_size = masking_of(config, corpus, model), flags.batch_size or config.eval.batch_size
    with kernel(kernel_name):
        found = measure_masked(model, corpus.ids(split), masking, protocol, batch_size, device)
    return {
        "run": str(folder),
        "split": split,
        **masked_figures(found),
        "remark": config.remark,
        "protocol": protocol.in_words(),
        "protocol_settings": dataclasses.asdict(protocol),
        "checkpoint": checkpoint,
        "corpus": corpus.label,
        "kernel": kernel_name,
    }
