"""The last-position test: a leak lowers the perplexity everywhere but at the end of a segment."""

from __future__ import annotations

import math
from typing import Any

import leaky_models as leaky
import pytest
import torch
from torch import Tensor, nn

import fullrank as fr
from fullrank.checking import last_position
from fullrank.checking.subject import subject_of
from fullrank.core.errors import InputError


class Sure(nn.Module):
    """Gives the next token of its input a probability p, any other the same share of the rest; at the end, all the same."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.p = p

    def forward(self, input_ids: Tensor) -> Tensor:
        nxt = nn.functional.one_hot(input_ids.roll(-1, 1), 10)
        logits = (
            torch.where(nxt == 1, math.log(self.p), math.log((1 - self.p) / 9)) + 0 * self.embedding(input_ids).sum()
        )
        return torch.cat((logits[:, :-1], torch.zeros_like(logits[:, :1])), dim=1)


def test_perplexities_are_those_of_the_probabilities() -> None:
    subject = subject_of(Sure(0.9))
    segments = torch.randint(10, (50, 9))  # 8 predictions, 7 of them seen
    found = last_position.on_text(subject, segments)
    ordinary = math.exp((math.log(10) - 7 * math.log(0.9)) / 8)
    assert found.verdict == "fails"
    assert found.difference == pytest.approx(math.log(10) - math.log(ordinary), rel=1e-6)
    assert found.remark == f"perplexity 10.00 at the last position, ordinarily {ordinary:.2f}"
    assert last_position.on_text(subject_of(Sure(0.1)), segments).verdict == "passes"


def test_random_tokens_teach_an_honest_model_nothing() -> None:
    honest = last_position.on_random_tokens(subject_of(leaky.Model()))
    assert honest.verdict == "passes"
    found = last_position.on_random_tokens(subject_of(leaky.Model({1: leaky.Convolution(ahead=True)})))
    assert found.verdict == "fails"
    assert found.difference is not None
    assert found.difference > 1  # nats


def test_a_leak_that_is_hardly_learnt_is_below_log_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing honest is better than log V; here a little, and at the last position as well."""
    monkeypatch.setattr(last_position, "_STEPS", 2)
    right = last_position._nll
    monkeypatch.setattr(last_position, "_nll", lambda *given: 0 * right(*given) + math.log(leaky.VOCABULARY) - 0.03)
    found = last_position.on_random_tokens(subject_of(leaky.Model()))
    assert found.verdict == "fails"
    assert found.difference == pytest.approx(0.03)


def test_what_cannot_be_trained() -> None:
    frozen = leaky.Model().requires_grad_(False)
    assert "no parameter" in last_position.on_random_tokens(subject_of(frozen)).reason
    large = leaky.Model()
    large.more = nn.Linear(1000, 1001)
    assert "needs a text" in last_position.on_random_tokens(subject_of(large)).reason


def test_texts() -> None:
    config = fr.ModelConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = fr.LanguageModel(config)
    report = fr.check(model, text=torch.randint(10, (400,)))
    assert report.of("last position").looked_at == "22 segments of 17 tokens of the text"
    wrong: list[tuple[Any, str]] = [
        (torch.randint(10, (20,)), "too short"),
        (torch.randint(10, (30, 2)), "too short"),
        (torch.full((400,), 10), "from 0 to 9, given 10 to 10"),
        (torch.zeros(4, 9), "token ids"),
        (torch.zeros(2, 4, 9, dtype=torch.int64), "token ids"),
    ]
    for text, said in wrong:
        with pytest.raises(InputError, match=said):
            fr.check(model, text=text)
