"""Beam search against every text written down, and against search on lists."""

import math

import pytest
import torch
from decoding_standin import PROMPTS, Recurrent, all_texts, keeps, log_prob, padded

from fullrank.decoding import beam_search

Text = tuple[int, ...]


@pytest.mark.parametrize(
    ("eos", "ngram", "shortest", "penalty"),
    [(1, 0, 0, 0.0), (None, 1, 0, 1.0), (1, 2, 0, 1.6), (None, 2, 3, -1.0), (1, 3, 1, 0.6)],
)
def test_a_wide_beam_finds_the_best_of_all_texts_that_keep_the_rules(eos, ngram, shortest, penalty):
    model = Recurrent(4, seed=5, sharpness=0.8).eval()
    prompts = [[0, 3, 2], [2]]
    longest = [4, 5]
    ids, mask = padded(prompts)
    result = beam_search(
        model, ids, max_new_tokens=torch.tensor(longest), min_new_tokens=shortest, no_repeat_ngram_size=ngram, beams=1024,
        n_best=20, length_penalty=penalty, eos_id=eos, attention_mask=mask,
    )  # fmt: skip
    for b, prompt in enumerate(prompts):
        texts = [text for text in all_texts(4, longest[b], eos) if keeps(text, eos=eos, shortest=shortest, ngram=ngram)]
        best = sorted(((log_prob(model, prompt, text) / len(text) ** penalty, text) for text in texts), reverse=True)
        for n, (score, text) in enumerate(best[:20]):
            assert tuple(result.ids[b, n, : int(result.lengths[b, n])].tolist()) == text
            assert result.scores[b, n].item() == pytest.approx(score, abs=1e-12)
            assert result.log_probs[b, n].item() == pytest.approx(score * len(text) ** penalty, abs=1e-12)
            assert result.ids[b, n, len(text) :].eq(0 if eos is None else eos).all()
        assert result.lengths[b, len(best) :].eq(0).all()
        assert result.scores[b, len(best) :].eq(-math.inf).all()


def by_hand(model, prompt, *, longest, beams, eos, penalty, shortest, ngram):
    """Beam search on lists, as the definition says; it never stops before `beams` texts have ended."""
    alive = [(0.0, ())]
    ended = []
    for length in range(1, longest + 1):
        grown = []
        for total, text in alive:
            table = model(torch.tensor([[*prompt, *text]])).logits[0, -1].log_softmax(-1).tolist()
            grown += [(total + p, (*text, v)) for v, p in enumerate(table)]
        grown = sorted(
            (pair for pair in grown if keeps(pair[1], eos=eos, shortest=shortest, ngram=ngram)), reverse=True
        )
        ended += [(total / length**penalty, text) for total, text in grown[:beams] if text[-1] == eos]
        alive = [(total, text) for total, text in grown if text[-1] != eos][:beams]
        if length < longest and len(ended) >= beams:
            return sorted(ended, reverse=True)
    return sorted(ended + [(total / longest**penalty, text) for total, text in alive], reverse=True)


@pytest.mark.parametrize(
    ("beams", "penalty", "ngram", "shortest"),
    [
        (1, 0.0, 2, 3), (1, 1.0, 0, 0), (2, 1.0, 3, 2), (2, -0.5, 0, 0), (3, 0.0, 0, 0), (3, 1.7, 1, 0), (5, 1.0, 2, 3),
        (5, 0.0, 3, 2), (5, -0.5, 1, 0), (5, 1.7, 0, 0),
    ],
)  # fmt: skip
def test_a_padded_batch_is_each_row_by_the_definition(beams, penalty, ngram, shortest):
    longest = [4, 9, 6]
    best_of = (beams + 1) // 2
    for seed in (0, 1, 9, 27):  # the last two end too early if only the longest continuation is hoped for
        model = Recurrent(6, seed=seed, sharpness=1.0).eval()
        ids, mask = padded(PROMPTS)
        result = beam_search(
            model, ids, max_new_tokens=torch.tensor(longest), min_new_tokens=shortest, no_repeat_ngram_size=ngram,
            beams=beams, n_best=best_of, length_penalty=penalty, eos_id=2, attention_mask=mask,
        )  # fmt: skip
        for b, prompt in enumerate(PROMPTS):
            expected = by_hand(
                model, prompt, longest=longest[b], beams=beams, eos=2, penalty=penalty, shortest=shortest, ngram=ngram
            )
            for n, (score, text) in enumerate(expected[:best_of]):
                assert tuple(result.ids[b, n, : int(result.lengths[b, n])].tolist()) == text, (seed, b, n)
                assert result.scores[b, n].item() == pytest.approx(score, abs=1e-12)


def test_search_stops_when_nothing_can_be_gained():
    model = Recurrent(5, seed=0, sharpness=0.2).eval()
    model.bias[2] = 3.0  # <eos> is likely from the start
    beams = beam_search(model, torch.tensor([[1], [3]]), max_new_tokens=40, beams=4, length_penalty=0.0, eos_id=2)
    assert beams.ids.tolist() == [[[2]], [[2]]]
    assert model.calls == 1
    # divided by its length, a sum that is worse now may still win after many certain tokens
    model.calls = 0
    beam_search(model, torch.tensor([[1], [3]]), max_new_tokens=40, beams=4, length_penalty=1.0, eos_id=2)
    assert model.calls > 1
