"""Causal and masked language models: a configuration becomes corpus, model and training, and ends in figures of a text."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.comparison.runs import SPLITS
from fullrank.config.run import PhaseConfig, RunConfig, TrainConfig
from fullrank.core import registry
from fullrank.core.decoder import LanguageModel
from fullrank.core.draws import evaluating
from fullrank.core.encoder import MaskedLanguageModel
from fullrank.core.errors import ConfigError, InputError, RunError
from fullrank.core.memory import Memory
from fullrank.core.released import DriftingMemory
from fullrank.core.skip_retain import SkipRetain
from fullrank.core.trace import Trace
from fullrank.data import Corpus, Tokenizer, load_tokenizer, unigram_nats, unigram_perplexity
from fullrank.data.batches import (
    Batch,
    Blocks,
    MaskedBatch,
    MaskedBatches,
    Masking,
    Streams,
    iterate_masked_blocks,
)
from fullrank.data.tokenizers import MASK
from fullrank.evaluation.ngram import measure_ngrams
from fullrank.experiments.measure import (
    Evaluation,
    MaskedProtocol,
    Tally,
    check_block,
    check_length,
    choose_first,
    divide_logits,
    figures,
    final_protocol,
    measure,
    validation_protocol,
)
from fullrank.experiments.task import TextTask, begin_pass, finish_loss
from fullrank.files import Entries, read_json, write_json
from fullrank.training.device import all_reduce, device_of, rank, world_size
from fullrank.training.values import Carry, Loss, TrainingPosition

COUNTED_TOKENS = 50_000_000  # most tokens of a training text whose 4-grams are counted: about 3 GB


def find_document_token(word: str, tokenizer: Tokenizer) -> int:
    """Find the id of `data.documents`.

    Raises ConfigError unless it is one token of the vocabulary.
    """
    if word == "line":
        return tokenizer.start_id
    ids = tokenizer.encode(word)
    if len(ids) != 1 or ids[0] == tokenizer.unk_id:
        fault = f"{len(ids)} tokens" if len(ids) != 1 else "no entry of the vocabulary"
        raise ConfigError(f"data.documents: one token of the text ({tokenizer.kind}), or line; given {word!r}, {fault}")
    return ids[0]


def training_batches(config: RunConfig, corpus: Corpus) -> Blocks | Streams:
    """Build training batches: blocks in a new order every epoch, or contiguous streams (`train.order`).

    Raises InputError for streams that the processes cannot share evenly, and for a text shorter than a batch.
    """
    options = config.train
    ids = corpus.ids("train")
    start = corpus.tokenizer.start_id
    size = options.batch_size
    length = options.segment_length
    if options.order == "contiguous" and size % world_size():
        raise InputError(
            f"train.batch_size: {size} streams cannot be shared evenly by {world_size()} processes; give a multiple of "
            f"{world_size()}, or another number of processes"
        )
    if options.order == "shuffled":
        if size > 1 and size * length > len(ids):  # streams are refused by the plan
            raise InputError(
                f"the training text of {len(ids):,} tokens is shorter than one batch: train.batch_size {size} blocks of "
                f"train.segment_length {length} tokens; make one of them smaller or give more text"
            )
        return Blocks(ids, batch_size=size, segment_length=length, start_id=start, shuffle=True, seed=options.seed)
    return Streams(ids, options, start)


def fourgram_perplexities(corpus: Corpus) -> dict[str, float]:
    """Measure the perplexity of the 4-gram model of the training text on each split.

    The result is kept with the corpus, whose texts it names. It is empty for a corpus of more than `COUNTED_TOKENS`,
    whose counts would fill the memory.
    """
    if corpus.splits["train"]["tokens"] > COUNTED_TOKENS:
        return {}
    file = corpus.folder / "fourgrams.json"
    checksums = corpus.text_checksums
    with contextlib.suppress(InputError):
        cached = read_json(file)
        if cached.get("texts") == checksums:
            return dict(cached["perplexity"])
    tokenizer = corpus.tokenizer
    texts = [corpus.ids(split) for split in SPLITS]
    orders = measure_ngrams(corpus.ids("train"), texts, vocab_size=len(tokenizer), start_id=tokenizer.start_id, order=4)
    perplexity = {split: figures[-1] for split, figures in zip(SPLITS, orders, strict=True)}
    with contextlib.suppress(RunError):  # a corpus that others own
        write_json(file, {"texts": checksums, "perplexity": perplexity})
    return perplexity


# -- causal models -----------------------------------------------------------------------------------------------------


class TrainingPart:
    """Contract of what training adds to a causal model and the model does not keep (`@register("training_part", NAME)`).

    Built from `(model, options, identity, **settings)`: the train section, the run.json of the run, and what `train.parts.NAME`
    holds. A part that is an `nn.Module` has its parameters trained, and saved with the state of training.
    """

    @staticmethod
    def identify(identity: Mapping[str, Any], **settings: Any) -> Entries:
        """Return facts of the part that run.json and result.json record when a run begins."""
        return settings

    def read(self, batch: Batch, carry: Carry) -> Carry:
        """Look at a batch before the model does, and return what the part carries to the next one."""
        return {}

    def add(self, loss: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        """Add to the loss of a batch.

        Args:
            loss: loss of the batch, a scalar.
            hidden: input of the output layer at the targets (B, T, E).
            batch: inputs, targets and weights, on the device of the model.

        Returns:
            The loss with what the part adds to it.
        """
        return loss


class CausalObjective:
    """Mean nll of the next token, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20 if asked for.

    parts: those of `train.parts` (slot `training_part`) by name. The carry holds the memory of a model that has one, and what
    parts carry. In a phase with Skip-Retain, the skipped layers of a pass are a function of `train.seed` and its number.
    Raises ConfigError if the probabilities of a phase do not fit the model.
    """

    def __init__(self, model: LanguageModel, options: TrainConfig, identity: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self.options = options
        self.schedules = {phase.name: skip_schedule(phase, model.config.num_hidden_layers) for phase in options.phases}
        self.parts: dict[str, Any] = {}
        for name, settings in options.parts.items():
            part = registry.lookup("training_part", name)(model, options, identity or {}, **settings)
            self.parts[name] = part
            if isinstance(part, nn.Module):
                model.add_module(name, part)

    def __call__(self, batch: Batch, carry: Carry, position: TrainingPosition) -> Loss:
        options = self.options
        phase = position.phase
        model = self.model
        trace = begin_pass(options, batch) or (Trace(weights=False) if self.parts else None)
        on_device = batch.to(device_of(model))
        next_carry: dict[str, Tensor] = {}
        of_memory = dict(carry)  # what is left without the tensors of parts
        for name, part in self.parts.items():
            prefix = f"{name}."
            names = [key for key in carry if key.startswith(prefix)]
            tensors = part.read(on_device, {key.removeprefix(prefix): of_memory.pop(key) for key in names})
            next_carry |= {f"{prefix}{key}": tensor for key, tensor in tensors.items()}
        memory = Memory.from_tensors(of_memory) if of_memory else None
        if memory is not None and phase is not None and phase.gaps == "drifting":
            memory = DriftingMemory(**vars(memory))
        value, nll, memory = model.loss_parts(
            on_device.inputs,
            on_device.targets,
            on_device.weights,
            memory,
            # padding comes last: models that do not see the future do not see it
            attention_mask=on_device.weights if model.config.sees_future else None,
            label_smoothing=options.label_smoothing,
            trace=trace,
            skip=frozenset() if phase is None else self.schedules[phase.name].skipped(options.seed, position.number),
        )
        for part in self.parts.values():
            assert trace is not None
            value = part.add(value, trace.hidden, on_device)
        next_carry |= {} if memory is None else memory.to_tensors()
        return finish_loss(value, nll, batch, trace, options, targets=batch.targets.shape[1], carry=next_carry)


def skip_schedule(phase: PhaseConfig, num_layers: int) -> SkipRetain:
    """Build Skip-Retain of a phase; ConfigError if its probabilities do not fit the model."""
    try:
        return SkipRetain(phase.skip, phase.p, num_layers=num_layers)
    except ValueError as error:
        raise ConfigError(f"train.phases.{phase.name}.p: {error}") from error


class LanguageModelTask(TextTask):
    """The task of causal language models."""

    model_class: Any = LanguageModel

    def check(self) -> None:
        for split in SPLITS:
            protocol = self.protocol(split)
            if protocol.kind != "memory":
                check_block(self.config.model.most_tokens, protocol.segment_length)

    def protocol(self, split: str = "test") -> Any:
        return final_protocol(self.config, split)

    def read_tokenizer(self) -> Tokenizer | None:
        start = self.config.train.start
        return None if start is None else load_tokenizer(Path(start))

    def with_sizes(self) -> RunConfig:
        """Return the configuration with `model.vocab_size` and `model.document_token_id` filled in.

        Raises ConfigError if the size there is too small for the corpus (and <mask>), or `data.documents` is no token of it.
        """
        config: RunConfig = self.config
        tokenizer = self.corpus.tokenizer
        size = config.model.vocab_size
        least = len(tokenizer) + config.masks
        if size is not None and size < least:
            beside = " beside <mask>" if config.masks else ""
            raise ConfigError(
                f"model.vocab_size: {size}, but {self.corpus.label} has {len(tokenizer)} entries{beside}; set it to null or at "
                f"least {least}, or make the vocabulary smaller with data.max_vocabulary or data.min_count"
            )
        token = config.model.document_token_id
        if config.data.documents is not None:
            token = find_document_token(config.data.documents, tokenizer)
        model = dataclasses.replace(config.model, vocab_size=size or least, document_token_id=token)
        return dataclasses.replace(config, model=model)

    def describe(self) -> Entries:
        corpus = self.corpus
        return {
            **super().describe(),
            "tokens": {split: counts["tokens"] for split, counts in corpus.splits.items()},
            "vocabulary": len(corpus.tokenizer),
            "fingerprint": corpus.tokenizer.fingerprint,
            **self.measure_counts(),
        }

    def measure_counts(self) -> Entries:
        """Measure the perplexity of what counting predicts: words, and 4-grams."""
        unigram = {split: unigram_perplexity(self.corpus, split) for split in SPLITS}
        return {"unigram_perplexity": unigram, "fourgram_perplexity": fourgram_perplexities(self.corpus)}

    def connect(self) -> None:
        model = self.model
        splits = self.corpus.splits
        _check_positions(model, splits["train"]["tokens"] // self.options.batch_size)
        check_length(model, self.validation, len(self.read_validation()))
        for split in SPLITS:
            final = self.protocol(split)
            check_length(model, final, splits[split]["tokens"])
            divide_logits(model, final.temperature)  # refused where the output layer has no logits
        self.objective = CausalObjective(model, self.options, self.identity)
        self.batches = training_batches(self.config, self.corpus)

    @property
    def bits(self) -> str | None:  # type: ignore[override]
        return {"byte": "bits/byte", "character": "bits/char"}.get(self.corpus.tokenizer.kind)

    @property
    def validation(self) -> Any:
        """Protocol of the evaluation while training."""
        return validation_protocol(self.config)

    def read_validation(self) -> np.ndarray:
        """Read the tokens for evaluation while training."""
        ids: np.ndarray = self.corpus.ids("valid")[: self.config.eval.max_tokens]
        return ids

    def evaluate(self, model: Any) -> Evaluation:
        return self.score(model, self.read_validation(), self.validation)

    def describe_evaluation(self) -> Entries:
        return {"protocol": self.validation.in_words(), "next_token": self.validation.next_token}

    def score(self, model: Any, ids: np.ndarray, protocol: Any) -> Evaluation:
        """Sum the nll of token ids.

        Args:
            model: causal language model.
            ids: token ids (N,).
            protocol: how they are read.

        Returns:
            Nats, and the number of tokens.
        """
        start_id = self.corpus.tokenizer.start_id
        return measure(model, ids, protocol, batch_size=self.config.eval.batch_size, start_id=start_id)

    def figures(self, model: Any, split: str, protocol: Any, keep: Path | None = None) -> Entries:
        """Compute the figures of a split.

        A word model scores `<unk>` for words it lacks, so bits per character would flatter it.

        Args:
            model: trained model.
            split: `valid`, `test` or another of the corpus.
            protocol: how it is read.
            keep: the run folder, into which language models write nothing.

        Returns:
            Figures by name, see `measure.figures`.
        """
        counts = self.corpus.splits[split]
        tokenizer = self.corpus.tokenizer
        ids = self.corpus.ids(split)
        total = self.score(model, ids, protocol)
        if tokenizer.kind == "word":
            starts = None if tokenizer.sos_id is None else int((ids == tokenizer.sos_id).sum())
            return figures(total, words=total.tokens - (starts or 0), line_starts=starts)
        return figures(total, words=counts["words"], characters=counts["characters"], bytes=counts["bytes"])


def _check_positions(model: LanguageModel, stream: int) -> None:
    """Raise InputError where positions go on through a memory beyond the last one that the model has."""
    if model.memory_length and model.max_length is not None and stream > model.max_length:
        raise InputError(
            f"with memory, positions go on through a whole stream of {stream:,} tokens, but this model's (learned ones, a "
            f"synthesizer's, or those of model.attention.output_map: pairs) end at model.max_position_embeddings "
            f"{model.max_length:,}; choose position relative, rotary, sinusoidal or none with another score, or "
            "model.attention.output_map: decayed, or set model.memory_length to 0"
        )


# -- masked models -----------------------------------------------------------------------------------------------------


class MaskedModelTask(LanguageModelTask):
    """The task of masked language models.

    `objective` is the mean nll of the masked tokens, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20.
    """

    model_class = MaskedLanguageModel
    name = "masked_modeling"
    bits = None

    def protocol(self, split: str = "test") -> Any:
        train = self.config.train
        return MaskedProtocol(
            segment_length=self.config.eval.segment_length or train.segment_length,
            mlm_probability=train.mlm_probability,
            mask_replace_prob=train.mask_replace_prob,
            random_replace_prob=train.random_replace_prob,
            mask_seed=self.config.eval.mask_seed,
        )

    @property
    def validation(self) -> Any:
        return self.protocol()

    def connect(self) -> None:
        self.measure_counts()  # refused where nothing is masked
        self.batches = MaskedBatches(training_batches(self.config, self.corpus), self.masking)

    def objective(self, batch: MaskedBatch, carry: Carry, position: TrainingPosition) -> Loss:
        options = self.options
        device = device_of(self.model)
        shared = batch.part or batch
        if shared.tokens == 0:  # no token was masked
            return Loss(torch.zeros((), device=device), 0.0, 0, read=shared.read)
        trace = begin_pass(options, batch)
        on_device = batch.to(device)
        value, nll, _ = self.model.loss_parts(
            on_device.inputs,
            on_device.targets,
            attention_mask=on_device.attention_mask,
            at=on_device.at,
            label_smoothing=options.label_smoothing,
            trace=trace,
        )
        return finish_loss(value, nll, batch, trace, options)

    @property
    def masking(self) -> Masking:
        """Choice of the tokens that are masked, and by what: <mask> is the last entry of the model."""
        mask_id = self.config.model.vocab_size - 1
        return Masking(self.corpus.tokenizer, mask_id, self.config.train)

    def measure_counts(self) -> Entries:
        """Measure the perplexity of word frequencies at the masked tokens: the baseline of a model that reads nothing."""
        masking = self.masking
        protocol = self.protocol()
        nats = unigram_nats(self.corpus, masking.marks)
        unigram = {}
        for split in SPLITS:
            blocks = _iterate_blocks(self.corpus.ids(split), masking, protocol, 64)
            targets = np.concatenate([batch.targets.numpy() for batch in blocks])
            if not len(targets):
                raise InputError(f"no token of {split} is asked for; raise train.mlm_probability, or give more text")
            unigram[split] = math.exp(float(nats[targets].mean()))
        return {"unigram_perplexity": unigram, "fourgram_perplexity": {}}

    def score(self, model: Any, ids: np.ndarray, protocol: Any) -> Evaluation:
        """Sum nll and hits at the masked tokens.

        The model is put into evaluation mode, and its mode is restored. The precision is that around the call: while
        training that of training, for final figures fp32.

        Args:
            model: masked language model.
            ids: token ids (N,).
            protocol: which of them are masked, and how they are read.

        Returns:
            Nats, the number of masked tokens, and the accuracy in percent.
        """
        check_block(model.max_length, min(len(ids), protocol.segment_length))
        device = device_of(model)
        tally = Tally(device)
        hits = torch.zeros(1, dtype=torch.int64, device=device)
        blocks = _iterate_blocks(ids, self.masking, protocol, self.config.eval.batch_size)
        with evaluating(model):
            for index, batch in enumerate(blocks):
                if batch.tokens and index % world_size() == rank():
                    batch = batch.to(device)
                    hidden = model.hidden(batch.inputs, batch.attention_mask).flatten(0, 1)[batch.at]
                    tally.add(model.output.nll(hidden[None], batch.targets[None]))
                    hits += (choose_first(model, hidden) == batch.targets).sum()
        total = tally.total()
        accuracy = 100 * int(all_reduce(hits)) / total.tokens
        return Evaluation(total.nll, total.tokens, {"accuracy_percent": accuracy})

    def figures(self, model: Any, split: str, protocol: Any, keep: Path | None = None) -> Entries:
        return figures(self.score(model, self.corpus.ids(split), protocol))

    def finish(self, model: Any, folder: Path) -> Entries:
        return {"mask": {"token": MASK, "id": model.mask_id}, **super().finish(model, folder)}


def _iterate_blocks(
    ids: np.ndarray, masking: Masking, protocol: MaskedProtocol, batch_size: int
) -> Iterator[MaskedBatch]:
    length = protocol.segment_length
    return iterate_masked_blocks(ids, masking, batch_size=batch_size, segment_length=length, seed=protocol.mask_seed)
