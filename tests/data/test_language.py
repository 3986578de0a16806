"""Text of one language to ids and back: any line is taken, and what was saved is what is loaded."""

import random
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.core.errors import InputError, RunError
from fullrank.data.language import (
    Codes,
    Language,
    Segmenter,
    Words,
    learn_byte_bpe,
    learn_unigram,
    load_language,
    plain,
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
    if not plain(line):
        assert (ids, text) == ([], "")
    if language.segmenter.kind == "byte_bpe":
        assert language.unk_id not in ids
        assert text == plain(line)
    assert ids == language.encode_prepared(["a", language.prepared(line)])[1]


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(), max_size=60))
def test_bytes_give_every_line_back(line):
    language = Language("en", SEGMENTERS["byte_bpe"], entries(SEGMENTERS["byte_bpe"]))
    assert language.decode(language.encode(line)) == plain(line)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="abcdehmnost .;&!", max_size=20), min_size=2, max_size=2))
def test_joined_lines_have_the_pieces_of_both(lines):
    for segmenter in SEGMENTERS.values():
        one, two, both = segmenter.segment([*map(plain, lines), plain(" ".join(lines))])
        assert one + two == both


def test_word_by_word_is_as_the_library_splits_whole_lines(language):
    """A space before the first word, as before every other."""
    from tokenizers import Tokenizer

    if language.segmenter.kind not in ("byte_bpe", "unigram"):
        pytest.skip("no tokenizer of the library")
    backend = Tokenizer.from_str(language.segmenter.state())
    for line in (*TEXT[:3], "don't 1,5 (the cat)", "🐺 &quot; x-y", "  cat "):
        whole = [backend.id_to_token(i) for i in backend.encode(plain(line)).ids]
        assert language.segmenter.segment([line])[0] == whole


def test_text_of_known_characters_comes_back(language):
    for line in TEXT[:3]:
        ids = language.encode(line)
        assert language.unk_id not in ids
        assert language.decode(ids) == language.tokens(ids) == line
        assert language.decode([*ids, language.eos_id]) == line


def test_ids_that_a_model_may_put_together(language):
    """Any ids are text without line breaks; ids beyond the vocabulary are refused."""
    everything = list(range(len(language)))
    assert "\n" not in language.decode(everything + everything[::-1])
    assert "<unk>" in language.decode([language.unk_id])
    assert language.decode([language.eos_id]) == ""
    with pytest.raises(InputError, match="is not in this vocabulary"):
        language.decode([len(language)])
    with pytest.raises(InputError, match="token id -1"):
        language.tokens([-1])


def test_what_is_saved_is_what_is_loaded(language, tmp_path):
    other = Language("en", language.segmenter, language.entries, lowercase=True)
    for number, one in enumerate((language, other)):
        one.save(tmp_path / str(number))
        again = load_language(tmp_path / str(number))
        assert (again.name, again.entries, again.counts) == (one.name, one.entries, one.counts)
        assert (again.fingerprint, again.lowercase, again.moses) == (one.fingerprint, one.lowercase, one.moses)
        for line in (*LINES, *TEXT[:3], "THE CAT"):
            assert again.encode(line) == one.encode(line)
        assert again.decode(one.encode("the cat")) == "the cat"
    assert other.encode("THE CAT") == language.encode("the cat")


@pytest.mark.parametrize("name", ["language.json", "segments.txt", "vocabulary.txt"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_damaged_files(tmp_path, name, damage):
    language = Language("en", SEGMENTERS["codes"], entries(SEGMENTERS["codes"]))
    language.save(tmp_path)
    path = tmp_path / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            data[: len(data) // 2] if damage == "cut" else data.replace(b"th", b"ht").replace(b"kind", b"sort")
        )
    wanted = (InputError, "no language.json") if (name, damage) == ("language.json", "gone") else (RunError, "damaged")
    with pytest.raises(wanted[0], match=wanted[1]):
        load_language(tmp_path)


def test_vocabularies_that_are_none():
    with pytest.raises(InputError, match="begin with <eos> and <unk>"):
        Language("en", Words(), ["a", "b"])
    with pytest.raises(InputError, match="stands twice"):
        Language("en", Words(), [*MARKS, "a", "a"])


def test_words_that_look_like_marks_are_words():
    language = Language("en", Words(), [*MARKS, "<eos>", "a"])
    assert language.encode("a <eos> <unk>") == [3, 2, 1]
    assert language.decode([3, 2]) == "a <eos>"


def test_fingerprints_tell_vocabularies_apart():
    one = Language("en", SEGMENTERS["codes"], [*MARKS, "a"])
    assert one.fingerprint == Language("de", SEGMENTERS["codes"], [*MARKS, "a"], lowercase=True).fingerprint
    assert one.fingerprint != Language("en", SEGMENTERS["codes"], [*MARKS, "b"]).fingerprint
    assert one.fingerprint != Language("en", Codes([("t", "h")]), [*MARKS, "a"]).fingerprint
    assert one.fingerprint != Language("en", Words(), [*MARKS, "a"]).fingerprint


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
    assert len({learn_unigram(text, 120).state() for _ in range(5)}) == 1
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
    assert language.prepared('Sie sagte: "Gut & schön", z.B. 3,5 - [x]') == " ".join(words)
    ids = language.encode('Sie sagte: "Gut & schön", z.B. 3,5 - [x]')
    assert language.unk_id not in ids
    assert language.tokens(ids) == " ".join(words)
    assert language.decode(ids) == 'sie sagte: "gut & schön", z.b. 3,5 - [x]'
    assert language.encode_prepared([" ".join(words)])[0] == ids
    english = Language("en", Words(), MARKS, moses=True)
    assert english.prepared("We're born, aren't we?") == "We &apos;re born , aren &apos;t we ?"
    assert english.detokenized("We &apos;re born , aren &apos;t we ?") == "We're born, aren't we?"


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_moses_takes_any_line(line):
    pytest.importorskip("sacremoses")
    for kind in ("byte_bpe", "codes"):
        language = Language("en", SEGMENTERS[kind], entries(SEGMENTERS[kind]), moses=True, lowercase=True)
        ids = language.encode(line)
        assert "\n" not in language.decode(ids)
        assert language.encode_prepared([language.prepared(line)])[0] == ids


def test_without_sacremoses_the_error_says_what_to_install(monkeypatch):
    from fullrank.data import language

    monkeypatch.setitem(sys.modules, "sacremoses", None)
    language._moses.cache_clear()
    with pytest.raises(InputError, match=r"pip install 'fullrank\[translate\]', or set data.moses=false"):
        Language("en", Words(), MARKS, moses=True).encode("a")
    assert Language("en", Words(), MARKS).encode("a") == [1]
