"""Translation: a configuration becomes sentence pairs, model and training, and ends in perplexity and BLEU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullrank.config.run import RunConfig
from fullrank.core.errors import FullRankError, InputError
from fullrank.core.translator import Translator
from fullrank.data import PairBatch, PairBatches, PairCorpus, Pairs, load_pairs, prepare_pairs
from fullrank.evaluation.perplexity import Evaluation, Tally, figures
from fullrank.evaluation.tasks import tokenised_bleu, translation_scores
from fullrank.experiments.objective import TranslationObjective
from fullrank.experiments.pair_vocabulary import with_vocabularies
from fullrank.experiments.run import Parts, Say, Text
from fullrank.experiments.run_folder import open_run
from fullrank.experiments.translating import SOURCE, TARGET
from fullrank.experiments.translation_search import Search, named, translate_ids
from fullrank.files import write_text
from fullrank.kernels import kernel
from fullrank.training.device import choose_device
from fullrank.training.values import EvaluationResult


@dataclass(frozen=True)
class Translated:
    """A split in the model's translation: `texts` as people read them, `tokens` as tokenised BLEU compares them."""

    texts: list[str]
    tokens: list[str]


class Translation:
    """The task of translation models."""

    def check(self, config: RunConfig) -> None:
        """Nothing is left to check: a configuration that is built is whole."""

    def text(self, config: RunConfig, known: Mapping[str, Any], allow_slice: bool, say: Say) -> tuple[RunConfig, Text]:
        corpus = _kept(known) or prepare_pairs(config.data, allow_slice=allow_slice, report=say)

        def keep(folder: Path) -> None:
            corpus.source.save(folder / SOURCE)
            corpus.target.save(folder / TARGET)

        return with_vocabularies(config, corpus), Text(corpus, corpus.folder, _vocabulary(corpus), _sums(corpus), keep)

    def parts(self, config: RunConfig, corpus: PairCorpus, folder: Path, device: torch.device) -> Parts:
        options = config.train
        assert options.batch_tokens is not None
        model = Translator(config.model).to(device)
        for split in corpus.splits:
            check_lengths(model, corpus.pairs(split))
        batches = PairBatches(corpus.pairs("train"), batch_tokens=options.batch_tokens, seed=options.seed)
        search, watched = Search.of(config.eval), corpus.pairs("valid")
        references = watched.references()[: config.eval.max_sentences]
        told = protocol_in_words(search)

        def judge(model: nn.Module) -> EvaluationResult:
            assert isinstance(model, Translator)
            found = score(model, watched, config, device)
            if not references:
                return EvaluationResult(found.nll, found.tokens)
            quick = dataclasses.replace(search, beams=1)
            with torch.autocast(device.type, enabled=False):  # one token at a time: casting weights would cost the most
                written = translate(model, corpus, "valid", quick, limit=len(references))
            return EvaluationResult(
                found.nll, found.tokens, {"bleu": translation_scores(written.texts, references)["bleu"]}
            )

        def measured(checkpoint: str) -> dict[str, Any]:
            saved, found = Translator.load(folder, checkpoint).to(device), {}
            for split in corpus.splits:
                if split != "train":
                    kept = folder / "translations" if checkpoint == "best" else None
                    found[split] = figures_of(saved, corpus, split, search, config, device, kept)
            return found

        some = config.eval.max_sentences
        return Parts(
            model,
            TranslationObjective(model, options),
            batches,
            judge,
            measured,
            judged={
                "protocol": "greedy search, nll of every target token"
                + ("" if some is None else f", BLEU of the first {some:,} sentences" if some else ", without BLEU"),
                "metric": config.eval.metric,
                "next_token": not config.model.of_decoder().sees_future,
            },
            told={
                "task": "translation",
                "protocol": told,
                "protocol_settings": dataclasses.asdict(search),
                "corpus": describe(corpus),
            },
        )


def protocol_in_words(search: Search) -> str:
    """How translations were found and what was counted, as a sentence for people."""
    return (
        f"{_in_words(search)}; BLEU of detokenised text by sacreBLEU; perplexity of every target token, <eos> included, given "
        "the source and the target tokens before it"
    )


def _in_words(search: Search) -> str:
    many = "greedy search" if search.beams == 1 else f"beam {search.beams}, length penalty {search.length_penalty:g}"
    repeat = f", no {search.no_repeat_ngram_size}-gram twice" if search.no_repeat_ngram_size else ""
    return f"{many}{repeat}, at most {search.max_length_a:g} M + {search.max_length_b} tokens"


def _vocabulary(corpus: PairCorpus) -> str:
    return f"{corpus.source.fingerprint} {corpus.target.fingerprint}"


def _sums(corpus: PairCorpus) -> dict[str, str]:
    """One line for each split: the sums of its files in the order of their names."""
    return {
        split: " ".join(f"{name}:{value}" for name, value in sorted(info.sha256.items()))
        for split, info in corpus.splits.items()
    }


def _kept(identity: Mapping[str, Any]) -> PairCorpus | None:
    """The prepared pairs that a run was started on, if they are still there and whole: the text may be gone by now."""
    try:
        corpus = load_pairs(Path(identity["prepared"]))
    except (KeyError, FullRankError):
        return None
    return corpus if _sums(corpus) == identity.get("text") else None


def describe(corpus: PairCorpus) -> dict[str, Any]:
    """What `result.json` says about the sentence pairs."""
    return {
        "name": corpus.name,
        "label": corpus.label,
        "is_slice": corpus.is_slice,
        "pairs": {split: info.pairs for split, info in corpus.splits.items()},
        "tokens": {
            split: {"source": info.source_tokens, "target": info.target_tokens} for split, info in corpus.splits.items()
        },
        "sha256": _sums(corpus),
        "vocabulary": {"source": len(corpus.source), "target": len(corpus.target)},
        "languages": {"source": corpus.source.name, "target": corpus.target.name},
        "fingerprint": _vocabulary(corpus),
        "details": dict(corpus.details),
    }


def check_lengths(model: Translator, pairs: Pairs) -> None:
    """InputError where a sentence is longer than the positions that a half of the model has."""
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
        for batch in _all(source):
            batch = batch.to(device)
            seen = batch.weights if sees_future else None  # others see no padding: it comes last
            found = model.nll(batch.source_ids, batch.inputs, batch.targets, batch.source_mask, seen)
            tally.add(found.per_token, batch.targets, batch.weights)
    model.train(training)
    return tally.total()


def _all(batches: PairBatches) -> Iterator[PairBatch]:
    return (batches.batch(0, index) for index in range(batches.batches_per_epoch))


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
    found = translate_ids(
        model,
        [pairs.source(i).tolist() for i in filled],
        search,
        source_eos=pairs.source_eos_id,
        target_eos=pairs.target_eos_id,
    )
    ids: list[tuple[int, ...]] = [()] * count  # an empty source has an empty translation
    for i, best in zip(filled, found, strict=True):
        ids[i] = named(best[0].ids, corpus.target)
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
    """What is reported of a split, in fp32. `folder`: translations and references are kept there, a sentence a line."""
    pairs = corpus.pairs(split)
    measured = figures(score(model, pairs, config, device))
    written, references = translate(model, corpus, split, search), pairs.references()
    measured |= translation_scores(written.texts, references)
    if corpus.target.moses:  # else tokens are not what fairseq counted
        measured |= tokenised_bleu(written.tokens, pairs.reference_tokens())
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in ((f"{split}.txt", written.texts), (f"{split}.reference.txt", references)):
            write_text(folder / name, "".join(f"{_one_line(line)}\n" for line in lines))
    return measured


def _one_line(text: str) -> str:
    return " ".join(text.split())


def corpus_of(folder: Path, split: str, say: Say = print) -> PairCorpus:
    """The pairs that the run in `folder` was started on, as they were prepared then, or prepared again.

    Raises InputError if they have no such split, or if a vocabulary or that split is not what it was.
    """
    config, identity = open_run(folder)
    corpus = _kept(identity) or prepare_pairs(config.data, allow_slice=True, report=say)
    if split not in corpus.splits:
        raise InputError(f"--split: '{split}' is not a split; {corpus.label} has {', '.join(corpus.splits)}")
    if _vocabulary(corpus) != identity["vocabulary"]:
        raise InputError(
            f"{folder} was trained with other vocabularies than {corpus.label} has now; have the texts changed?"
        )
    if _sums(corpus)[split] != identity["text"].get(split):
        raise InputError(f"the {split} pairs of {corpus.label} are not those that {folder} was started with")
    return corpus


def evaluate(
    folder: Path,
    split: str,
    *,
    checkpoint: str = "best",
    search: Mapping[str, Any] | None = None,
    device_name: str = "auto",
    kernel_name: str = "auto",
    say: Say = print,
) -> dict[str, Any]:
    """Perplexity and BLEU of the run in `folder` on `split`; `search`: what differs from the run's own (see `Search`)."""
    config, _ = open_run(folder)
    how = dataclasses.replace(Search.of(config.eval), **(search or {}))
    corpus = corpus_of(folder, split, say)
    device = choose_device(device_name, "--device")
    model = Translator.load(folder, checkpoint).to(device)
    with kernel(kernel_name):
        measured = figures_of(model, corpus, split, how, config, device)
    return {
        "run": str(folder),
        "split": split,
        **measured,
        "protocol": protocol_in_words(how),
        "protocol_settings": dataclasses.asdict(how),
        "checkpoint": checkpoint,
        "corpus": corpus.label,
        "kernel": kernel_name,
    }


def is_translation(folder: Path) -> bool:
    """Whether the run in `folder` translates."""
    try:
        config, _ = open_run(folder)
    except (FullRankError, json.JSONDecodeError):
        return False
    return config.translates
