"""Reading text in pieces, and cutting splits by lines."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from fullrank import files as text
from fullrank.core.errors import InputError
from fullrank.files import Section, cut_files, read_pieces


def pieces(section, exact=False):
    return [piece.text for piece in read_pieces(section, exact=exact)]


contents = st.text(st.sampled_from("ab. \n\u3000é日\U0001f600"), min_size=1, max_size=80)
LLAMA = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
READERS = [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Split(LLAMA, "isolated")]


@given(contents, st.integers(1, 9), st.sampled_from([4, 12, 1 << 20]))
@settings(deadline=None)
def test_pieces_are_the_whole_text_and_end_between_words(tmp_path_factory, content, piece, longest):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(content, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_PIECE", piece)
        patch.setattr(text, "_LONGEST_LINE", longest)
        texts = pieces(Section(path))
    assert "".join(texts) == content
    for reader in READERS if longest == 1 << 20 else []:
        words = [word for part in texts for word in reader.pre_tokenize_str(part)]
        assert [word for word, _ in words] == [word for word, _ in reader.pre_tokenize_str(content)]


def test_lines_between_spaces_end_pieces_as_in_penn_treebank(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(" a b \n" * 9)
    monkeypatch.setattr(text, "_PIECE", 8)
    assert pieces(Section(tmp_path / "a.txt")) == [" a b \n a b \n"] * 4 + [" a b \n"]


@given(contents, st.data())
@settings(deadline=None)
def test_sections_of_a_file_meet_between_characters(tmp_path_factory, content, data):
    """Cut anywhere, even inside a character, the parts are the whole text again."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    raw = content.encode()
    path.write_bytes(raw)
    cut = data.draw(st.integers(0, len(raw)))
    sections = [Section(path, 0, cut), Section(path, cut, len(raw))]
    assert "".join(piece for part in sections for piece in pieces(part)) == content
    exact = ["".join(pieces(part, exact=True)) for part in sections]
    assert [text.encode("utf-8", "surrogateescape") for text in exact] == [raw[:cut], raw[cut:]]


@given(st.text(st.sampled_from("ab \n\r\u2028\x0b\x85\u00e9"), min_size=1, max_size=60))
@settings(deadline=None)
def test_carriage_returns_are_newlines(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(content.encode())
    expected = content.replace("\r\n", "\n").replace("\r", "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_PIECE", 3)
        assert "".join(pieces(Section(path))) == expected
        begins_line = True
        for piece in read_pieces(Section(path), exact=False):
            assert piece.begins == begins_line
            begins_line = piece.text.endswith("\n")


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.booleans(), st.integers(1, 2))
@settings(deadline=None)
def test_files_are_cut_by_lines(tmp_path_factory, counts, ended, absent):
    """Every line is in one part, in order, and the later parts hold 5 % of the lines, at least one."""
    folder = tmp_path_factory.mktemp("text")
    paths = []
    lines = []
    for number, count in enumerate(counts):
        paths.append(folder / f"{number}.txt")
        lines_of_file = [f"file {number} line {line}" for line in range(count)]
        lines += lines_of_file
        paths[-1].write_text("\n".join(lines_of_file) + ("\n" if ended else ""), encoding="utf-8")
    shares = [1.0, *[0.05] * absent]
    if len(lines) <= absent:
        with pytest.raises(InputError, match=rf"{len(lines)} lines are too few to cut {absent + 1} splits"):
            cut_files(paths, shares, "data.train")
        return
    parts = []
    for sections in cut_files(paths, shares, "data.train"):
        parts.append([line for section in sections for line in "".join(pieces(section)).splitlines()])
    assert [line for part in parts for line in part] == lines
    assert [len(part) for part in parts[1:]] == [max(1, len(lines) // 20)] * absent
