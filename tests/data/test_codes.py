"""BPE by a list of merges: the published algorithm, worked by hand and written out plainly."""

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from fullrank.core.errors import InputError
from fullrank.data.language import Codes, learn_codes, load_codes, read_codes

REAL = Path(__file__).parents[3] / "shared" / "data" / "iwslt14.de-en"

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
    assert len(codes) == 7
    assert codes.segment([word]) == [pieces.split()]
    assert codes.join(pieces.split()) == word
    assert codes.segment([f" {word}   {word}"]) == [pieces.split() * 2]


def test_the_first_version_has_a_symbol_for_the_end():
    old = read_codes("l o\nlo w\ne r\nw </w>\n", "old")
    # `lo w` comes before `w </w>`, so </w> stays alone and is no piece; in "row" it is taken in and taken off again
    assert old.segment(["low lower row"]) == [["low", "low@@", "er", "r@@", "o@@", "w"]]
    assert read_codes("#version: 0.1\nl o\n", "old").segment(["lo"]) == [["lo"]]
    again = read_codes(old.state(), "again")
    assert again.segment(["low lower row"]) == old.segment(["low lower row"])
    new = read_codes(HAND, "hand")
    assert new.state() == HAND


def test_of_a_merge_that_stands_twice_the_first_counts():
    twice = Codes([("a", "b"), ("b", "c"), ("a", "b")])
    assert twice.segment(["abcx"]) == [["ab@@", "c@@", "x"]]
    assert Codes([("b", "c"), ("a", "b")]).segment(["abcx"]) == [["a@@", "bc@@", "x"]]


def plainly(word: str, merges: list[tuple[str, str]], old: bool) -> list[str]:
    """As in the paper: as long as there is a pair with a code, merge the best wherever it stands."""
    if len(word) == 1:
        return [word]
    symbols = [*word, "</w>"] if old else [*word[:-1], word[-1] + "</w>"]
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
    symbols = symbols[:-1] if symbols[-1] == "</w>" else [*symbols[:-1], symbols[-1].removesuffix("</w>")]
    return [*(symbol + "@@" for symbol in symbols[:-1]), symbols[-1]]


@pytest.mark.parametrize("old", [False, True])
def test_merges_in_any_order_on_words_of_few_letters(old):
    """Codes that no training would give: a merge may come before those that make its symbols."""
    draw = random.Random(7)
    for _ in range(400):
        symbols = ["a", "b", "a</w>", "b</w>", "</w>"]
        merges: list[tuple[str, str]] = []
        for _ in range(draw.randrange(1, 25)):
            pair = draw.choice([s for s in symbols if not s.endswith("</w>")]), draw.choice(symbols)
            merges.append(pair)
            symbols.append("".join(pair))
        draw.shuffle(merges)
        codes = Codes(merges, old=old)
        for _ in range(5):
            word = "".join(draw.choice("abc") for _ in range(draw.randrange(1, 30)))
            assert codes.segment([word])[0] == plainly(word, merges, old), (word, merges)
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
    assert len(codes) == 4
    assert len(learn_codes(lambda: text, 1000)) < 25  # nothing is left that was seen twice
    assert learn_codes(lambda: text, 4).state() == codes.state()


def test_files_that_are_no_codes(tmp_path):
    def error(data: bytes) -> str:
        path = tmp_path / "codes"
        path.write_bytes(data)
        with pytest.raises(InputError) as e:
            load_codes(path)
        return str(e.value)

    assert "line 3 is 'a b c'" in error(b"#version: 0.2\ne n\na b c\n")
    assert "line 1 is 'just'" in error(b"just\n")
    assert "version 0.3 of BPE codes; known are 0.1 and 0.2" in error(b"#version: 0.3\na b\n")
    assert "is empty" in error(b"")
    assert "not UTF-8" in error(b"a \xff\n")
    with pytest.raises(InputError, match=r"data.codes: no such file: .*nowhere"):
        load_codes(tmp_path / "nowhere")


def test_long_words_take_no_time():
    codes = Codes([("a", "b"), ("ab", "ab"), ("abab", "abab")])
    pieces = codes.segment(["ab" * 20_000])[0]
    assert "".join(piece.removesuffix("@@") for piece in pieces) == "ab" * 20_000
    assert Counter(len(piece.removesuffix("@@")) for piece in pieces).most_common(1)[0][0] == 8


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no corpus at {REAL}")
def test_published_codes_on_published_text():
    codes = load_codes(REAL / "bpe10k.codes")
    assert len(codes) == 10_000
    merges = [tuple(line.split(" ")) for line in (REAL / "bpe10k.codes").read_text(encoding="utf-8").split("\n")[1:-1]]
    with (REAL / "test.de").open(encoding="utf-8") as file:
        words = {word for line, _ in zip(file, range(6), strict=False) for word in line.split()}
    assert len(words) > 50
    for word in words:
        assert codes.segment([word])[0] == plainly(word, merges, old=False)
