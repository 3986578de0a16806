"""Translation: a configuration becomes sentence pairs, model and training, and ends in perplexity and BLEU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.config.run import RunConfig, TrainConfig
from fullrank.core.config import EncoderConfig
from fullrank.core.errors import ConfigError, InputError
from fullrank.core.translator import Translator
from fullrank.data import PairBatch, PairBatches, PairCorpus, Pairs, load_pairs, prepare_pairs
from fullrank.evaluation.perplexity import Evaluation, Tally, figures
from fullrank.evaluation.tasks import tokenised_bleu, translation_scores
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
from fullrank.experiments.translate import SOURCE, TARGET, Search, named, translate_ids
from fullrank.files import write_text
from fullrank.training.optimizer import parameter_groups
from fullrank.training.values import EvaluationResult, FitResult, Loss, TrainingPosition


class TranslationTask:
    """The task of translation models (`task.TextTask`)."""

    def check(self, config: RunConfig) -> None:
        """Nothing is left to check: a configuration that is built is whole."""

    def prepare(
        self, config: RunConfig, identity: Mapping[str, Any], allow_slice: bool, say: Say
    ) -> Prepared[RunConfig, PairCorpus]:
        corpus = reopen(identity, load_pairs, _checksums) or prepare_pairs(
            config.data, allow_slice=allow_slice, report=say
        )

        def save(folder: Path) -> None:
            corpus.source.save(folder / SOURCE)
            corpus.target.save(folder / TARGET)

        known = {
            "vocabulary": _vocabulary(corpus),
            "text": _checksums(corpus),
            "prepared": str(corpus.folder.resolve()),
        }
        return Prepared(with_vocabularies(config, corpus), corpus, corpus.label, known, save)

    def parts(self, config: RunConfig, corpus: PairCorpus, folder: Path, device: torch.device) -> Parts:
        options, some = config.train, config.eval.max_sentences
        assert options.batch_tokens is not None
        model = Translator(config.model).to(device)
        for split in corpus.splits:
            check_lengths(model, corpus.pairs(split))
        search, watched = Search.of(config.eval), corpus.pairs("valid")
        references = watched.references()[:some]

        def evaluate(model: nn.Module) -> EvaluationResult:
            assert isinstance(model, Translator)
            total = score(model, watched, config, device)
            if not references:
                return EvaluationResult(total.nll, total.tokens)
            greedy = dataclasses.replace(search, beams=1)
            with torch.autocast(device.type, enabled=False):  # one token at a time: casting weights would cost the most
                written = translate(model, corpus, "valid", greedy, limit=len(references))
            return EvaluationResult(
                total.nll, total.tokens, {"bleu": translation_scores(written.texts, references)["bleu"]}
            )

        def measured(checkpoint: str) -> dict[str, Any]:
            saved = Translator.load(folder, checkpoint).to(device)
            keep = folder / "translations" if checkpoint == "best" else None
            return {
                split: figures_of(saved, corpus, split, search, config, device, keep)
                for split in corpus.splits
                if split != "train"
            }

        def result(done: FitResult) -> dict[str, Any]:
            bleu = "" if some is None else f", BLEU of the first {some:,} sentences" if some else ", without BLEU"
            return trained_entries(
                config,
                model,
                done,
                measured,
                evaluation={
                    "protocol": f"greedy search, nll of every target token{bleu}",
                    "metric": config.eval.metric,
                    "next_token": not config.model.of_decoder().sees_future,
                },
                entries={
                    "task": "translation",
                    "protocol": protocol_in_words(search),
                    "protocol_settings": dataclasses.asdict(search),
                    "corpus": describe(corpus),
                },
            )

        return Parts(
            model,
            TranslationObjective(model, options),
            PairBatches(corpus.pairs("train"), batch_tokens=options.batch_tokens, seed=options.seed),
            evaluate,
            options,
            config.eval,
            parameter_groups(model, options.weight_decay),
            result,
        )

    def measure(
        self, config: RunConfig, corpus: PairCorpus, folder: Path, request: EvaluationRequest, device: torch.device
    ) -> Measured:
        search = dataclasses.replace(Search.of(config.eval), **(request.search or {}))
        model = Translator.load(folder, request.checkpoint).to(device)
        found = figures_of(model, corpus, request.split, search, config, device)
        return Measured(found, protocol_in_words(search), dataclasses.asdict(search))


class TranslationObjective:
    """Mean nll of the target tokens given the source, with label smoothing, plus the same penalties over all attention."""

    def __init__(self, model: Translator, options: TrainConfig) -> None:
        self.model, self.options = model, options
        self.device = next(model.parameters()).device

    def __call__(self, batch: PairBatch, carry: Mapping[str, Tensor], position: TrainingPosition) -> Loss:
        options = self.options
        trace = trace_for(options)
        tokens = batch.tokens  # counted here, before it goes to a GPU
        batch = batch.to(self.device)
        value, nll, _ = self.model.loss_parts(
            batch.source_ids,
            batch.inputs,
            batch.targets,
            batch.weights,
            batch.source_mask,
            batch.weights
            if self.model.config.of_decoder().sees_future
            else None,  # others: padding comes last, not seen
            label_smoothing=options.label_smoothing,
            trace=trace,
            padded_right=True,
        )
        return Loss(penalized(value, trace, options), nll * tokens, tokens)


def with_vocabularies(config: RunConfig, corpus: PairCorpus) -> RunConfig:
    """`config` with `model.vocab_size`, the target's, and `model.encoder.vocab_size` known.

    What is given stays: entries that the corpus has no piece for are never read, and a translation learns not to write them.
    Raises ConfigError where a given size is too small, or one table is asked for and each language has its own vocabulary.
    """
    model, own = config.model, config.model.encoder or EncoderConfig()
    target = model.vocab_size or len(corpus.target)
    source = own.vocab_size or model.vocab_size or len(corpus.source)
    problems = [
        f"{key}: {given}, but the {language.name} of {corpus.label} has {len(language)} entries; set it to null or at least "
        f"{len(language)}, or make the vocabulary smaller with data.max_vocabulary"
        for key, given, language in (
            ("model.vocab_size", target, corpus.target),
            ("model.encoder.vocab_size", source, corpus.source),
        )
        if given < len(language)
    ]
    if own.share_embedding and corpus.source.fingerprint != corpus.target.fingerprint:
        problems.append(
            f"model.encoder.share_embedding: one table for both languages, and in {corpus.label} each has a vocabulary of its "
            "own; set data.vocabulary: joint, or model.encoder.share_embedding: false"
        )
    if problems:
        raise ConfigError(*problems)
    encoder = model.encoder if source == target else dataclasses.replace(own, vocab_size=source)
    return dataclasses.replace(config, model=dataclasses.replace(model, vocab_size=target, encoder=encoder))


def protocol_in_words(search: Search) -> str:
    """The search and the figures of translations, as a sentence for people."""
    return (
        f"{_search_in_words(search)}; BLEU of detokenised text by sacreBLEU; perplexity of every target token, <eos> "
        "included, given the source and the target tokens before it"
    )


def _search_in_words(search: Search) -> str:
    many = "greedy search" if search.beams == 1 else f"beam {search.beams}, length penalty {search.length_penalty:g}"
    repeat = f", no {search.no_repeat_ngram_size}-gram twice" if search.no_repeat_ngram_size else ""
    return f"{many}{repeat}, at most {search.max_length_a:g} M + {search.max_length_b} tokens"


def _vocabulary(corpus: PairCorpus) -> str:
    return f"{corpus.source.fingerprint} {corpus.target.fingerprint}"


def _checksums(corpus: PairCorpus) -> dict[str, str]:
    """One line for each split: the checksums of its files in the order of their names."""
    return {
        split: " ".join(f"{name}:{value}" for name, value in sorted(info.sha256.items()))
        for split, info in corpus.splits.items()
    }


def describe(corpus: PairCorpus) -> dict[str, Any]:
    """The entry `corpus` of result.json."""
    return {
        "name": corpus.name,
        "label": corpus.label,
        "is_slice": corpus.is_slice,
        "pairs": {split: info.pairs for split, info in corpus.splits.items()},
        "tokens": {
            split: {"source": info.source_tokens, "target": info.target_tokens} for split, info in corpus.splits.items()
        },
        "sha256": _checksums(corpus),
        "vocabulary": {"source": len(corpus.source), "target": len(corpus.target)},
        "languages": {"source": corpus.source.name, "target": corpus.target.name},
        "fingerprint": _vocabulary(corpus),
        "details": dict(corpus.details),
    }


def check_lengths(model: Translator, pairs: Pairs) -> None:
    """Raises InputError where a sentence is longer than the positions of encoder or decoder."""
    for side, lengths, limit in (
        ("source", pairs.source_lengths, model.max_source_length),
        ("target", pairs.target_lengths, model.max_length),
    ):
        if limit is not None and len(lengths) and int(lengths.max()) + 1 > limit:
            raise InputError(
                f"sentence {int(lengths.argmax()) + 1:,} of {pairs.split} has {int(lengths.max()) + 1:,} tokens on the {side} "
                f"side, and this model has {limit:,} positions; raise model.max_position_embeddings, or lower data.max_length "
                "(training pairs longer than so many words are left out)"
            )


def score(model: Translator, pairs: Pairs, config: RunConfig, device: torch.device) -> Evaluation:
    """nll of every target token of `pairs`, in evaluation mode, in the precision around the call."""
    tokens = max(
        config.train.batch_tokens or 4096, int(max(pairs.source_lengths.max(), pairs.target_lengths.max())) + 1
    )
    source = PairBatches(pairs, batch_tokens=tokens, seed=0, shuffle=False)
    tally, training, sees_future = Tally(device), model.training, model.config.of_decoder().sees_future
    model.eval()
    with torch.no_grad():
        for index in range(source.batches_per_epoch):
            batch = source.batch(0, index).to(device)
            seen = batch.weights if sees_future else None  # others: padding comes last, and is not seen
            nll = model.nll(batch.source_ids, batch.inputs, batch.targets, batch.source_mask, seen)
            tally.add(nll.per_token, batch.targets, batch.weights)
    model.train(training)
    return tally.total()


@dataclass(frozen=True)
class Translated:
    """A split in the model's translation: `texts` as people read them, `tokens` as tokenised BLEU compares them."""

    texts: list[str]
    tokens: list[str]


def translate(
    model: Translator,
    corpus: PairCorpus,
    split: str,
    search: Search,
    limit: int | None = None,
) -> Translated:
    """The first `limit` sentences of a split (None: all) in the model's translation."""
    pairs = corpus.pairs(split)
    count = len(pairs) if limit is None else min(limit, len(pairs))
    filled = [i for i in range(count) if len(pairs.source(i))]
    best = translate_ids(
        model,
        [pairs.source(i).tolist() for i in filled],
        search,
        source_eos=pairs.source_eos_id,
        target_eos=pairs.target_eos_id,
    )
    ids: list[tuple[int, ...]] = [()] * count  # an empty source has an empty translation
    for i, translations in zip(filled, best, strict=True):
        ids[i] = named(translations[0].ids, corpus.target)
    return Translated([corpus.target.decode(line) for line in ids], [corpus.target.tokens(line) for line in ids])


def figures_of(
    model: Translator,
    corpus: PairCorpus,
    split: str,
    search: Search,
    config: RunConfig,
    device: torch.device,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Figures of a split, in fp32. `folder`: translations and references are written there, a sentence a line."""
    pairs = corpus.pairs(split)
    measured = figures(score(model, pairs, config, device))
    written, references = translate(model, corpus, split, search), pairs.references()
    measured |= translation_scores(written.texts, references)
    if corpus.target.moses:  # else tokens are not what fairseq counted
        measured |= tokenised_bleu(written.tokens, pairs.reference_tokens())
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in ((f"{split}.txt", written.texts), (f"{split}.reference.txt", references)):
            write_text(folder / name, "".join(" ".join(line.split()) + "\n" for line in lines))
    return measured
