"""Tokenizers: ids, order, round trips, files."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.core.errors import InputError, RunError
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


BPE = {end: train_bpe([TEXT * 3], size=300, line_end=end) for end in (True, False)}
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


@given(ANY_TEXT)
@settings(deadline=None, max_examples=150)
def test_bytes_and_bpe_lose_nothing(text):
    assert ByteVocabulary().decode(ByteVocabulary().encode(text)) == text
    assert list(text.encode()) == ByteVocabulary().encode(text)
    for tokenizer in BPE.values():
        assert tokenizer.decode(tokenizer.encode(text)) == text


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
