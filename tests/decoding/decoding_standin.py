"""A tiny recurrent model with the protocol of decoding, in float64, and slow computations of what decoding should give."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PROMPTS = [[1, 4, 2], [3], [0, 2, 2, 4, 1]]


@dataclass(frozen=True)
class State:
    hidden: Tensor  # (B, E)

    def reorder(self, index):
        return State(self.hidden[index])


@dataclass(frozen=True)
class Out:
    logits: Tensor
    cache: State


class Recurrent(nn.Module):
    """h_n = tanh(x_n + W h_{n-1}), logits U h_n; padding leaves h as it is. Counts its calls and the tokens it read."""

    def __init__(self, vocabulary, seed=0, sharpness=2.0, max_length=None):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.embedding = draw(vocabulary, 6)
        self.recurrence = draw(6, 6) / 2
        self.readout = draw(6, vocabulary) * sharpness
        self.bias = torch.zeros(vocabulary, dtype=torch.float64)
        self.max_length = max_length
        self.calls = 0
        self.read = 0
        self.dropout = nn.Dropout(0.5)

    def new_cache(self):
        return State(torch.zeros(0, 6, dtype=torch.float64))

    def forward(self, input_ids, memory=None, *, cache=None, attention_mask=None):
        self.calls += 1
        self.read += input_ids.numel()
        rows, count = input_ids.shape
        hidden = torch.zeros(rows, 6, dtype=torch.float64) if cache is None or not len(cache.hidden) else cache.hidden
        mask = (
            torch.ones(rows, count, dtype=torch.bool) if attention_mask is None else attention_mask[:, -count:].bool()
        )
        logits = []
        for n in range(count):
            step = torch.tanh(self.embedding[input_ids[:, n]] + hidden @ self.recurrence)
            hidden = torch.where(mask[:, n, None], step, hidden)
            logits.append(self.dropout(hidden) @ self.readout + self.bias)
        return Out(torch.stack(logits, dim=1), State(hidden))


def log_prob(model, prompt, text):
    """log p(text | prompt), by reading everything once."""
    ids = torch.tensor([[*prompt, *text]])
    table = model(ids).logits[0].log_softmax(-1)
    return float(sum(table[len(prompt) - 1 + t, token] for t, token in enumerate(text)))


def all_texts(vocabulary, longest, eos):
    """Every text that ends with its only `eos`, and every text of full length without one."""
    others = [token for token in range(vocabulary) if token != eos]
    full = list(itertools.product(others, repeat=longest))
    if eos is None:
        return full
    ended = [(*head, eos) for length in range(longest) for head in itertools.product(others, repeat=length)]
    return [*ended, *full]


def keeps(text, *, eos, shortest, ngram):
    """Whether a text, finished or not, keeps the constraints."""
    grams = [text[i : i + ngram] for i in range(len(text) - ngram + 1)] if ngram else []
    return len(grams) == len(set(grams)) and (eos is None or eos not in text[:shortest])


def padded(prompts, filler=0):
    """Prompts side by side, padded on the left with `filler`, and their mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[filler] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask
