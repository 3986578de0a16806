"""Decoding with language models and translators: caches, padding and limits are as decoding assumes."""

import pytest
import torch
from decoding_standin import PROMPTS
from decoding_standin import padded as left_padded

import fullrank as fr
from fullrank.core.errors import InputError
from fullrank.decoding import Ensemble, MemoryReader, beam_search, sample
from moving import narrow
from translator_models import translator

EOS = 0
SENTENCES = [[3, 1, 7, 2, 8], [4], [6, 6, 2], [1, 2, 3, 4, 5, 6, 7]]


def padded(sentences, longest=None, filler=EOS):
    """Sentences with <eos>, padded on the right, and their mask."""
    width = longest or max(map(len, sentences)) + 1
    rows = [[*sentence, EOS] for sentence in sentences]
    return (
        torch.tensor([row + [filler] * (width - len(row)) for row in rows]),
        torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    )


@pytest.mark.parametrize(
    "mechanism",
    ["relative positions with B, own biases", "adaptive, tied", "tied mixture", "multi-linear decoder, decayed"],
)
def test_a_batch_is_its_sentences_one_by_one(mechanism):
    model = translator(mechanism)
    longest = [5, 3, 6, 8]
    rules = {"beams": 4, "n_best": 3, "eos_id": EOS, "min_new_tokens": 1, "no_repeat_ngram_size": 3}
    for filler, width in ((EOS, None), (5, 11)):  # what padding holds, and how much there is, changes nothing
        ids, mask = padded(SENTENCES, width, filler)
        start = torch.full((4, 1), EOS)
        together = beam_search(
            model.of_source(model.encode(ids, mask)), start, max_new_tokens=torch.tensor(longest), **rules
        )
        for b, sentence in enumerate(SENTENCES):
            alone = beam_search(
                model.of_source(model.encode(torch.tensor([[*sentence, EOS]]))), start[:1],
                max_new_tokens=longest[b], **rules,
            )  # fmt: skip
            assert together.lengths[b].tolist() == alone.lengths[0].tolist()
            for n, length in enumerate(alone.lengths[0].tolist()):
                assert together.ids[b, n, :length].tolist() == alone.ids[0, n, :length].tolist()
            torch.testing.assert_close(together.scores[b], alone.scores[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(together.log_probs[b], alone.log_probs[0], rtol=0, atol=1e-10)


def language_model(mix, position, **keys):
    score = "relative" if position == "relative" else "dot_product"
    return narrow(position=position, attention={"score": score, "mix": mix}, **keys)


@pytest.mark.parametrize("position", ["relative", "rotary"])
def test_a_memory_takes_the_place_of_the_cache(position):
    """A model that remembers four tokens writes what it writes when every window is read anew."""
    lm = language_model("position_wise", position, memory_length=4, num_hidden_layers=1)
    ids, mask = left_padded(PROMPTS)
    reader = MemoryReader(lm)
    batch = sample(reader, ids, greedy=True, attention_mask=mask, max_new_tokens=9)
    beams = beam_search(reader, ids, beams=3, n_best=3, attention_mask=mask, max_new_tokens=9)
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
        torch.testing.assert_close(beams.scores[b], alone.scores[0], rtol=0, atol=1e-10)


def test_a_model_with_memory_is_decoded_without_dropout():
    """In training mode, alone and in an ensemble, and it stays in that mode."""
    lm = language_model("none", "relative", memory_length=4, dropout=fr.DropoutConfig(embedding=0.5, residual=0.5))
    ids, _ = left_padded(PROMPTS)
    limits = {"greedy": True, "max_new_tokens": 9}
    expected = sample(MemoryReader(lm), ids, **limits)
    lm.train()
    for reader in (MemoryReader(lm), Ensemble([MemoryReader(lm), MemoryReader(lm)])):
        drawn = sample(reader, ids, **limits)
        assert drawn.ids.equal(expected.ids)
        torch.testing.assert_close(drawn.log_probs, expected.log_probs, rtol=0, atol=1e-10)
    assert all(module.training for module in lm.modules())


@pytest.mark.parametrize("tied", [False, True])
def test_a_long_text_is_that_of_short_texts_one_after_another(tied):
    lm = narrow(vocab_size=7, output={"tied": tied})
    text = lm.generate(torch.tensor([[1, 2]]), max_new_tokens=40, temperature=0.0)
    for end in range(2, 42, 20):
        expected = lm.generate(text[:, :end], max_new_tokens=20, temperature=0.0)
        assert text[:, : end + 20].equal(expected)
    for name, value in (("attention_mask", torch.ones(1, 5)), ("max_new_tokens", 1.5)):
        with pytest.raises(InputError, match=name):
            sample(lm, torch.tensor([[1, 2]]), **{"max_new_tokens": 40} | {name: value})
