"""Synthesizers against their equations: scores from the query alone, or from a table."""

import math

import torch

import fullrank as fr
from fullrank.core.score import DenseSynthesizer, RandomSynthesizer
from fullrank.core.stages import HeadSize

B, H, D, P = 2, 3, 4, 8
SIZE = HeadSize(H, D, 10, P)


def test_dense_is_its_equation():
    score = DenseSynthesizer(DenseSynthesizer.Config(), SIZE).double()
    query = torch.randn(B, H, 3, D, dtype=torch.float64)
    weight, bias = score.to_positions.weight.detach(), score.to_positions.bias.detach()
    assert weight.shape == (P, D)

    def expected(b, h, n, place):
        return sum(float(weight[place, d] * max(query[b, h, n, d], 0)) for d in range(D)) + float(bias[place])

    contiguous = score(query, fr.Layout.of(3, 5)).detach()
    places = torch.tensor([[0, 0, 1, 2], [1, 3, 5, 7]])
    by_row = score(query, fr.Layout(places[:, :3], places)).detach()
    shared = score(query, fr.Layout(places[1, :3], places[1])).detach()
    assert contiguous.shape == (B, H, 3, 5)
    for b in range(B):
        for h in range(H):
            for n in range(3):
                for m in range(5):
                    assert abs(float(contiguous[b, h, n, m]) - expected(b, h, n, m)) < 1e-13
                for m in range(4):  # columns are positions, not places in the batch
                    assert abs(float(by_row[b, h, n, m]) - expected(b, h, n, int(places[b, m]))) < 1e-13
                    assert abs(float(shared[b, h, n, m]) - expected(b, h, n, int(places[1, m]))) < 1e-13


def test_random_is_a_table():
    torch.manual_seed(1)
    score = RandomSynthesizer(None, SIZE).double()
    assert score.logits.shape == (H, P, P)
    assert abs(float(score.logits.detach().std()) - 1) < 5 / math.sqrt(2 * H * P * P)
    logits = score(fr.Layout.of(2, 5)).detach()
    assert logits.shape == (1, H, 2, 5)
    assert torch.equal(logits[0, :, 0, :], score.logits[:, 3, :5])
    assert torch.equal(logits[0, :, 1, :], score.logits[:, 4, :5])
    places = torch.tensor([[0, 0, 1, 2], [1, 3, 5, 7]])
    by_row = score(fr.Layout(places[:, 2:], places)).detach()
    shared = score(fr.Layout(places[1, 2:], places[1])).detach()
    for h in range(H):
        for n in range(2):
            for m in range(4):
                for b in range(B):
                    assert by_row[b, h, n, m] == score.logits[h, places[b, 2 + n], places[b, m]]
                assert shared[0, h, n, m] == score.logits[h, places[1, 2 + n], places[1, m]]
    early = score(fr.Layout.of(5, 2, causal=False)).detach()  # queries at -3 .. 1
    assert torch.equal(early[0, :, :, :], score.logits[:, [0, 0, 0, 0, 1], :2])


def attention(score, mix="none", length=P, **options):
    torch.manual_seed(3)
    config = fr.AttentionConfig(score=score, mix=mix, **options)
    made = fr.Attention(config, hidden_size=10, num_attention_heads=H, head_dim=D, max_position_embeddings=length)
    return made.double()


def test_a_kept_key_projection_is_there_and_idle():
    plain, idle = attention("dense_synthesizer"), attention({"name": "dense_synthesizer", "keep_key_projection": True})
    added = {*dict(idle.named_parameters())} - {*dict(plain.named_parameters())}
    assert added == {"project.key.weight", "project.key.bias"}
    x = torch.randn(2, 5, 10, dtype=torch.float64)
    before = idle(x)
    with torch.no_grad():
        for parameter in idle.project.key.parameters():
            parameter.fill_(math.nan)
    assert torch.equal(idle(x), before)
    assert not any(parameter.requires_grad for parameter in idle.project.key.parameters())
