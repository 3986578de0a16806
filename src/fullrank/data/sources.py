"""The source files of a corpus: downloaded, or in a local folder; of text for language models, and of sentence pairs.

IWSLT 2014 as it was published is read as everybody prepares it since Ranzato et al. (2016): the training file without its
address, keyword and id lines and without the tags of title and description; the test set is dev2010, dev2012, tst2010, tst2011
and tst2012, from XML; every 23rd of the cleaned training pairs is the validation set.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullrank.config.data import DataConfig
from fullrank.config.finetune import TaskDataConfig
from fullrank.core.errors import InputError
from fullrank.data import synthetic
from fullrank.data.corpora import CorpusInfo, download, read_extra, text_corpus
from fullrank.data.files import (
    Report,
    Section,
    count_lines,
    cut_by_lines,
    existing_folder,
    file_digest,
    lines,
    open_text,
)

SPLITS = ("train", "valid", "test")
_MOST_CUT = 1000  # pairs of a split that is cut from the training files
_IWSLT_VALID_EVERY = 23
_IWSLT_DROPPED = re.compile("<url>|<talkid>|<keywords>")
_IWSLT_TAGS = re.compile("</?title>|</?description>")
_IWSLT_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*|\s*</seg>\s*')


def _choose_folder(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> Path:
    """The folder with the files of a corpus, which is downloaded where no folder is named."""
    if info.name == synthetic.SYNTHETIC:
        return synthetic.write_files(cache)
    if config.dir is not None:
        folder = existing_folder(Path(config.dir).expanduser(), info.file_names())
    elif info.urls:
        folder = download(info, cache, report)
    else:
        raise InputError(
            f"data.name: {info.name} is not downloaded; give its folder with --from DIR (data.dir): {info.source}"
        )
    inner = [folder / name for name in (info.name, read_extra(info.name, "folder", info.name))]
    return next((candidate for candidate in inner if candidate.is_dir()), folder)


def _choose_files(
    info: CorpusInfo, folder: Path, names: Mapping[str, Sequence[str]], suffixes: Sequence[str] = ("",)
) -> dict[str, list[Path]]:
    """Match the files of each split: the first of its accepted `names` that has every suffix in `folder`.

    InputError for a split that is missing; splits beyond train, valid and test may be.
    """
    files, missing = {}, []
    for split, accepted in names.items():
        choices = [[folder / f"{name}{suffix}" for suffix in suffixes] for name in accepted]
        complete = next((paths for paths in choices if all(path.is_file() for path in paths)), None)
        if complete is not None:
            files[split] = complete
        elif split in (*SPLITS, "all"):
            missing += [path.name for path in choices[0] if not path.is_file()]
    if missing:
        hint = ". Without data.dir the corpus is downloaded" if info.urls else ""
        raise InputError(f"data.dir: {info.name}: {folder} lacks {', '.join(missing)}{hint}")
    return files


def files_of(config: DataConfig, split: str) -> list[Path]:
    """The files of a split of one's own text or sentence pairs; of a text, a pattern is all files that match."""
    paths = _list_paths(config, split)
    if config.has_pairs:
        return [Path(f"{path}.{str(side).lstrip('.')}") for path in paths for side in (config.source, config.target)]
    return [file for path in paths for file in _match_files(path, f"data.{split}")]


def _list_paths(config: DataConfig, split: str) -> list[Path]:
    """The files or prefixes that a configuration gives for a split."""
    value = getattr(config, split)
    if value == []:
        raise InputError(f"data.{split}: an empty list; give a file, or null")
    return [
        Path(config.dir or "").expanduser() / Path(name).expanduser()
        for name in ([value] if isinstance(value, str) else value or [])
    ]


def _match_files(path: Path, key: str) -> list[Path]:
    """The file `path`; of a folder all .txt files in it, with `*`, `?` or `[` all files that match, in alphabetical order."""
    pattern = str(path / "**" / "*.txt") if path.is_dir() else str(path)
    if path.is_file() or not glob.has_magic(pattern):
        return [path]
    files = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
    if not files:
        raise InputError(f"{key}: no file matches {pattern}")
    return files


def check_data(config: DataConfig | TaskDataConfig) -> None:
    """InputError for files of one's own, or a folder of a corpus, that are not there; reads no more than their names."""
    if config.dir is not None and config.name not in (synthetic.SYNTHETIC, "builtin"):
        existing_folder(Path(config.dir).expanduser(), "the files of the corpus")
    if not isinstance(config, DataConfig):
        return
    if not config.has_pairs:
        text_corpus(config.name)
    if config.name in ("text", "parallel"):
        for split in SPLITS:
            for path in files_of(config, split):
                open_text(path, f"data.{split}").close()


# text for language models


@dataclass(frozen=True)
class TextSources:
    """The text of each split, and notes on how it was divided (they go into the corpus's details)."""

    sections: Mapping[str, Sequence[Section]]
    notes: tuple[str, ...] = ()

    def describe(self) -> list[dict[str, Any]]:
        """Files and their sha256, for the record of the corpus."""
        digests: dict[Path, str] = {}
        rows = []
        for split in SPLITS:
            for section in self.sections[split]:
                path = section.path
                digests[path] = digests.get(path) or file_digest(path, f"data.{split}")
                about = {"split": split, "file": str(path.absolute()), "start": section.start, "end": section.end}
                rows.append({**about, "sha256": digests[path]})
        return rows


def find_text(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> TextSources:
    """The text of a corpus of files. Raises InputError for folders or files that are missing, empty or of the wrong kind."""
    if info.name == "text":
        return _find_own_text(config, report)
    folder = _choose_folder(config, info, cache, report)
    if info.name == "lm1b":
        return _find_lm1b(folder)
    files = _choose_files(info, folder, info.files)
    if info.name == "enwik8":
        return _cut_by_bytes(info, files["all"][0])
    return TextSources({split: [Section(files[split][0])] for split in SPLITS})


def _cut_by_bytes(info: CorpusInfo, path: Path) -> TextSources:
    """One file in the published proportions 90/5/5."""
    size = path.stat().st_size
    part = size // 20
    if part == 0:
        raise InputError(f"data.dir: {path} has {size} bytes, too few to cut 90, 5 and 5 % from")
    borders = itertools.pairwise((0, size - 2 * part, size - part, size))
    sections = {split: [Section(path, *ends)] for split, ends in zip(SPLITS, borders, strict=True)}
    is_whole = size == sum(info.published.values())
    return TextSources(sections, () if is_whole else (f"{path.name}: {size:,} bytes cut 90/5/5 in their order",))


def _find_lm1b(folder: Path) -> TextSources:
    """Training shards with two held-out shards, or a slice of held-out shards alone."""
    train = sorted(folder.rglob("news.en-*-of-00100"), key=lambda path: path.name)
    heldout = {path.name: path for path in sorted(folder.rglob("news.en.heldout-*"))}
    valid, test = (heldout.get(f"news.en.heldout-{number:05d}-of-00050") for number in (1, 0))
    if train and valid and test:
        sections = {"train": [Section(path) for path in train], "valid": [Section(valid)], "test": [Section(test)]}
        return TextSources(sections)
    if train or len(heldout) < 2:
        raise InputError(
            f"data.dir: lm1b: {folder} holds {len(train)} training shards and {len(heldout)} held-out shards; wanted are "
            "news.en-*-of-00100 with news.en.heldout-00000-of-00050 (test) and -00001- (valid), or, as a slice, "
            "at least two files news.en.heldout-*. Without data.dir the corpus is downloaded."
        )
    *first, last = (heldout[name] for name in sorted(heldout))
    valid_half, test_half = cut_by_lines([last], (0.5, 0.5), "data.dir")
    note = f"held-out shards only: {', '.join(p.name for p in first)} as train, {last.name} in halves as valid and test"
    sections = {"train": [Section(path) for path in first], "valid": valid_half, "test": test_half}
    return TextSources(sections, (note,))


def _find_own_text(config: DataConfig, report: Report) -> TextSources:
    """The files of `data.name: text`. Splits that are not given are cut from the end of the training lines, 5 % each."""
    paths = {split: files_of(config, split) for split in SPLITS}
    sections = {split: [Section(path) for path in paths[split]] for split in SPLITS if paths[split]}
    absent = [split for split in SPLITS if split not in sections]
    if not absent:
        return TextSources(sections)
    parts = cut_by_lines(paths["train"], [1.0, *[0.05] * len(absent)], "data.train")
    sections |= dict(zip(["train", *absent], parts, strict=True))
    note = f"{' and '.join(absent)}: the last lines of the training files, 5 % each"
    report(note)
    return TextSources(sections, (note,))


# sentence pairs


@dataclass(frozen=True)
class SplitFiles:
    """Files of both sides of a split; several of a side are read one after another.

    `key`: the configuration key that errors name. `is_raw`: files of IWSLT with their tags. `is_tokenized`: with Moses' rules
    already. `span`: the first of the lines, and the one after the last; None: all.
    """

    key: str
    sides: tuple[Sequence[Path], Sequence[Path]]
    is_raw: bool = False
    is_tokenized: bool = False
    span: tuple[int, int | None] = (0, None)

    def _read_side(self, paths: Sequence[Path]) -> Iterator[str]:
        for path in paths:
            rows = itertools.islice(lines(path, self.key), *self.span)
            yield from _read_iwslt(path, rows) if self.is_raw else rows

    def read_pairs(self) -> Iterator[tuple[str, str]]:
        """The lines of both sides, side by side."""
        return zip(*map(self._read_side, self.sides), strict=True)

    def check(self) -> None:
        """InputError if the two sides have different numbers of lines, or none."""
        m, n = (sum(1 for _ in self._read_side(paths)) for paths in self.sides)
        if m != n:
            source, target = (" + ".join(map(str, paths)) for paths in self.sides)
            raise InputError(
                f"{self.key}: {source} has {m:,} lines and {target} has {n:,}; line k of the one must be the translation of "
                "line k of the other (where there is none, an empty line)"
            )


def _read_iwslt(path: Path, rows: Iterator[str]) -> Iterator[str]:
    """Sentences of a published file: of the test set from XML, of the training set without their tags."""
    if path.suffix == ".xml":
        return (_IWSLT_SEGMENT.sub("", row).replace("\u2019", "'") for row in rows if "<seg id" in row)
    return (_IWSLT_TAGS.sub("", row) for row in rows if not _IWSLT_DROPPED.search(row))


@dataclass(frozen=True)
class PairFiles:
    """The files of each split. `codes`: BPE merges that go with them. `valid_every`: every so many-th training pair that
    cleaning keeps belongs to the validation split instead, which then has no files."""

    splits: Mapping[str, SplitFiles]
    languages: tuple[str, str]  # source, target
    codes: Path | None = None
    valid_every: int | None = None
    notes: tuple[str, ...] = ()


def find_pairs(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> PairFiles:
    """The files of a corpus of sentence pairs.

    Raises InputError for folders or files that are missing, empty, or of different numbers of lines; RunError if a
    download fails.
    """
    if info.languages is None:
        files = _find_own_pairs(config, report)
    else:
        source = config.source or next(side for side in info.languages if side != config.target)
        target = config.target or next(side for side in info.languages if side != source)
        if {source, target} != set(info.languages):
            raise InputError(
                f"data.source, data.target: {info.name} has the languages {' and '.join(info.languages)}, given {source} "
                f"and {target}"
            )
        folder = _choose_folder(config, info, cache, report)
        files = _find_iwslt(info, (source, target), folder) or _find_known(config, info, (source, target), folder)
    if config.codes is not None:
        files = replace(files, codes=Path(config.dir or "").expanduser() / Path(config.codes).expanduser())
    for content in files.splits.values():
        content.check()
    return files


def _find_own_pairs(config: DataConfig, report: Report) -> PairFiles:
    """The files of `data.name: parallel`. A prefix with the part `tok`, as in `train.tok`, names tokenized files.

    Splits that are not given are cut from the end of the training pairs.
    """
    splits = {}
    for split in SPLITS:
        if paths := files_of(config, split):
            tokenized = all(map(_is_tokenized, paths))
            splits[split] = SplitFiles(f"data.{split}", (paths[::2], paths[1::2]), is_tokenized=tokenized)
    notes = []
    if absent := [split for split in SPLITS if split not in splits]:
        splits |= _cut_from_training(splits["train"], absent)
        notes.append(f"{' and '.join(absent)}: the last pairs of the training files, 5 % each, at most {_MOST_CUT:,}")
        report(notes[-1])
    source, target = (str(side).removesuffix(".txt").rpartition(".")[2] for side in (config.source, config.target))
    return PairFiles(splits, (source, target), notes=tuple(notes))


def _cut_from_training(train: SplitFiles, absent: Sequence[str]) -> dict[str, SplitFiles]:
    """The training files without their last lines, and those as the splits `absent`, in their order.

    Raises InputError for several files, and for too few lines.
    """
    if len(train.sides[0]) > 1:
        raise InputError(
            f"data.{absent[0]}: cut from the training pairs only where these are one prefix; give its prefix"
        )
    total = count_lines(train.sides[0][0], train.key)
    part = min(total // 20, _MOST_CUT)
    if part == 0:
        raise InputError(
            f"data.train: {total} pairs are too few to cut {' and '.join(absent)} from; give their prefixes"
        )
    starts = [0, *(total - part * left for left in range(len(absent), 0, -1))]
    return {
        split: replace(train, key=f"data.{split}", span=(start, end))
        for split, start, end in zip(["train", *absent], starts, [*starts[1:], None], strict=True)
    }


def _is_tokenized(path: Path) -> bool:
    return "tok" in path.name.split(".")


def _find_iwslt(info: CorpusInfo, languages: tuple[str, str], folder: Path) -> PairFiles | None:
    """The files of IWSLT 2014 as it was published; None where they are not there."""
    files = [folder / name for name in info.packed]
    source, target = ([path for path in files if path.name.removesuffix(".xml").endswith(side)] for side in languages)
    if not files or not all(path.is_file() for path in files):
        return None
    splits = {
        "train": SplitFiles("data.dir", (source[:1], target[:1]), is_raw=True),
        "test": SplitFiles("data.dir", (source[1:], target[1:]), is_raw=True),
    }
    note = f"every {_IWSLT_VALID_EVERY}rd training pair that cleaning keeps is in the validation split"
    return PairFiles(splits, languages, valid_every=_IWSLT_VALID_EVERY, notes=(note,))


def _find_known(config: DataConfig, info: CorpusInfo, languages: tuple[str, str], folder: Path) -> PairFiles:
    """The files of a corpus by their known names, with the BPE merges beside them unless a size is asked for."""
    accepted: dict[str, list[str]] = {}
    for name, file_names in info.files.items():
        accepted[name.rpartition(".")[0]] = [file.rpartition(".")[0] for file in file_names]
    splits = {}
    for split, (source, target) in _choose_files(info, folder, accepted, [f".{side}" for side in languages]).items():
        tokenized = info.name == "iwslt14-de-en" or _is_tokenized(source)
        splits[split] = SplitFiles("data.dir", ([source], [target]), is_tokenized=tokenized)
    codes = None
    if config.max_vocabulary is None:
        codes = next((folder / name for name in read_extra(info.name, "codes", ()) if (folder / name).is_file()), None)
    tokenized_splits = [split for split, content in splits.items() if content.is_tokenized]
    notes = (f"tokenized already: {', '.join(tokenized_splits)}",) if tokenized_splits else ()
    return PairFiles(splits, languages, codes, notes=notes)
