"""Sentences as token ids to their translations as token ids: many at a time, in any order, each as if it were alone."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullrank.config.schema import EvalConfig
from fullrank.decoding import beam_search, sample
from fullrank.errors import InputError
from fullrank.model.translator import Translator
from fullrank.training.device import device_of

_LONG = 128  # tokens; where sentences are longer, a batch holds fewer of them


@dataclass(frozen=True)
class Search:
    """How translations are searched for (see `decoding.beam_search`).

    Of M source tokens with `<eos>` come at most max_length_a M + max_length_b tokens, `<eos>` among them, and at least one
    before it: as with fairseq's `min_len`, a sentence never becomes nothing. Raises InputError for values out of range.
    """

    beams: int = 5
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    max_length_a: float = 1.2
    max_length_b: int = 10

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise InputError(f"beams: one or more, given {self.beams}")
        if not (0 <= self.max_length_a < math.inf and self.max_length_b >= 0):
            raise InputError(
                f"max_length_a and max_length_b: zero or more, given {self.max_length_a} and {self.max_length_b}"
            )

    @classmethod
    def final(cls, config: EvalConfig) -> Search:
        """That of final figures."""
        return cls(
            config.beams,
            config.length_penalty,
            config.no_repeat_ngram_size,
            config.max_length_a,
            config.max_length_b,
        )

    @classmethod
    def while_training(cls, config: EvalConfig) -> Search:
        """Greedy, with the same limits."""
        return cls(1, 0.0, config.no_repeat_ngram_size, config.max_length_a, config.max_length_b)

    def in_words(self) -> str:
        """The search as a clause, for people."""
        many = "greedy search" if self.beams == 1 else f"beam {self.beams}, length penalty {self.length_penalty:g}"
        repeat = f", no {self.no_repeat_ngram_size}-gram twice" if self.no_repeat_ngram_size else ""
        return f"{many}{repeat}, at most {self.max_length_a:g} M + {self.max_length_b} tokens"

    def longest(self, source: int, limit: int | None) -> int:
        """The most tokens of a translation of `source` tokens, from a model that takes `limit`."""
        wanted = int(self.max_length_a * source + self.max_length_b)
        return max(1, wanted if limit is None else min(wanted, limit - 1))  # a start token stands before them


@dataclass(frozen=True)
class Sampling:
    """Draw translations instead of searching for the best: see `decoding.sample`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Found:
    """A translation: ids without `<eos>`; tokens, which count it where the model wrote it; log_prob in nats; score."""

    ids: tuple[int, ...]
    tokens: int
    log_prob: float
    score: float


def translate_ids(
    model: Translator,
    sources: Sequence[Sequence[int] | np.ndarray],
    search: Search,
    *,
    source_eos_id: int,
    target_eos_id: int,
    n_best: int = 1,
    sampling: Sampling | None = None,
    batch_size: int = 64,
    numbers: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[list[Found]]:
    """The `n_best` translations of each source (token ids without `<eos>`), best first; none of an empty source.

    Sources of about one length are read together, at most `batch_size`, the longest first; `progress` hears how many are done.
    Neither their order nor batch_size changes a translation beyond rounding. One is cut where the model's positions end.
    sampling: translations are drawn and stand in the order of their draws, which depend on the seed and on what a source is
    called (`numbers`, its place if not given) alone.
    """
    if n_best < 1 or (sampling is None and n_best > search.beams):
        raise InputError(
            f"n_best: from 1 to the number of beams ({search.beams}), given {n_best}; widen the beam, or sample"
        )
    device = device_of(model)
    called = range(len(sources)) if numbers is None else numbers
    seed = secrets.randbits(62) if sampling is None or sampling.seed is None else sampling.seed
    found: list[list[Found]] = [[] for _ in sources]
    done = 0
    for batch in _batches([len(source) for source in sources], batch_size):
        rows = [i for i in batch for _ in range(n_best if sampling else 1)]
        lengths = [len(sources[i]) + 1 for i in rows]
        limits = torch.tensor([search.longest(length, model.max_length) for length in lengths], device=device)
        with torch.no_grad():
            reader = model.of_source(model.encode(*_padded([sources[i] for i in rows], source_eos_id, device)))
        start = torch.full((len(rows), 1), target_eos_id, device=device)
        rules: dict[str, Any] = {
            "max_new_tokens": limits, "min_new_tokens": 1, "eos_id": target_eos_id,
            "no_repeat_ngram_size": search.no_repeat_ngram_size,
        }  # fmt: skip
        if sampling is None:
            best = beam_search(
                reader, start, beams=search.beams, n_best=n_best, length_penalty=search.length_penalty, **rules
            )
            written = (best.ids, best.log_probs, best.lengths)
        else:
            seeds = [_seed(seed, called[i], draw) for i in batch for draw in range(n_best)]
            how: dict[str, Any] = {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
            drawn = sample(reader, start, seed=seeds, **how, **rules)
            flat = (drawn.ids, drawn.log_probs.sum(1), drawn.lengths)
            written = tuple(values.unflatten(0, (len(batch), n_best)) for values in flat)
        for i, *of_one in zip(batch, *(values.tolist() for values in written), strict=True):
            found[i] = [
                _found(text[:length], total, search.length_penalty, target_eos_id)
                for text, total, length in zip(*of_one, strict=True)
                if length  # a beam may hold fewer texts than it is wide
            ]
        done += len(batch)
        if progress is not None:
            progress(done)
    return found


def _padded(
    sources: Sequence[Sequence[int] | np.ndarray], eos_id: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Sources with `<eos>`, padded on the right, (B, M), and their mask; None where nothing is padded."""
    lengths = torch.tensor([len(source) + 1 for source in sources])
    ids = torch.full((len(sources), int(lengths.max())), eos_id, dtype=torch.int64)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = torch.as_tensor(np.asarray(source, dtype=np.int64))
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids.to(device), None if bool(mask.all()) else mask.to(device)


def _batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Places of sources of about one length, the longest first, at most batch_size, and fewer where they are long."""
    order = sorted((i for i in range(len(lengths)) if lengths[i]), key=lambda i: -lengths[i])
    while order:
        most = max(1, min(batch_size, batch_size * _LONG // (lengths[order[0]] + 1)))
        yield order[:most]
        order = order[most:]


def _found(ids: list[int], log_prob: float, length_penalty: float, eos_id: int) -> Found:
    text = ids[:-1] if ids[-1] == eos_id else ids
    return Found(tuple(text), len(ids), log_prob, log_prob / len(ids) ** length_penalty)


def _seed(seed: int, number: int, draw: int) -> int:
    """A seed of its own for each draw of each source."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number} {draw}".encode(), digest_size=7).digest())
