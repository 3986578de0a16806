"""Decoding with the real model: its cache, its padding and its limit are what decoding takes them for."""

from __future__ import annotations

import pytest
import torch
from decoding_standin import PROMPTS, padded

import fullrank as fr
from fullrank.core.errors import InputError
from fullrank.decoding import beam_search, sample
from fullrank.tasks.generation import Remembering


def model(mix: str, position: str) -> fr.LanguageModel:
    torch.manual_seed(1)
    config = fr.ModelConfig(
        vocab_size=11, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, position=position,
        max_position_embeddings=16, attention=fr.AttentionConfig(mix=mix),
    )  # fmt: skip
    made = fr.LanguageModel(config).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # away from the start, where mixing does nothing
    return made


@pytest.mark.parametrize("mix", ["none", "position_independent", "position_wise"])
@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_cache_and_padding_change_nothing(mix: str, position: str) -> None:
    lm = model(mix, position)
    ids, mask = padded(PROMPTS)
    options = {"max_new_tokens": 8, "eos_id": 3}
    batch = sample(lm, ids, greedy=True, attention_mask=mask, **options)
    found = beam_search(lm, ids, beams=3, n_best=3, attention_mask=mask, **options)
    reread = beam_search(lm, ids, beams=3, n_best=3, attention_mask=mask, use_cache=False, **options)
    assert found.ids.tolist() == reread.ids.tolist()
    torch.testing.assert_close(found.scores, reread.scores, rtol=0, atol=1e-10)
    for b, prompt in enumerate(PROMPTS):
        text = torch.tensor([prompt])
        alone = sample(lm, text, greedy=True, use_cache=False, **options)
        length = int(alone.lengths)
        assert batch.ids[b, :length].tolist() == alone.ids[0].tolist()
        torch.testing.assert_close(batch.log_probs[b, :length], alone.log_probs[0], rtol=0, atol=1e-10)
        scores = beam_search(lm, text, beams=3, n_best=3, **options).scores
        torch.testing.assert_close(found.scores[b], scores[0], rtol=0, atol=1e-10)


def test_learned_positions_limit_the_length() -> None:
    lm = model("none", "learned")
    assert sample(lm, torch.ones(1, 6, dtype=torch.int64), max_new_tokens=10, seed=0).ids.shape == (1, 10)
    with pytest.raises(InputError, match="make 17, but the model takes at most 16"):
        sample(lm, torch.ones(1, 6, dtype=torch.int64), max_new_tokens=11, seed=0)


@pytest.mark.parametrize("position", ["relative", "rotary"])
def test_a_memory_takes_the_place_of_the_cache(position: str) -> None:
    """A model that remembers four tokens writes what it writes when every window is read anew."""
    score = "relative" if position == "relative" else "dot_product"
    torch.manual_seed(1)
    config = fr.ModelConfig(
        vocab_size=11, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, position=position, memory_length=4,
        attention=fr.AttentionConfig(score=score, mix="position_wise"),
    )  # fmt: skip
    lm = fr.LanguageModel(config).double().eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    ids, mask = padded(PROMPTS)
    reader = Remembering(lm)
    batch = sample(reader, ids, greedy=True, attention_mask=mask, max_new_tokens=9)
    found = beam_search(reader, ids, beams=3, n_best=3, attention_mask=mask, max_new_tokens=9)
    for b, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for n in range(9):  # with one layer, what a token sees is all that counts
            window = text if n == 0 else text[-5:]
            log_probs = torch.log_softmax(lm(torch.tensor([window])).logits[0, -1].detach(), -1)
            token = int(log_probs.argmax())
            assert batch.ids[b, n] == token
            assert abs(float(batch.log_probs[b, n] - log_probs[token])) < 1e-10
            text.append(token)
        alone = beam_search(reader, torch.tensor([prompt]), beams=3, n_best=3, max_new_tokens=9)
        torch.testing.assert_close(found.scores[b], alone.scores[0], rtol=0, atol=1e-10)
