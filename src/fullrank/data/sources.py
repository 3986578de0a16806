"""Where the text of each split is: found in a local folder, downloaded, or given file by file."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError, suggest
from fullrank.data.download import download
from fullrank.data.files import Section, cut_by_lines, file_digest
from fullrank.data.known import CORPORA, CorpusInfo

Report = Callable[[str], None]
SPLITS = ("train", "valid", "test")
_LM1B_FOLDERS = (
    "",
    "training-monolingual.tokenized.shuffled",
    "heldout-monolingual.tokenized.shuffled",
    "1-billion-word-language-modeling-benchmark-r13output/training-monolingual.tokenized.shuffled",
    "1-billion-word-language-modeling-benchmark-r13output/heldout-monolingual.tokenized.shuffled",
)


@dataclass(frozen=True)
class Found:
    """The text of each split, and notes on how it was divided (they go into the corpus's details)."""

    sections: Mapping[str, Sequence[Section]]
    notes: tuple[str, ...] = ()


def find(config: DataConfig, cache: Path, report: Report) -> Found:
    """The text of a corpus of files (all but `builtin`).

    Raises InputError for an unknown name and for folders or files that are missing, empty or of the wrong kind;
    RunError if a download fails.
    """
    info = corpus_info(config.name)
    if info.name == "text":
        return _given(config, report)
    if config.dir is None:
        return _in_folder(info, download(info, cache, report))
    folder = Path(config.dir).expanduser()
    if not folder.exists():
        raise InputError(f"data.dir: no such folder: {folder}")
    if not folder.is_dir():
        raise InputError(f"data.dir: {folder} is a file; give the folder that holds {info.wanted()}")
    return _in_folder(info, folder)


def corpus_info(name: str) -> CorpusInfo:
    """What is known of a corpus; InputError suggests the nearest name."""
    if name not in CORPORA:
        near, known = suggest(name, CORPORA), f"known: {', '.join(CORPORA)}"
        found = f"{near} ({known})" if near.startswith("did you mean") else known
        raise InputError(f"data.name: unknown corpus '{name}'; {found}")
    if CORPORA[name].unit == "pairs":
        raise InputError(f"data.name: {name} is a corpus of sentence pairs, for translation; this is a language model")
    return CORPORA[name]


def _in_folder(info: CorpusInfo, folder: Path) -> Found:
    """`folder` is the corpus's own folder, or holds it under the corpus's name."""
    candidates = [place for place in (folder / info.name, folder) if place.is_dir()]
    if info.name == "lm1b":
        return _lm1b(candidates)
    best: dict[str, Path] = {}
    where = candidates[0]
    for place in candidates:
        here = {
            split: next(place / name for name in names if (place / name).is_file())
            for split, names in info.files.items()
            if any((place / name).is_file() for name in names)
        }
        if len(here) > len(best):
            best, where = here, place
    missing = [info.files[split][0] for split in info.files if split not in best]
    if missing:
        raise InputError(_missing(info, where, missing, best))
    _check_identity(info, best)
    if info.name == "enwik8":
        return _by_bytes(info, best["all"])
    return Found({split: [Section(best[split])] for split in SPLITS})


def _missing(info: CorpusInfo, where: Path, missing: Sequence[str], best: Mapping[str, Path]) -> str:
    found = f"; found there: {', '.join(path.name for path in best.values())}" if best else ""
    text = f"data.dir: {info.name}: {where} lacks {', '.join(missing)}{found}."
    if info.name == "wikitext-2":
        text += " WikiText-103 has the same validation and test articles: data.name=wikitext-103"
        near = [base / "wikitext-103" for base in (where, where.parent)]
        files = [
            base / name for base in near for name in CORPORA["wikitext-103"].files["train"] if (base / name).is_file()
        ]
        text += f", with {files[0]}" if files else " (also as a slice, wiki.train.slice.tokens)"
    return text.rstrip(".") + ". Without data.dir the corpus is downloaded."


def _check_identity(info: CorpusInfo, files: Mapping[str, Path]) -> None:
    """WikiText-2 and WikiText-103 have the same file names; their validation files tell them apart."""
    valid = files.get("valid")
    if valid is None:
        return
    digest = file_digest(valid, "data.dir")
    for other in CORPORA.values():
        if other.name != info.name and other.sha256.get("valid") == digest:
            raise InputError(
                f"data.name: '{info.name}', but {valid} is the validation file of {other.name}; set data.name={other.name}"
            )


def _by_bytes(info: CorpusInfo, path: Path) -> Found:
    """One file in the published proportions 90/5/5."""
    size = path.stat().st_size
    part = size // 20
    if part == 0:
        raise InputError(f"data.dir: {path} has {size} bytes, too few to cut 90, 5 and 5 % from")
    borders = (0, size - 2 * part, size - part, size)
    sections = {split: [Section(path, a, b)] for split, a, b in zip(SPLITS, borders[:-1], borders[1:], strict=True)}
    if size == sum(info.published.values()):
        return Found(sections)
    return Found(sections, (f"{path.name}: {size:,} bytes cut 90/5/5 in their order",))


def _lm1b(candidates: Sequence[Path]) -> Found:
    places = [place / inner for place in candidates for inner in _LM1B_FOLDERS if (place / inner).is_dir()]
    shards = [sorted(place.glob("news.en-*-of-00100")) for place in places]
    train = next((found for found in shards if found), [])
    heldout = {p.name: p for place in reversed(places) for p in place.glob("news.en.heldout-*") if p.is_file()}
    valid, test = (heldout.get(f"news.en.heldout-{n:05d}-of-00050") for n in (1, 0))
    if train and valid and test:
        return Found({"train": [Section(path) for path in train], "valid": [Section(valid)], "test": [Section(test)]})
    slices = [heldout[name] for name in sorted(heldout)]
    if not train and len(slices) >= 2:
        *first, last = slices
        halves = cut_by_lines([last], (0.5, 0.5), "data.dir")
        note = f"held-out shards only: {', '.join(p.name for p in first)} as train, {last.name} in halves as valid and test"
        return Found({"train": [Section(path) for path in first], "valid": halves[0], "test": halves[1]}, (note,))
    raise InputError(
        f"data.dir: lm1b: {candidates[0]} holds {len(train)} training shards and {len(slices)} held-out shards; wanted are "
        "news.en-*-of-00100 with news.en.heldout-00000-of-00050 (test) and -00001- (valid), or, as a slice, "
        "at least two files news.en.heldout-*. Without data.dir the corpus is downloaded."
    )


def _matching(path: Path, key: str) -> list[Path]:
    """The file `path`, or with `*`, `?` or `[` in it all files that match, in alphabetical order."""
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not found:
        raise InputError(f"{key}: no file matches {path}")
    return found


def _given(config: DataConfig, report: Report) -> Found:
    """`data.name: text`. Splits that are not given are cut from the end of the training lines, 5 % each."""
    base = Path(config.dir).expanduser() if config.dir else Path()
    paths: dict[str, list[Path]] = {}
    digests: dict[str, str] = {}
    notes = []
    for split in SPLITS:
        given = getattr(config, split)
        if given is None:
            continue
        names = [given] if isinstance(given, str) else list(given)
        if not names:
            raise InputError(f"data.{split}: an empty list of files")
        paths[split] = [path for name in names for path in _matching(base / Path(name).expanduser(), f"data.{split}")]
        for path in paths[split]:
            digest = file_digest(path, f"data.{split}")
            other = digests.setdefault(digest, split)
            if other != split:
                notes.append(f"warning: {path} in {split} has the same content as a file in {other}")
                report(notes[-1])
    if "train" not in paths:
        raise InputError("data.train: `data.name: text` needs at least one training file")
    sections = {split: [Section(path) for path in found] for split, found in paths.items()}
    absent = [split for split in SPLITS if split not in paths]
    if absent:
        parts = cut_by_lines(paths["train"], [1.0, *[0.05] * len(absent)], "data.train")
        sections |= dict(zip(["train", *absent], parts, strict=True))
        notes.append(f"{' and '.join(absent)}: the last lines of the training files, 5 % each")
        report(notes[-1])
    return Found(sections, tuple(notes))
