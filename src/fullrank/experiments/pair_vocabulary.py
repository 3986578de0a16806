"""The vocabularies of a translation model, from a corpus of sentence pairs."""

from __future__ import annotations

from dataclasses import replace

from fullrank.config.run import RunConfig
from fullrank.core.config import EncoderConfig
from fullrank.core.errors import ConfigError
from fullrank.data import PairCorpus


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
    encoder = model.encoder if source == target else replace(own, vocab_size=source)
    return replace(config, model=replace(model, vocab_size=target, encoder=encoder))
