"""Lengths and n-grams that texts are held to: against every text written down, and against search on lists."""

from __future__ import annotations

import math

import pytest
import torch
from decoding_standin import PROMPTS, Recurrent, all_texts, log_prob, padded

from fullrank.core.errors import InputError, RunError
from fullrank.decoding import beam_search, sample
from fullrank.decoding.sample import log_normalized
from fullrank.decoding.sample import Constraints
from fullrank.decoding.beam import largest

Text = tuple[int, ...]


def keeps(text: Text, *, eos: int | None, shortest: int, ngram: int) -> bool:
    """Whether a text, whole or begun, keeps the rules."""
    grams = [text[i : i + ngram] for i in range(len(text) - ngram + 1)] if ngram else []
    return len(grams) == len(set(grams)) and (eos is None or eos not in text[:shortest])


@pytest.mark.parametrize("ngram", [1, 2, 3, 5])
@pytest.mark.parametrize("shortest", [0, 4])
def test_exactly_the_tokens_that_would_break_a_rule_are_forbidden(ngram: int, shortest: int) -> None:
    generator = torch.Generator().manual_seed(ngram)
    rules = Constraints.build(torch.zeros(2, 1, dtype=torch.int64), 20, shortest, ngram, 0)
    forbidden = 0
    for length in range(9):
        texts = torch.randint(1, 4, (40, length), generator=generator)
        if ngram == 1:
            texts = torch.stack([torch.randperm(11, generator=generator)[:length] + 1 for _ in range(40)])
        log_probs = torch.randn(40, 13, generator=generator, dtype=torch.float64)
        before = log_probs.clone()
        allowed = rules.apply(log_probs, texts)
        assert torch.equal(log_probs, before)
        for row, text in enumerate(map(tuple, texts.tolist())):
            if not keeps(text, eos=0, shortest=shortest, ngram=ngram):
                continue  # no search would have come here
            for v in range(13):
                breaks = not keeps((*text, v), eos=0, shortest=shortest, ngram=ngram)
                forbidden += breaks
                assert allowed[row, v].item() == (-math.inf if breaks else before[row, v].item()), (text, v)
    assert forbidden >= 40 if ngram < 5 or shortest else True


@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.6, -1.0])
@pytest.mark.parametrize(("ngram", "shortest"), [(1, 0), (2, 0), (3, 1), (0, 2), (2, 3), (0, 4)])
@pytest.mark.parametrize("eos", [None, 1])
def test_a_wide_beam_finds_the_best_of_all_texts_that_keep_the_rules(
    eos: int | None, ngram: int, shortest: int, penalty: float
) -> None:
    model = Recurrent(4, seed=5, sharpness=0.8).eval()
    prompts, longest = [[0, 3, 2], [2]], [4, 5]
    ids, mask = padded(prompts)
    found = beam_search(
        model, ids, max_new_tokens=torch.tensor(longest), min_new_tokens=shortest, no_repeat_ngram_size=ngram, beams=1024,
        n_best=20, length_penalty=penalty, eos_id=eos, attention_mask=mask,
    )  # fmt: skip
    for b, prompt in enumerate(prompts):
        texts = [text for text in all_texts(4, longest[b], eos) if keeps(text, eos=eos, shortest=shortest, ngram=ngram)]
        best = sorted(((log_prob(model, prompt, text) / len(text) ** penalty, text) for text in texts), reverse=True)
        for n, (score, text) in enumerate(best[:20]):
            assert tuple(found.ids[b, n, : int(found.lengths[b, n])].tolist()) == text
            assert found.scores[b, n].item() == pytest.approx(score, abs=1e-12)
        assert found.lengths[b, len(best) :].eq(0).all()
        assert found.scores[b, len(best) :].eq(-math.inf).all()


def by_hand(
    model: Recurrent,
    prompt: list[int],
    *,
    longest: int,
    beams: int,
    eos: int,
    penalty: float,
    shortest: int,
    ngram: int,
) -> list[tuple[float, Text]]:
    """Beam search on lists, as the definition says; it never stops before `beams` texts have ended."""
    alive: list[tuple[float, Text]] = [(0.0, ())]
    ended: list[tuple[float, Text]] = []
    for length in range(1, longest + 1):
        grown: list[tuple[float, Text]] = []
        for total, text in alive:
            table = model(torch.tensor([[*prompt, *text]])).logits[0, -1].log_softmax(-1).tolist()
            grown += [(total + p, (*text, v)) for v, p in enumerate(table)]
        grown = sorted((one for one in grown if keeps(one[1], eos=eos, shortest=shortest, ngram=ngram)), reverse=True)
        ended += [(total / length**penalty, text) for total, text in grown[:beams] if text[-1] == eos]
        alive = [(total, text) for total, text in grown if text[-1] != eos][:beams]
        if length < longest and len(ended) >= beams:
            return sorted(ended, reverse=True)
    return sorted(ended + [(total / longest**penalty, text) for total, text in alive], reverse=True)


@pytest.mark.parametrize(("ngram", "shortest"), [(0, 0), (1, 0), (2, 0), (2, 3), (3, 2)])
@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
def test_a_batch_keeps_the_rules_as_search_on_lists_does(beams: int, penalty: float, ngram: int, shortest: int) -> None:
    longest = [4, 9, 6]
    best_of = (beams + 1) // 2
    for seed in (0, 1, 9):
        model = Recurrent(6, seed=seed, sharpness=1.0).eval()
        ids, mask = padded(PROMPTS)
        found = beam_search(
            model, ids, max_new_tokens=torch.tensor(longest), min_new_tokens=shortest, no_repeat_ngram_size=ngram,
            beams=beams, n_best=best_of, length_penalty=penalty, eos_id=2, attention_mask=mask,
        )  # fmt: skip
        for b, prompt in enumerate(PROMPTS):
            expected = by_hand(
                model, prompt, longest=longest[b], beams=beams, eos=2, penalty=penalty, shortest=shortest, ngram=ngram
            )
            for n, (score, text) in enumerate(expected[:best_of]):
                assert tuple(found.ids[b, n, : int(found.lengths[b, n])].tolist()) == text, (seed, b, n)
                assert found.scores[b, n].item() == pytest.approx(score, abs=1e-12)


def test_eos_counts_in_the_length() -> None:
    model = Recurrent(3, seed=1).eval()
    found = beam_search(model, torch.tensor([[0]]), max_new_tokens=3, beams=20, n_best=5, length_penalty=1.0, eos_id=2)
    for n in range(5):
        text = tuple(found.ids[0, n, : int(found.lengths[0, n])].tolist())
        assert found.scores[0, n].item() == pytest.approx(log_prob(model, [0], text) / len(text), abs=1e-12)
    assert {int(length) for length in found.lengths[0]} > {1}


@pytest.mark.parametrize("ngram", [0, 1, 2])
def test_greedy_texts_keep_the_rules_like_a_beam_of_one(ngram: int) -> None:
    longest = torch.tensor([3, 5, 4])
    for seed in range(6):
        model = Recurrent(7, seed=seed).eval()
        ids, mask = padded(PROMPTS)
        options = {
            "max_new_tokens": longest, "min_new_tokens": 2, "no_repeat_ngram_size": ngram, "eos_id": 2,
            "attention_mask": mask,
        }  # fmt: skip
        greedy = sample(model, ids, greedy=True, **options)
        beam = beam_search(model, ids, beams=1, **options)
        assert greedy.ids.tolist() == beam.ids[:, 0].tolist()
        assert greedy.lengths.tolist() == beam.lengths[:, 0].tolist()
        assert (greedy.lengths <= longest).all()
        assert (greedy.lengths >= 3).all()
        torch.testing.assert_close(greedy.log_probs.sum(1), beam.log_probs[:, 0], rtol=0, atol=1e-12)


def test_samples_follow_the_model_among_what_is_allowed() -> None:
    """4,000 texts of two tokens: each pair as often as p(a) p(b | a), with <eos> left out before and equal tokens left out."""
    model = Recurrent(4, seed=3, sharpness=0.5).eval()
    draws = 4000
    found = sample(
        model, torch.tensor([[1, 3]]).expand(draws, -1), max_new_tokens=2, min_new_tokens=2, no_repeat_ngram_size=1,
        eos_id=0, seed=5,
    )  # fmt: skip
    first = model(torch.tensor([[1, 3]])).logits[0, -1].softmax(-1).index_fill(0, torch.tensor([0]), 0.0)
    first = first / first.sum()
    for a in range(1, 4):
        second = model(torch.tensor([[1, 3, a]])).logits[0, -1].softmax(-1).index_fill(0, torch.tensor([0, a]), 0.0)
        second = second / second.sum()
        for b in range(4):
            p = float(first[a] * second[b])
            seen = found.ids.eq(torch.tensor([a, b])).all(1).double().mean().item()
            assert abs(seen - p) <= 4.5 * math.sqrt(p * (1 - p) / draws), (a, b)
            if p == 0:
                assert seen == 0
    whole = torch.tensor([log_prob(model, [1, 3], tuple(text)) for text in found.ids[:20].tolist()])
    torch.testing.assert_close(found.log_probs[:20].sum(1).float(), whole)


def test_a_text_that_cannot_go_on_ends() -> None:
    model = Recurrent(3, seed=2).eval()
    prompts = torch.tensor([[0], [1]])
    for greedy in (True, False):
        found = sample(model, prompts, max_new_tokens=9, no_repeat_ngram_size=1, greedy=greedy, seed=1)
        assert found.lengths.tolist() == [3, 3]
        assert found.ids.sort(dim=1).values.tolist() == [[0, 1, 2]] * 2
    nothing = beam_search(model, prompts, max_new_tokens=9, no_repeat_ngram_size=1, beams=2)
    assert nothing.lengths.tolist() == [[0], [0]]
    never = sample(Recurrent(1).eval(), prompts[:1], max_new_tokens=2, min_new_tokens=1, eos_id=0, seed=1)
    assert never.ids.shape == (1, 0)
    assert never.lengths.tolist() == [0]


def test_with_a_seed_for_each_row_a_sample_does_not_depend_on_its_neighbours() -> None:
    model = Recurrent(7, seed=4, sharpness=0.6).eval()
    ids, mask = padded(PROMPTS)
    seeds = [11, 12, 11]
    together = sample(model, ids, max_new_tokens=8, eos_id=2, seed=seeds, attention_mask=mask)
    for b, prompt in enumerate(PROMPTS):
        alone = sample(model, torch.tensor([prompt]), max_new_tokens=8, eos_id=2, seed=[seeds[b]])
        length = int(together.lengths[b])
        assert together.ids[b, :length].tolist() == alone.ids[0].tolist()
    same = sample(model, torch.tensor([[1, 4], [1, 4]]), max_new_tokens=8, seed=[3, 3])
    assert same.ids[0].tolist() == same.ids[1].tolist()
    with pytest.raises(InputError, match="one for each of 2 prompts, given 3"):
        sample(model, torch.tensor([[1], [2]]), max_new_tokens=2, seed=[1, 2, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: one or more, given 0"),
        ({"max_new_tokens": torch.tensor([3, 0])}, "max_new_tokens: one or more, given 0"),
        ({"max_new_tokens": torch.tensor([3, 3, 3])}, r"whole numbers of shape \(2,\).* of shape \(3,\)"),
        ({"max_new_tokens": torch.tensor([3.0, 3.0])}, "given torch.float32"),
        ({"max_new_tokens": torch.tensor([4, 3]), "min_new_tokens": 4}, r"from 0 to max_new_tokens \(3 in the shortest row"),
        ({"min_new_tokens": -1}, "min_new_tokens: from 0"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size: .* given -2"),
        ({"max_new_tokens": torch.tensor([2, 7])}, "make 9, but the model takes at most 8"),
    ],
)  # fmt: skip
def test_rules_that_no_text_can_keep_are_refused(options: dict[str, object], message: str) -> None:
    model = Recurrent(5, max_length=8).eval()
    for decode in (beam_search, sample):
        with pytest.raises(InputError, match=message):
            decode(model, torch.tensor([[1, 2], [3, 4]]), **{"max_new_tokens": 4, **options})
    assert model.calls == 0


@pytest.mark.parametrize("columns", [7, 128 * 12, 128 * 12 + 1, 5000])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_largest_are_those_of_topk(columns: int, k: int) -> None:
    generator = torch.Generator().manual_seed(columns + k)
    for impossible in (False, True):
        scores = torch.randn(6, columns, generator=generator, dtype=torch.float64)
        if impossible:
            scores[:, : columns - 5] = -math.inf  # what is left stands at the end
        values, places = largest(scores, k)
        expected = scores.topk(k)
        assert torch.equal(values, expected.values)
        assert torch.equal(scores.gather(1, places), values)
        assert all(len(set(row)) == k for row in places.tolist())
        if not impossible or k <= 5:
            assert torch.equal(places, expected.indices)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_one_broken_logit_anywhere_is_found(broken: float) -> None:
    for row, column in ((0, 0), (2, 0), (1, 300), (2, 299)):
        logits = torch.zeros(3, 301)
        logits[row, column] = broken
        with pytest.raises(RunError, match="not finite"):
            log_normalized(logits)
    log_normalized(torch.zeros(3, 301).index_fill(1, torch.arange(300), -math.inf))  # one certain token is no fault
