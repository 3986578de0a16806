"""A corpus, prepared once: found or downloaded, tokenized, and kept as memory-mapped ids.

A prepared corpus is a folder `corpora/<name>-<tokens>-<key>` of the cache, where the key is a hash of the contents of the
source files and of every setting. It appears whole or not at all, so that several processes may prepare it at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data import builtin
from fullrank.data.build import Settings, Split, build_tokenizer, encode_split, id_type
from fullrank.data.files import Section, cache_root, discard, file_digest, publish, workspace, writing
from fullrank.data.known import CorpusInfo
from fullrank.data.sources import SPLITS, Found, corpus_info, find
from fullrank.data.tokenizers import EOS, SOS, Tokenizer, load_tokenizer

Report = Callable[[str], None]
_FORMAT = 1  # of the folder; part of the key
_RECORD = "corpus.json"
_BUILTIN_MIN_COUNT = 3


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus on disk.

    `label` names it in reports: a corpus whose counts differ from the published ones is "<name> (slice)".
    `details`: source files with their sha256, settings, notes on how splits were made, Python version for `builtin`.
    """

    folder: Path
    name: str
    label: str
    is_slice: bool
    tokenizer: Tokenizer
    splits: Mapping[str, Split]
    details: Mapping[str, Any]

    def ids(self, split: str) -> np.ndarray:
        """The token ids of a split, memory-mapped and read-only."""
        if split not in self.splits:
            raise InputError(f"a corpus has the splits {', '.join(self.splits)}, not '{split}'")
        return np.memmap(_ids_file(self.folder, split), dtype=id_type(len(self.tokenizer)), mode="r")


def _ids_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"


def _settings(config: DataConfig, info: CorpusInfo) -> Settings:
    """Every `null` resolved; InputError for keys that the kind of tokens has no use for."""
    kind = config.tokens or info.tokens
    if config.eos and kind in ("byte", "character"):
        raise InputError(f"data.eos: {kind} tokens keep the newline itself; set data.eos=false or data.tokens=word")
    if (config.min_count or 1) > 1 and kind in ("byte", "bpe"):
        raise InputError(
            f"data.min_count: nothing is rare or unknown with data.tokens={kind}; set it to null, given {config.min_count}"
        )
    if config.max_vocabulary is not None and kind == "byte":
        raise InputError(
            f"data.max_vocabulary: byte tokens have 256 entries; set it to null, given {config.max_vocabulary}"
        )
    line_end = kind in ("word", "bpe") if config.eos is None else config.eos
    if config.sos and not line_end:
        raise InputError(
            f"data.sos: {SOS} begins lines that end in {EOS}, which {kind} tokens have "
            + (f"with data.eos=true; given {config.eos}" if kind in ("word", "bpe") else "not; set data.tokens=word")
        )
    prose = info.name == "builtin" and kind == "word"
    return Settings(
        kind=kind,
        lowercase=config.lowercase or prose,
        line_end=line_end,
        split="punctuation" if prose else "whitespace",
        min_count=config.min_count or (_BUILTIN_MIN_COUNT if prose else 1),
        max_vocabulary=config.max_vocabulary,
        max_tokens=config.max_tokens,
        line_start=config.sos,
    )


def _sources(found: Found) -> list[dict[str, Any]]:
    digests: dict[Path, str] = {}
    rows = []
    for split in SPLITS:
        for section in found.sections[split]:
            path = section.path
            if path not in digests:
                digests[path] = file_digest(path, f"data.{split}")
            rows.append(
                {
                    "split": split,
                    "file": str(path.absolute()),
                    "start": section.start,
                    "end": section.end,
                    "sha256": digests[path],
                }
            )
    return rows


def _key(info: CorpusInfo, settings: Settings, sources: list[dict[str, Any]]) -> str:
    choices = dataclasses.asdict(settings)
    if not settings.line_start:  # so that corpora prepared before there was a choice are found
        del choices["line_start"]
    text: dict[str, Any] = {"format": _FORMAT, "name": info.name, "settings": choices}
    if info.name == "builtin":
        text["python"] = builtin.signature()
        text["extraction"] = hashlib.sha256(Path(builtin.__file__).read_bytes()).hexdigest()
    else:
        text["sources"] = [{**row, "file": Path(row["file"]).name} for row in sources]
    if settings.kind == "bpe":
        import tokenizers

        text["tokenizers"] = tokenizers.__version__
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()


def _differences(info: CorpusInfo, settings: Settings, splits: Mapping[str, Split]) -> dict[str, dict[str, int]]:
    """Splits whose counts are not the published ones."""
    slack = 3 if info.unit == "bytes" and settings.kind != "byte" else 0  # a cut inside a character moves to its end
    here = {split: getattr(counts, info.unit) for split, counts in splits.items()}
    return {
        split: {"published": count, "here": here[split]}
        for split, count in info.published.items()
        if abs(here[split] - count) > slack
    }


_KINDS = {"byte": "bytes", "character": "characters", "bpe": "BPE"}  # of tokens, in a label; words are the usual


def _label(
    info: CorpusInfo, settings: Settings, found: Found, record: Mapping[str, Any], first: int | None, is_slice: bool
) -> str:
    """The name in reports; `first`: so many tokens of the training split were used."""
    kind, marked = settings.kind, [f"with {SOS}"] if settings.line_start else []
    if is_slice:
        return f"{info.name} ({'; '.join(['slice', *marked])})"
    parts = []
    if info.name == "builtin":
        parts.append(f"Python {record['python']}")
    elif info.name == "text":
        names = list(dict.fromkeys(section.path.name for section in found.sections["train"]))
        kinds = [_KINDS[kind]] if kind in _KINDS else []
        parts.append(", ".join([", ".join(names[:3]) + (" ..." if len(names) > 3 else ""), *kinds]))
    parts += marked
    if first is not None:
        parts.append(f"first {first:,} tokens")
    return f"{info.name} ({'; '.join(parts)})" if parts else info.name


def _build(
    folder: Path,
    info: CorpusInfo,
    settings: Settings,
    found: Found | None,
    sources: list[dict[str, Any]],
    report: Report,
) -> None:
    """Writes a whole corpus into `folder`."""
    record: Mapping[str, Any] = {}
    if found is None:
        report("builtin: reading the documentation of the running Python")
        record = builtin.write(folder)
        found = Found({split: [Section(folder / f"{split}.txt")] for split in SPLITS})
    report(f"{info.name}: making a {settings.kind} vocabulary")
    tokenizer = build_tokenizer(found.sections["train"], settings, report)
    tokenizer.save(folder)
    splits = {}
    for split in SPLITS:
        report(f"{info.name}: encoding {split}")
        target = _ids_file(folder, split)
        splits[split] = encode_split(tokenizer, found.sections[split], target, settings, split=split, report=report)
    if info.name == "builtin":
        for sections in found.sections.values():
            sections[0].path.unlink()
    differences = _differences(info, settings, splits)
    first = settings.max_tokens if splits["train"].tokens == settings.max_tokens else None
    details = {
        "sources": sources,
        "settings": dataclasses.asdict(settings),
        "notes": list(found.notes),
        "unit": info.unit,
        "differs_from_published": differences,
        **record,
    }
    corpus = {
        "format": _FORMAT,
        "name": info.name,
        "label": _label(info, settings, found, record, first, bool(differences)),
        "is_slice": bool(differences),
        "splits": {split: dataclasses.asdict(counts) for split, counts in splits.items()},
        "details": details,
    }
    (folder / _RECORD).write_text(json.dumps(corpus, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_corpus(folder: Path) -> Corpus:
    """A prepared corpus, opened again; its ids are checked against their recorded sha256.

    Raises InputError if the folder is not a prepared corpus, RunError if it is damaged.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; a prepared corpus is a folder with {_RECORD}")
    if not (folder / _RECORD).exists():
        raise InputError(f"{folder}: not a prepared corpus, there is no {_RECORD}; run `fullrank data prepare NAME`")
    try:
        raw = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        splits = {split: Split(**counts) for split, counts in raw["splits"].items()}
        corpus = Corpus(
            folder, raw["name"], raw["label"], raw["is_slice"], load_tokenizer(folder), splits, raw["details"]
        )  # fmt: skip
        for split, counts in splits.items():
            with _ids_file(folder, split).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != counts.sha256:
                    raise RunError(f"{file.name} is damaged (truncated or changed)")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder}: the prepared corpus is damaged ({error})") from error
    return corpus


def _reopen(folder: Path, report: Report) -> Corpus | None:
    """The prepared corpus, if there is a whole one."""
    if not folder.exists():
        return None
    try:
        return load_corpus(folder)
    except (InputError, RunError) as error:
        report(f"the prepared corpus cannot be used, preparing it again: {error}")
        discard(folder)
        return None


def prepare(config: DataConfig, *, report: Report | None = None, allow_slice: bool = True) -> Corpus:
    """The corpus of a configuration: found or downloaded, checked against published counts, tokenized, and kept.

    A second call with the same text and settings only opens it. `report` is called with a line at each step and with
    every departure from the published corpus. `allow_slice=False` (paper scale) refuses a corpus whose counts differ.
    Raises InputError for bad data or settings, RunError for a failed download or a full disk.
    """
    say = report or (lambda line: None)
    info = corpus_info(config.name)
    settings = _settings(config, info)
    cache = cache_root(config.cache)
    found = None if info.name == "builtin" else find(config, cache, say)
    sources = [] if found is None else _sources(found)
    folder = cache / "corpora" / f"{info.name}-{settings.kind}-{_key(info, settings, sources)[:16]}"
    corpus = _reopen(folder, say)
    if corpus is None:
        with workspace(folder.parent) as temporary, writing(cache):
            _build(temporary, info, settings, found, sources, say)
            publish(temporary, folder)
        corpus = load_corpus(folder)
    if corpus.is_slice:
        _tell_slice(corpus, allow_slice, say)
    return corpus


def _tell_slice(corpus: Corpus, allowed: bool, report: Report) -> None:
    details = corpus.details
    text = "; ".join(
        f"{split} has {counts['here']:,} {details['unit']}, published are {counts['published']:,}"
        for split, counts in details["differs_from_published"].items()
    )
    if not allowed:
        raise InputError(
            f"data.name: {corpus.label} is not the published corpus ({text}), and the paper scale needs it; "
            "give the full files with --from DIR (data.dir), leave data.max_tokens out, or choose --scale small"
        )
    report(f"{corpus.label}: {text}; figures are not comparable with published ones")
