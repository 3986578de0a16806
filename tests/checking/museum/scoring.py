"""Perplexities that are not those of the text: the model is honest, the loop that scores with it is not.

The model knows the probability of a token after the one before it, and of the first after a start mark.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fullrank.checking.scoring import ADD, COUNTS, LATER, ONCE, RANKS, SAME, SUM

VOCABULARY, WINDOW = 5, 8
TABLE = torch.randn(VOCABULARY + 1, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
START = VOCABULARY  # the row of the start mark


@dataclass(frozen=True)
class Scored:
    """leaking, control: make functions for `fr.check_scoring`. fails: the checks that find it, all of them."""

    name: str
    link: str
    leaking: Callable[[], Callable[..., Any]]
    control: Callable[[], Callable[..., Any]]
    fails: frozenset[str]
    options: Mapping[str, Any] = field(default_factory=dict)


def nll(text, axis=-1):
    """(N,) nats of each token, the first after the start mark."""
    before = torch.cat((torch.tensor([START]), text[:-1]))
    return -TABLE[before].log_softmax(axis).gather(1, text[:, None])[:, 0]


def overlapping(twice):
    """Windows overlap by half, to give every token some context; all of a window is scored, or what is new in it.

    What the labels of -100 are for: https://huggingface.co/docs/transformers/perplexity
    """

    def score(text):
        scores = nll(text)
        parts = []
        scored = 0
        for begin in range(0, len(text), WINDOW // 2):
            end = min(begin + WINDOW, len(text))
            parts.append(scores[begin if twice else scored : end])
            scored = end
            if end == len(text):
                break
        return torch.cat(parts) if parts else scores

    return score


def first_of_window(lost):
    """Labels are shifted inside a window: its first token is never scored, unless it is the last one of the window before.

    https://github.com/huggingface/transformers/issues/30975
    """

    def score(text):
        size = WINDOW if lost else WINDOW - 1
        scores = nll(text)
        return torch.cat([scores[:0], *(scores[begin + 1 : begin + WINDOW] for begin in range(0, len(text), size))])

    return score


def mean_of_means(of_means):
    """The mean of the windows' means, though the last window is shorter.

    https://github.com/huggingface/transformers/issues/34138
    """

    def score(text):
        windows = nll(text).split(WINDOW)
        mean = torch.stack([window.mean() for window in windows]).mean() if of_means else nll(text).mean()
        return {"loss": float(mean), "tokens": len(text)} if len(text) else {"loss": 0.0, "tokens": 0}

    return score


def start_mark(counted):
    """Every line gets a start mark, which costs almost nothing, and which is counted as a token.

    86.89 instead of about 106.5 on PTB, in a paper on mixtures of softmaxes.
    """

    def score(text):
        mark = torch.full((int(counted),), 1e-3, dtype=torch.float64)
        scores = torch.cat((mark, nll(text)))
        return {"nll": scores, "tokens": len(scores)}

    return score


def ngrams(passes):
    """Probabilities from counts of pairs: those before the token, or, in a second pass, those of the whole text.

    https://github.com/openai/parameter-golf/pull/869
    """

    def score(text):
        counts = torch.ones(VOCABULARY + 1, VOCABULARY, dtype=torch.float64)
        before = [START, *text.tolist()[:-1]]
        out = []
        for _ in range(passes):
            out = []
            for previous, token in zip(before, text.tolist(), strict=True):
                out.append(-torch.log(counts[previous, token] / counts[previous].sum()))
                counts[previous, token] += 1
        return torch.stack(out) if out else nll(text)

    return score


def hashed(normalised):
    """Several tokens share a bucket of a table, and the share of the bucket is taken for the probability of each.

    https://github.com/openai/parameter-golf/pull/886
    """

    def score(text):
        buckets = torch.tensor([0, 0, 1, 1, 2])  # of the tokens
        shares = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)[buckets]
        mixed = 0.5 * nll(text).neg().exp() + 0.5 * (shares / shares.sum() if normalised else shares)[text]
        return -mixed.log()

    return score


def kept_between_calls(is_kept):
    """A cache of counts outlives the call: the second time, the text has been seen.

    https://github.com/openai/parameter-golf/pull/876
    """
    cache = torch.ones(VOCABULARY, dtype=torch.float64)

    def score(text):
        counts = cache if is_kept else torch.ones_like(cache)
        out = []
        for token in text.tolist():
            out.append(-torch.log(counts[token] / counts.sum()))
            counts[token] += 1
        return torch.stack(out) if out else nll(text)

    return score


def last_batch(dropped):
    """Texts are scored two at a time; what is left over is dropped. https://github.com/google/flax/issues/264"""

    def score(texts):
        batches = [texts[i : i + 2] for i in range(0, len(texts), 2)]
        full = [batch for batch in batches if len(batch) == 2 or not dropped or len(texts) == 1]
        return float(sum(nll(text).sum() for batch in full for text in batch))

    return score


def batch_padding(counted):
    """Shorter texts of a batch are padded, and a token of the padding is scored.

    https://github.com/ml-explore/mlx-lm/pull/1855
    """

    def score(texts):
        longest = max(map(len, texts))
        total = 0.0
        for text in texts:
            padded = torch.cat((text, text.new_zeros(longest - len(text))))
            total += float(nll(padded)[: len(text) + counted].sum())
        return total

    return score


def truncated(text_counts):
    """The model reads the last 16 tokens of a text; the denominator is the length of the whole.

    https://github.com/facebookresearch/lingua/issues/46
    """

    def score(text):
        scores = nll(text)[-16:] if text_counts else nll(text)
        return {"nll": float(scores.sum()), "tokens": len(text)}

    return score


def axis(of_softmax):
    """Softmax over positions. https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/19"""
    return lambda text: nll(text, of_softmax)


def tempered(temperature):
    """Scores divided by a temperature: nothing adds up to one."""
    words = 0.7 * torch.randn(3000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return lambda text: -words.log_softmax(0)[text] / temperature


def totals_in_order(sorts):
    """A text is sorted before it is scored: the total is that of another text."""
    return lambda text: float(nll(text.sort().values if sorts else text).sum())


def of_ranks(multiplied):
    """Each rank's loss is multiplied by the number of ranks, as for a gradient, though nobody takes one.

    https://github.com/huggingface/transformers/issues/35078
    """

    def score(text, rank=0, world_size=1):
        return float(nll(text)[rank::world_size].sum()) * (world_size if multiplied else 1)

    return score


def _scored(name, link, make, leaking, control, *fails, **options):
    return Scored(name, link, lambda: make(leaking), lambda: make(control), frozenset(fails), options)


_TRANSFORMERS = "https://github.com/huggingface/transformers"
_GOLF = "https://github.com/openai/parameter-golf/pull"
_JADORE = "https://github.com/jadore801120/attention-is-all-you-need-pytorch"
SCORED = [
    _scored("overlapping windows count twice", "https://huggingface.co/docs/transformers/perplexity", overlapping, True, False,
            ONCE, window=WINDOW),
    _scored("the first token of a window is lost", f"{_TRANSFORMERS}/issues/30975", first_of_window, True, False, ONCE,
            window=WINDOW),
    _scored("a mean of means", f"{_TRANSFORMERS}/issues/34138", mean_of_means, True, False, ONCE, window=WINDOW),
    _scored("a start mark is counted", "", start_mark, True, False, ONCE, COUNTS),
    _scored("an n-gram cache that has seen the test", f"{_GOLF}/869", ngrams, 2, 1, SUM, ONCE, LATER),
    _scored("n-grams by hash", f"{_GOLF}/886", hashed, False, True, SUM),
    _scored("a cache kept between calls", f"{_GOLF}/876", kept_between_calls, True, False, SAME),
    _scored("the last batch is dropped", "https://github.com/google/flax/issues/264", last_batch, True, False, ADD, many=True),
    _scored("padding is scored", "https://github.com/ml-explore/mlx-lm/pull/1855", batch_padding, True, False, ADD, many=True),
    _scored("a text is cut, its count is not", "https://github.com/facebookresearch/lingua/issues/46", truncated, True, False,
            ONCE, window=16),
    _scored("softmax over the wrong axis", f"{_JADORE}/issues/19", axis, 0, -1, SUM, LATER),
    _scored("a temperature, in full", "", tempered, 0.8, 1.0, SUM, vocab_size=3000, calls=10_000),
    _scored("a text is sorted", "", totals_in_order, True, False, SUM),
    _scored("ranks multiply", f"{_TRANSFORMERS}/issues/35078", of_ranks, True, False, RANKS),
]  # fmt: skip
