"""Tokenizers: ids, order, round trips, files."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.core.errors import InputError, RunError
from fullrank.data.synthetic import make_pairs
from fullrank.data.tokenizers import (
    ByteVocabulary,
    CharacterVocabulary,
    Tokenizer,
    WordVocabulary,
    load_tokenizer,
    train_bpe,
)

TEXT = "the cat sat\non the mat\n\nthe end \u00e9t\u00e9 \u65e5\u672c\n"


def words(text: str) -> Counter[str]:
    return Counter(text.replace("\n", " <eos> ").split())


def test_ids_follow_frequency_then_alphabet():
    vocabulary = WordVocabulary.from_counts(
        {"b": 2, "a": 2, "z": 9, "<eos>": 5, "c": 1, "d": 1, "<unk>": 1}, min_count=2
    )
    assert vocabulary.entries == ["z", "<eos>", "<unk>", "a", "b"]  # <unk> stands for three
    assert vocabulary.start_id == vocabulary.eos_id == 1
    assert vocabulary.encode("c never") == [vocabulary.unk_id] * 2


def test_largest_vocabulary_counts_special_entries():
    counts = {f"w{i}": 100 - i for i in range(50)} | {"<eos>": 1}
    vocabulary = WordVocabulary.from_counts(counts, max_vocabulary=10)
    assert len(vocabulary) == 10
    assert set(vocabulary.entries) == {"<unk>", "<eos>", *(f"w{i}" for i in range(8))}
    assert vocabulary.entries[0] == "<unk>", "it stands for 42 words"


def test_eos_is_a_newline_both_ways():
    vocabulary = WordVocabulary.from_counts(words(TEXT))
    ids = vocabulary.encode("the cat\n\nthe end")
    assert [vocabulary.entries[i] for i in ids] == ["the", "cat", "<eos>", "<eos>", "the", "end"]
    assert vocabulary.decode(ids) == "the cat\n\nthe end"
    plain = WordVocabulary(vocabulary.entries, line_end=False)
    assert plain.encode("the cat\nend") == vocabulary.encode("the cat end")


def test_punctuation_split_and_lower_case():
    vocabulary = WordVocabulary.from_counts(
        words("don't return the __list__ ( )\n"), split="punctuation", lowercase=True
    )
    assert vocabulary.words("Don't return(the\n__list__)") == ["don't", "return", "(", "the", "<eos>", "__list__", ")"]
    ids = vocabulary.encode("Don't return(the __list__) <unk>")
    assert vocabulary.encode(vocabulary.decode(ids)) == ids
    assert vocabulary.decode(ids) == "don't return ( the __list__ ) <unk>"


@pytest.mark.parametrize("bad", [[-1], [0, 256], [999]])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(InputError, match=r"not in this vocabulary of 256 entries \(ids 0 to 255\)"):
        ByteVocabulary().decode(bad)


BPE = {end: train_bpe([TEXT * 3], size=300, line_end=end) for end in (True, False)}
CHARACTERS = CharacterVocabulary.from_counts(Counter(map(chr, range(0x250))))
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


@given(ANY_TEXT)
@settings(deadline=None, max_examples=150)
def test_bytes_and_bpe_lose_nothing(text):
    assert ByteVocabulary().decode(ByteVocabulary().encode(text)) == text
    assert list(text.encode()) == ByteVocabulary().encode(text)
    for tokenizer in BPE.values():
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(st.characters(max_codepoint=0x24F), max_size=60))
def test_characters_lose_nothing(text):
    assert CHARACTERS.decode(CHARACTERS.encode(text)) == text
    assert len(CHARACTERS.encode(text)) == len(text)


MARKS = ["<unk>", "<eos>", "<pad>", "<s>", "</s>", "<sos>", "<mask>", "@@", "</w>", "\u2581", "\u0120", "\u010a"]
MARKED = [
    line.format(m=m) for m in MARKS for line in ("{m}", "a {m} b", "cat{m}", "{m}dog", "he{m}re {m}{m}", "{m} {m}")
]
READ = "\n".join(MARKED) + "\n"
KINDS = {
    "word": lambda: WordVocabulary.from_counts(Counter(WordVocabulary(["<eos>"]).words(READ))),
    "word without line ends": lambda: WordVocabulary.from_counts(
        Counter(WordVocabulary(["<eos>"], line_end=False).words(READ)), line_end=False
    ),
    "character": lambda: CharacterVocabulary.from_counts(Counter(READ)),
    "byte": ByteVocabulary,
    "bpe": lambda: train_bpe([READ * 3], size=330),
    "bpe without line ends": lambda: train_bpe([READ * 3], size=330, line_end=False),
    "bpe of lines that begin": lambda: train_bpe([READ * 3], size=330, line_start=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_marks_of_a_text_come_back(kind, tmp_path):
    KINDS[kind]().save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in (*MARKED, *(READ,) * ("without" not in kind or kind[0] == "b")):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        ends = text.count("\n") * (tokenizer.eos_id is not None and "without" not in kind)
        assert ids.count(tokenizer.eos_id) == ends, "a mark of a text ends a line"


def test_another_process_with_other_hashes_gives_the_same():
    """BPE, the synthetic pairs."""
    code = (
        "import hashlib, json\n"
        "from fullrank.data import train_bpe; from fullrank.data.synthetic import make_pairs\n"
        f"print(train_bpe([{TEXT!r} * 3], size=300).fingerprint)\n"
        "print(hashlib.sha256(json.dumps(make_pairs()).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    here = hashlib.sha256(json.dumps(make_pairs()).encode()).hexdigest()
    assert there.stdout.split() == [BPE[True].fingerprint, here]


ALL = {
    "word": WordVocabulary.from_counts(words(TEXT), lowercase=True, split="punctuation"),
    "word without <unk>": WordVocabulary(sorted(words(TEXT)), line_end=False),
    "byte": ByteVocabulary(),
    "character": CharacterVocabulary.from_counts(Counter(TEXT + "\\ \t\r\x85\u2028\U0001f600")),
    "bpe": BPE[True],
    "bpe with newlines": BPE[False],
}


@pytest.mark.parametrize("name", ALL)
def test_saved_and_loaded(name, tmp_path):
    tokenizer = ALL[name]
    assert isinstance(tokenizer, Tokenizer)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.kind, len(loaded), loaded.fingerprint) == (tokenizer.kind, len(tokenizer), tokenizer.fingerprint)
    assert (loaded.start_id, loaded.eos_id) == (tokenizer.start_id, tokenizer.eos_id)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert getattr(loaded, "entries", None) == getattr(tokenizer, "entries", None)


@pytest.mark.parametrize("name", ALL)
def test_hugging_face_reads_the_file_as_it_is(name, tmp_path):
    from transformers import PreTrainedTokenizerFast

    ALL[name].save(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in (TEXT, "the end", "\n", "cat\n\nmat"):
        ids = ALL[name].encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs(text)["input_ids"] == [ALL[name].start_id, *ids]
        assert theirs.decode(ids) == ALL[name].decode(ids)


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
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(RunError, match="damaged or incomplete"):
        load_tokenizer(tmp_path)
    meta = json.loads((tmp_path / "vocabulary.json").read_text()) | {"kind": "runes"}
    (tmp_path / "vocabulary.json").write_text(json.dumps(meta))
    with pytest.raises(RunError, match="does not match its checksum"):
        load_tokenizer(tmp_path)
