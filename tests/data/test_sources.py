"""IWSLT 2014 and WMT 2016: raw files as they were published, files prepared by others, and the real ones."""

import pytest

from fullrank.config.run import DataConfig
from fullrank.core.errors import InputError
from fullrank.data import prepare

SPLITS = ("train", "valid", "test")
TEST_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")


def put(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def iwslt(folder, **keys):
    return prepare(DataConfig(name="iwslt14-de-en", dir=str(folder), cache=str(folder / "cache"), **keys))


def raw_talks(folder):
    """Training files with tags, 50 pairs of which three are cleaned away, and five test files of two sentences."""
    for side, word in (("de", "Satz"), ("en", "Line")):
        rows = ["<url>http://x</url>", "<keywords>k</keywords>", "<talkid>1</talkid>", f"<title>{word} 0</title>"]
        rows += [f"<description>{word} 1</description>"]
        for i in range(2, 50):
            text = f"{word} {i}, »so«!" if side == "de" else f"{word} {i}, it's so!"
            if i == 5:
                text = "" if side == "de" else "Nothing."
            if i == 7:
                text += " viel mehr davon, als im anderen Text" if side == "de" else ""
            if i == 9:
                text = "lang " * 176
            rows.append(text)
        put(folder / f"train.tags.de-en.{side}", rows)
        for name in TEST_SETS:
            seg = f"{name} Das ist’s gut." if side == "de" else f"{name} That’s it."
            segments = [f'<seg id="1"> {seg} </seg>', f'<seg id="12">{seg}2</seg>']
            put(folder / f"IWSLT14.{name}.de-en.{side}.xml", ["<?xml version='1.0'?>", "<doc>", *segments, "</doc>"])


def test_raw_talks_become_the_usual_files(tmp_path):
    pytest.importorskip("sacremoses")
    raw_talks(tmp_path)
    corpus = iwslt(tmp_path, max_vocabulary=50)
    assert corpus.details["cleaning"] == {"given": 50, "kept": 47, "empty": 1, "too_long": 1, "ratio": 1, "valid": 2}
    assert [corpus.splits[split]["pairs"] for split in SPLITS] == [45, 2, 10]
    remaining = [i for i in range(50) if i not in (5, 7, 9)]
    valid = corpus.pairs("valid").target.read_tokens()
    assert valid == [f"line {remaining[22]} , it &apos;s so !", f"line {remaining[45]} , it &apos;s so !"]
    train = corpus.pairs("train")
    assert train.target.read_tokens()[:4] == [
        "line 0", "line 1", "line 2 , it &apos;s so !", "line 3 , it &apos;s so !",
    ]  # fmt: skip
    assert train.target.read_lines()[2] == "line 2, it's so!"
    assert train.source.read_lines()[:2] == ["satz 0", "satz 1"]
    assert len(set(train.target.read_lines())) == 45
    test = corpus.pairs("test")
    # the typographic apostrophe of the test files becomes a plain one, and Moses escapes it
    assert test.source.read_tokens()[0] == "ted.dev2010 das ist &apos; s gut ."
    assert test.target.read_tokens()[0] == "ted.dev2010 that &apos;s it ."
    assert [line.split()[0] for line in test.target.read_tokens()[::2]] == [name.lower() for name in TEST_SETS]
    assert corpus.label == "iwslt14-de-en (slice)"
    assert "every 23rd training pair" in corpus.details["notes"][0]
    assert corpus.source.encode("Satz 0") == train.source[0].tolist()
    assert corpus.target.decode(corpus.target.encode("It's so!")) == "it's so!"
    assert corpus.source.kind == "codes"
    back = iwslt(tmp_path, max_vocabulary=50, source="en")
    assert back.pairs("train").target.read_lines()[0] == "satz 0"
    assert back.label == "iwslt14-de-en (slice; en to de)"


def test_the_codes_beside_the_talks_are_used(tmp_path):
    folder = tmp_path / "iwslt14.de-en"
    put(folder / "code", ["#version: 0.2", "g u", "gu t</w>"])
    for split in SPLITS:
        put(folder / f"{split}.de", ["er sagte gut", "gut"])
        put(folder / f"{split}.en", ["he said so", "good"])
    corpus = iwslt(tmp_path, moses=False)
    assert corpus.details["codes"].endswith("code")
    assert [corpus.source.entries[i] for i in corpus.source.encode("gut")] == ["gut</w>"]
    put(tmp_path / "mine.codes", ["#version: 0.2", "u t</w>"])
    recoded = iwslt(tmp_path, moses=False, codes="mine.codes")
    assert [recoded.source.entries[i] for i in recoded.source.encode("gut")] == ["g", "ut</w>"]
    assert recoded.folder != corpus.folder
    with pytest.raises(InputError, match=r"data.codes: no such file: .*nowhere"):
        iwslt(tmp_path, codes="nowhere")
    # with a number of merges, merges are learned instead
    assert iwslt(tmp_path, moses=False, max_vocabulary=3).details["codes"] is None
    # each language holds the pieces of its own text, and of the other's none; a character it lacks is unknown
    assert set(corpus.target.entries) & {"gut", "er", "t@@"} == set()
    assert corpus.target.encode("😀") == [corpus.target.unk_id]
    joint = iwslt(tmp_path, moses=False, vocabulary="joint")
    assert joint.source.entries == joint.target.entries
    assert set(joint.source.entries) == set(corpus.source.entries) | set(corpus.target.entries)


def wmt(folder, **keys):
    return prepare(DataConfig(name="wmt16-en-de", dir=str(folder), cache=str(folder / "cache"), **keys))


def test_news_by_their_names(tmp_path):
    """Both sides of a split come from files of the same kind, the fuller set before the smaller."""
    folder = tmp_path / "wmt.en-de"
    for name, count in (("train.10k.tok", 4), ("newstest2012.tok", 2), ("newstest2014.tok", 3)):
        put(folder / f"{name}.en", [f"{name} it &apos;s {i} ." for i in range(count)])
        put(folder / f"{name}.de", [f"{name} es ist {i} ." for i in range(count)])
    put(folder / "newstest2013.de", ["roh"])
    put(folder / "newstest2013.tok.en", ["raw"])
    corpus = wmt(tmp_path, moses=False, max_vocabulary=300)
    assert (corpus.source.name, corpus.target.name) == ("en", "de")
    assert [corpus.splits[split]["pairs"] for split in SPLITS] == [4, 2, 3]
    assert corpus.pairs("valid").target.read_lines()[0] == "newstest2012.tok es ist 0 ."
    assert corpus.source.kind == "byte_bpe"
    put(folder / "train.tok.clean.en", ["more", "and more"])
    put(folder / "train.tok.clean.de", ["mehr", "und mehr"])
    assert wmt(tmp_path, moses=False, max_vocabulary=300).pairs("train").target.read_lines() == ["mehr", "und mehr"]
    with pytest.raises(InputError, match=r"wmt16-en-de is not downloaded; give its folder with --from DIR"):
        prepare(DataConfig(name="wmt16-en-de", cache=str(tmp_path / "cache")))
