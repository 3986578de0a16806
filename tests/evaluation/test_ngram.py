"""The n-gram model against one that is written as its equations read, with dictionaries."""

import json
import math
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fullrank.config.run import DataConfig
from fullrank.data import prepare
from fullrank.evaluation.ngram import discount_evenly, measure_ngrams
from fullrank.experiments.language_model import fourgram_perplexities
from research.ngrams import discount_by_count

TEXT = Path(__file__).resolve().parents[1] / "invented_text"
VOCAB = 7
START = 0


def draw_text(length, seed):
    """A text in which a word often depends on the two before it."""
    generator = np.random.default_rng(seed)
    words = [1, 2]
    for _ in range(length):
        likely = (2 * words[-1] + words[-2]) % VOCAB
        words.append(likely if generator.random() < 0.6 else int(generator.integers(VOCAB)))
    return np.array(words[2:])


class Definition:
    """Interpolated Kneser-Ney of one order, word by word."""

    def __init__(self, train, order, modified):
        padded = [START] * order + train
        ends = range(order, len(padded))
        self.counts = {order: Counter(tuple(padded[i - order + 1 : i + 1]) for i in ends)}
        for n in range(order - 1, 0, -1):
            longer = {tuple(padded[i - n : i + 1]) for i in ends}
            self.counts[n] = Counter(gram[1:] for gram in longer)
        self.order = order
        self.modified = modified

    def discount(self, n, count):
        number = Counter(self.counts[n].values())
        share = number[1] / (number[1] + 2 * number[2]) if number[1] else 0.5
        k = min(count, 3)
        discount = k - (k + 1) * share * number[k + 1] / number[k] if self.modified and number[k] else 0
        return min(discount, k) if discount > 0 else share

    def probability(self, word, history, n=None):
        n = self.order if n is None else n
        if n == 0:
            return 1 / VOCAB
        history = history[len(history) - n + 1 :]
        lower = self.probability(word, history, n - 1)
        after = {gram[-1]: count for gram, count in self.counts[n].items() if gram[:-1] == history}
        if not after:
            return lower
        discounts = sum(self.discount(n, count) for count in after.values())
        discounted = after[word] - self.discount(n, after[word]) if word in after else 0.0
        return (discounted + discounts * lower) / sum(after.values())


@pytest.mark.parametrize(
    ("length", "discount"), [(400, discount_evenly), (400, discount_by_count), (46, discount_by_count)]
)
def test_perplexities_are_those_of_the_definition(length, discount):
    """In the shorter text the discount of pairs that occur twice would be negative."""
    train, text = draw_text(length, seed=1), draw_text(60, seed=2)
    texts = [draw_text(30, seed=4), text]  # what precedes a text in the call is not its history
    _, measured = measure_ngrams(train, texts, vocab_size=VOCAB, start_id=START, order=4, discount=discount)
    for order in (1, 2, 3, 4):
        definition = Definition(train.tolist(), order, discount is discount_by_count)
        padded = [START] * order + text.tolist()
        ends = range(order, len(padded))
        nats = [-math.log(definition.probability(padded[i], tuple(padded[i - order : i]))) for i in ends]
        assert measured[order - 1] == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-12)


def test_unknown_words_share_what_the_first_order_leaves():
    """Two words of the text are in no n-gram: one count of 4 is discounted by 0.5, and every word gets its share of that."""
    (measured,) = measure_ngrams(np.array([1, 1, 1, 1]), [np.array([5, 5])], vocab_size=VOCAB, start_id=START, order=1)
    assert measured == [pytest.approx(4 * VOCAB / 0.5)]


def test_counting_takes_80_bytes_a_token():
    """50 million tokens, the most that are counted, take 3 GB (`COUNTED_TOKENS`)."""
    train = np.minimum(np.random.default_rng(0).zipf(1.3, 200_000), 9_999)
    tracemalloc.start()
    try:
        measure_ngrams(train, [train[:100]], vocab_size=10_000, start_id=0, order=4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 80 * len(train)


def test_the_4_gram_line_is_kept_with_its_corpus(tmp_path):
    """It is that of `measure_ngrams` on the splits, and is read again while the texts stay the same."""
    texts = {split: str(TEXT / f"{split}.svo") for split in ("train", "valid", "test")}
    corpus = prepare(DataConfig(name="text", tokens="word", cache=str(tmp_path), **texts))
    line = fourgram_perplexities(corpus)
    train, test = (np.asarray(corpus.ids(split)) for split in ("train", "test"))
    tokenizer = corpus.tokenizer
    (perplexities,) = measure_ngrams(train, [test], vocab_size=len(tokenizer), start_id=tokenizer.start_id)
    assert line["test"] == pytest.approx(perplexities[3])
    file = corpus.folder / "fourgrams.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "perplexity": {"valid": 1.0, "test": 2.0}}))
    assert fourgram_perplexities(corpus) == {"valid": 1.0, "test": 2.0}
    file.write_text(json.dumps({**content, "texts": {"train": "another"}}))
    assert fourgram_perplexities(corpus) == line
