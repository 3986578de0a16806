"""A corpus of sentence pairs, prepared once: found or downloaded, cleaned, made subwords, and kept as memory-mapped ids.

A prepared corpus is a folder `pairs/<name>-<source>-<target>-<tokens>-<key>` of the cache, where the key is a hash of the
contents of the source files and of every setting. It appears whole or not at all, so that several processes may prepare it
at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data import synthetic_pairs
from fullrank.data.files import cache_root, discard, file_digest, number_of_lines, publish, workspace, writing
from fullrank.data.known import CORPORA, CorpusInfo
from fullrank.data.language import Language, load_language
from fullrank.data.pair_build import encode_pairs, make_languages, write_texts
from fullrank.data.pair_lines import SIDES, PairFiles
from fullrank.data.pair_settings import PairSettings, choices, pair_settings
from fullrank.data.pair_store import Pairs as Pairs
from fullrank.data.pair_store import PairSplit, text_file
from fullrank.data.parallel import find_pairs, key_of

Report = Callable[[str], None]
_FORMAT = 1  # of the folder; part of the key
_RECORD = "pairs.json"


@dataclass(frozen=True)
class PairCorpus:
    """A prepared corpus of sentence pairs on disk.

    `label` names it in reports: a corpus whose numbers of pairs differ from the published ones is "<name> (slice)".
    `details`: source files with their sha256, settings, notes, what cleaning left out.
    """

    folder: Path
    name: str
    label: str
    is_slice: bool
    source: Language
    target: Language
    splits: Mapping[str, PairSplit]
    details: Mapping[str, Any]

    def pairs(self, split: str) -> Pairs:
        """The sentence pairs of a split."""
        if split not in self.splits:
            raise InputError(f"{self.label} has the splits {', '.join(self.splits)}, not '{split}'")
        return Pairs(self.folder, split, (self.source, self.target))


def pair_corpus_info(name: str) -> CorpusInfo:
    """What is known of a corpus of sentence pairs; InputError names them all."""
    info = CORPORA.get(name)
    if info is None or info.unit != "pairs":
        known = ", ".join(n for n, corpus in CORPORA.items() if corpus.unit == "pairs")
        what = "is text of one language, for language models" if info else "is unknown"
        raise InputError(f"data.name: '{name}' {what}; corpora of sentence pairs: {known}")
    return info


def _sources(files: PairFiles) -> list[dict[str, Any]]:
    return [
        {"split": split, "side": side, "file": str(path.absolute()), "sha256": file_digest(path, f"data.{split}")}
        for split, content in files.splits.items()
        for side, paths in zip(SIDES, content.sides(), strict=True)
        for path in paths
    ]


def _key(info: CorpusInfo, settings: PairSettings, sources: list[dict[str, Any]]) -> str:
    text: dict[str, Any] = {
        "format": _FORMAT,
        "name": info.name,
        "settings": choices(settings),
        "sources": [{**row, "file": Path(row["file"]).name} for row in sources],
    }
    if settings.segmenter in ("byte_bpe", "unigram") or (settings.segmenter == "codes" and settings.codes is None):
        import tokenizers

        text["tokenizers"] = tokenizers.__version__
    if settings.moses:
        from importlib.metadata import PackageNotFoundError, version

        try:
            text["sacremoses"] = version("sacremoses")
        except PackageNotFoundError:  # it is missed where it is needed
            text["sacremoses"] = None
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()


def _label(info: CorpusInfo, files: PairFiles, settings: PairSettings, is_slice: bool) -> str:
    marks = ["slice"] if is_slice else []
    if info.languages is None:
        train = files.splits["train"]
        marks.append(", ".join(path.name for path in (train.source[0], train.target[0])))
    elif files.languages != info.languages:
        marks.append(" to ".join(files.languages))
    if info.name == synthetic_pairs.NAME:
        marks.append("not a language")
    if settings.concatenate is not None:
        marks.append(f"joined to {settings.concatenate} tokens")
    return f"{info.name} ({'; '.join(marks)})" if marks else info.name


def _build(
    folder: Path,
    info: CorpusInfo,
    settings: PairSettings,
    files: PairFiles,
    sources: list[dict[str, Any]],
    report: Report,
) -> None:
    """Writes a whole corpus into `folder`."""

    def say(line: str) -> None:
        report(f"{info.name}: {line}")

    texts = folder / "texts"
    texts.mkdir()
    cleaned = write_texts(files, settings, texts, lambda split: key_of(info, split), say)
    say("making the vocabularies")
    languages = make_languages(settings, files.codes, texts, cleaned.kept, say)
    for side, language in zip(SIDES, languages, strict=True):
        language.save(folder / side)
    splits = {}
    for split in files.names:
        say(f"encoding {split}")
        counts = encode_pairs(texts, folder, split, languages, settings)
        written = sorted(path for path in folder.glob(f"{split}.*") if path.is_file())
        splits[split] = PairSplit(**counts, sha256={path.name: _sha256(path) for path in written})
    here = {
        split: number_of_lines(text_file(texts, split, SIDES[0]), "data.cache") for split in splits
    }  # before joining
    shutil.rmtree(texts)
    differences = {
        split: {"published": count, "here": here[split]}
        for split, count in info.published.items()
        if split in here and here[split] != count
    }
    details = {
        "sources": sources,
        "settings": choices(settings),
        "notes": list(files.notes),
        "unit": info.unit,
        "differs_from_published": differences,
        "cleaning": dataclasses.asdict(cleaned),
        "codes": None if settings.codes is None else str(files.codes),
        "vocabulary": {side: len(language) for side, language in zip(SIDES, languages, strict=True)},
    }
    record = {
        "format": _FORMAT,
        "name": info.name,
        "label": _label(info, files, settings, bool(differences)),
        "is_slice": bool(differences),
        "splits": {split: dataclasses.asdict(content) for split, content in splits.items()},
        "details": details,
    }
    (folder / _RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_pairs(folder: Path) -> PairCorpus:
    """A prepared corpus of sentence pairs, opened again; its files are checked against their recorded sha256.

    Raises InputError if the folder is not a prepared corpus, RunError if it is damaged.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; prepared sentence pairs are a folder with {_RECORD}")
    if not (folder / _RECORD).exists():
        raise InputError(
            f"{folder}: no prepared sentence pairs, there is no {_RECORD}; run `fullrank data prepare NAME`"
        )
    try:
        raw = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        splits = {split: PairSplit(**content) for split, content in raw["splits"].items()}
        for content in splits.values():
            for name, digest in content.sha256.items():
                if _sha256(folder / name) != digest:
                    raise RunError(f"{folder / name} is damaged (truncated or changed)")
        source, target = (load_language(folder / side) for side in SIDES)
        return PairCorpus(folder, raw["name"], raw["label"], raw["is_slice"], source, target, splits, raw["details"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder}: the prepared sentence pairs are damaged ({error})") from error


def _reopen(folder: Path, report: Report) -> PairCorpus | None:
    """The prepared corpus, if there is a whole one."""
    if not folder.exists():
        return None
    try:
        return load_pairs(folder)
    except (InputError, RunError) as error:
        report(f"the prepared sentence pairs cannot be used, preparing them again: {error}")
        discard(folder)
        return None


def prepare_pairs(config: DataConfig, *, report: Report | None = None, allow_slice: bool = True) -> PairCorpus:
    """The sentence pairs of a configuration: found or downloaded, counted, cleaned, made subwords, and kept.

    A second call with the same text and settings only opens them. `report` is called with a line at each step and with
    every departure from the published corpus. `allow_slice=False` (paper scale) refuses a corpus whose counts differ.
    Raises InputError for bad data or settings, RunError for a failed download or a full disk.
    """
    say = report or (lambda line: None)
    info = pair_corpus_info(config.name)
    cache = cache_root(config.cache)
    files = find_pairs(config, info, cache, say)
    settings = pair_settings(config, info, files)
    sources = _sources(files)
    names = "-".join(files.languages)
    folder = cache / "pairs" / f"{info.name}-{names}-{settings.tokens}-{_key(info, settings, sources)[:16]}"
    corpus = _reopen(folder, say)
    if corpus is None:
        with workspace(folder.parent) as temporary, writing(cache):
            _build(temporary, info, settings, files, sources, say)
            publish(temporary, folder)
        corpus = load_pairs(folder)
    if corpus.is_slice:
        _tell_slice(corpus, allow_slice, say)
    return corpus


def _tell_slice(corpus: PairCorpus, allowed: bool, report: Report) -> None:
    text = "; ".join(
        f"{split} has {counts['here']:,} pairs, published are {counts['published']:,}"
        for split, counts in corpus.details["differs_from_published"].items()
    )
    if not allowed:
        raise InputError(
            f"data.name: {corpus.label} is not the published corpus ({text}), and the paper scale needs it; "
            "give the full files with --from DIR (data.dir), or choose --scale small"
        )
    report(f"{corpus.label}: {text}; figures are not comparable with published ones")
