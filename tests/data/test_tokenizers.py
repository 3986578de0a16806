"""Tokenizers: ids, order, round trips, files."""

import hashlib
import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.config.run import DataConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data import load_tokenizer, prepare, tokenizers
from fullrank.data.tokenizers import build_bytes, build_characters, build_words, rank_entries, train_bpe
from fullrank.text import _encode_lines

TEXT = "the cat sat\non the mat\n\nthe end \u00e9t\u00e9 \u65e5\u672c\n"
EMPTY = ["<unk>", "\n"]


def word_tokenizer(text, **options):
    """The words of a text as a tokenizer."""
    return build_words(rank_entries(Counter(build_words(EMPTY, **options).cut(text))), **options)


def test_ids_follow_frequency_then_alphabet():
    entries = rank_entries({"b": 2, "a": 2, "z": 9, "\n": 5, "c": 1, "d": 1, "<unk>": 1}, min_count=2)
    assert entries == ["z", "\n", "<unk>", "a", "b"]  # <unk> stands for three
    vocabulary = build_words(entries)
    assert vocabulary.entries == entries
    assert vocabulary.start_id == vocabulary.eos_id == 1
    assert vocabulary.encode("c never") == [vocabulary.unk_id] * 2
    with pytest.raises(InputError, match="lacks '<unk>'"):
        build_words(["\n", "a"])


def test_punctuation_split_and_lower_case():
    vocabulary = word_tokenizer("don't return the __list__ ( )\n", split="punctuation", lowercase=True)
    assert vocabulary.cut("Don't return(the\n__list__)") == ["don't", "return", "(", "the", "\n", "__list__", ")"]
    ids = vocabulary.encode("Don't return(the __list__) <unk>")
    assert vocabulary.decode(ids) == "don't return ( the __list__ ) <unk>"
    assert vocabulary.encode(vocabulary.decode(ids)) == ids


@pytest.mark.parametrize("bad", [[-1], [0, 256], [999]])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(InputError, match=r"not in this vocabulary of 256 entries \(ids 0 to 255\)"):
        build_bytes().decode(bad)


MARKS = ["<unk>", "<eos>", "<pad>", "<s>", "</s>", "<sos>", "<mask>", "@@", "</w>", "\u2581", "\u0120", "\u010a"]
MARKED = [
    line.format(m=m) for m in MARKS for line in ("{m}", "a {m} b", "cat{m}", "{m}dog", "he{m}re {m}{m}", "{m} {m}")
]
READ = "\n".join(MARKED) + "\n"
BPE = train_bpe([TEXT * 3], size=300)
ALL = {
    "word": word_tokenizer(READ + TEXT),
    "word and punctuation": word_tokenizer(TEXT, lowercase=True, split="punctuation"),
    "byte": build_bytes(),
    "character": build_characters(rank_entries(Counter(READ + TEXT + "\\ \t\r\x85\u2028\U0001f600"))),
    "bpe": BPE,
}
CHARACTERS = build_characters(rank_entries(Counter(map(chr, range(0x250)))))


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@settings(deadline=None, max_examples=150)
def test_bytes_and_bpe_lose_nothing(text):
    assert list(text.encode()) == ALL["byte"].encode(text)
    for name in ("byte", "bpe"):
        assert ALL[name].decode(ALL[name].encode(text)) == text


@given(st.text(st.characters(max_codepoint=0x24F), max_size=60))
def test_characters_lose_nothing(text):
    assert CHARACTERS.decode(CHARACTERS.encode(text)) == text
    assert len(CHARACTERS.encode(text)) == len(text)


@pytest.mark.parametrize("name", [name for name in ALL if "punctuation" not in name])
def test_marks_of_a_text_come_back(name):
    tokenizer = ALL[name]
    for text in (*MARKED, READ):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        ends = text.count("\n") * (tokenizer.eos_id is not None)
        assert ids.count(tokenizer.eos_id) == ends, "a mark of a text ends a line"


@pytest.mark.parametrize("name", ALL)
def test_saved_and_read_by_hugging_face_as_it_is(name, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = ALL[name]
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for value in ("kind", "entries", "fingerprint", "start_id", "eos_id"):
        assert getattr(loaded, value) == getattr(tokenizer, value)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in (TEXT, "the end", "\n", "cat\n\nmat"):
        ids = tokenizer.encode(text)
        assert loaded.encode(text) == ids
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs(text)["input_ids"] == [tokenizer.start_id, *ids]
        assert theirs.decode(ids) == tokenizer.decode(ids)


def test_a_pretrained_tokenizer_cuts_a_text_where_no_token_goes_over(tmp_path):
    """By the rules of GPT-2 two line ends are one token only at the end of a text."""
    from transformers import PreTrainedTokenizerFast

    rules = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = tokenizers.train_byte_bpe(["end\n\n"] * 2, 300, rules, ["<s>"])
    text = "an end\n\n" * 9000
    ids = backend.encode(text).ids
    assert tokenizers.PretrainedTokenizer(backend, start="<s>", eos=None).encode(text) == ids
    (tmp_path / "text").write_text(text)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert [*itertools.chain(*_encode_lines(theirs, tmp_path / "text"))] == ids


@pytest.mark.parametrize("name", ["word", "bpe"])
def test_damaged_files_are_errors(name, tmp_path):
    with pytest.raises(InputError, match=r"no vocabulary.json there"):
        load_tokenizer(tmp_path)
    ALL[name].save(tmp_path)
    state = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    for damaged in (state[: len(state) // 2], state.replace('"th', '"ht'), "{}"):
        (tmp_path / "tokenizer.json").write_text(damaged, encoding="utf-8")
        with pytest.raises(RunError, match="damaged"):
            load_tokenizer(tmp_path)
    meta = json.loads((tmp_path / "vocabulary.json").read_text()) | {"kind": "runes"}
    (tmp_path / "vocabulary.json").write_text(json.dumps(meta))
    with pytest.raises(RunError, match="does not match its checksum"):
        load_tokenizer(tmp_path)


SOS_WORDS = build_words(["b", "<unk>", "\n", "<sos>", "a"], sos=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\n", "<sos> a b <eos>"),
        ("a\n\nb\n", "<sos> a <eos> <sos> <eos> <sos> b <eos>"),
        ("a\nb", "<sos> a <eos> <sos> b"),
        ("\n", "<sos> <eos>"),
        ("", ""),
    ],
)
def test_every_line_begins_with_sos(text, expected):
    """The form of the paper's code: `<sos>` words `<eos>`, for a blank line, too."""
    ids = SOS_WORDS.encode(text)
    assert [SOS_WORDS.entries[i].replace("\n", "<eos>") for i in ids] == expected.split()
    assert SOS_WORDS.backend.encode(text, add_special_tokens=False).ids == ids
    assert SOS_WORDS.decode(ids) == text
    assert SOS_WORDS.start_id == SOS_WORDS.eos_id != SOS_WORDS.sos_id


def test_penn_treebank_with_sos(corpora, tmp_path):
    """The counts of the paper's code: 10,001 entries, 77,130 and 86,191 tokens; it is no slice of the published corpus."""
    config = DataConfig(name="ptb", dir=str(corpora), cache=str(tmp_path), sos=True)
    corpus = prepare(config, allow_slice=False)
    assert len(corpus.tokenizer) == 10_001
    assert [corpus.splits[split]["tokens"] for split in ("valid", "test")] == [77_130, 86_191]
    assert [corpus.splits[split]["words"] for split in ("train", "valid", "test")] == [929_589, 73_760, 82_430]
    raw = (corpora / "ptb" / "ptb.test.txt").read_text(encoding="utf-8")
    expected = [word for line in raw.splitlines() for word in ["<sos>", *line.split(), "\n"]]
    assert [corpus.tokenizer.entries[i] for i in corpus.ids("test").tolist()] == expected
    assert (corpus.label, corpus.is_slice) == ("ptb (with <sos>)", False)
    assert prepare(replace(config, max_tokens=5000)).label == "ptb (slice; with <sos>)"


def test_the_fingerprint_of_words_is_that_of_their_entries():
    state = "\0".join(("word", "b", "<unk>", "<eos>", "a"))
    assert build_words(["b", "<unk>", "\n", "a"]).fingerprint == hashlib.sha256(state.encode()).hexdigest()
