"""Findings of `fullrank diagnose` on models whose bottleneck is known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fullrank.experiments.diagnose import _memory, _Subject, unigram_perplexity
from fullrank.models import open_model
from fullrank.text import Text

PERIOD, VOCABULARY = 16, 20


class LooksBack(nn.Module):
    """Predicts with certainty the token that stands `distance` places before the one wanted, where it can see it."""

    def __init__(self, distance: int) -> None:
        super().__init__()
        self.distance = distance
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.otherwise = nn.Embedding(VOCABULARY, VOCABULARY)  # logits where it cannot

    def forward(self, ids: Tensor) -> SimpleNamespace:
        logits = self.otherwise(ids).detach()
        back = self.distance - 1
        if back < ids.shape[1]:
            logits[:, back:].scatter_(2, ids[:, : ids.shape[1] - back, None], 90.0)
        return SimpleNamespace(logits=logits)


def diagnosed(distance: int, length: int) -> tuple[str, dict[str, float], int]:
    text = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:PERIOD].repeat(length * 5).tolist()
    found = _memory(_Subject(open_model(LooksBack(distance)), Text.from_ids(text, length)))
    return found.verdict, dict(found.figures["perplexity"]), found.figures["reach"]


def test_more_context_would_help() -> None:
    """The text repeats after 32 tokens, too, and only the longest context of 40 tokens reaches as far."""
    verdict, perplexity, reach = diagnosed(2 * PERIOD, 45)
    assert (verdict, reach) == ("bottleneck", 40)
    assert min(perplexity["8"], perplexity["16"]) > 5
    assert perplexity["40"] == pytest.approx(1)


def test_context_enough() -> None:
    verdict, perplexity, reach = diagnosed(PERIOD, 63)
    assert (verdict, reach) == ("no bottleneck", 16)
    assert perplexity["8"] > 5  # the last of 7 tokens has 14 before it
    assert [perplexity[n] for n in ("16", "32", "56")] == pytest.approx([1, 1, 1])


def test_the_unigram_model_counts_all_tokens_but_the_one_that_it_predicts() -> None:
    tokens = [3, 1, 3, 3, 2, 1, 3]
    nll = 0.0
    for place, token in enumerate(tokens):
        others = tokens[:place] + tokens[place + 1 :]
        nll -= math.log((others.count(token) + 1) / (len(others) + len(set(tokens))))
    assert unigram_perplexity(tokens) == pytest.approx(math.exp(nll / len(tokens)))
