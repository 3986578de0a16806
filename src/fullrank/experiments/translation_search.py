"""Sentences as token ids to their best translations: in batches of like lengths, order kept."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullrank.config.run import EvalConfig
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator
from fullrank.data import Language
from fullrank.decoding import beam_search, sample
from fullrank.decoding.sample import evaluating
from fullrank.training.device import device_of

_LONG = 128  # tokens; where sentences are longer, a batch holds fewer of them


@dataclass(frozen=True)
class Sampling:
    """Draw translations instead of searching for the best: see `fullrank.decoding.sample`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Search:
    """How translations are chosen: by beam search, or by `sampling`.

    score = log p / tokens^length_penalty, with <eos> among the tokens (see `fullrank.decoding.beam_search`). Of M source
    tokens come at most max_length_a M + max_length_b, each with its <eos>, and at least one before <eos>: as with fairseq's
    `min_len`, a sentence never becomes nothing. n_best: translations of each sentence.
    """

    beams: int = 5
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    max_length_a: float = 1.2
    max_length_b: int = 10
    n_best: int = 1
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise InputError(f"beams: one or more, given {self.beams}")
        if self.n_best < 1 or (self.sampling is None and self.n_best > self.beams):
            raise InputError(
                f"n_best: from 1 to the number of beams ({self.beams}), given {self.n_best}; widen the beam, or sample"
            )
        if not (0 <= self.max_length_a < math.inf and self.max_length_b >= 0):
            raise InputError(
                f"max_length_a and max_length_b: zero or more, given {self.max_length_a} and {self.max_length_b}"
            )

    @classmethod
    def of(cls, config: EvalConfig) -> Search:
        """The search that a run is judged with."""
        return cls(
            config.beams,
            config.length_penalty,
            config.no_repeat_ngram_size,
            config.max_length_a,
            config.max_length_b,
        )

    def longest(self, source: int, limit: int | None) -> int:
        """The most tokens of a translation of `source` tokens, from a model that takes `limit`."""
        wanted = int(self.max_length_a * source + self.max_length_b)
        return max(1, wanted if limit is None else min(wanted, limit - 1))  # a start token stands before them


@dataclass(frozen=True)
class Found:
    """A translation: ids without <eos>; tokens, which count <eos> where the model wrote it; log_prob in nats; score."""

    ids: tuple[int, ...]
    tokens: int
    log_prob: float
    score: float


def translate_ids(
    model: Translator,
    sentences: Sequence[Sequence[int]],
    search: Search,
    *,
    source_eos: int,
    target_eos: int,
    batch_size: int = 64,
    numbers: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[list[Found]]:
    """Translations of each sentence (ids without <eos>), best first; drawn ones in the order of their draws.

    Sentences of like lengths are translated together, at most batch_size, the longest first; `progress` hears how many are
    done. Neither their order nor batch_size changes a translation, but for rounding.
    numbers: what the sentences are called, their places if not given; what is drawn depends on them and on the seed alone.
    """
    device = device_of(model)
    called = range(len(sentences)) if numbers is None else numbers
    seed = secrets.randbits(62) if search.sampling is None or search.sampling.seed is None else search.sampling.seed
    found: list[list[Found]] = [[] for _ in sentences]
    done = 0
    for batch in _batches([len(sentence) + 1 for sentence in sentences], batch_size):
        rows = [i for i in batch for _ in range(search.n_best if search.sampling else 1)]
        given = [[*sentences[i], source_eos] for i in rows]
        limits = torch.tensor([search.longest(len(one), model.max_length) for one in given], device=device)
        with evaluating(model):  # no dropout in the source either
            reader = model.of_source(model.encode(*padded(given, source_eos, device)))
        start = torch.full((len(rows), 1), target_eos, device=device)
        rules: dict[str, Any] = {
            "max_new_tokens": limits, "min_new_tokens": 1, "eos_id": target_eos,
            "no_repeat_ngram_size": search.no_repeat_ngram_size,
        }  # fmt: skip
        if search.sampling is None:
            best = beam_search(
                reader, start, beams=search.beams, n_best=search.n_best, length_penalty=search.length_penalty, **rules
            )
            ids, log_probs, lengths = best.ids, best.log_probs, best.lengths
        else:
            how = search.sampling
            seeds = [_seed(seed, called[i], k) for i in batch for k in range(search.n_best)]
            drawn = sample(
                reader, start, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p, seed=seeds, **rules
            )
            ids, log_probs, lengths = (
                values.unflatten(0, (len(batch), search.n_best))
                for values in (drawn.ids, drawn.log_probs.sum(1), drawn.lengths)
            )
        for i, *of_one in zip(batch, ids.tolist(), log_probs.tolist(), lengths.tolist(), strict=True):
            found[i] = [
                _found(text[:length], total, search.length_penalty, target_eos)
                for text, total, length in zip(*of_one, strict=True)
                if length
            ]
        done += len(batch)
        if progress is not None:
            progress(done)
    return found


def named(ids: Sequence[int], language: Language) -> tuple[int, ...]:
    """`ids` as the language can write them: entries that only the model has (a larger `vocab_size`) are unknown words."""
    return tuple(token if token < len(language) else language.unk_id for token in ids)


def padded(sentences: Sequence[Sequence[int]], filler: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Sentences side by side, padded on the right, (B, M), and their mask; None where nothing is padded."""
    longest = max(len(sentence) for sentence in sentences)
    ids = torch.tensor([[*sentence, *[filler] * (longest - len(sentence))] for sentence in sentences], device=device)
    lengths = torch.tensor([len(sentence) for sentence in sentences], device=device)
    mask = torch.arange(longest, device=device) < lengths[:, None]
    return ids, None if bool(mask.all()) else mask


def _batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Places of sentences of like lengths, the longest first, at most batch_size, and fewer where they are long."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        most = max(1, min(batch_size, batch_size * _LONG // lengths[order[0]]))
        yield order[:most]
        order = order[most:]


def _found(ids: list[int], log_prob: float, length_penalty: float, eos: int) -> Found:
    text = ids[:-1] if ids[-1] == eos else ids
    return Found(tuple(text), len(ids), log_prob, log_prob / len(ids) ** length_penalty)


def _seed(seed: int, number: int, draw: int) -> int:
    """A seed of its own for each draw of each sentence."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number} {draw}".encode(), digest_size=7).digest())
