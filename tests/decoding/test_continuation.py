"""`model.generate`: a window that slides is the slow loop of its definition; options mean what `sample` and the search mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fullrank as fr
from fullrank.core.errors import InputError
from fullrank.decoding import MemoryReader, sample
from moving import moved

PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
PAIRS = fr.AttentionConfig(kind="multilinear", cores=2, rank=5)
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"attention": fr.AttentionConfig(mix="position_wise")},
    "sinusoidal": {"position": "sinusoidal"},
    "learned": {"position": "learned"},
    "pairs": {"attention": PAIRS},
    "decayed": {"attention": fr.AttentionConfig(kind="multilinear", cores=2, rank=5, output_map="decayed")},
    "relative": {"position": "relative", "attention": fr.AttentionConfig(score="relative")},
}


def build(**settings: Any) -> fr.LanguageModel:
    torch.manual_seed(2)
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return moved(fr.LanguageModel(fr.ModelConfig(**sizes, max_position_embeddings=7, **settings)).double().eval())


def slow(model: fr.LanguageModel, prompt: list[int], count: int, window: int) -> list[int]:
    """The likeliest tokens, every one from a context that is read anew: the last `window` tokens, or half once it was full."""
    context, written = prompt[-window:], list(prompt)
    for _ in range(count):
        with torch.no_grad():
            token = int(model(torch.tensor([context])).logits[0, -1].argmax())
        written.append(token)
        context = [*context, token]
        if len(context) > window:
            context = context[len(context) - (window + 1) // 2 :]
    return written


@pytest.mark.parametrize("window", [1, 4, 7])
@pytest.mark.parametrize("name", MODELS)
def test_the_window_slides(name: str, window: int) -> None:
    model = build(**MODELS[name])
    found = model.generate(PROMPT, 20, greedy=True, window=window)
    assert found.tolist() == [slow(model, row, 20, window) for row in PROMPT.tolist()]
    searched = model.generate(PROMPT, 20, beams=1, window=window)
    assert torch.equal(searched, found)
    uncached = sample(model, PROMPT, max_new_tokens=20, greedy=True, window=window, use_cache=False)
    assert torch.equal(torch.cat((PROMPT, uncached.ids), 1), found)


def test_it_slides_past_the_largest_position_by_default_and_past_the_trained_length() -> None:
    model = build(position="learned")
    long = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
    assert model.generate(long, 9, greedy=True).tolist() == [slow(model, long[0].tolist(), 9, 7)]
    assert model.generate(long, 9, greedy=True, window=50).tolist() == [slow(model, long[0].tolist(), 9, 7)]
    model.trained_length = 4
    assert model.generate(long, 9, greedy=True).tolist() == [slow(model, long[0].tolist(), 9, 4)]


def test_a_memory_slides_by_itself_up_to_the_largest_position() -> None:
    model = build(memory_length=3)
    model.trained_length = 4
    plain = sample(MemoryReader(model), PROMPT, max_new_tokens=20, greedy=True)
    assert torch.equal(model.generate(PROMPT, 20, greedy=True)[:, 4:], plain.ids)
    assert build(memory_length=3, position="learned").generate(PROMPT, 20, greedy=True).shape == (2, 24)


def test_options_are_those_of_sampling_and_search() -> None:
    model = build()
    first, again = (model.generate(PROMPT, 9, temperature=0.8, top_p=0.9, seed=1) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first[:, :4], PROMPT)
    assert not torch.equal(first, model.generate(PROMPT, 9, temperature=0.8, top_p=0.9, seed=2))
    assert torch.equal(model.generate(PROMPT, 9, top_k=1), model.generate(PROMPT, 9, greedy=True))
    ended = model.generate(PROMPT, 9, greedy=True, eos_id=int(model.generate(PROMPT, 1, greedy=True)[0, -1]))
    assert (ended[0, 4:] == ended[0, 4]).all()
    left = torch.tensor([[0, 0, 3, 1], [5, 9, 2, 6]])
    padded = model.generate(left, 3, greedy=True, attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    assert torch.equal(padded[0, 2:], model.generate(left[:1, 2:], 3, greedy=True)[0])
    found = model.generate(PROMPT, 9, beams=3)
    assert torch.equal(found[:, :4], PROMPT)
    for wrong, word in (
        ({"beams": 2, "temperature": 0.5}, "beams"), ({"beams": 2, "seed": 1}, "seed"), ({"window": 0}, "window"),
        ({"temperature": -1.0}, "temperature"), ({"max_new_tokens": 0}, "max_new_tokens"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=word):
            model.generate(PROMPT, **wrong)
    with pytest.raises(InputError, match="at least one row with one token"):
        model.generate(PROMPT[:, :0])
