"""The files of sentence pairs: found in a local folder, downloaded, or given as prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError
from fullrank.data import iwslt, synthetic_pairs
from fullrank.data.download import download
from fullrank.data.files import lines
from fullrank.data.known import CorpusInfo
from fullrank.data.pair_lines import PairFiles, SplitFiles, whole_words
from fullrank.data.sources import SPLITS

Report = Callable[[str], None]
# folders under which a corpus is looked for besides its own name, the best first
_FOLDERS = {
    "multi30k-de-en": ("multi30k",),
    "iwslt14-de-en": ("iwslt14.de-en", "iwslt14.tokenized.de-en/tmp", "iwslt14.tokenized.de-en", "de-en", "tmp"),
    "wmt16-en-de": ("wmt.en-de", "wmt16_en_de"),
}
_CODES = {"iwslt14-de-en": ("bpe10k.codes", "code"), "wmt16-en-de": ("bpe.32000",)}
_LOOKED_AT = 200  # lines, to see whether a file was split by BPE


def find_pairs(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> PairFiles:
    """The files of a corpus of sentence pairs.

    Raises InputError for folders or files that are missing, empty, or of different numbers of lines; RunError if a
    download fails.
    """
    found = _given(config) if info.languages is None else _named(config, info, cache, report)
    for split, files in found.splits.items():
        files.check(key_of(info, split))
    return found


def key_of(info: CorpusInfo, split: str) -> str:
    """The configuration key that says where a split is."""
    return f"data.{split}" if info.languages is None else "data.dir"


def _base(config: DataConfig) -> Path:
    return Path(config.dir).expanduser() if config.dir else Path()


def _codes(config: DataConfig) -> Path | None:
    return None if config.codes is None else _base(config) / Path(config.codes).expanduser()


def _given(config: DataConfig) -> PairFiles:
    """`data.name: parallel`. A prefix that holds the part `tok`, as in `train.tok`, names tokenized files."""
    suffixes = str(config.source).lstrip("."), str(config.target).lstrip(".")
    splits = {}
    for split in SPLITS:
        given = getattr(config, split)
        prefixes = [given] if isinstance(given, str) else list(given or ())
        if not prefixes:
            raise InputError(f"data.{split}: an empty list of prefixes")
        source, target = (
            [_base(config) / f"{Path(prefix).expanduser()}.{suffix}" for prefix in prefixes] for suffix in suffixes
        )
        splits[split] = SplitFiles(source, target, tokenized=all(_is_tokenized(path) for path in source))
    names = suffixes[0].rpartition(".")[2], suffixes[1].rpartition(".")[2]
    return PairFiles(splits, names, _codes(config))


def _is_tokenized(path: Path) -> bool:
    return "tok" in path.name.split(".")


def _named(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> PairFiles:
    """A corpus whose files are known by name."""
    languages = _languages(config, info)
    if info.name == synthetic_pairs.NAME:
        places = [synthetic_pairs.files(cache)]
    elif config.dir is None:
        if not info.urls:
            raise InputError(
                f"data.name: {info.name} is not downloaded; give its folder with --from DIR (data.dir): {info.source}"
            )
        places = [download(info, cache, report)]
    else:
        folder = Path(config.dir).expanduser()
        if not folder.is_dir():
            what = f"{folder} is a file" if folder.exists() else f"no such folder: {folder}"
            raise InputError(f"data.dir: {what}; give the folder that holds {info.wanted()}")
        inner = (info.name, *_FOLDERS.get(info.name, ()))
        places = [place for place in (*(folder / name for name in inner), folder) if place.is_dir()]
    codes = _codes(config)
    if info.name == "iwslt14-de-en" and (raw := iwslt.raw_files(places, languages)) is not None:
        note = f"every {iwslt.VALID_EVERY}rd training pair that cleaning keeps is in the validation split"
        return PairFiles(raw, languages, codes, iwslt.VALID_EVERY, (note,))
    where, prefixes = _prefixes(info, places)
    if codes is None and config.max_vocabulary is None:
        around = (where, where.parent) if where.name == "tmp" else (where,)
        codes = next((p / name for p in around for name in _CODES.get(info.name, ()) if (p / name).is_file()), None)
    splits, notes = {}, []
    for split, prefix in prefixes.items():
        source, target = (where / f"{prefix}.{side}" for side in languages)
        tokenized = info.name == "iwslt14-de-en" or _is_tokenized(source)
        split_up = _split_by_bpe(source)
        if split_up:
            notes.append(f"{split}: the marks @@ of BPE are taken out of {prefix}.*")
        splits[split] = SplitFiles([source], [target], whole_words if split_up else lines, tokenized)
    if any(files.tokenized for files in splits.values()):
        notes.append(f"tokenized already: {', '.join(split for split, files in splits.items() if files.tokenized)}")
    return PairFiles(splits, languages, codes, notes=tuple(notes))


def _languages(config: DataConfig, info: CorpusInfo) -> tuple[str, str]:
    """Source and target; `data.source` and `data.target` may turn a corpus round."""
    assert info.languages is not None
    source = config.source or next(side for side in info.languages if side != config.target)
    target = config.target or next(side for side in info.languages if side != source)
    if {source, target} != set(info.languages):
        raise InputError(
            f"data.source, data.target: {info.name} has the languages {' and '.join(info.languages)}, given {source} and "
            f"{target}"
        )
    return source, target


def _split_by_bpe(path: Path) -> bool:
    """Whether most lines hold a word that is split by the marks of subword-nmt."""
    head = list(itertools.islice(lines(path, "data.dir"), _LOOKED_AT))
    return 2 * sum("@@ " in line for line in head) > len(head)


def _prefixes(info: CorpusInfo, places: Sequence[Path]) -> tuple[Path, dict[str, str]]:
    """The folder that holds most splits, and of each the first prefix that both languages have.

    Splits beyond train, valid and test may be absent.
    """
    assert info.languages is not None
    sides = info.languages
    splits = list(dict.fromkeys(key.rpartition(".")[0] for key in info.files))
    names = {
        split: [name.removesuffix(f".{sides[0]}") for name in info.files[f"{split}.{sides[0]}"]] for split in splits
    }

    def there(place: Path, prefix: str) -> list[str]:
        return [f"{prefix}.{side}" for side in sides if (place / f"{prefix}.{side}").is_file()]

    best: dict[str, str] = {}
    where = places[0]
    for place in places:
        here = {
            split: next(name for name in names[split] if len(there(place, name)) == 2)
            for split in splits
            if any(len(there(place, name)) == 2 for name in names[split])
        }
        if len(here) > len(best):
            best, where = here, place
    missing, found = [], [f"{prefix}.{side}" for prefix in best.values() for side in sides]
    for split in (split for split in splits if split not in best):
        half = next((name for name in names[split] if there(where, name)), None)
        if half is not None:
            found += there(where, half)
            missing += [f"{half}.{side}" for side in sides if f"{half}.{side}" not in found]
        elif split in SPLITS:
            missing += [f"{names[split][0]}.{side}" for side in sides]
    if missing:
        text = f"; found there: {', '.join(found)}" if found else ""
        last = " Without data.dir the corpus is downloaded." if info.urls else ""
        raise InputError(f"data.dir: {info.name}: {where} lacks {', '.join(missing)}{text}.{last}")
    return where, best
