"""Causal and masked language models: a configuration becomes corpus, model and training, and ends in figures of a text."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fullrank.config.run import RunConfig
from fullrank.config.training import TrainConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.encoder import MaskedLanguageModel
from fullrank.core.errors import ConfigError, InputError, RunError
from fullrank.data import Corpus, load_tokenizer, prepare, unigram_nats, unigram_perplexity
from fullrank.data.batches import ALL_ROWS, Blocks, Share, Streams
from fullrank.data.masked import MaskedBatch, MaskedBatches, Masking, iterate_masked_blocks
from fullrank.data.tokenizers import MASK
from fullrank.decoding.sample import evaluating
from fullrank.evaluation.ngram import measure_ngrams
from fullrank.evaluation.perplexity import (
    EvaluationProtocol,
    MaskedEvaluation,
    MaskedProtocol,
    choose_masked_protocol,
    compute_masked_figures,
    figures,
    final_protocol,
    validation_protocol,
)
from fullrank.experiments.measure import check_block, check_length, choose_first, divide_logits, measure
from fullrank.experiments.objective import CausalObjective
from fullrank.experiments.task import (
    Parts,
    Prepared,
    Say,
    TextTask,
    add_penalties,
    choose_own_rows,
    describe_prepared,
    identify,
    place_draws,
    reuse_prepared,
    shared,
    trace_for,
    training_parts,
)
from fullrank.files import read_json, write_json
from fullrank.seal import read_identity
from fullrank.training.device import device_of
from fullrank.training.distributed import all_reduce, rank, world_size
from fullrank.training.values import Carry, EvaluationResult, Loss, TrainingPosition

Text = Prepared[RunConfig, Corpus]

_MEASURED = ("valid", "test")
COUNTED_TOKENS = 50_000_000  # most tokens of a training text whose 4-grams are counted: about 3 GB
_PROMPT, _SAMPLE, _TEMPERATURE = 12, 50, 0.8  # tokens, tokens: the text that a finished run shows


def prepare_text(config: RunConfig, identity: Mapping[str, Any], allow_slice: bool, say: Say) -> Text:
    """The prepared text of one language (see `Task.prepare`)."""
    corpus = reuse_prepared(identity)
    if corpus is None:
        tokenizer = None if config.train.start is None else load_tokenizer(Path(config.train.start))
        corpus = prepare(config.data, allow_slice=allow_slice, report=say, tokenizer=tokenizer)
    return Prepared(with_vocabulary(config, corpus), corpus, corpus.label, identify(corpus), corpus.tokenizer.save)


def with_vocabulary(config: RunConfig, corpus: Corpus) -> RunConfig:
    """`config` with `model.vocab_size` filled in; ConfigError if the one there is too small for the corpus (and <mask>)."""
    entries, size = len(corpus.tokenizer), config.model.vocab_size
    least = entries + config.masks
    if size is not None and size < least:
        raise ConfigError(
            f"model.vocab_size: {size}, but {corpus.label} has {entries} entries{' beside <mask>' if config.masks else ''}; "
            f"set it to null or at least {least}, or make the vocabulary smaller with data.max_vocabulary or data.min_count"
        )
    return config if size else dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=least))


def training_batches(config: RunConfig, corpus: Corpus, share: Share = ALL_ROWS) -> Blocks | Streams:
    """Training batches: blocks in a new order every epoch, or contiguous streams (`train.order`)."""
    options, ids, start = config.train, corpus.ids("train"), corpus.tokenizer.start_id
    size, length = options.batch_size, options.segment_length
    if options.order == "contiguous" and size % share.count:
        raise InputError(
            f"train.batch_size: {size} streams cannot be shared evenly by {share.count} processes; give a multiple of "
            f"{share.count}, or another number of processes"
        )
    if options.order == "shuffled":
        if size > 1 and size * length > len(ids):  # streams are refused by the plan
            raise InputError(
                f"the training text of {len(ids):,} tokens is shorter than one batch: train.batch_size {size} blocks of "
                f"train.segment_length {length} tokens; make one of them smaller or give more text"
            )
        return Blocks(
            ids, batch_size=size, segment_length=length, start_id=start, shuffle=True, seed=options.seed, share=share
        )
    return Streams(
        ids, batch_size=size, segment_length=length, start_id=start, share=share, seed=options.seed,
        deviation=options.segment_deviation, half=options.half_segments, multiple=options.segment_multiple,
        context=options.context, shuffle=options.partial_shuffle,
    )  # fmt: skip


def describe(corpus: Corpus, unigram: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The entry `corpus` of result.json. `unigram`: perplexity of word frequencies, where not that of all tokens."""
    is_masked = unigram is not None
    if unigram is None:
        unigram = {split: unigram_perplexity(corpus, split) for split in _MEASURED}
    return {
        **describe_prepared(corpus),
        "tokens": {split: counts["tokens"] for split, counts in corpus.splits.items()},
        "vocabulary": len(corpus.tokenizer),
        "fingerprint": corpus.tokenizer.fingerprint,
        "unigram_perplexity": dict(unigram),
        "fourgram_perplexity": {} if is_masked else fourgram_perplexities(corpus),
    }


def fourgram_perplexities(corpus: Corpus) -> dict[str, float]:
    """Perplexity of the 4-gram model of the training text on each split; kept with the corpus, whose texts it names.

    None of a corpus of more than `COUNTED_TOKENS`, whose counts would fill the memory.
    """
    if corpus.splits["train"]["tokens"] > COUNTED_TOKENS:
        return {}
    file, checksums = corpus.folder / "fourgrams.json", corpus.text_checksums
    with contextlib.suppress(InputError):
        kept = read_json(file)
        if kept.get("texts") == checksums:
            return dict(kept["perplexity"])
    tokenizer, train = corpus.tokenizer, np.asarray(corpus.ids("train"))
    texts = [np.asarray(corpus.ids(split)) for split in _MEASURED]
    orders = measure_ngrams(train, texts, vocab_size=len(tokenizer), start_id=tokenizer.start_id, order=4)
    perplexity = {split: figures[-1] for split, figures in zip(_MEASURED, orders, strict=True)}
    with contextlib.suppress(RunError):  # a corpus that others own
        write_json(file, {"texts": checksums, "perplexity": perplexity})
    return perplexity


# -- causal models -----------------------------------------------------------------------------------------------------


class LanguageModelTask(TextTask[Corpus, LanguageModel, EvaluationProtocol]):
    """The task of causal language models."""

    model = LanguageModel
    prepare = staticmethod(prepare_text)

    def protocol(self, config: RunConfig, changes: Any = None, split: str = "test") -> EvaluationProtocol:
        return final_protocol(config, changes, split)

    def parts(self, data: Text, folder: Path, device: torch.device) -> Parts:
        config, corpus = data.config, data.corpus
        model, batch_size = LanguageModel(config.model).to(device), config.eval.batch_size
        model.trained_length = config.train.segment_length
        train_tokens, validation = corpus.splits["train"]["tokens"], corpus.ids("valid")[: config.eval.max_tokens]
        while_training = validation_protocol(config)
        _check_positions(model, train_tokens // config.train.batch_size)
        check_length(model, while_training, len(validation))
        for split in _MEASURED:
            protocol = self.protocol(config, split=split)
            check_length(model, protocol, corpus.splits[split]["tokens"])
            divide_logits(model, protocol.temperature)  # refused where the output layer has no logits

        identity = read_identity(folder) if config.train.parts else {}

        def evaluate(model: nn.Module) -> EvaluationResult:
            start = corpus.tokenizer.start_id
            result = measure(model, validation, while_training, batch_size=batch_size, start_id=start)
            return EvaluationResult(result.nll, result.tokens)

        return training_parts(
            self,
            data,
            model,
            folder,
            objective=CausalObjective(model, config.train, identity),
            batches=training_batches(config, corpus, choose_own_rows()),
            evaluate=evaluate,
            splits=_MEASURED,
            evaluation={"protocol": while_training.in_words(), "next_token": while_training.next_token},
            entries={"corpus": describe(corpus), **({"parts": identity["parts"]} if identity else {})},
        )

    def figures(
        self, data: Text, model: LanguageModel, split: str, protocol: EvaluationProtocol, keep: Path | None = None
    ) -> dict[str, Any]:
        """Figures of a split. A word model scores `<unk>` for words it lacks, so bits per character would flatter it."""
        corpus = data.corpus
        counts, tokenizer, ids = corpus.splits[split], corpus.tokenizer, corpus.ids(split)
        batch_size = data.config.eval.batch_size
        total = measure(model, ids, protocol, batch_size=batch_size, start_id=tokenizer.start_id)
        if tokenizer.kind == "word":
            starts = None if tokenizer.sos_id is None else int((ids == tokenizer.sos_id).sum())
            return figures(total, words=total.tokens - (starts or 0), line_starts=starts)
        return figures(total, words=counts["words"], characters=counts["characters"], bytes=counts["bytes"])

    def sample(self, model: LanguageModel, corpus: Corpus) -> dict[str, Any] | None:
        """A continuation of the beginning of the validation text; None where tokens see later ones."""
        if model.config.sees_future:
            return None
        tokenizer = corpus.tokenizer
        longer = 5 if tokenizer.kind in ("byte", "character") else 1
        tokens, prompt = longer * _SAMPLE, corpus.ids("valid")[: longer * _PROMPT].tolist()
        ids = torch.tensor([[tokenizer.start_id, *prompt]], device=device_of(model))
        with torch.no_grad():
            text = model.generate(ids, tokens, temperature=_TEMPERATURE, seed=1)[0, 1:].tolist()
        return {
            "prompt": tokenizer.decode(prompt),
            "text": tokenizer.decode(text),
            "tokens": tokens,
            "temperature": _TEMPERATURE,
            "seed": 1,
        }


def _check_positions(model: LanguageModel, stream: int) -> None:
    """InputError where positions go on through a memory beyond the last one that the model has."""
    if model.memory_length and model.max_length is not None and stream > model.max_length:
        raise InputError(
            f"with memory, positions go on through a whole stream of {stream:,} tokens, but this model's (learned ones, a "
            f"synthesizer's, or those of model.attention.output_map: pairs) end at model.max_position_embeddings "
            f"{model.max_length:,}; choose position relative, rotary, sinusoidal or none with another score, or "
            "model.attention.output_map: decayed, or set model.memory_length to 0"
        )


# -- masked models -----------------------------------------------------------------------------------------------------


class MaskedModelTask(TextTask[Corpus, MaskedLanguageModel, MaskedProtocol]):
    """The task of masked language models."""

    model = MaskedLanguageModel
    name = "masked_modeling"
    prepare = staticmethod(prepare_text)

    def protocol(self, config: RunConfig, changes: Any = None, split: str = "test") -> MaskedProtocol:
        return choose_masked_protocol(config, changes)

    def parts(self, data: Text, folder: Path, device: torch.device) -> Parts:
        config, corpus = data.config, data.corpus
        options, batch_size = config.train, config.eval.batch_size
        model = MaskedLanguageModel(config.model).to(device)
        masking, protocol = _masking(config, corpus, model), self.protocol(config)
        validation = corpus.ids("valid")[: config.eval.max_tokens]
        unigram = {split: _unigram_of_masked(corpus, split, masking, protocol) for split in _MEASURED}

        def evaluate(model: nn.Module) -> EvaluationResult:
            assert isinstance(model, MaskedLanguageModel)
            result = measure_masked(model, validation, masking, protocol, batch_size)
            return EvaluationResult(result.nll, result.tokens, result.scores)

        return training_parts(
            self,
            data,
            model,
            folder,
            objective=MaskedObjective(model, options),
            batches=MaskedBatches(
                training_batches(config, corpus), masking, seed=options.seed, share=choose_own_rows()
            ),
            evaluate=evaluate,
            splits=_MEASURED,
            evaluation={"protocol": protocol.in_words(), "next_token": False},
            entries={"mask": {"token": MASK, "id": masking.mask_id}, "corpus": describe(corpus, unigram)},
        )

    def figures(
        self, data: Text, model: MaskedLanguageModel, split: str, protocol: MaskedProtocol, keep: Path | None = None
    ) -> dict[str, Any]:
        config, corpus = data.config, data.corpus
        masking = _masking(config, corpus, model)
        return compute_masked_figures(
            measure_masked(model, corpus.ids(split), masking, protocol, config.eval.batch_size)
        )


@dataclass(frozen=True)
class MaskedObjective:
    """Mean nll of the masked tokens, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20."""

    model: MaskedLanguageModel
    options: TrainConfig

    def __call__(self, batch: MaskedBatch, carry: Carry, position: TrainingPosition) -> Loss:
        device, trace = device_of(self.model), trace_for(self.options)
        own, part = batch.tokens, batch.part
        tokens, read = (own, batch.read) if part is None else (part.tokens, part.read)
        if tokens == 0:  # no token was masked
            return Loss(torch.zeros((), device=device), 0.0, 0, read=read)
        place_draws(part, len(batch.inputs))
        batch = batch.to(device)
        value, nll, _ = self.model.loss_parts(
            batch.inputs,
            batch.targets,
            attention_mask=batch.attention_mask,
            at=batch.at,
            label_smoothing=self.options.label_smoothing,
            trace=trace,
        )
        value = add_penalties(shared(value, own, part), trace, self.options, part)
        return Loss(value, nll * own, tokens, read=read)


def _masking(config: RunConfig, corpus: Corpus, model: MaskedLanguageModel) -> Masking:
    return Masking.of(
        corpus.tokenizer,
        model.mask_id,
        probability=config.train.mlm_probability,
        replaced=config.train.mask_replace_prob,
        drawn=config.train.random_replace_prob,
    )


def _iterate_blocks(
    ids: np.ndarray, masking: Masking, protocol: MaskedProtocol, batch_size: int
) -> Iterator[MaskedBatch]:
    length, seed = protocol.segment_length, protocol.mask_seed
    return iterate_masked_blocks(ids, masking, batch_size=batch_size, segment_length=length, seed=seed)


def _unigram_of_masked(corpus: Corpus, split: str, masking: Masking, protocol: MaskedProtocol) -> float:
    """Perplexity of word frequencies at the masked tokens: the baseline of a model that reads nothing."""
    blocks = _iterate_blocks(corpus.ids(split), masking, protocol, 64)
    targets = np.concatenate([batch.targets.numpy() for batch in blocks])
    if not len(targets):
        raise InputError(f"no token of {split} is asked for; raise train.mlm_probability, or give more text")
    return math.exp(float(unigram_nats(corpus, masking.marks.tolist())[targets].mean()))


def measure_masked(
    model: MaskedLanguageModel, ids: np.ndarray, masking: Masking, protocol: MaskedProtocol, batch_size: int
) -> MaskedEvaluation:
    """Summed nll and hits at the masked tokens of the text `ids`, in evaluation mode; the mode is restored.

    In the precision around the call: while training that of training, for final figures fp32.
    """
    check_block(model.max_length, min(len(ids), protocol.segment_length))
    device = next(model.parameters()).device
    nats = torch.zeros((), dtype=torch.float64, device=device)
    hits = torch.zeros((), dtype=torch.int64, device=device)
    tokens = 0
    with evaluating(model):
        for index, batch in enumerate(_iterate_blocks(ids, masking, protocol, batch_size)):
            if batch.tokens and index % world_size() == rank():
                batch = batch.to(device)
                hidden = model.hidden(batch.inputs, batch.attention_mask).flatten(0, 1)[batch.at]
                nats += model.output.nll(hidden[None], batch.targets[None]).double().sum()
                hits += (choose_first(model, hidden) == batch.targets).sum()
                tokens += batch.tokens
    nll, correct, read = all_reduce(torch.stack((nats, hits.double(), nats.new_tensor(tokens)))).tolist()
    return MaskedEvaluation(nll, int(read), int(correct))
