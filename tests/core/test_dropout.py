"""Dropout: its distribution, and the places of a model where it acts."""

import math

import pytest
import torch

import fullrank as fr
import fullrank.core.config
from fullrank.core.draws import Dropout, draw_words, dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.75])
def test_every_entry_is_dropped_with_probability_p(p):
    torch.manual_seed(0)
    count, masks = 100_001, 20
    dropped = sum(int((dropout(torch.ones(count), p) == 0).sum()) for _ in range(masks))
    tolerance = 5 * math.sqrt(p * (1 - p) * count * masks) + 2**-16 * count * math.sqrt(masks)
    assert abs(dropped - p * count * masks) < tolerance


def test_a_mask_is_a_function_of_the_seed_and_advances_it():
    torch.manual_seed(3)
    first, second = dropout(torch.ones(99), 0.5), dropout(torch.ones(99), 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropout(torch.ones(99), 0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("locked", [False, True])
def test_does_nothing_in_evaluation_or_at_zero(locked):
    x = torch.randn(2, 3, 4)
    state = torch.get_rng_state()
    assert Dropout(0.5, locked).eval()(x) is x
    assert Dropout(0.0, locked).train()(x) is x
    assert torch.equal(torch.get_rng_state(), state)


def test_locked_shares_one_mask_over_positions():
    out = Dropout(0.5, locked=True).train()(torch.ones(50, 7, 10))
    assert torch.equal(out, out[:, :1].expand_as(out))
    assert not torch.equal(out[0], out[1])  # each text has its own
    ordinary = Dropout(0.5).train()(torch.ones(50, 7, 10))
    assert not torch.equal(ordinary, ordinary[:, :1].expand_as(ordinary))


def test_weights_are_dropped_after_mixing():
    """With one key and values of 1 each mixed head is 2: dropped after mixing 0 or 4, dropped before mixing sometimes 2."""
    config = fr.AttentionConfig(mix="position_independent", bias=False)
    made = fr.Attention(config, hidden_size=4, num_attention_heads=2, dropout=0.5).train()
    with torch.no_grad():
        made.attend.mix.mixing.fill_(1.0)
        made.project.value.weight.copy_(torch.eye(4))
        made.merge.weight.copy_(torch.eye(4))
    out = made(torch.ones(500, 1, 4))
    assert set(out.flatten().tolist()) == {0.0, 4.0}
    assert not torch.equal(made(torch.ones(500, 1, 4)), out)
    assert set(made.eval()(torch.ones(5, 1, 4)).flatten().tolist()) == {2.0}


def test_places_are_where_they_are_named():
    """Hooks around each place find the share of zeros that belongs to it."""
    shares = {"embedding": 0.1, "activation": 0.2, "residual": 0.3, "output": 0.4}
    config = fr.ModelConfig(vocab_size=9, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, hidden_act="gelu",
                            dropout=fr.DropoutConfig(**shares))  # fmt: skip
    made = fr.LanguageModel(config).train()
    seen = {}

    def note(name):
        return lambda module, args, out=None: seen.setdefault(name, []).append(args[0])

    made.blocks[0].attention_norm.register_forward_pre_hook(note("embedding"))
    made.blocks[0].feed_forward.down.register_forward_pre_hook(note("activation"))
    forward = made.output.forward
    made.output.forward = lambda h: (seen.setdefault("output", []).append(h), forward(h))[1]
    made.blocks[0].dropout.register_forward_hook(lambda module, args, out: seen.setdefault("residual", []).append(out))
    made(torch.randint(9, (20, 30)))
    assert len(seen["residual"]) == 2  # attention and feed-forward
    for place, share in shares.items():
        for tensor in seen[place]:
            assert abs(float((tensor == 0).float().mean()) - share) < 0.02, place


def test_whole_words_are_dropped_in_the_whole_batch():
    torch.manual_seed(1)
    ids = torch.randint(4000, (40, 50))
    factor = draw_words(0.25, ids, 4000)
    by_word = {}
    for word, scale in zip(ids.flatten().tolist(), factor.flatten().tolist(), strict=True):
        by_word.setdefault(word, set()).add(scale)
    assert all(len(values) == 1 for values in by_word.values())
    assert sorted(set().union(*by_word.values())) == pytest.approx([0.0, 4 / 3])
    share = sum(values == {0.0} for values in by_word.values()) / len(by_word)
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(by_word))


def test_a_dropped_word_is_almost_a_zero_vector_and_still_predicted():
    """Were a first token exactly zero, 16 post-norm layers would multiply its gradient by 316 at each of 32 norms."""
    dropout = fr.core.config.DropoutConfig(words=0.5, embedding=0.5)
    config = fr.ModelConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=16, num_attention_heads=2, norm="post", position="relative",
        attention=fr.AttentionConfig(score={"name": "relative", "shared_projection": True}), dropout=dropout,
        initializer="transformer_xl",
    )  # fmt: skip
    model = fr.LanguageModel(config)
    seen = 0
    for seed in range(4):
        torch.manual_seed(seed)
        ids = torch.randperm(9)[None]
        vectors = model.embed(model.embedding, ids)
        dropped = (vectors == 1e-12).all(-1)[0]
        seen += int(dropped[0])
        torch.testing.assert_close(vectors[0, ~dropped], 2 * model.embedding.weight[ids[0, ~dropped]])
        torch.manual_seed(seed)
        model.zero_grad()
        model.loss(ids, ids).backward()
        assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert 0 < seen < 4
    torch.testing.assert_close(model.eval().embed(model.embedding, ids), model.embedding(ids))
