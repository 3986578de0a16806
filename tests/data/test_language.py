"""Sentences to pieces, ids and back: any line is taken, what was saved is what is loaded, and merges are the published ones."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.core.errors import InputError
from fullrank.data.language import (
    Codes,
    Language,
    Segmenter,
    Words,
    clean_line,
    learn_byte_bpe,
    learn_codes,
    learn_unigram,
    load_codes,
    load_language,
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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="abcdehmnost .;&!", max_size=20), min_size=2, max_size=2))
def test_joined_lines_have_the_pieces_of_both(lines):
    for segmenter in SEGMENTERS.values():
        one, two, both = segmenter.segment([*map(clean_line, lines), clean_line(" ".join(lines))])
        assert one + two == both


def test_text_of_known_characters_comes_back(language):
    for line in TEXT[:3]:
        ids = language.encode(line)
        assert language.unk_id not in ids
        assert language.decode(ids) == language.tokens(ids) == line
        assert language.decode([*ids, language.eos_id]) == line


SIGNS = ["<unk>", "<eos>", "<pad>", "<s>", "</s>", "@@", "@@@", "</w>", "\u2581", "\u0120"]
SIGNED = [line.format(m=m) for m in SIGNS for line in ("{m}", "a {m} b", "cat{m}", "{m}dog x", "he{m}re {m}{m}")]
SIGNED_SEGMENTERS = {
    "word": Words,
    "byte_bpe": lambda: learn_byte_bpe(SIGNED * 3, 330),
    "unigram": lambda: learn_unigram(SIGNED * 3, 90),
    "codes": lambda: learn_codes(lambda: SIGNED * 3, 60),
    "codes of whole marks": lambda: Codes([("@", "@</w>"), ("t", "@@</w>"), ("a", "t@@</w>"), ("w", "></w>")]),
}


@pytest.mark.parametrize("kind", SIGNED_SEGMENTERS)
def test_marks_in_a_text_come_back(kind, tmp_path):
    segmenter = SIGNED_SEGMENTERS[kind]()
    seen = Counter(piece for pieces in segmenter.segment(SIGNED) for piece in pieces)
    if kind == "word":
        del seen["<unk>"]
    Language("en", segmenter, [*MARKS, *seen]).save(tmp_path)
    language = load_language(tmp_path)
    for line in SIGNED:
        ids = language.encode(line)
        assert language.decode(ids) == line
        assert language.eos_id not in ids
        assert (language.unk_id in ids) == (kind == "word" and "<unk>" in line.split())


def test_what_is_saved_is_what_is_loaded(language, tmp_path):
    Language("en", language.segmenter, language.entries, lowercase=True).save(tmp_path)
    again = load_language(tmp_path)
    assert (again.name, again.entries, again.lowercase, again.moses) == ("en", language.entries, True, False)
    assert again.fingerprint == language.fingerprint
    for line in TEXT[:3]:
        assert again.encode(line.upper()) == language.encode(line)
    with pytest.raises(InputError, match="is not in this vocabulary"):
        again.decode([len(language)])


def sentences() -> list[str]:
    """Words with endings, the first ones often; Z and Y stand once."""
    draw = random.Random(3)
    stems = ["".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.randrange(3, 7))) for _ in range(60)]
    words = [stem + end for stem in stems for end in ("", "s", "ing")]
    shares = [1 / (rank + 1) for rank in range(len(words))]
    return [" ".join(draw.choices(words, shares, k=8)) for _ in range(500)] + ["Z Y"]


def test_unigram_pieces_are_whole_words_where_those_are_frequent():
    text = sentences()
    segmenter = learn_unigram(text, 120)
    assert len(segmenter.pieces) == len(set(segmenter.pieces)) <= 120
    assert {c for line in text for c in line if c != " "} <= set("".join(segmenter.pieces))
    frequent = Counter(word for line in text for word in line.split()).most_common(1)[0][0]
    assert segmenter.segment([f"{frequent} {frequent}"]) == [[f"▁{frequent}"] * 2]
    assert segmenter.segment([f"<unk> {frequent}"])[0][-1] == f"▁{frequent}"
    assert "<unk>" in segmenter.segment(["🐺"])[0]
    for line in text[:50]:
        assert segmenter.join(segmenter.segment([line])[0]) == line


def test_unigram_models_of_the_same_text_are_the_same():
    text = sentences()
    assert len({learn_unigram(text, 120).state for _ in range(5)}) == 1
    with pytest.raises(InputError, match=r"data.max_vocabulary: no unigram model of 7 entries"):
        learn_unigram(text, 5)


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


def split_plainly(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """The paper's procedure: as long as there is a pair with a code, merge the best wherever it stands."""
    if len(word) == 1:
        return [word]
    symbols = [*word[:-1], word[-1] + "</w>"]
    while True:
        there = [merges.index(pair) for pair in itertools.pairwise(symbols) if pair in merges]
        if not there:
            break
        best = merges[min(there)]
        merged: list[str] = []
        while symbols:
            both = tuple(symbols[:2]) == best
            merged.append("".join(symbols[:2]) if both else symbols[0])
            symbols = symbols[2 if both else 1 :]
        symbols = merged
    symbols[-1] = symbols[-1].removesuffix("</w>")
    return [*(symbol + "@@" for symbol in symbols[:-1]), symbols[-1]]


def test_merges_in_any_order_on_words_of_few_letters():
    """Codes that no training would give: a merge may come before those that make its symbols."""
    draw = random.Random(7)
    for _ in range(400):
        symbols = ["a", "b", "a</w>", "b</w>"]
        merges: list[tuple[str, str]] = []
        for _ in range(draw.randrange(1, 25)):
            pair = draw.choice([s for s in symbols if not s.endswith("</w>")]), draw.choice(symbols)
            merges.append(pair)
            symbols.append("".join(pair))
        draw.shuffle(merges)
        codes = Codes(merges)
        for _ in range(5):
            word = "".join(draw.choice("abc") for _ in range(draw.randrange(1, 30)))
            assert codes.segment([word])[0] == split_plainly(word, merges), (word, merges)
            assert codes.join(codes.segment([word])[0]) == word


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


def test_merges_of_equal_counts_are_learned_in_one_order():
    """Every word is seen twice, so that every first merge is a tie; characters at the end of words are among them."""
    words = [f"{left}{right}" for left in "abcdef" for right in "uvwxyz"]
    learned = {learn_codes(lambda: words * 2, 20).state for _ in range(10)}
    assert len(learned) == 1


def test_files_that_are_no_codes(tmp_path):
    def error(data: bytes) -> str:
        path = tmp_path / "codes"
        path.write_bytes(data)
        with pytest.raises(InputError) as e:
            load_codes(path)
        return str(e.value)

    assert "line 3 is 'a b c'" in error(b"#version: 0.2\ne n\na b c\n")
    assert "line 1 is 'just'" in error(b"just\n")
    assert "line 1 is '#version: 0.3'" in error(b"#version: 0.3\na b\n")
    assert "is empty" in error(b"")
    assert "not UTF-8" in error(b"a \xff\n")
    with pytest.raises(InputError, match=r"data.codes: no such file: .*nowhere"):
        load_codes(tmp_path / "nowhere")
