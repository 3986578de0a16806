from __future__ import annotations

import pytest
import torch
from decoding_standin import PROMPTS, Recurrent, WithoutCache, all_texts, log_prob, padded

from fullrank.core.errors import InputError
from fullrank.decoding import beam_search, sample


def exhaustive(
    model: Recurrent, prompt: list[int], longest: int, eos: int | None, penalty: float
) -> list[tuple[float, tuple[int, ...]]]:
    texts = all_texts(len(model.bias), longest, eos)
    return sorted(((log_prob(model, prompt, text) / len(text) ** penalty, text) for text in texts), reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("eos", [None, 1])
def test_a_wide_beam_is_exhaustive_search(eos: int | None, penalty: float) -> None:
    model = Recurrent(4, seed=5, sharpness=0.8).eval()
    prompts = [[0, 3, 2], [2]]
    ids, mask = padded(prompts)
    found = beam_search(
        model, ids, max_new_tokens=3, beams=64, n_best=12, length_penalty=penalty, eos_id=eos, attention_mask=mask
    )
    for b, prompt in enumerate(prompts):
        for n, (score, text) in enumerate(exhaustive(model, prompt, 3, eos, penalty)[:12]):
            length = int(found.lengths[b, n])
            assert tuple(found.ids[b, n, :length].tolist()) == text
            assert found.scores[b, n].item() == pytest.approx(score, abs=1e-12)
            assert found.log_probs[b, n].item() == pytest.approx(score * length**penalty, abs=1e-12)
            assert found.ids[b, n, length:].eq(eos if eos is not None else 0).all()


def by_hand(
    model: Recurrent, prompt: list[int], *, longest: int, beams: int, eos: int, penalty: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search as the definition says, on lists, never stopping before `beams` texts have ended."""
    alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, longest + 1):
        table = [model(torch.tensor([[*prompt, *text]])).logits[0, -1].log_softmax(-1).tolist() for _, text in alive]
        grown = sorted(
            (
                (total + p, (*text, v))
                for (total, text), row in zip(alive, table, strict=True)
                for v, p in enumerate(row)
            ),
            reverse=True,
        )
        ended += [(total / length**penalty, text) for total, text in grown[:beams] if text[-1] == eos]
        alive = [(total, text) for total, text in grown if text[-1] != eos][:beams]
        if length < longest and len(ended) >= beams:
            return sorted(ended, reverse=True)
    return sorted(ended + [(total / longest**penalty, text) for total, text in alive], reverse=True)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("beams", [1, 2, 3, 5])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.7, -0.5])
def test_batch_with_padding_is_each_row_by_the_definition(beams: int, penalty: float, use_cache: bool) -> None:
    ended_early = 0
    for seed in (0, 1, 9, 27):  # the last two end too early if only the longest continuation is hoped for
        model = Recurrent(6, seed=seed, sharpness=1.0).eval()
        ids, mask = padded(PROMPTS)
        options = {
            "max_new_tokens": 7,
            "beams": beams,
            "n_best": (beams + 1) // 2,
            "length_penalty": penalty,
            "eos_id": 2,
        }
        found = beam_search(model, ids, attention_mask=mask, use_cache=use_cache, **options)
        ended_early += found.ids.shape[2] < 7
        for b, prompt in enumerate(PROMPTS):
            expected = by_hand(model, prompt, longest=7, beams=beams, eos=2, penalty=penalty)
            for n in range((beams + 1) // 2):
                score, text = expected[n]
                assert tuple(found.ids[b, n, : int(found.lengths[b, n])].tolist()) == text, (seed, b, n)
                assert found.scores[b, n].item() == pytest.approx(score, abs=1e-12)
    assert ended_early < 4


@pytest.mark.parametrize("eos", [None, 2])
def test_one_beam_is_greedy(eos: int | None) -> None:
    for seed in range(6):
        model = Recurrent(7, seed=seed).eval()
        ids, mask = padded(PROMPTS)
        found = beam_search(model, ids, max_new_tokens=9, beams=1, eos_id=eos, attention_mask=mask)
        greedy = sample(model, ids, max_new_tokens=9, greedy=True, eos_id=eos, attention_mask=mask)
        assert found.lengths[:, 0].tolist() == greedy.lengths.tolist()
        assert found.ids[:, 0].tolist() == greedy.ids.tolist()
        torch.testing.assert_close(found.log_probs[:, 0], greedy.log_probs.sum(1), rtol=0, atol=1e-12)


def test_a_beam_finds_what_greedy_misses() -> None:
    better = 0
    for seed in range(10):
        model = Recurrent(6, seed=seed, sharpness=1.0).eval()
        prompt = torch.tensor([[1, 3]])
        one, four = (beam_search(model, prompt, max_new_tokens=5, beams=beams).scores.item() for beams in (1, 4))
        better += four > one + 1e-9
    assert better >= 3


def test_a_model_without_cache_gives_the_same() -> None:
    model = Recurrent(6, seed=1, sharpness=1.0).eval()
    ids, mask = padded(PROMPTS)
    options = {"max_new_tokens": 6, "beams": 4, "n_best": 4, "eos_id": 2, "attention_mask": mask}
    cached = beam_search(model, ids, **options)
    bare = beam_search(WithoutCache(model), ids, use_cache=False, **options)
    assert cached.ids.tolist() == bare.ids.tolist()
    torch.testing.assert_close(cached.scores, bare.scores, rtol=0, atol=1e-12)


def test_search_stops_when_nothing_can_be_gained() -> None:
    model = Recurrent(5, seed=0, sharpness=0.2).eval()
    model.bias[2] = 3.0  # <eos> is likely from the start
    found = beam_search(model, torch.tensor([[1], [3]]), max_new_tokens=40, beams=4, length_penalty=0.0, eos_id=2)
    assert found.ids.tolist() == [[[2]], [[2]]]
    assert model.calls == 1
    # divided by its length, a sum that is worse now may still win after many certain tokens
    model.calls = 0
    beam_search(model, torch.tensor([[1], [3]]), max_new_tokens=40, beams=4, length_penalty=1.0, eos_id=2)
    assert model.calls > 1


def test_finished_rows_are_not_read_any_more() -> None:
    model = Recurrent(6, seed=2, sharpness=1.0).eval()
    together = beam_search(
        model, padded(PROMPTS)[0], max_new_tokens=8, beams=2, eos_id=2, attention_mask=padded(PROMPTS)[1]
    )
    read = model.read
    alone = []
    model.read = 0
    for prompt in PROMPTS:
        alone.append(beam_search(model, torch.tensor([prompt]), max_new_tokens=8, beams=2, eos_id=2))
    assert len({int(found.ids.shape[2]) for found in alone}) > 1
    padding = padded(PROMPTS)[0].numel() - sum(map(len, PROMPTS))
    assert read == model.read + padding
    assert together.scores.flatten().tolist() == pytest.approx([found.scores.item() for found in alone], abs=1e-12)


def test_fewer_texts_than_asked_for_are_marked() -> None:
    found = beam_search(Recurrent(2).eval(), torch.tensor([[0]]), max_new_tokens=2, beams=8, n_best=8, eos_id=1)
    assert found.lengths.tolist() == [[2, 2, 1, 0, 0, 0, 0, 0]] or sorted(found.lengths[0].tolist()) == [0] * 5 + [
        1,
        2,
        2,
    ]
    assert found.scores[0, 3:].tolist() == [-float("inf")] * 5


def test_a_single_token_that_ends_the_text() -> None:
    found = beam_search(Recurrent(1).eval(), torch.tensor([[0]]), max_new_tokens=4, beams=3, eos_id=0)
    assert found.ids.tolist() == [[[0]]]
    assert found.scores.tolist() == [[0.0]]


def test_dropout_is_off_while_searching_and_on_again_after() -> None:
    model = Recurrent(6, seed=2).train()
    prompt = torch.tensor([[1, 3]])
    searched = beam_search(model, prompt, max_new_tokens=5, beams=3)
    assert model.dropout.training
    assert searched.scores.item() == beam_search(model.eval(), prompt, max_new_tokens=5, beams=3).scores.item()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 0}, "beams: one or more, given 0"),
        ({"beams": 2, "n_best": 3}, r"n_best: from 1 to the number of beams \(2\), given 3"),
        ({"n_best": 0}, "n_best: from 1"),
        ({"length_penalty": float("nan")}, "length_penalty: an exponent"),
        ({"max_new_tokens": 7}, "at most 8"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    model = Recurrent(5, max_length=8).eval()
    with pytest.raises(InputError, match=message):
        beam_search(model, torch.tensor([[1, 2]]), **{"max_new_tokens": 4, **options})
    assert model.calls == 0
