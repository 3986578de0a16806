"""Sampling and greedy decoding, and constraints on texts, against the definition written out."""

import itertools
import math

import pytest
import torch
from decoding_standin import PROMPTS, Recurrent, keeps, log_prob, padded

from fullrank.decoding import Ensemble, beam_search, sample
from fullrank.decoding.sample import Constraints, distribution, penalize_repetition


def greedy_by_hand(model, prompt, count, eos):
    text = []
    while len(text) < count and (not text or text[-1] != eos):
        text.append(int(model(torch.tensor([[*prompt, *text]])).logits[0, -1].argmax()))
    return text


def rows(drawn):
    return [ids[:length].tolist() for ids, length in zip(drawn.ids, drawn.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("eos", [None, 2])
def test_greedy_batch_with_padding_is_each_row_by_hand(eos):
    model = Recurrent(7, seed=3).eval()
    ids, mask = padded(PROMPTS)
    drawn = sample(model, ids, max_new_tokens=9, greedy=True, eos_id=eos, attention_mask=mask)
    expected = [greedy_by_hand(model, prompt, 9, eos) for prompt in PROMPTS]
    assert rows(drawn) == expected
    if eos is not None:
        assert len({len(text) for text in expected}) > 1  # rows end at different steps
    for b, text in enumerate(expected):
        assert drawn.log_probs[b].sum().item() == pytest.approx(log_prob(model, PROMPTS[b], tuple(text)), abs=1e-12)
        assert drawn.ids[b, len(text) :].tolist() == [eos] * (drawn.ids.shape[1] - len(text))
        assert drawn.log_probs[b, len(text) :].tolist() == [0.0] * (drawn.ids.shape[1] - len(text))


def test_every_token_is_read_once():
    model = Recurrent(7, seed=3).eval()
    ids, mask = padded(PROMPTS)
    options = {"max_new_tokens": 6, "seed": 5, "attention_mask": mask}
    drawn = sample(model, ids, **options)
    assert model.read == ids.numel() + 5 * len(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        expected = log_prob(model, prompt, drawn.ids[row].tolist())
        assert drawn.log_probs[row].sum().item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("top_p", [None, 0.1, 0.8, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 7])
@pytest.mark.parametrize("levels", [3, 1000])
def test_truncation_by_hand(levels, top_k, top_p):
    """Token by token from the likeliest on, of equal ones the first; with few levels most of 40 are equal."""
    scores = torch.log_softmax(
        torch.randint(levels, (5, 40), generator=torch.Generator().manual_seed(levels)) / levels, -1
    )
    drawn = distribution(scores, temperature=0.7, top_k=top_k, top_p=top_p)
    for row, probabilities in zip(scores.tolist(), drawn, strict=True):
        order = sorted(range(40), key=lambda token: (-row[token], token))[:top_k]
        weights = {token: math.exp(row[token] / 0.7) for token in order}
        total = sum(weights.values())
        before = 0.0
        likeliest = {}
        for token in order:
            if top_p is None or before < top_p * total or not likeliest:
                likeliest[token] = weights[token]
            before += weights[token]
        expected = torch.zeros(40, dtype=torch.float64)
        for token, weight in likeliest.items():
            expected[token] = weight / sum(likeliest.values())
        torch.testing.assert_close(probabilities, expected)


def test_seed_decides_and_the_global_generator_is_untouched():
    model = Recurrent(7, seed=3, sharpness=0.3).eval()
    prompt = torch.tensor([[1, 3]])
    before = torch.get_rng_state()
    first, same, other = (sample(model, prompt, max_new_tokens=20, seed=seed).ids.tolist() for seed in (1, 1, 2))
    assert first == same != other
    free = {str(sample(model, prompt, max_new_tokens=20).ids.tolist()) for _ in range(3)}
    assert len(free) > 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("ngram", "shortest"), [(1, 4), (2, 0), (3, 4), (5, 4)])
def test_exactly_the_tokens_that_would_break_a_rule_are_forbidden(ngram, shortest):
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
                continue  # no search arrives at such a text
            for v in range(13):
                breaks = not keeps((*text, v), eos=0, shortest=shortest, ngram=ngram)
                forbidden += breaks
                assert allowed[row, v].item() == (-math.inf if breaks else before[row, v].item()), (text, v)
    assert forbidden >= 40


def test_samples_follow_the_model_among_what_is_allowed():
    """4,000 texts of two tokens: each pair as often as p(a) p(b | a), without <eos> and without a token twice."""
    model = Recurrent(4, seed=3, sharpness=0.5).eval()
    draws = 4000
    drawn = sample(
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
            seen = drawn.ids.eq(torch.tensor([a, b])).all(1).double().mean().item()
            assert abs(seen - p) <= 4.5 * math.sqrt(p * (1 - p) / draws), (a, b)
            if p == 0:
                assert seen == 0
    expected = torch.tensor([log_prob(model, [1, 3], tuple(text)) for text in drawn.ids[:20].tolist()])
    torch.testing.assert_close(drawn.log_probs[:20].sum(1).float(), expected)


@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
def test_min_p_is_that_of_transformers(min_p):
    transformers = pytest.importorskip("transformers")
    scores = torch.randn(5, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    warped = transformers.MinPLogitsWarper(min_p)(None, scores / 0.7)
    expected = torch.softmax(warped, -1)
    probabilities = distribution(torch.log_softmax(scores, -1), temperature=0.7, min_p=min_p)
    torch.testing.assert_close(probabilities, expected)
    # after top_k and top_p, in the order of transformers
    chain = [transformers.TopKLogitsWarper(7), transformers.TopPLogitsWarper(0.9), transformers.MinPLogitsWarper(min_p)]
    warped = scores
    for warp in chain:
        warped = warp(None, warped)
    probabilities = distribution(torch.log_softmax(scores, -1), top_k=7, top_p=0.9, min_p=min_p)
    torch.testing.assert_close(probabilities, torch.softmax(warped, -1))
    assert bool((probabilities > 0).sum(-1).ge(1).all())


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_a_repetition_penalty_is_that_of_transformers(penalty):
    transformers = pytest.importorskip("transformers")
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 9, generator=draw, dtype=torch.float64) * 2
    ids = torch.randint(0, 9, (4, 6), generator=draw)
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    torch.testing.assert_close(penalize_repetition(logits, ids, penalty), expected)
    counts = torch.tensor([[0, 0, 1, 1, 1, 1]] * 4)
    masked = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids[:, 2:], logits)
    torch.testing.assert_close(penalize_repetition(logits, ids, penalty, counts.bool()), masked)


def test_penalized_texts_are_those_of_transformers():
    """Greedy texts of a GPT-2, token by token; the log-probabilities are those of the model itself."""
    transformers = pytest.importorskip("transformers")
    from fullrank.hf.causal import CausalModel

    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=40, eos_token_id=None)
    config.initializer_range = 0.6
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    texts = {}
    for penalty in (1.0, 1.2, 3.0):
        options = {"do_sample": False, "repetition_penalty": penalty, "pad_token_id": 0}
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, **options)
        drawn = sample(CausalModel(theirs), ids, max_new_tokens=16, greedy=True, repetition_penalty=penalty)
        assert torch.equal(drawn.ids, expected[:, 5:])
        texts[penalty] = drawn.ids.tolist()
        continued = torch.cat((ids, drawn.ids), 1)
        log_p = theirs(continued).logits.log_softmax(-1)[:, 4:-1].gather(2, drawn.ids[..., None])[..., 0]
        torch.testing.assert_close(drawn.log_probs, log_p)
    assert len({str(text) for text in texts.values()}) == 3


def mean_log_prob(models, text):
    """log of the mean of the models' probabilities of the next token, (V,)."""
    probs = [model(torch.tensor([text])).logits[0, -1].softmax(-1) for model in models]
    return torch.stack(probs).mean(0).log()


def test_an_ensemble_takes_the_mean_of_probabilities():
    models = [Recurrent(7, seed=seed).eval() for seed in (3, 4, 5)]
    ids, mask = padded(PROMPTS)
    drawn = sample(Ensemble(models), ids, max_new_tokens=9, greedy=True, attention_mask=mask)
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for place in range(9):
            log_p = mean_log_prob(models, text)
            text.append(int(log_p.argmax()))
            assert drawn.log_probs[row, place].item() == pytest.approx(float(log_p.max()), abs=1e-12)
        assert drawn.ids[row].tolist() == text[len(prompt) :]
    searched = beam_search(Ensemble(models), torch.tensor([PROMPTS[0]]), max_new_tokens=3, beams=400, n_best=3)
    scores = {}
    for text in itertools.product(range(7), repeat=3):
        terms = [mean_log_prob(models, [*PROMPTS[0], *text[:place]])[text[place]] for place in range(3)]
        scores[text] = float(sum(terms))
    best = sorted(scores.values(), reverse=True)[:3]
    assert searched.log_probs[0].tolist() == pytest.approx(best, abs=1e-12)
    assert Ensemble([Recurrent(7, max_length=5), Recurrent(7, max_length=9), Recurrent(7)]).max_length == 5
