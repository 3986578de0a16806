"""Language models: a configuration becomes corpus, model and training, and ends in perplexities."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.config.run import PhaseConfig, RunConfig, TrainConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import ConfigError, InputError
from fullrank.core.memory import Memory
from fullrank.core.skip_retain import SkipRetain
from fullrank.data import Batch, Blocks, Corpus, Streams, load_corpus, prepare, unigram_perplexity
from fullrank.evaluation.perplexity import figures
from fullrank.evaluation.protocol import EvaluationProtocol, final_protocol, judging_protocol
from fullrank.experiments.measure import check_length, check_training_length, measure
from fullrank.experiments.task import (
    EvaluationRequest,
    Measured,
    Parts,
    Prepared,
    Say,
    penalized,
    reopen,
    trace_for,
    trained_entries,
)
from fullrank.training.optimizer import parameter_groups
from fullrank.training.values import EvaluationResult, FitResult, Loss, TrainingPosition

MEASURED = ("valid", "test")


class LanguageModelTask:
    """The task of causal language models (`task.TextTask`)."""

    def check(self, config: RunConfig) -> None:
        final_protocol(config)

    def prepare(
        self, config: RunConfig, identity: Mapping[str, Any], allow_slice: bool, say: Say
    ) -> Prepared[RunConfig, Corpus]:
        return prepare_text(config, identity, allow_slice, say)

    def parts(self, config: RunConfig, corpus: Corpus, folder: Path, device: torch.device) -> Parts:
        options, batch_size = config.train, config.eval.batch_size
        model = LanguageModel(config.model).to(device)
        _check_positions(model, corpus.splits["train"].tokens // options.batch_size)
        watched = corpus.ids("valid")[: config.eval.max_tokens]
        watching, reported = judging_protocol(config), final_protocol(config)
        check_training_length(model, options.segment_length, corpus.splits["train"].tokens)
        check_length(model, watching, len(watched))
        for split in MEASURED:
            check_length(model, reported, corpus.splits[split].tokens)

        def evaluate(model: nn.Module) -> EvaluationResult:
            start = corpus.tokenizer.start_id
            result = measure(model, watched, watching, batch_size=batch_size, start_id=start, device=device)
            return EvaluationResult(result.nll, result.tokens)

        def measured(checkpoint: str) -> dict[str, Any]:
            saved = LanguageModel.load(folder, checkpoint).to(device)
            return {split: figures_of(saved, corpus, split, reported, batch_size, device) for split in MEASURED}

        def result(done: FitResult) -> dict[str, Any]:
            return trained_entries(
                config,
                model,
                done,
                measured,
                evaluation={"protocol": watching.in_words(), "next_token": watching.next_token},
                entries={
                    "protocol": reported.in_words(),
                    "protocol_settings": dataclasses.asdict(reported),
                    "corpus": describe(corpus),
                },
            )

        return Parts(
            model,
            CausalObjective(model, options),
            training_batches(config, corpus),
            evaluate,
            options,
            config.eval,
            parameter_groups(model, options.weight_decay),
            result,
        )

    def measure(
        self, config: RunConfig, corpus: Corpus, folder: Path, request: EvaluationRequest, device: torch.device
    ) -> Measured:
        protocol = final_protocol(config, request.flags)
        batch_size = (request.flags and request.flags.batch_size) or config.eval.batch_size
        model = LanguageModel.load(folder, request.checkpoint).to(device)
        found = figures_of(model, corpus, request.split, protocol, batch_size, device)
        return Measured(found, protocol.in_words(), dataclasses.asdict(protocol))


class CausalObjective:
    """Mean nll of the next token, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20 if asked for.

    The carry holds the memory of a model that has one. In a phase with Skip-Retain, the skipped layers are drawn for every
    pass; the draw is a function of `train.seed` and the number of the pass.
    Raises ConfigError if the probabilities of a phase do not fit the model.
    """

    def __init__(self, model: LanguageModel, options: TrainConfig) -> None:
        self.model, self.options = model, options
        self.device = next(model.parameters()).device
        self.schedules = {phase.name: _schedule(phase, model.config.num_hidden_layers) for phase in options.phases}

    def __call__(self, batch: Batch, carry: Mapping[str, Tensor], position: TrainingPosition) -> Loss:
        options, phase = self.options, position.phase
        trace = trace_for(options)
        tokens = batch.tokens  # counted here, before it goes to a GPU
        batch = batch.to(self.device)
        inputs, targets, weights = batch.inputs, batch.targets, batch.weights
        memory = Memory.from_tensors(carry) if carry else None
        if memory is not None and phase is not None and phase.gaps == "drifting":
            memory = dataclasses.replace(memory, drifting=True)
        value, nll, memory = self.model.loss_parts(
            inputs,
            targets,
            weights,
            memory,
            attention_mask=weights
            if self.model.config.sees_future
            else None,  # others: padding comes last, and is not seen
            label_smoothing=options.label_smoothing,
            trace=trace,
            skip=frozenset() if phase is None else self.schedules[phase.name].skipped(options.seed, position.number),
        )
        value = penalized(value, trace, options)
        return Loss(value, nll * tokens, tokens, {} if memory is None else memory.to_tensors())


def _schedule(phase: PhaseConfig, num_layers: int) -> SkipRetain:
    try:
        return SkipRetain(phase.skip, phase.p, num_layers=num_layers)
    except ValueError as error:
        raise ConfigError(f"train.phases.{phase.name}: {error}; change train.phases.{phase.name}.p") from error


# -- text, also of masked models -------------------------------------------------------------------------------------


def prepare_text(
    config: RunConfig, identity: Mapping[str, Any], allow_slice: bool, say: Say
) -> Prepared[RunConfig, Corpus]:
    """The prepared text of one language (see `Task.prepare`)."""
    corpus = reopen(identity, load_corpus, _checksums) or prepare(config.data, allow_slice=allow_slice, report=say)
    known = {
        "vocabulary": corpus.tokenizer.fingerprint,
        "text": _checksums(corpus),
        "prepared": str(corpus.folder.resolve()),
    }
    return Prepared(with_vocabulary(config, corpus), corpus, corpus.label, known, corpus.tokenizer.save)


def _checksums(corpus: Corpus) -> dict[str, str]:
    return {split: info.sha256 for split, info in corpus.splits.items()}


def with_vocabulary(config: RunConfig, corpus: Corpus) -> RunConfig:
    """`config` with `model.vocab_size` known; ConfigError if a given one is too small for the corpus, and <mask> if need be."""
    entries, given = len(corpus.tokenizer), config.model.vocab_size
    size = entries + config.masks
    if given is not None and given < size:
        raise ConfigError(
            f"model.vocab_size: {given}, but {corpus.label} has {entries} entries{' beside <mask>' if config.masks else ''}; "
            f"set it to null or at least {size}, or make the vocabulary smaller with data.max_vocabulary or data.min_count"
        )
    return config if given else dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def training_batches(config: RunConfig, corpus: Corpus) -> Blocks | Streams:
    """Training batches: blocks in a new order every epoch, or contiguous streams (`train.order`)."""
    options, ids, start = config.train, corpus.ids("train"), corpus.tokenizer.start_id
    size, length = options.batch_size, options.segment_length
    if options.order == "shuffled":
        return Blocks(ids, batch_size=size, segment_length=length, start_id=start, shuffle=True, seed=options.seed)
    return Streams(ids, batch_size=size, segment_length=length, start_id=start)


def describe(corpus: Corpus, unigram: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The entry `corpus` of result.json. `unigram`: perplexity of word frequencies, where not that of all tokens."""
    if unigram is None:
        unigram = {split: unigram_perplexity(corpus, split) for split in ("valid", "test")}
    return {
        "name": corpus.name,
        "label": corpus.label,
        "is_slice": corpus.is_slice,
        "tokens": {split: info.tokens for split, info in corpus.splits.items()},
        "sha256": _checksums(corpus),
        "vocabulary": len(corpus.tokenizer),
        "fingerprint": corpus.tokenizer.fingerprint,
        "unigram_perplexity": dict(unigram),
        "details": dict(corpus.details),
    }


def figures_of(
    model: LanguageModel,
    corpus: Corpus,
    split: str,
    protocol: EvaluationProtocol,
    batch_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """Figures of a split. A word model scores `<unk>` for words it lacks, so bits per character would flatter it."""
    info, tokenizer, ids = corpus.splits[split], corpus.tokenizer, corpus.ids(split)
    found = measure(model, ids, protocol, batch_size=batch_size, start_id=tokenizer.start_id, device=device)
    begun = None if tokenizer.sos_id is None else int((ids == tokenizer.sos_id).sum())
    if tokenizer.kind == "word":
        return figures(found, words=found.tokens - (begun or 0), line_starts=begun)
    return figures(found, words=info.words, characters=info.characters, bytes=info.bytes, line_starts=begun)


def _check_positions(model: LanguageModel, stream: int) -> None:
    """InputError where positions go on through a memory beyond the last one that the model has."""
    if model.memory_length and model.max_length is not None and stream > model.max_length:
        raise InputError(
            f"with memory, positions go on through a whole stream of {stream:,} tokens, but this model's (learned ones, a "
            f"synthesizer's, or those of model.attention.output_map: pairs) end at model.max_position_embeddings "
            f"{model.max_length:,}; choose position relative, rotary, sinusoidal or none with another score, or "
            "model.attention.output_map: decayed, or set model.memory_length to 0"
        )
