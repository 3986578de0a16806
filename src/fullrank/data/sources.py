"""The source files of a corpus: downloaded, or found in a local folder; of text for language models, and of sentence pairs.

IWSLT 2014 as it was published is read as everybody prepares it since Ranzato et al. (2016): the training file without its
address, keyword and id lines and without the tags of title and description; the test set is dev2010, dev2012, tst2010, tst2011
and tst2012, from XML; every 23rd of the cleaned training pairs is the validation set.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullrank.config.data import DataConfig
from fullrank.config.finetune import TaskDataConfig
from fullrank.core.errors import InputError
from fullrank.data import builtin
from fullrank.data.corpora import CODES, CORPORA, FOLDERS, CorpusInfo, download, iwslt_files, text_corpus
from fullrank.data.files import (
    Report,
    Section,
    cut_by_lines,
    existing_folder,
    file_digest,
    lines,
    number_of_lines,
    open_text,
)

SPLITS = ("train", "valid", "test")
_LM1B = "1-billion-word-language-modeling-benchmark-r13output"
_LM1B_PARTS = ("training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled")
_LM1B_FOLDERS = ("", *_LM1B_PARTS, *(f"{_LM1B}/{part}" for part in _LM1B_PARTS))
_MOST_CUT = 1000  # pairs of a split that is cut from the training files
_HEAD = 200  # lines that say whether a file was split by BPE
_BPE_MARK = re.compile("@@( |$)")
_IWSLT_VALID_EVERY = 23
_IWSLT_DROPPED = re.compile("<url>|<talkid>|<keywords>")
_IWSLT_TAGS = re.compile("</?title>|</?description>")
_IWSLT_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*|\s*</seg>\s*')


def report_unread_folder(config: DataConfig, report: Report) -> None:
    """Say that a folder plays no part beside a text that is made here."""
    if config.dir is not None:
        report(f"data.dir (--from): no file of {config.dir} is read, as data.name is {config.name}, which is made here")


def _local_folders(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> list[Path]:
    """Folders that may hold the files of a corpus, which is downloaded where no folder is named."""
    if info.name == builtin.SYNTHETIC:
        report_unread_folder(config, report)
        return [builtin.synthetic_files(cache)]
    if config.dir is None:
        if not info.urls:
            raise InputError(
                f"data.name: {info.name} is not downloaded; give its folder with --from DIR (data.dir): {info.source}"
            )
        folder = download(info, cache, report)
    else:
        folder = existing_folder(Path(config.dir).expanduser(), info.file_names())
    candidates = (*(folder / name for name in (info.name, *FOLDERS.get(info.name, ()))), folder)
    return [candidate for candidate in candidates if candidate.is_dir()]


def _names(split: str, value: str | list[str] | None, kind: str) -> list[str]:
    """The files or prefixes that a configuration gives for a split."""
    if value == []:
        raise InputError(f"data.{split}: an empty list of {kind}")
    return [value] if isinstance(value, str) else value or []


def _fullest_folder(
    folders: Sequence[Path], names: Mapping[str, Sequence[str]], holds: Callable[[Path, str], bool]
) -> tuple[Path, dict[str, str]]:
    """The folder that holds most splits, and of each split the first of its accepted `names` there."""

    def first_names(folder: Path) -> dict[str, str]:
        first = {split: next((n for n in accepted if holds(folder, n)), None) for split, accepted in names.items()}
        return {split: name for split, name in first.items() if name is not None}

    return max(((folder, first_names(folder)) for folder in folders), key=lambda item: len(item[1]))


def _lacking(info: CorpusInfo, folder: Path, missing: Sequence[str], present: Sequence[str]) -> InputError:
    text = f"data.dir: {info.name}: {folder} lacks {', '.join(missing)}"
    text += f"; found there: {', '.join(present)}." if present else "."
    if info.name == "wikitext-2":
        text += " WikiText-103 has the same validation and test articles: data.name=wikitext-103"
        folders, names = (folder, folder.parent), CORPORA["wikitext-103"].files["train"]
        candidates = (inner / "wikitext-103" / name for inner in folders for name in names)
        train = next((path for path in candidates if path.is_file()), None)
        text += f", with {train}." if train else " (also as a slice, wiki.train.slice.tokens)."
    return InputError(text + (" Without data.dir the corpus is downloaded." if info.urls else ""))


def files_of(config: DataConfig, split: str) -> list[Path]:
    """The files of a split of one's own text or sentence pairs; of a text, a pattern is all files that match."""
    base = Path(config.dir or "").expanduser()
    paths = [base / Path(name).expanduser() for name in _names(split, getattr(config, split), "files")]
    if config.has_pairs:
        return [Path(f"{path}.{str(side).lstrip('.')}") for path in paths for side in (config.source, config.target)]
    return [file for path in paths for file in _matching(path, f"data.{split}")]


def check_data(config: DataConfig | TaskDataConfig) -> None:
    """InputError for files of one's own, or a folder of a corpus, that are not there; reads no more than their names."""
    if config.dir is not None and config.name not in (builtin.SYNTHETIC, "builtin"):
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

    def rows(self) -> list[dict[str, Any]]:
        """Files and their sha256, for the record of the corpus."""
        digests: dict[Path, str] = {}
        for split in SPLITS:
            for path in dict.fromkeys(section.path for section in self.sections[split]):
                digests[path] = digests.get(path) or file_digest(path, f"data.{split}")
        return [
            {
                "split": split,
                "file": str(section.path.absolute()),
                "start": section.start,
                "end": section.end,
                "sha256": digests[section.path],
            }
            for split in SPLITS
            for section in self.sections[split]
        ]


def find_text(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> TextSources:
    """The text of a corpus of files. Raises InputError for folders or files that are missing, empty or of the wrong kind."""
    if info.name == "text":
        return _given_files(config, report)
    folders = _local_folders(config, info, cache, report)
    if info.name == "lm1b":
        return _lm1b(folders)
    folder, names = _fullest_folder(folders, info.files, lambda inner, name: (inner / name).is_file())
    missing = [info.files[split][0] for split in info.files if split not in names]
    if missing:
        raise _lacking(info, folder, missing, list(names.values()))
    if "valid" in names:  # WikiText-2 and WikiText-103 have the same file names
        valid = folder / names["valid"]
        digest = file_digest(valid, "data.dir")
        for other in CORPORA.values():
            if other.name != info.name and other.sha256.get("valid") == digest:
                raise InputError(
                    f"data.name: '{info.name}', but {valid} is the validation file of {other.name}; set "
                    f"data.name={other.name}"
                )
    if info.name == "enwik8":
        return _by_bytes(info, folder / names["all"])
    return TextSources({split: [Section(folder / names[split])] for split in SPLITS})


def _by_bytes(info: CorpusInfo, path: Path) -> TextSources:
    """One file in the published proportions 90/5/5."""
    size = path.stat().st_size
    part = size // 20
    if part == 0:
        raise InputError(f"data.dir: {path} has {size} bytes, too few to cut 90, 5 and 5 % from")
    borders = (0, size - 2 * part, size - part, size)
    sections = {split: [Section(path, a, b)] for split, a, b in zip(SPLITS, borders[:-1], borders[1:], strict=True)}
    whole = size == sum(info.published.values())
    if whole and file_digest(path, "data.dir") != info.sha256["all"]:
        raise InputError(f"data.dir: {path} has the size of {info.name} and is another file (its sha256 differs)")
    return TextSources(sections, () if whole else (f"{path.name}: {size:,} bytes cut 90/5/5 in their order",))


def _lm1b(candidates: Sequence[Path]) -> TextSources:
    folders = [folder / inner for folder in candidates for inner in _LM1B_FOLDERS if (folder / inner).is_dir()]
    shards = (sorted(folder.glob("news.en-*-of-00100")) for folder in folders)
    train = next((paths for paths in shards if paths), [])
    heldout = {p.name: p for folder in reversed(folders) for p in folder.glob("news.en.heldout-*") if p.is_file()}
    valid, test = (heldout.get(f"news.en.heldout-{n:05d}-of-00050") for n in (1, 0))
    if train and valid and test:
        return TextSources(
            {"train": [Section(path) for path in train], "valid": [Section(valid)], "test": [Section(test)]}
        )
    slices = [heldout[name] for name in sorted(heldout)]
    if not train and len(slices) >= 2:
        *first, last = slices
        halves = cut_by_lines([last], (0.5, 0.5), "data.dir")
        note = f"held-out shards only: {', '.join(p.name for p in first)} as train, {last.name} in halves as valid and test"
        return TextSources({"train": [Section(path) for path in first], "valid": halves[0], "test": halves[1]}, (note,))
    raise InputError(
        f"data.dir: lm1b: {candidates[0]} holds {len(train)} training shards and {len(slices)} held-out shards; wanted are "
        "news.en-*-of-00100 with news.en.heldout-00000-of-00050 (test) and -00001- (valid), or, as a slice, "
        "at least two files news.en.heldout-*. Without data.dir the corpus is downloaded."
    )


def _given_files(config: DataConfig, report: Report) -> TextSources:
    """The files of `data.name: text`. Splits that are not given are cut from the end of the training lines, 5 % each."""
    paths: dict[str, list[Path]] = {}
    digests: dict[str, str] = {}
    notes = []
    for split, value in zip(SPLITS, (config.train, config.valid, config.test), strict=True):
        if value is not None:
            paths[split] = files_of(config, split)
        for path in paths.get(split, ()):
            other = digests.setdefault(file_digest(path, f"data.{split}"), split)
            if other != split:
                notes.append(f"warning: {path} in {split} has the same content as a file in {other}")
                report(notes[-1])
    if "train" not in paths:
        raise InputError("data.train: `data.name: text` needs at least one training file")
    sections = {split: [Section(path) for path in some] for split, some in paths.items()}
    absent = [split for split in SPLITS if split not in paths]
    if absent:
        parts = cut_by_lines(paths["train"], [1.0, *[0.05] * len(absent)], "data.train")
        sections |= dict(zip(["train", *absent], parts, strict=True))
        notes.append(f"{' and '.join(absent)}: the last lines of the training files, 5 % each")
        report(notes[-1])
    return TextSources(sections, tuple(notes))


_MODEL_FILES = ("config.yaml", "run.json", "config.json", "adapter_config.json")


def _matching(path: Path, key: str) -> list[Path]:
    """The file `path`; of a folder all .txt files in it, with `*`, `?` or `[` all files that match, in alphabetical order."""
    if path.is_dir():
        if models := [file for name in _MODEL_FILES for file in path.rglob(name)]:
            raise InputError(
                f"{key}: the folder {path} holds models or runs ({models[0]}), whose .txt files are no texts"
            )
        if not (texts := sorted(file for file in path.rglob("*.txt") if file.is_file())):
            raise InputError(f"{key}: the folder {path} holds no .txt file")
        return texts
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not matches:
        raise InputError(f"{key}: no file matches {path}")
    return matches


# sentence pairs


def _without_bpe_marks(rows: Iterator[str]) -> Iterator[str]:
    return (_BPE_MARK.sub("", row) for row in rows)


def _iwslt_training(rows: Iterator[str]) -> Iterator[str]:
    return (_IWSLT_TAGS.sub("", row) for row in rows if not _IWSLT_DROPPED.search(row))


def _iwslt_test(rows: Iterator[str]) -> Iterator[str]:
    return (_IWSLT_SEGMENT.sub("", row).replace("\u2019", "'") for row in rows if "<seg id" in row)


@dataclass(frozen=True)
class SplitFiles:
    """Files of both sides of a split; several of a side are read one after another.

    `key`: the configuration key that errors name. `reader`: sentences of the rows of a file, where they are not the same.
    `tokenized`: with Moses' rules already. `span`: the first of the lines, and the one after the last; None: all.
    """

    key: str
    sides: tuple[Sequence[Path], Sequence[Path]]
    reader: Callable[[Iterator[str]], Iterator[str]] | None = None
    tokenized: bool = False
    span: tuple[int, int] | None = None

    def _sentences(self, path: Path) -> Iterator[str]:
        rows = lines(path, self.key) if self.span is None else itertools.islice(lines(path, self.key), *self.span)
        return rows if self.reader is None else self.reader(rows)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """The lines of both sides, side by side."""
        source, target = (itertools.chain.from_iterable(map(self._sentences, paths)) for paths in self.sides)
        return zip(source, target, strict=True)

    def check(self) -> None:
        """InputError if the two sides have different numbers of lines, or none."""

        def count(path: Path) -> int:
            whole = self.reader is None and self.span is None
            return number_of_lines(path, self.key) if whole else sum(1 for _ in self._sentences(path))

        m, n = (sum(map(count, paths)) for paths in self.sides)
        if m != n:
            source, target = (" + ".join(map(str, paths)) for paths in self.sides)
            raise InputError(
                f"{self.key}: {source} has {m:,} lines and {target} has {n:,}; line k of the one must be the translation of "
                "line k of the other (where there is none, an empty line)"
            )


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
    base = Path(config.dir or "").expanduser()
    codes = None if config.codes is None else base / Path(config.codes).expanduser()
    if info.languages is None:
        files = _given_prefixes(config, base, codes, report)
    else:
        files = _known_names(config, info, info.languages, _local_folders(config, info, cache, report), codes)
    for content in files.splits.values():
        content.check()
    return files


def _given_prefixes(config: DataConfig, base: Path, codes: Path | None, report: Report) -> PairFiles:
    """The files of `data.name: parallel`. A prefix with the part `tok`, as in `train.tok`, names tokenized files.

    Splits that are not given are cut from the end of the training pairs.
    """
    suffixes = str(config.source).lstrip("."), str(config.target).lstrip(".")
    splits = {}
    for split, value in zip(SPLITS, (config.train, config.valid, config.test), strict=True):
        prefixes = _names(split, value, "prefixes")
        source, target = (
            [base / f"{Path(prefix).expanduser()}.{suffix}" for prefix in prefixes] for suffix in suffixes
        )
        if prefixes:
            splits[split] = SplitFiles(f"data.{split}", (source, target), tokenized=all(map(_is_tokenized, source)))
    notes = []
    if absent := [split for split in SPLITS if split not in splits]:
        splits |= _cut_from_training(splits["train"], absent)
        notes.append(f"{' and '.join(absent)}: the last pairs of the training files, 5 % each, at most {_MOST_CUT:,}")
        report(notes[-1])
    languages = tuple(suffix.removesuffix(".txt").rpartition(".")[2] for suffix in suffixes)
    return PairFiles(splits, (languages[0], languages[1]), codes, notes=tuple(notes))


def _cut_from_training(train: SplitFiles, absent: Sequence[str]) -> dict[str, SplitFiles]:
    """The training files without their last lines, and those as the splits `absent`, in their order.

    Raises InputError for several files, and for too few lines.
    """
    if len(train.sides[0]) > 1:
        raise InputError(
            f"data.{absent[0]}: cut from the training pairs only where these are one prefix; give its prefix"
        )
    train.check()
    total = number_of_lines(train.sides[0][0], train.key)
    part = min(total // 20, _MOST_CUT)
    if part == 0:
        raise InputError(
            f"data.train: {total} pairs are too few to cut {' and '.join(absent)} from; give their prefixes"
        )
    borders = [0, *(total - part * left for left in range(len(absent), -1, -1))]
    return {
        split: replace(train, key=f"data.{split}", span=span)
        for split, span in zip(["train", *absent], itertools.pairwise(borders), strict=True)
    }


def _is_tokenized(path: Path) -> bool:
    return "tok" in path.name.split(".")


def _known_names(
    config: DataConfig, info: CorpusInfo, sides: tuple[str, str], folders: Sequence[Path], codes: Path | None
) -> PairFiles:
    """The files of a corpus whose names are known; `data.source` and `data.target` may turn it round."""
    source = config.source or next(side for side in sides if side != config.target)
    target = config.target or next(side for side in sides if side != source)
    if {source, target} != set(sides):
        raise InputError(
            f"data.source, data.target: {info.name} has the languages {' and '.join(sides)}, given {source} and {target}"
        )
    if info.name == "iwslt14-de-en":
        for folder in folders:
            first, second = ([folder / name for name in iwslt_files(side)] for side in (source, target))
            if all(path.is_file() for path in (*first, *second)):
                splits = {
                    "train": SplitFiles("data.dir", (first[:1], second[:1]), _iwslt_training),
                    "test": SplitFiles("data.dir", (first[1:], second[1:]), _iwslt_test),
                }
                note = f"every {_IWSLT_VALID_EVERY}rd training pair that cleaning keeps is in the validation split"
                return PairFiles(splits, (source, target), codes, _IWSLT_VALID_EVERY, (note,))
    folder, prefixes = _prefixes(info, sides, folders)
    if codes is None and config.max_vocabulary is None:
        around = (folder, folder.parent) if folder.name == "tmp" else (folder,)
        codes = next((p / name for p in around for name in CODES.get(info.name, ()) if (p / name).is_file()), None)
    splits, notes = {}, []
    for split, prefix in prefixes.items():
        first, second = ([folder / f"{prefix}.{side}"] for side in (source, target))
        tokenized = info.name == "iwslt14-de-en" or _is_tokenized(first[0])
        head = list(itertools.islice(lines(first[0], "data.dir"), _HEAD))
        split_up = 2 * sum("@@ " in line for line in head) > len(head)
        if split_up:
            notes.append(f"{split}: the marks @@ of BPE are taken out of {prefix}.*")
        splits[split] = SplitFiles("data.dir", (first, second), _without_bpe_marks if split_up else None, tokenized)
    if tokenized_splits := [split for split, content in splits.items() if content.tokenized]:
        notes.append(f"tokenized already: {', '.join(tokenized_splits)}")
    return PairFiles(splits, (source, target), codes, notes=tuple(notes))


def _prefixes(info: CorpusInfo, sides: tuple[str, str], folders: Sequence[Path]) -> tuple[Path, dict[str, str]]:
    """The folder that holds most splits, and of each the first prefix that both languages have.

    Splits beyond train, valid and test may be absent.
    """
    accepted: dict[str, list[str]] = {}
    for name, file_names in info.files.items():
        accepted[name.rpartition(".")[0]] = [file.rpartition(".")[0] for file in file_names]

    def present(folder: Path, prefix: str) -> list[str]:
        return [f"{prefix}.{side}" for side in sides if (folder / f"{prefix}.{side}").is_file()]

    folder, prefixes = _fullest_folder(folders, accepted, lambda inner, prefix: len(present(inner, prefix)) == 2)
    missing, files_there = [], [f"{prefix}.{side}" for prefix in prefixes.values() for side in sides]
    for split, names in accepted.items():
        one_side = next((name for name in names if present(folder, name)), None)  # the other is missing
        if split in prefixes or (one_side is None and split not in SPLITS):
            continue
        files = present(folder, one_side) if one_side is not None else []
        files_there += files
        missing += [name for side in sides if (name := f"{one_side or names[0]}.{side}") not in files]
    if missing:
        raise _lacking(info, folder, missing, files_there)
    return folder, prefixes
