"""Sentences as token ids to their translations as token ids: many at a time, in any order, each as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fullrank.config.schema import EvalConfig
from fullrank.decoding import beam_search
from fullrank.model.translator import Translator


@dataclass(frozen=True)
class Search:
    """How translations are searched for (see `decoding.beam_search`).

    Of M source tokens with `<eos>` come at most max_length_a M + max_length_b tokens, `<eos>` among them.
    """

    beams: int = 5
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    max_length_a: float = 1.2
    max_length_b: int = 10

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


def translate_ids(
    model: Translator,
    sources: Sequence[Sequence[int] | np.ndarray],
    search: Search,
    *,
    source_eos_id: int,
    target_eos_id: int,
    batch_tokens: int,
    device: torch.device,
) -> list[list[int]]:
    """The best translation of each source (token ids without `<eos>`), without its `<eos>`; an empty source has an empty one.

    Sources of about one length are read together, at most `batch_tokens` of them, padding and beams counted; that changes
    no translation beyond rounding. A translation is cut where the model's positions end.
    """
    found: list[list[int]] = [[] for _ in sources]
    order = sorted((i for i in range(len(sources)) if len(sources[i])), key=lambda i: len(sources[i]))
    start = 0
    while start < len(order):
        size = 1
        while start + size < len(order):
            width = (len(sources[order[start + size]]) + 1) * search.beams
            if width * (size + 1) > batch_tokens:
                break
            size += 1
        part = order[start : start + size]
        start += size
        lengths = torch.tensor([len(sources[i]) + 1 for i in part])
        ids = torch.full((size, int(lengths.max())), source_eos_id, dtype=torch.int64)
        for row, i in enumerate(part):
            ids[row, : len(sources[i])] = torch.as_tensor(np.asarray(sources[i], dtype=np.int64))
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        longest = (search.max_length_a * lengths.double()).floor().long() + search.max_length_b
        if model.max_length is not None:
            longest = longest.clamp_max(model.max_length - 1)
        with torch.no_grad():
            source = model.encode(ids.to(device), mask.to(device))
        best = beam_search(
            model.of_source(source),
            torch.full((size, 1), target_eos_id, dtype=torch.int64, device=device),
            max_new_tokens=longest.to(device),
            no_repeat_ngram_size=search.no_repeat_ngram_size,
            beams=search.beams,
            length_penalty=search.length_penalty,
            eos_id=target_eos_id,
        )
        lengths_out, written = best.lengths[:, 0].tolist(), best.ids[:, 0].tolist()
        for i, count, tokens in zip(part, lengths_out, written, strict=True):
            found[i] = [token for token in tokens[:count] if token != target_eos_id]
    return found
