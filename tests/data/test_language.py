"""Sentences to pieces, ids and back: any line is taken, what was saved is what is loaded, and merges are the published ones."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.data.language import (
    Codes,
    Language,
    Segmenter,
    Words,
    clean_line,
    learn_byte_bpe,
    learn_codes,
    learn_unigram,
    read_codes,
)

TEXT = ["the cat sat on the mat .", "the dog sat on the cat .", "a mat and a hat ; the cat &amp; the dog !"] * 9
MARKS = ["<eos>", "<unk>"]


def entries(segmenter: Segmenter) -> list[str]:
    if segmenter.pieces is not None:
        return [*MARKS, *segmenter.pieces]
    return [*MARKS, *sorted({piece for pieces in segmenter.segment(TEXT) for piece in pieces})]


SEGMENTERS = {
    "word": Words(),
    "byte_bpe": learn_byte_bpe(TEXT, 280),
    "codes": Codes([("t", "h"), ("th", "e</w>"), ("a", "t</w>")]),
    "unigram": learn_unigram(TEXT, 40),
}
LINES = [
    "", " \t", "\n", "\x00\x01\x7f", "\ud800 half", "🐺 \u202eemoji\u2028line", "the " * 3000, "x" * 30_000, "<eos> <unk>",
    "the<unk>", "@@ a@@", "&quot; &amp;", "▁ Ġ", "İstanbul", "\ufeffthe", "\x85\x1c",
]  # fmt: skip


@pytest.fixture(params=SEGMENTERS)
def language(request):
    segmenter = SEGMENTERS[request.param]
    return Language("en", segmenter, entries(segmenter))


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_any_line_is_taken(language, line):
    ids = language.encode(line)
    assert all(isinstance(i, int) and 0 < i < len(language) for i in ids), "no <eos> inside a line"
    text = language.decode(ids)
    assert "\n" not in text
    if not clean_line(line):
        assert (ids, text) == ([], "")
    if language.segmenter.kind == "byte_bpe":
        assert language.unk_id not in ids
        assert text == clean_line(line)
    assert ids == language.encode_normalized(["a", language.normalize(line)])[1]


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(), max_size=60))
def test_bytes_give_every_line_back(line):
    language = Language("en", SEGMENTERS["byte_bpe"], entries(SEGMENTERS["byte_bpe"]))
    assert language.decode(language.encode(line)) == clean_line(line)


def test_moses_tokens_and_lower_case():
    pytest.importorskip("sacremoses")
    words = [
        "sie",
        "sagte",
        ":",
        "&quot;",
        "gut",
        "&amp;",
        "schön",
        "&quot;",
        ",",
        "z.b.",
        "3,5",
        "-",
        "&#91;",
        "x",
        "&#93;",
    ]
    language = Language("de", Words(), [*MARKS, *dict.fromkeys(words)], moses=True, lowercase=True)
    # the rules of Moses: commas inside numbers and points of abbreviations stay, brackets and quotes are escaped
    assert language.normalize('Sie sagte: "Gut & schön", z.B. 3,5 - [x]') == " ".join(words)
    ids = language.encode('Sie sagte: "Gut & schön", z.B. 3,5 - [x]')
    assert language.unk_id not in ids
    assert language.tokens(ids) == " ".join(words)
    assert language.decode(ids) == 'sie sagte: "gut & schön", z.b. 3,5 - [x]'
    assert language.encode_normalized([" ".join(words)])[0] == ids
    english = Language("en", Words(), MARKS, moses=True)
    assert english.normalize("We're born, aren't we?") == "We &apos;re born , aren &apos;t we ?"
    assert english.detokenize("We &apos;re born , aren &apos;t we ?") == "We're born, aren't we?"


HAND = "#version: 0.2\nl o\nlo w\ne r</w>\nlow er</w>\na a\ne s\nes t</w>\n"


@pytest.mark.parametrize(
    ("word", "pieces"),
    [
        ("lower", "lower"),  # l o w e r</w>: lo w e r</w>, low e r</w>, low er</w>, lower</w>
        ("low", "lo@@ w"),  # the last symbol is w</w>, and `lo w` is another pair
        ("lowest", "low@@ est"),  # e s, then es t</w>
        ("newer", "n@@ e@@ w@@ er"),
        ("aaaa", "aa@@ a@@ a"),  # a a a a</w>: from left to right, the second a is taken
        ("aaaaa", "aa@@ aa@@ a"),
        ("es", "e@@ s"),
        ("x", "x"),
        ("🐺o", "🐺@@ o"),
    ],
)
def test_worked_by_hand(word, pieces):
    codes = read_codes(HAND, "hand")
    assert len(codes.merges) == 7
    assert codes.segment([word]) == [pieces.split()]
    assert codes.join(pieces.split()) == word
    assert codes.segment([f" {word}   {word}"]) == [pieces.split() * 2]


def test_merges_are_learned_most_frequent_first():
    """The counts of Sennrich et al. (2016), Fig. 1, with `</w>`; ties aside, every merge is a most frequent pair."""
    text = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3
    codes = learn_codes(lambda: text, 4)
    words = {word: [*word[:-1], word[-1] + "</w>"] for word in set(text)}
    for left, right in codes.merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in words.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] += text.count(word)
        assert pairs[left, right] == max(pairs.values()) >= 2
        for word, symbols in words.items():
            merged: list[str] = []
            while symbols:
                both = tuple(symbols[:2]) == (left, right)
                merged.append("".join(symbols[:2]) if both else symbols[0])
                symbols = symbols[2 if both else 1 :]
            words[word] = merged
    assert len(codes.merges) == 4
    assert len(learn_codes(lambda: text, 1000).merges) < 25  # nothing is left that was seen twice
    assert learn_codes(lambda: text, 4).state == codes.state
