"""The files of sentence pairs: found in a local folder, downloaded, or given as prefixes; their lines, checked and cleaned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fullrank.config.schema import DataConfig
from fullrank.data import synthetic_pairs
from fullrank.data.download import download
from fullrank.data.known import CorpusInfo
from fullrank.data.sources import SPLITS
from fullrank.data.text import open_text
from fullrank.errors import InputError

Report = Callable[[str], None]
SIDES = ("source", "target")
_FOLDERS = {"multi30k-de-en": ("multi30k",)}  # other names of the folder of a corpus
_BLOCK = 1 << 20


@dataclass(frozen=True)
class PairFiles:
    """Files of each split, (source, target); several of a side are read one after another."""

    splits: Mapping[str, tuple[Sequence[Path], Sequence[Path]]]
    languages: tuple[str, str]  # source, target
    notes: tuple[str, ...] = ()


@dataclass
class Cleaned:
    """What became of the pairs of the training split; `given` is the sum of the others."""

    given: int = 0
    kept: int = 0
    empty: int = 0
    too_long: int = 0
    ratio: int = 0


@dataclass(frozen=True)
class Cleaning:
    """Which training pairs are left out; lengths in words, before subwords. An empty side always is a reason."""

    max_length: int | None = None
    max_ratio: float | None = None
    counts: Cleaned = field(default_factory=Cleaned)

    def keeps(self, source: str, target: str) -> bool:
        """Whether a pair stays; it is counted."""
        counts, m, n = self.counts, len(source.split()), len(target.split())
        counts.given += 1
        if m == 0 or n == 0:
            counts.empty += 1
        elif self.max_length is not None and max(m, n) > self.max_length:
            counts.too_long += 1
        elif self.max_ratio is not None and max(m, n) > self.max_ratio * min(m, n):
            counts.ratio += 1
        else:
            counts.kept += 1
            return True
        return False


def find_pairs(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> PairFiles:
    """The files of a corpus of sentence pairs.

    Raises InputError for folders or files that are missing, empty, or of different numbers of lines; RunError if a
    download fails.
    """
    found = _given(config) if info.languages is None else _named(config, info, cache, report)
    for split, (source, target) in found.splits.items():
        key = f"data.{split}" if info.languages is None else "data.dir"
        m, n = (sum(_number_of_lines(path, key) for path in paths) for paths in (source, target))
        if m != n:
            names = [" + ".join(map(str, paths)) for paths in (source, target)]
            raise InputError(
                f"{key}: {names[0]} has {m:,} lines and {names[1]} has {n:,}; line k of the one must be the translation of "
                "line k of the other (untranslated lines are left empty)"
            )
    return found


def _given(config: DataConfig) -> PairFiles:
    """`data.name: parallel`."""
    base = Path(config.dir).expanduser() if config.dir else Path()
    suffixes = str(config.source), str(config.target)
    splits = {}
    for split in SPLITS:
        given = getattr(config, split)
        prefixes = [given] if isinstance(given, str) else list(given or ())
        if not prefixes:
            raise InputError(f"data.{split}: an empty list of prefixes")
        source, target = (
            [base / f"{Path(prefix).expanduser()}.{suffix.lstrip('.')}" for prefix in prefixes] for suffix in suffixes
        )
        splits[split] = (source, target)
    return PairFiles(splits, (suffixes[0].rpartition(".")[2], suffixes[1].rpartition(".")[2]))


def _named(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> PairFiles:
    """A corpus whose files are known by name; `data.source` and `data.target` may turn it round."""
    assert info.languages is not None
    languages = info.languages
    if config.source or config.target:
        source = config.source or next((side for side in languages if side != config.target), "")
        target = config.target or next((side for side in languages if side != source), "")
        if {source, target} != set(languages):
            raise InputError(
                f"data.source, data.target: {info.name} has the languages {' and '.join(languages)}, given {source} and "
                f"{target}"
            )
        languages = source, target
    if info.name == synthetic_pairs.NAME:
        candidates = [synthetic_pairs.files(cache)]
    elif config.dir is None:
        if not info.urls:
            raise InputError(f"data.name: {info.name} is not downloaded; give its folder with --from DIR (data.dir)")
        candidates = [download(info, cache, report)]
    else:
        folder = Path(config.dir).expanduser()
        if not folder.is_dir():
            what = f"{folder} is a file" if folder.exists() else f"no such folder: {folder}"
            raise InputError(f"data.dir: {what}; give the folder that holds {info.wanted()}")
        inner = (info.name, *_FOLDERS.get(info.name, ()))
        candidates = [place for place in (*(folder / name for name in inner), folder) if place.is_dir()]
    return PairFiles(_in_folder(info, candidates, languages), languages)


def _in_folder(
    info: CorpusInfo, candidates: Sequence[Path], languages: tuple[str, str]
) -> dict[str, tuple[list[Path], list[Path]]]:
    """The splits in the first folder that holds most of them; those beyond train, valid and test may be absent."""
    best: dict[str, Path] = {}
    where = candidates[0]
    for place in candidates:
        here = {
            key: place / next(name for name in names if (place / name).is_file())
            for key, names in info.files.items()
            if any((place / name).is_file() for name in names)
        }
        if len(here) > len(best):
            best, where = here, place
    missing = [
        info.files[key][0]
        for key in info.files
        if key not in best and (key.rpartition(".")[0] in SPLITS or _other(key, languages) in best)
    ]
    if missing:
        found = f"; found there: {', '.join(path.name for path in best.values())}" if best else ""
        last = " Without data.dir the corpus is downloaded." if info.urls else ""
        raise InputError(f"data.dir: {info.name}: {where} lacks {', '.join(missing)}{found}.{last}")
    splits = dict.fromkeys(key.rpartition(".")[0] for key in info.files)
    source, target = languages
    return {
        split: ([best[f"{split}.{source}"]], [best[f"{split}.{target}"]])
        for split in splits
        if f"{split}.{source}" in best
    }


def _other(key: str, languages: tuple[str, str]) -> str:
    """`train.de` of `train.en`."""
    split, _, side = key.rpartition(".")
    return f"{split}.{languages[side == languages[0]]}"


def _number_of_lines(path: Path, key: str) -> int:
    """Lines of a file; one without a newline at its end counts."""
    count, last = 0, b"\n"
    with open_text(path, key) as file:
        while block := file.read(_BLOCK):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def lines(path: Path, key: str) -> Iterator[str]:
    """Lines of a text file, without line ends; only a newline ends a line. InputError for what is not UTF-8."""
    with open_text(path, key) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{key}: {path} is not UTF-8 text: line {number:,} has the byte 0x{line[error.start]:02x} (convert the "
                    "file to UTF-8)"
                ) from None
            yield text.removeprefix("\ufeff") if number == 1 else text


def pairs_of_lines(files: tuple[Sequence[Path], Sequence[Path]], key: str) -> Iterator[tuple[str, str]]:
    """The lines of both sides, side by side."""
    source, target = (itertools.chain.from_iterable(lines(path, key) for path in paths) for paths in files)
    return zip(source, target, strict=True)
