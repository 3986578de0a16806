"""Causal language modelling: a configuration becomes corpus, model and training, and ends in figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullrank.config.run import RunConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import ConfigError, FullRankError, InputError
from fullrank.data import Blocks, Corpus, Streams, load_corpus, prepare, unigram_perplexity
from fullrank.evaluation.perplexity import figures
from fullrank.evaluation.protocol import EvaluationProtocol, Flags, final_protocol, judging_protocol
from fullrank.experiments.measuring import check_length, check_training_length, measure
from fullrank.experiments.objective import CausalObjective
from fullrank.experiments.run import Parts, Say, Text
from fullrank.experiments.run_folder import open_run
from fullrank.kernels import kernel
from fullrank.training.device import choose_device
from fullrank.training.values import EvaluationResult


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


class LanguageModeling:
    """The task of causal language models."""

    def check(self, config: RunConfig) -> None:
        final_protocol(config)

    def text(self, config: RunConfig, known: Mapping[str, Any], allow_slice: bool, say: Say) -> tuple[RunConfig, Text]:
        return text_of(config, known, allow_slice, say)

    def parts(self, config: RunConfig, corpus: Corpus, folder: Path, device: torch.device) -> Parts:
        options, judging = config.train, config.eval
        model = LanguageModel(config.model).to(device)
        _check_positions(model, corpus.splits["train"].tokens // options.batch_size)
        batches = training_batches(config, corpus)
        watched, judged, reported = (
            corpus.ids("valid")[: judging.max_tokens],
            judging_protocol(config),
            final_protocol(config),
        )
        check_training_length(model, options.segment_length, corpus.splits["train"].tokens)
        check_length(model, judged, len(watched))
        for split in ("valid", "test"):
            check_length(model, reported, corpus.splits[split].tokens)

        def judge(model: nn.Module) -> EvaluationResult:
            start = corpus.tokenizer.start_id
            found = measure(model, watched, judged, batch_size=judging.batch_size, start_id=start, device=device)
            return EvaluationResult(found.nll, found.tokens)

        def measured(checkpoint: str) -> dict[str, Any]:
            saved = LanguageModel.load(folder, checkpoint).to(device)
            return {
                split: _figures(saved, corpus, split, reported, judging.batch_size, device)
                for split in ("valid", "test")
            }

        return Parts(
            model,
            CausalObjective(model, options),
            batches,
            judge,
            measured,
            judged={"protocol": judged.in_words(), "next_token": judged.next_token},
            told={
                "protocol": reported.in_words(),
                "protocol_settings": dataclasses.asdict(reported),
                "corpus": describe(corpus),
            },
        )


def text_of(config: RunConfig, known: Mapping[str, Any], allow_slice: bool, say: Say) -> tuple[RunConfig, Text]:
    """The prepared text of one language (see `Task.text`)."""
    corpus = _kept(known) or prepare(config.data, allow_slice=allow_slice, report=say)
    sums = {split: info.sha256 for split, info in corpus.splits.items()}
    text = Text(corpus, corpus.folder, corpus.tokenizer.fingerprint, sums, corpus.tokenizer.save)
    return with_vocabulary(config, corpus), text


def _kept(identity: Mapping[str, Any]) -> Corpus | None:
    """The prepared corpus that a run was started on, if it is still there and whole: its text may be gone by now."""
    try:
        corpus = load_corpus(Path(identity["prepared"]))
    except (KeyError, FullRankError):
        return None
    same = {split: info.sha256 for split, info in corpus.splits.items()} == identity.get("text")
    return corpus if same else None


def training_batches(config: RunConfig, corpus: Corpus) -> Blocks | Streams:
    """What training reads: blocks in a new order every epoch, or contiguous streams (`train.order`)."""
    options, ids, start = config.train, corpus.ids("train"), corpus.tokenizer.start_id
    size, length = options.batch_size, options.segment_length
    if options.order == "shuffled":
        return Blocks(ids, batch_size=size, segment_length=length, start_id=start, shuffle=True, seed=options.seed)
    return Streams(ids, batch_size=size, segment_length=length, start_id=start)


def _check_positions(model: LanguageModel, stream: int) -> None:
    """InputError where positions go on through a memory beyond the last one that the model has."""
    if model.memory_length and model.max_length is not None and stream > model.max_length:
        raise InputError(
            f"with memory, positions go on through a whole stream of {stream:,} tokens, but this model's (learned ones, a "
            f"synthesizer's, or those of model.attention.output_map: pairs) end at model.max_position_embeddings "
            f"{model.max_length:,}; choose position relative, rotary, sinusoidal or none with another score, or "
            "model.attention.output_map: decayed, or set model.memory_length to 0"
        )


def describe(corpus: Corpus, unigram: Mapping[str, float] | None = None) -> dict[str, Any]:
    """What `result.json` says about the text. `unigram`: perplexity of word frequencies, where not that of all tokens."""
    if unigram is None:
        unigram = {split: unigram_perplexity(corpus, split) for split in ("valid", "test")}
    return {
        "name": corpus.name,
        "label": corpus.label,
        "is_slice": corpus.is_slice,
        "tokens": {split: info.tokens for split, info in corpus.splits.items()},
        "sha256": {split: info.sha256 for split, info in corpus.splits.items()},
        "vocabulary": len(corpus.tokenizer),
        "fingerprint": corpus.tokenizer.fingerprint,
        "unigram_perplexity": dict(unigram),
        "details": dict(corpus.details),
    }


def _figures(
    model: LanguageModel,
    corpus: Corpus,
    split: str,
    protocol: EvaluationProtocol,
    batch_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """What is reported of a split. A word model scores `<unk>` for words it lacks, so bits per character would flatter it."""
    info, tokenizer, ids = corpus.splits[split], corpus.tokenizer, corpus.ids(split)
    found = measure(model, ids, protocol, batch_size=batch_size, start_id=tokenizer.start_id, device=device)
    begun = None if tokenizer.sos_id is None else int((ids == tokenizer.sos_id).sum())
    if tokenizer.kind == "word":
        return figures(found, words=found.tokens - (begun or 0), line_starts=begun)
    return figures(found, words=info.words, characters=info.characters, bytes=info.bytes, line_starts=begun)


def corpus_of(folder: Path, split: str, say: Say = print) -> Corpus:
    """The corpus that the run in `folder` was started on, as it was prepared then, or prepared again.

    Raises InputError if it has no such split, or if the vocabulary or that split is not what it was.
    """
    config, identity = open_run(folder)
    corpus = _kept(identity) or prepare(config.data, allow_slice=True, report=say)
    if split not in corpus.splits:
        raise InputError(f"--split: '{split}' is not a split; {corpus.label} has {', '.join(corpus.splits)}")
    if corpus.tokenizer.fingerprint != identity["vocabulary"]:
        raise InputError(
            f"{folder} was trained with another vocabulary than {corpus.label} has now; has the text changed?"
        )
    if corpus.splits[split].sha256 != identity["text"].get(split):
        raise InputError(f"the {split} text of {corpus.label} is not the one that {folder} was started with")
    return corpus


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
    """Perplexity of the run in `folder` on `split`, with the protocol it was measured by: the run's, or as `flags` say."""
    config, _ = open_run(folder)
    protocol, flags = final_protocol(config, flags), flags or Flags()
    corpus = corpus_of(folder, split, say)
    device = choose_device(device_name, "--device")
    model = LanguageModel.load(folder, checkpoint).to(device)
    with kernel(kernel_name):
        measured = _figures(model, corpus, split, protocol, flags.batch_size or config.eval.batch_size, device)
    return {
        "run": str(folder),
        "split": split,
        **measured,
        "protocol": protocol.in_words(),
        "protocol_settings": dataclasses.asdict(protocol),
        "checkpoint": checkpoint,
        "corpus": corpus.label,
        "kernel": kernel_name,
    }
