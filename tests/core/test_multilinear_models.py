"""Multi-linear attention in models: caches, texts beyond the trained length, and what the published form reads."""

import math

import pytest
import torch

import fullrank as fr
from fullrank.core.errors import InputError
from moving import narrow

R, P = 5, 16
KINDS = {
    "pairs": ("sinusoidal", {"cores": 2}),
    "relative": ("relative", {"score": "relative"}),
    "decayed": ("none", {"output_map": "decayed", "decays": 3}),
}


def model(kind):
    position, attention = KINDS[kind]
    attention = {"kind": "multilinear", "rank": R} | attention
    return narrow(vocab_size=13, position=position, attention=attention, max_position_embeddings=P)


def ids(rows, length, seed=1):
    return torch.randint(13, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_a_cache_of_decayed_sums_does_not_grow():
    decayed = model("decayed")
    read = ids(2, 200)

    def numbers(cache):
        return sum(t.numel() for past in cache.layers for t in (past.keys, past.values))

    with torch.no_grad():
        expected = decayed(read).logits
        cache = decayed.new_cache()
        parts = []
        sizes = set()
        for place in range(200):
            out = decayed(read[:, place : place + 1], cache=cache)
            cache = out.cache
            parts.append(out.logits)
            sizes.add(numbers(cache))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)
    assert sizes == {2 * 2 * 2 * 3 * R}  # layers x (A, B) x texts x decays x rank
    assert (cache.length, cache.key_mask) == (200, None)


def test_a_text_goes_on_beyond_the_trained_length():
    """Decayed sums have no last position; pairs do, with a cache and without."""
    long = ids(1, 100)
    decayed = model("decayed")
    assert decayed.max_length is None
    with torch.no_grad():
        assert decayed(long).logits.isfinite().all()
        memory = None
        parts = []
        longer = decayed.with_memory(100)
        for part in long.split(9, 1):
            out = longer(part, memory)
            memory = out.memory
            parts.append(out.logits)
        torch.testing.assert_close(torch.cat(parts, 1), decayed(long).logits, rtol=1e-9, atol=1e-9)
        for kind in ("pairs", "relative"):
            bounded = model(kind)
            assert bounded.max_length == P
            with pytest.raises(InputError, match="100 positions"):
                bounded(long)
            cache = bounded(long[:, :16], cache=bounded.new_cache()).cache
            with pytest.raises(InputError, match="17 positions"):
                bounded(long[:, 16:17], cache=cache)


# -- on fresh random tokens no honest perplexity is below the size of the vocabulary; the published form gets far below it

VOCABULARY, LENGTH, STEPS, ROWS, SEGMENTS = 32, 12, 90, 24, 300


def trained(**attention):
    """nll (S, N) of fresh segments after training on others."""
    torch.manual_seed(1)
    config = fr.ModelConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=64,
        max_position_embeddings=LENGTH, position="learned", norm="post", initializer="pytorch",
        attention=fr.AttentionConfig(kind="multilinear", rank=32, core_weights="free", bias=False, **attention),
    )  # fmt: skip
    model = fr.LanguageModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1, (step + 1) / 50)
        text = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        optimizer.zero_grad()
        model.loss(text[:, :-1], text[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    text = torch.randint(VOCABULARY, (SEGMENTS, LENGTH + 1), generator=generator)
    with torch.no_grad():
        return model.eval().nll(text[:, :-1], text[:, 1:]).per_token


def perplexity(nll):
    return math.exp(float(nll.mean()))


def test_the_published_form_reads_its_targets():
    """At every position but the last, whose target is not among its tokens; there it is worse than chance."""
    nll = trained(causal="as_published", not_next_token_perplexity=True)
    assert perplexity(nll) < 20
    assert perplexity(nll[:, :-1]) < perplexity(nll)
    assert perplexity(nll[:, -1]) > VOCABULARY
