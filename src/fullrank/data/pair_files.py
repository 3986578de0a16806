"""Files of sentence pairs: found in a local folder, downloaded, or given as prefixes; and their lines, side by side.

IWSLT 2014 as it was published is read as everybody prepares it since Ranzato et al. (2016): the training file without its
address, keyword and id lines and without the tags of title and description; the test set is dev2010, dev2012, tst2010, tst2011
and tst2012, from XML; every 23rd of the cleaned training pairs is the validation set.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError
from fullrank.data import synthetic_pairs
from fullrank.data.corpora import CorpusInfo, iwslt_files
from fullrank.data.download import download
from fullrank.data.files import Report, existing_folder, fullest_folder, lines, number_of_lines

# folders under which a corpus is looked for besides its own name, the best first
_FOLDERS = {
    "multi30k-de-en": ("multi30k",),
    "iwslt14-de-en": ("iwslt14.de-en", "iwslt14.tokenized.de-en/tmp", "iwslt14.tokenized.de-en", "de-en", "tmp"),
    "wmt16-en-de": ("wmt.en-de", "wmt16_en_de"),
}
_CODES = {"iwslt14-de-en": ("bpe10k.codes", "code"), "wmt16-en-de": ("bpe.32000",)}
_HEAD = 200  # lines that say whether a file was split by BPE
_BPE_MARK = re.compile("@@( |$)")
_IWSLT_VALID_EVERY = 23
_IWSLT_DROPPED = re.compile("<url>|<talkid>|<keywords>")
_IWSLT_TAGS = re.compile("</?title>|</?description>")
_IWSLT_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*|\s*</seg>\s*')

# the lines of a file; the second argument is the configuration key that errors name
Reader = Callable[[Path, str], Iterator[str]]


def _whole_words(path: Path, key: str) -> Iterator[str]:
    """Lines of a file that BPE has split, with the marks `@@` taken out."""
    return (_BPE_MARK.sub("", line) for line in lines(path, key))


def _iwslt_training(path: Path, key: str) -> Iterator[str]:
    return (_IWSLT_TAGS.sub("", line) for line in lines(path, key) if not _IWSLT_DROPPED.search(line))


def _iwslt_test(path: Path, key: str) -> Iterator[str]:
    return (_IWSLT_SEGMENT.sub("", line).replace("\u2019", "'") for line in lines(path, key) if "<seg id" in line)


@dataclass(frozen=True)
class SplitFiles:
    """Files of a split; several of a side are read one after another. `tokenized`: with Moses' rules already."""

    source: Sequence[Path]
    target: Sequence[Path]
    reader: Reader = lines
    tokenized: bool = False

    def sides(self) -> tuple[Sequence[Path], Sequence[Path]]:
        return self.source, self.target

    def pairs(self, key: str) -> Iterator[tuple[str, str]]:
        """The lines of both sides, side by side."""
        source, target = (
            itertools.chain.from_iterable(self.reader(path, key) for path in paths) for paths in self.sides()
        )
        return zip(source, target, strict=True)

    def check(self, key: str) -> None:
        """InputError if the two sides have different numbers of lines, or none."""

        def count(path: Path) -> int:
            return number_of_lines(path, key) if self.reader is lines else sum(1 for _ in self.reader(path, key))

        m, n = (sum(map(count, paths)) for paths in self.sides())
        if m != n:
            source, target = (" + ".join(map(str, paths)) for paths in self.sides())
            raise InputError(
                f"{key}: {source} has {m:,} lines and {target} has {n:,}; line k of the one must be the translation of "
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

    @property
    def names(self) -> list[str]:
        """Names of the splits, in order."""
        first, *others = self.splits
        return [first, "valid", *others] if self.valid_every else [first, *others]


def find_pairs(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> PairFiles:
    """The files of a corpus of sentence pairs.

    Raises InputError for folders or files that are missing, empty, or of different numbers of lines; RunError if a
    download fails.
    """
    base = Path(config.dir).expanduser() if config.dir else Path()
    codes = None if config.codes is None else base / Path(config.codes).expanduser()
    if info.languages is None:
        files = _given_prefixes(config, base, codes)
    else:
        files = _known_names(config, info, info.languages, _places(config, info, cache, report), codes)
    for split, content in files.splits.items():
        content.check(split_key(info, split))
    return files


def split_key(info: CorpusInfo, split: str) -> str:
    """The configuration key that says where a split is."""
    return f"data.{split}" if info.languages is None else "data.dir"


def _given_prefixes(config: DataConfig, base: Path, codes: Path | None) -> PairFiles:
    """The files of `data.name: parallel`. A prefix with the part `tok`, as in `train.tok`, names tokenized files."""
    suffixes = str(config.source).lstrip("."), str(config.target).lstrip(".")
    splits = {}
    for split, given in (("train", config.train), ("valid", config.valid), ("test", config.test)):
        prefixes = [given] if isinstance(given, str) else list(given or ())
        if not prefixes:
            raise InputError(f"data.{split}: an empty list of prefixes")
        source, target = (
            [base / f"{Path(prefix).expanduser()}.{suffix}" for prefix in prefixes] for suffix in suffixes
        )
        splits[split] = SplitFiles(source, target, tokenized=all(_is_tokenized(path) for path in source))
    names = suffixes[0].rpartition(".")[2], suffixes[1].rpartition(".")[2]
    return PairFiles(splits, names, codes)


def _is_tokenized(path: Path) -> bool:
    return "tok" in path.name.split(".")


def _places(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> list[Path]:
    """Folders that may hold the files of a corpus."""
    if info.name == synthetic_pairs.NAME:
        return [synthetic_pairs.files(cache)]
    if config.dir is None:
        if not info.urls:
            raise InputError(
                f"data.name: {info.name} is not downloaded; give its folder with --from DIR (data.dir): {info.source}"
            )
        return [download(info, cache, report)]
    folder = existing_folder(Path(config.dir).expanduser(), info.wanted())
    inner = (folder / name for name in (info.name, *_FOLDERS.get(info.name, ())))
    return [place for place in (*inner, folder) if place.is_dir()]


def _known_names(
    config: DataConfig, info: CorpusInfo, sides: tuple[str, str], places: Sequence[Path], codes: Path | None
) -> PairFiles:
    """The files of a corpus whose names are known; `data.source` and `data.target` may turn it round."""
    source = config.source or next(side for side in sides if side != config.target)
    target = config.target or next(side for side in sides if side != source)
    if {source, target} != set(sides):
        raise InputError(
            f"data.source, data.target: {info.name} has the languages {' and '.join(sides)}, given {source} and {target}"
        )
    if info.name == "iwslt14-de-en":
        for place in places:
            raw = [[place / name for name in iwslt_files(side)] for side in (source, target)]
            if all(path.is_file() for paths in raw for path in paths):
                splits = {
                    "train": SplitFiles(raw[0][:1], raw[1][:1], _iwslt_training),
                    "test": SplitFiles(raw[0][1:], raw[1][1:], _iwslt_test),
                }
                note = f"every {_IWSLT_VALID_EVERY}rd training pair that cleaning keeps is in the validation split"
                return PairFiles(splits, (source, target), codes, _IWSLT_VALID_EVERY, (note,))
    where, prefixes = _prefixes(info, sides, places)
    if codes is None and config.max_vocabulary is None:
        around = (where, where.parent) if where.name == "tmp" else (where,)
        codes = next((p / name for p in around for name in _CODES.get(info.name, ()) if (p / name).is_file()), None)
    splits, notes = {}, []
    for split, prefix in prefixes.items():
        files = [where / f"{prefix}.{side}" for side in (source, target)]
        tokenized = info.name == "iwslt14-de-en" or _is_tokenized(files[0])
        head = list(itertools.islice(lines(files[0], "data.dir"), _HEAD))
        split_up = 2 * sum("@@ " in line for line in head) > len(head)
        if split_up:
            notes.append(f"{split}: the marks @@ of BPE are taken out of {prefix}.*")
        splits[split] = SplitFiles([files[0]], [files[1]], _whole_words if split_up else lines, tokenized)
    if any(content.tokenized for content in splits.values()):
        tokenized_splits = (split for split, content in splits.items() if content.tokenized)
        notes.append(f"tokenized already: {', '.join(tokenized_splits)}")
    return PairFiles(splits, (source, target), codes, notes=tuple(notes))


def _prefixes(info: CorpusInfo, sides: tuple[str, str], places: Sequence[Path]) -> tuple[Path, dict[str, str]]:
    """The folder that holds most splits, and of each the first prefix that both languages have.

    Splits beyond train, valid and test may be absent.
    """
    accepted = {
        name.rpartition(".")[0]: [file.removesuffix(f".{sides[0]}") for file in files]
        for name, files in info.files.items()
        if name.endswith(f".{sides[0]}")
    }

    def there(place: Path, prefix: str) -> list[str]:
        return [f"{prefix}.{side}" for side in sides if (place / f"{prefix}.{side}").is_file()]

    where, prefixes = fullest_folder(places, accepted, lambda place, prefix: len(there(place, prefix)) == 2)
    missing, found = [], [f"{prefix}.{side}" for prefix in prefixes.values() for side in sides]
    for split, names in accepted.items():
        half = next((name for name in names if there(where, name)), None)
        if split in prefixes or (half is None and split not in ("train", "valid", "test")):
            continue
        files = there(where, half) if half is not None else []
        found += files
        missing += [f"{half or names[0]}.{side}" for side in sides if f"{half}.{side}" not in files]
    if missing:
        text = f"; found there: {', '.join(found)}" if found else ""
        last = " Without data.dir the corpus is downloaded." if info.urls else ""
        raise InputError(f"data.dir: {info.name}: {where} lacks {', '.join(missing)}{text}.{last}")
    return where, prefixes
