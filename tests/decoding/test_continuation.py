"""`model.generate`: a window that slides is the slow loop of its definition; with one beam it writes the same."""

import pytest
import torch

import fullrank as fr
from moving import narrow

PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
PAIRS = fr.AttentionConfig(kind="multilinear", cores=2, rank=5)
MODELS = {
    "rotary": {"attention": fr.AttentionConfig(mix="position_wise")},
    "sinusoidal": {"position": "sinusoidal"},
    "learned": {"position": "learned"},
    "pairs": {"attention": PAIRS},
    "decayed": {"attention": fr.AttentionConfig(kind="multilinear", cores=2, rank=5, output_map="decayed")},
    "relative": {"position": "relative", "attention": fr.AttentionConfig(score="relative")},
}


def slow(model, prompt, count, window):
    """The likeliest tokens, each from a context that is read anew: up to `window` tokens, then its later half."""
    context = prompt[-window:]
    written = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            token = int(model(torch.tensor([context])).logits[0, -1].argmax())
        written.append(token)
        context = [*context, token]
        if len(context) > window:
            context = context[len(context) - (window + 1) // 2 :]
    return written


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_window_slides(name, window):
    model = narrow(max_position_embeddings=7, **MODELS[name])
    written = model.generate(PROMPT, 20, greedy=True, window=window)
    assert written.tolist() == [slow(model, row, 20, window) for row in PROMPT.tolist()]
    searched = model.generate(PROMPT, 20, beams=1, window=window)
    assert torch.equal(searched, written)
