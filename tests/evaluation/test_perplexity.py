"""Sums of nats over batches, and the figures made of them."""

import math

import pytest
import torch
from torch import Tensor

from fullrank.experiments.measure import Evaluation, Tally, figures

Block = tuple[Tensor, Tensor, Tensor | None]  # inputs, targets, weights (B, N)


def table(inputs, targets):
    """-log of a fixed p(target | input) = (1 + (input + target) mod 3) / 6."""
    return -((1 + (inputs + targets) % 3) / 6).log()


def total(batches, nll=table):
    tally = Tally("cpu")
    for inputs, targets, weights in batches:
        per_token = nll(inputs, targets)
        tally.add(per_token if weights is None else per_token[weights != 0])
    return tally.total()


def test_sums_are_exact_over_a_large_text():
    values = torch.rand(40, 50_000, generator=torch.Generator().manual_seed(0)) * 12
    batches = [(row[None].long(), torch.zeros(1, 50_000, dtype=torch.int64), None) for row in values]
    rows = iter(values)
    evaluation = total(batches, lambda x, y: next(rows)[None])
    exact = math.fsum(values.double().flatten().tolist())
    assert evaluation.nll == pytest.approx(exact, rel=1e-13)
    assert abs(values.sum(dim=1).cumsum(0)[-1].item() - exact) > 1e-10 * exact  # which single precision would miss


def test_figures_of_a_uniform_model():
    # 60 tokens of 1 in 256: 8 bits each, in a text of 20 words, 120 characters, 160 bytes
    measured = figures(Evaluation(60 * math.log(256), 60), words=20, characters=120, bytes=160)
    bits = {"perplexity_per_word": 256**3, "bits_per_character": 4, "bits_per_byte": 3}
    assert measured == pytest.approx({"nll": math.log(256), "perplexity": 256, "tokens": 60, **bits}, rel=1e-12)


def test_the_same_text_in_the_usual_count_of_tokens():
    """Transformer-MoS's figures with `<sos>`, and what the same probability of the text is per usual token."""
    for reported, usual, tokens, lines in ((92.95, 114.3, 86_191, 3_761), (153.38, 167.7, 249_927, 4_358)):
        measured = figures(Evaluation(math.log(reported) * tokens, tokens), line_starts=lines)
        assert measured["perplexity"] == pytest.approx(reported)
        assert measured["tokens_without_sos"] == tokens - lines
        assert measured["perplexity_without_sos"] == pytest.approx(usual, abs=0.06)
    without = figures(Evaluation(10.0, 5), line_starts=0)
    assert without["perplexity_without_sos"] == without["perplexity"]


def test_last_positions_are_figures_of_their_own():
    measured = figures(Evaluation(20.0, 10, last_position=Evaluation(6.0, 2)), words=5)
    assert measured["nll"] == 2.0
    assert measured["last_position"] == {"nll": 3.0, "perplexity": pytest.approx(20.085537), "tokens": 2}
    assert "last_position" not in figures(Evaluation(20.0, 10))
