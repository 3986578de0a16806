"""Reading text in pieces, and cutting splits by lines."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.core.errors import InputError
from fullrank.data import files as text
from fullrank.data.files import Section, cut_by_lines, pieces, workspace

contents = st.text(st.sampled_from("ab \né日\U0001f600"), min_size=1, max_size=80)


@given(contents, st.integers(1, 9), st.sampled_from([4, 12, 1 << 20]))
@settings(deadline=None)
def test_pieces_are_the_whole_text_and_end_between_words(tmp_path_factory, content, piece, longest):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(content, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_PIECE", piece)
        patch.setattr(text, "_LONGEST", longest)
        found = list(pieces(Section(path), exact=False))
    assert "".join(found) == content
    if longest == 1 << 20:
        assert all(before.endswith("\n") or after.startswith(" ") for before, after in pairwise(found))


@given(contents, st.data())
@settings(deadline=None)
def test_sections_of_a_file_meet_between_characters(tmp_path_factory, content, data):
    """Cut anywhere, even inside a character, the parts are the whole text again."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    raw = content.encode()
    path.write_bytes(raw)
    cut = data.draw(st.integers(0, len(raw)))
    parts = [Section(path, 0, cut), Section(path, cut, len(raw))]
    assert "".join(piece for part in parts for piece in pieces(part, exact=False)) == content
    exact = [b"".join(p.encode("utf-8", "surrogateescape") for p in pieces(part, exact=True)) for part in parts]
    assert exact == [raw[:cut], raw[cut:]]


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfab\n")
    assert list(pieces(Section(path), exact=False)) == ["ab\n"]
    assert list(pieces(Section(path), exact=True)) == ["\ufeffab\n"]


@pytest.mark.parametrize("before", [0, 7, (1 << 20) + 3, 3 << 20])
def test_bytes_that_are_not_utf8_are_named_by_offset(tmp_path, before):
    path = tmp_path / "latin1.txt"
    path.write_bytes((b"word\n" * (before // 5 + 1))[:before] + b"caf\xe9 noir\n")
    with pytest.raises(InputError, match=rf"latin1.txt is not UTF-8 text: byte 0xe9 at offset {before + 3:,} "):
        list(pieces(Section(path), exact=False))
    assert "".join(pieces(Section(path), exact=True)).encode("utf-8", "surrogateescape") == path.read_bytes()


def test_missing_empty_and_folder(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"data.valid: no such file: .*nothing.txt"):
        list(pieces(Section(tmp_path / "nothing.txt"), exact=False, key="data.valid"))
    with pytest.raises(InputError, match=r"data.train: .*empty.txt is empty"):
        list(pieces(Section(tmp_path / "empty.txt"), exact=False))
    with pytest.raises(InputError, match=r"data.train: .* is a folder; a text file is wanted"):
        list(pieces(Section(tmp_path), exact=False))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.booleans(), st.integers(1, 2))
@settings(deadline=None)
def test_cut_by_lines(tmp_path_factory, counts, ended, absent):
    """Every line is in one part, in order, and the later parts hold 5 % of the lines, at least one."""
    folder = tmp_path_factory.mktemp("text")
    paths, lines = [], []
    for number, count in enumerate(counts):
        paths.append(folder / f"{number}.txt")
        mine = [f"file {number} line {line}" for line in range(count)]
        lines += mine
        paths[-1].write_text("\n".join(mine) + ("\n" if ended else ""), encoding="utf-8")
    shares = [1.0, *[0.05] * absent]
    if len(lines) <= absent:
        with pytest.raises(InputError, match=rf"{len(lines)} lines are too few to cut {absent + 1} splits"):
            cut_by_lines(paths, shares, "data.train")
        return
    parts = [
        [line for section in part for line in "".join(pieces(section, exact=False)).splitlines()]
        for part in cut_by_lines(paths, shares, "data.train")
    ]
    assert [line for part in parts for line in part] == lines
    assert [len(part) for part in parts[1:]] == [max(1, len(lines) // 20)] * absent


def test_old_folders_of_others_stay(tmp_path: Path) -> None:
    """Only what a killed preparation of ours was making is taken away from a folder of the user."""
    own, others = tmp_path / ".tmp-fullrank-abcdefgh", tmp_path / ".tmp-download"
    for folder in (own, others):
        folder.mkdir()
        os.utime(folder, (0, 0))
    with workspace(tmp_path):
        assert not own.exists()
    assert [path.name for path in tmp_path.iterdir()] == [others.name]
