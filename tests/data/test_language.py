"""Sentences to pieces, ids and back: any line is taken, what was saved is what is loaded, and merges are the published ones."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.data.language import (
    build_language,
    clean_line,
    find_words,
    learn_byte_bpe,
    learn_codes,
    learn_unigram,
    normalize_line,
    read_codes,
    write_piece,
)

TEXT = ["the cat sat on the mat .", "the dog sat on the cat .", "a mat and a hat ; the cat &amp; the dog !"] * 9
CODES = "#version: 0.2\nt h\nth e</w>\na t</w>\n"


def codes(folder, text, lines):
    """The merges of a codes file with this text."""
    (folder / "codes").write_text(text, encoding="utf-8")
    return read_codes(folder / "codes", lines)


def cut(language, line):
    """The pieces of a line, as subword-nmt writes them."""
    [ids] = language.encode_normalized([line])
    return [write_piece(language.entries[i]) if i != language.unk_id else "<unk>" for i in ids]


@pytest.fixture(scope="module", params=["word", "byte_bpe", "codes", "unigram"])
def language(request, tmp_path_factory):
    match request.param:
        case "word":
            pieces = find_words(TEXT)
        case "byte_bpe":
            pieces = learn_byte_bpe(TEXT, 280)
        case "codes":
            pieces = codes(tmp_path_factory.mktemp("codes"), CODES, TEXT)
        case "unigram":
            pieces = learn_unigram(TEXT, 40)
    return build_language("en", pieces)


LINES = [
    "", " \t", "\n", "\x00\x01\x7f", "\ud800 half", "🐺 \u202eemoji\u2028line", "the " * 3000, "x" * 30_000, "<eos> <unk>",
    "the<unk>", "@@ a@@", "&quot; &amp;", "▁ Ġ", "İstanbul", "\ufeffthe", "\x85\x1c",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_any_line_is_taken(language, line):
    ids = language.encode(line)
    assert all(isinstance(i, int) and 0 < i < len(language) for i in ids), "no <eos> inside a line"
    text = language.decode(ids)
    assert "\n" not in text
    if not clean_line(line):
        assert (ids, text) == ([], "")
    if language.kind == "byte_bpe":
        assert language.unk_id not in ids
        assert text == clean_line(line)
    assert ids == language.encode_normalized(["a", normalize_line(line, "en", moses=False, lowercase=False)])[1]


@settings(max_examples=60, deadline=None)
@given(line=st.text(alphabet=st.characters(), max_size=60))
def test_bytes_give_every_line_back(line):
    assert BYTES.decode(BYTES.encode(line)) == clean_line(line)


BYTES = build_language("en", learn_byte_bpe(TEXT, 280))


def test_moses_tokens_and_lower_case():
    pytest.importorskip("sacremoses")
    words = "sie sagte : &quot; gut &amp; schön &quot; , z.b. 3,5 - &#91; x &#93;"
    language = build_language("de", find_words([words]), moses=True, lowercase=True)
    raw = 'Sie sagte: "Gut & schön", z.B. 3,5 - [x]'
    # the rules of Moses: commas inside numbers and points of abbreviations stay, brackets and quotes are escaped
    assert normalize_line(raw, "de", moses=True, lowercase=True) == words
    ids = language.encode(raw)
    assert language.unk_id not in ids
    assert language.tokens(ids) == words
    assert language.decode(ids) == raw.lower()
    assert language.encode_normalized([words])[0] == ids
    english = build_language("en", find_words([]), moses=True)
    tokens = "We &apos;re born , aren &apos;t we ?"
    assert normalize_line("We're born, aren't we?", "en", moses=True, lowercase=False) == tokens
    assert english.detokenize(tokens) == "We're born, aren't we?"


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
def test_worked_by_hand(word, pieces, tmp_path):
    language = build_language("en", codes(tmp_path, HAND, ["newer lowest x 🐺o aaaa"]))
    assert cut(language, word) == pieces.split()
    assert cut(language, f" {word}   {word}") == pieces.split() * 2
    assert language.decode(language.encode(f"{word} {word}")) == f"{word} {word}"


def split_plainly(word, merges):
    """The paper's procedure: as long as there is a pair with a code, merge the best wherever it stands."""
    symbols = [*word[:-1], word[-1] + "</w>"]
    while True:
        ranks = [merges.index(pair) for pair in itertools.pairwise(symbols) if pair in merges]
        if not ranks:
            return [*map(write_piece, symbols)]
        symbols = merge_pair(symbols, merges[min(ranks)])


def merge_pair(symbols, best):
    merged = []
    while symbols:
        both = tuple(symbols[:2]) == best
        merged.append("".join(symbols[:2]) if both else symbols[0])
        symbols = symbols[2 if both else 1 :]
    return merged


def test_words_are_cut_by_the_papers_procedure():
    """Merges learned from one text, on words of another."""
    draw = random.Random(7)
    text = ["".join(draw.choices("abcdefgings", k=draw.randrange(1, 9))) for _ in range(900)]
    pieces = learn_codes(lambda: text, 150)
    language = build_language("en", pieces)
    for _ in range(300):
        word = "".join(draw.choices("abcdefgings", k=draw.randrange(1, 30)))
        assert cut(language, word) == split_plainly(word, [*pieces.merges]), word
    marks = "a </w> b</w>"  # the mark of an end as words of the text
    language = build_language("en", learn_codes(lambda: [marks] * 9, 8))
    assert language.decode(language.encode(marks)) == marks


def test_merges_are_learned_most_frequent_first():
    """The counts of Sennrich et al. (2016), Fig. 1, with `</w>`; ties aside, every merge is a most frequent pair."""
    text = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3
    learned = learn_codes(lambda: text, 4)
    words = {word: [*word[:-1], word[-1] + "</w>"] for word in set(text)}
    for best in learned.merges:
        pairs = Counter()
        for word, symbols in words.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] += text.count(word)
        assert pairs[best] == max(pairs.values()) >= 2
        words = {word: merge_pair(symbols, best) for word, symbols in words.items()}
    assert len(learned.merges) == 4
    assert len(learn_codes(lambda: text, 1000).merges) < 25  # nothing is left that was seen twice


def test_merges_of_equal_counts_are_learned_in_one_order():
    """Every word is seen twice, so that every first merge is a tie; characters at the end of words are among them."""
    words = [f"{left}{right}" for left in "abcdef" for right in "uvwxyz"]
    learned = {tuple(learn_codes(lambda: words * 2, 20).merges) for _ in range(10)}
    assert len(learned) == 1
