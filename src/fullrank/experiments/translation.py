"""Translation: a configuration becomes sentence pairs, model and training, and ends in perplexity and BLEU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullrank.comparison.runs import TRANSLATIONS
from fullrank.config.run import RunConfig
from fullrank.config.training import TrainConfig
from fullrank.core.config import EncoderConfig
from fullrank.core.errors import ConfigError, InputError
from fullrank.core.translator import Translator
from fullrank.data import Corpus, Pairs, prepare
from fullrank.data.pair_batches import PairBatch, PairBatches
from fullrank.decoding.sample import evaluating
from fullrank.evaluation.perplexity import Evaluation, Tally, figures
from fullrank.evaluation.tasks import bleu_of, tokenised_bleu, tokenization_of, translation_scores
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
from fullrank.experiments.translate import SOURCE, TARGET, Search, replace_unknown, translate_ids
from fullrank.files import write_text
from fullrank.training.device import device_of
from fullrank.training.distributed import all_reduce, merge_shares, rank, share_of_process
from fullrank.training.values import Carry, EvaluationResult, Loss, TrainingPosition

Sentences = Prepared[RunConfig, Corpus]


class TranslationTask(TextTask[Corpus, Translator, Search]):
    """The task of translation models."""

    model = Translator
    name = "translation"

    def protocol(self, config: RunConfig, changes: Any = None, split: str = "test") -> Search:
        return dataclasses.replace(Search.of(config.eval), **(changes or {}))

    def prepare(self, config: RunConfig, identity: Mapping[str, Any], allow_slice: bool, say: Say) -> Sentences:
        corpus = reuse_prepared(identity) or prepare(config.data, allow_slice=allow_slice, report=say)
        bleu_of(bleu_tokens(config, corpus))  # an error here, not after training

        def save(folder: Path) -> None:
            corpus.source.save(folder / SOURCE)
            corpus.target.save(folder / TARGET)

        return Prepared(with_vocabularies(config, corpus), corpus, corpus.label, identify(corpus), save)

    def parts(self, data: Sentences, folder: Path, device: torch.device) -> Parts:
        config, corpus = data.config, data.corpus
        options, some = config.train, config.eval.max_sentences
        assert options.batch_tokens is not None
        model = Translator(config.model).to(device)
        for split in corpus.splits:
            check_lengths(model, corpus.pairs(split))
        validation, greedy = corpus.pairs("valid"), self.protocol(config, {"beams": 1})
        references, tokenize = validation.references()[:some], bleu_tokens(config, corpus)

        def evaluate(model: nn.Module) -> EvaluationResult:
            assert isinstance(model, Translator)
            total = score(model, validation, config)
            if not references:
                return EvaluationResult(total.nll, total.tokens)
            with torch.autocast(device.type, enabled=False):  # one token at a time: casting weights would cost the most
                texts, _ = translate_split(model, corpus, "valid", greedy, len(references))
            scores = translation_scores(texts, references, tokenize=tokenize)
            return EvaluationResult(total.nll, total.tokens, {"bleu": scores["bleu"]})

        bleu = "" if some is None else f", BLEU of the first {some:,} sentences" if some else ", without BLEU"
        return training_parts(
            self,
            data,
            model,
            folder,
            objective=TranslationObjective(model, options),
            batches=PairBatches(
                corpus.pairs("train"), batch_tokens=options.batch_tokens, seed=options.seed, share=choose_own_rows()
            ),
            evaluate=evaluate,
            splits=[split for split in corpus.splits if split != "train"],
            evaluation={
                "protocol": f"greedy search, nll of every target token{bleu}",
                "metric": config.eval.metric,
                "next_token": not config.model.of_decoder().sees_future,
            },
            entries={"corpus": describe(corpus)},
        )

    def figures(
        self, data: Sentences, model: Translator, split: str, protocol: Search, keep: Path | None = None
    ) -> dict[str, Any]:
        """Figures of a split, in fp32. `keep`: a run folder for translations and references, a sentence a line."""
        config, corpus = data.config, data.corpus
        pairs = corpus.pairs(split)
        measured = figures(score(model, pairs, config))
        (texts, tokens), references = translate_split(model, corpus, split, protocol), pairs.references()
        measured |= translation_scores(texts, references, tokenize=bleu_tokens(config, corpus))
        if corpus.target.moses:  # else tokens are not what fairseq counted
            measured |= tokenised_bleu(tokens, pairs.reference_tokens())
        if keep is not None and rank() == 0:
            keep = keep / TRANSLATIONS
            keep.mkdir(parents=True, exist_ok=True)
            for name, lines in ((f"{split}.txt", texts), (f"{split}.reference.txt", references)):
                write_text(keep / name, "".join(" ".join(line.split()) + "\n" for line in lines))
        return measured


@dataclass(frozen=True)
class TranslationObjective:
    """Mean nll of the target tokens given the source, with label smoothing, plus the same penalties over all attention."""

    model: Translator
    options: TrainConfig

    def __call__(self, batch: PairBatch, carry: Carry, position: TrainingPosition) -> Loss:
        options = self.options
        trace = trace_for(options)
        own, part = batch.tokens, batch.part  # counted here, before it goes to a GPU
        place_draws(part, len(batch.inputs))
        batch = batch.to(device_of(self.model))
        value, nll, _ = self.model.loss_parts(
            batch.source_ids,
            batch.inputs,
            batch.targets,
            batch.weights,
            batch.source_mask,
            # padding comes last: models that do not see the future do not see it
            batch.weights if self.model.config.of_decoder().sees_future else None,
            label_smoothing=options.label_smoothing,
            trace=trace,
        )
        value = add_penalties(shared(value, own, part), trace, options, part)
        return Loss(value, nll * own, own if part is None else part.tokens)


def with_vocabularies(config: RunConfig, corpus: Corpus) -> RunConfig:
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


def bleu_tokens(config: RunConfig, corpus: Corpus) -> str:
    """Tokens of BLEU, as sacreBLEU names them: `eval.bleu_tokenize`, else those of the target language, else 13a."""
    return config.eval.bleu_tokenize or tokenization_of(corpus.target.name) or "13a"


def describe(corpus: Corpus) -> dict[str, Any]:
    """The entry `corpus` of result.json."""
    return {
        **describe_prepared(corpus),
        "pairs": {split: counts["pairs"] for split, counts in corpus.splits.items()},
        "tokens": {
            split: {side: counts[f"{side}_tokens"] for side in corpus.tokenizers}
            for split, counts in corpus.splits.items()
        },
        "vocabulary": {"source": len(corpus.source), "target": len(corpus.target)},
        "languages": {"source": corpus.source.name, "target": corpus.target.name},
        "fingerprint": corpus.vocabulary,
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


def score(model: Translator, pairs: Pairs, config: RunConfig) -> Evaluation:
    """nll of every target token of `pairs`, in evaluation mode, in the precision around the call."""
    longest = int(max(pairs.source_lengths.max(), pairs.target_lengths.max())) + 1
    batches = PairBatches(pairs, batch_tokens=max(config.train.batch_tokens or 4096, longest), seed=0, shuffle=False)
    device, sees_future = device_of(model), model.config.of_decoder().sees_future
    tally = Tally(device, sums=all_reduce)
    with evaluating(model):
        for index in share_of_process(batches.batches_per_epoch):
            batch = batches.batch(0, index).to(device)
            seen = batch.weights if sees_future else None
            nll = model.nll(batch.source_ids, batch.inputs, batch.targets, batch.source_mask, seen)
            tally.add(nll.per_token[batch.weights != 0])
    return tally.total()


def translate_split(
    model: Translator, corpus: Corpus, split: str, search: Search, limit: int | None = None
) -> tuple[list[str], list[str]]:
    """The first `limit` sentences of a split (None: all) in the model's translation.

    As people read them, and as the tokens that tokenised BLEU compares.
    """
    pairs, target = corpus.pairs(split), corpus.target
    count = len(pairs) if limit is None else min(limit, len(pairs))
    sentences = [pairs.source(i).tolist() for i in share_of_process(count)]
    best = translate_ids(model, sentences, search, source_eos=pairs.source_eos_id, target_eos=pairs.target_eos_id)
    ids = merge_shares([replace_unknown(translations[0].ids, target) for translations in best])
    return [target.decode(line) for line in ids], [target.tokens(line) for line in ids]
