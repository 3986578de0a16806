"""Text for language models: found or downloaded, divided into splits, counted, and made token ids, a megabyte at a time."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError
from fullrank.data import builtin
from fullrank.data.corpora import CORPORA, CorpusInfo, text_corpus
from fullrank.data.download import download
from fullrank.data.files import (
    Report,
    Section,
    cache_root,
    cut_by_lines,
    existing_folder,
    file_digest,
    fullest_folder,
    pieces,
)
from fullrank.data.prepared import (
    Corpus,
    Split,
    differences,
    id_type,
    key_of,
    load_corpus,
    open_or_build,
    write_record,
)
from fullrank.data.tokenizers import (
    DEFAULT_BPE_SIZE,
    EOS,
    SOS,
    ByteVocabulary,
    CharacterVocabulary,
    Tokenizer,
    WordVocabulary,
    train_bpe,
)

SPLITS = ("train", "valid", "test")
_BUILTIN_MIN_COUNT = 3
_REPORT_EVERY = 64 << 20  # characters between two progress messages
_LABELS = {"byte": "bytes", "character": "characters", "bpe": "BPE"}  # of tokens, in a label; words are the usual
_LM1B = "1-billion-word-language-modeling-benchmark-r13output"
_LM1B_PARTS = ("training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled")
_LM1B_FOLDERS = ("", *_LM1B_PARTS, *(f"{_LM1B}/{part}" for part in _LM1B_PARTS))


@dataclass(frozen=True)
class Settings:
    """The choices by which text becomes tokens, none left open."""

    kind: str
    lowercase: bool
    line_end: bool  # a newline is the token <eos>
    split: Literal["whitespace", "punctuation"]
    min_count: int
    max_vocabulary: int | None
    max_tokens: int | None  # of the training split
    line_start: bool = False  # <sos> stands before every line


@dataclass(frozen=True)
class Sources:
    """The text of each split, and notes on how it was divided (they go into the corpus's details)."""

    sections: Mapping[str, Sequence[Section]]
    notes: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Files and their sha256, for the record of the corpus."""
        digests: dict[Path, str] = {}
        for split, sections in self.sections.items():
            for section in sections:
                if section.path not in digests:
                    digests[section.path] = file_digest(section.path, f"data.{split}")
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


def prepare(config: DataConfig, *, report: Report | None = None, allow_slice: bool = True) -> Corpus:
    """The text of a configuration: found or downloaded, checked against published counts, tokenized, and kept.

    A second call with the same text and settings only opens it. `report` is called with a line at each step and with
    every departure from the published corpus. `allow_slice=False` (paper scale) refuses a corpus whose counts differ.
    Raises InputError for bad data or settings, RunError for a failed download or a full disk.
    """
    say = report or (lambda line: None)
    info = text_corpus(config.name)
    settings = _settings(config, info)
    cache = cache_root(config.cache)
    found = None if info.name == "builtin" else _find(config, info, cache, say)
    sources = [] if found is None else found.rows()
    folder = cache / "corpora" / f"{info.name}-{settings.kind}-{_key(info, settings, sources)}"

    def build(target: Path) -> None:
        _build(target, info, settings, found, sources, say)

    return open_or_build(folder, load_corpus, build, say, allow_slice=allow_slice)


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


def _key(info: CorpusInfo, settings: Settings, sources: Sequence[Mapping[str, Any]]) -> str:
    choices = dataclasses.asdict(settings)
    if not settings.line_start:  # so that corpora prepared before there was a choice are found
        del choices["line_start"]
    identity: dict[str, Any] = {}
    if info.name == "builtin":
        identity["python"] = builtin.signature()
        identity["extraction"] = hashlib.sha256(Path(builtin.__file__).read_bytes()).hexdigest()
    else:
        identity["sources"] = [{**row, "file": Path(row["file"]).name} for row in sources]
    if settings.kind == "bpe":
        import tokenizers

        identity["tokenizers"] = tokenizers.__version__
    return key_of(info, choices, **identity)


def _build(
    folder: Path,
    info: CorpusInfo,
    settings: Settings,
    found: Sources | None,
    sources: Sequence[Mapping[str, Any]],
    report: Report,
) -> None:
    """Write a whole corpus into `folder`."""
    extracted: Mapping[str, Any] = {}
    if found is None:
        report("builtin: reading the documentation of the running Python")
        extracted = builtin.write(folder)
        found = Sources({split: [Section(folder / f"{split}.txt")] for split in SPLITS})
    report(f"{info.name}: making a {settings.kind} vocabulary")
    tokenizer = _make_tokenizer(found.sections["train"], settings, report)
    tokenizer.save(folder)
    splits = {}
    for split in SPLITS:
        report(f"{info.name}: encoding {split}")
        splits[split] = _encode(tokenizer, found.sections[split], folder / f"{split}.bin", settings, split, report)
    if info.name == "builtin":
        for split in SPLITS:
            (folder / f"{split}.txt").unlink()
    # a cut inside a character moves to its end
    slack = 3 if info.unit == "bytes" and settings.kind != "byte" else 0
    differs = differences(info, {split: getattr(counts, info.unit) for split, counts in splits.items()}, slack)
    marks = _marks(info, settings, found, extracted, splits["train"].tokens, bool(differs))
    label = f"{info.name} ({'; '.join(marks)})" if marks else info.name
    write_record(
        folder, info, label, splits, sources=sources, settings=dataclasses.asdict(settings), notes=found.notes,
        differs=differs, **extracted,
    )  # fmt: skip


def _marks(
    info: CorpusInfo, settings: Settings, found: Sources, extracted: Mapping[str, Any], tokens: int, is_slice: bool
) -> list[str]:
    """The words in brackets after the name of a corpus, in reports. `tokens`: of the training split."""
    with_sos = [f"with {SOS}"] if settings.line_start else []
    if is_slice:
        return ["slice", *with_sos]
    marks = []
    if info.name == "builtin":
        marks.append(f"Python {extracted['python']}")
    elif info.name == "text":
        names = list(dict.fromkeys(section.path.name for section in found.sections["train"]))
        kinds = [_LABELS[settings.kind]] if settings.kind in _LABELS else []
        marks.append(", ".join([", ".join(names[:3]) + (" ..." if len(names) > 3 else ""), *kinds]))
    marks += with_sos
    if tokens == settings.max_tokens:
        marks.append(f"first {tokens:,} tokens")
    return marks


# finding the text of each split


def _find(config: DataConfig, info: CorpusInfo, cache: Path, report: Report) -> Sources:
    """The text of a corpus of files. Raises InputError for folders or files that are missing, empty or of the wrong kind."""
    if info.name == "text":
        return _given_files(config, report)
    if config.dir is None:
        folder = download(info, cache, report)
    else:
        folder = existing_folder(Path(config.dir).expanduser(), info.wanted())
    candidates = [place for place in (folder / info.name, folder) if place.is_dir()]
    if info.name == "lm1b":
        return _lm1b(candidates)
    where, names = fullest_folder(candidates, info.files, lambda place, name: (place / name).is_file())
    missing = [info.files[split][0] for split in info.files if split not in names]
    if missing:
        raise InputError(_missing(info, where, missing, list(names.values())))
    if "valid" in names:
        _check_identity(info, where / names["valid"])
    if info.name == "enwik8":
        return _by_bytes(info, where / names["all"])
    return Sources({split: [Section(where / names[split])] for split in SPLITS})


def _missing(info: CorpusInfo, where: Path, missing: Sequence[str], there: Sequence[str]) -> str:
    found = f"; found there: {', '.join(there)}" if there else ""
    text = f"data.dir: {info.name}: {where} lacks {', '.join(missing)}{found}."
    if info.name == "wikitext-2":
        text += " WikiText-103 has the same validation and test articles: data.name=wikitext-103."
    return text + " Without data.dir the corpus is downloaded."


def _check_identity(info: CorpusInfo, valid: Path) -> None:
    """InputError for the files of another corpus: WikiText-2 and WikiText-103 have the same file names."""
    digest = file_digest(valid, "data.dir")
    for other in CORPORA.values():
        if other.name != info.name and other.sha256.get("valid") == digest:
            raise InputError(
                f"data.name: '{info.name}', but {valid} is the validation file of {other.name}; set data.name={other.name}"
            )


def _by_bytes(info: CorpusInfo, path: Path) -> Sources:
    """One file in the published proportions 90/5/5."""
    size = path.stat().st_size
    part = size // 20
    if part == 0:
        raise InputError(f"data.dir: {path} has {size} bytes, too few to cut 90, 5 and 5 % from")
    borders = (0, size - 2 * part, size - part, size)
    sections = {split: [Section(path, a, b)] for split, a, b in zip(SPLITS, borders[:-1], borders[1:], strict=True)}
    whole = size == sum(info.published.values())
    return Sources(sections, () if whole else (f"{path.name}: {size:,} bytes cut 90/5/5 in their order",))


def _lm1b(candidates: Sequence[Path]) -> Sources:
    places = [place / inner for place in candidates for inner in _LM1B_FOLDERS if (place / inner).is_dir()]
    shards = [sorted(place.glob("news.en-*-of-00100")) for place in places]
    train = next((found for found in shards if found), [])
    heldout = {p.name: p for place in reversed(places) for p in place.glob("news.en.heldout-*") if p.is_file()}
    valid, test = (heldout.get(f"news.en.heldout-{n:05d}-of-00050") for n in (1, 0))
    if train and valid and test:
        return Sources({"train": [Section(path) for path in train], "valid": [Section(valid)], "test": [Section(test)]})
    slices = [heldout[name] for name in sorted(heldout)]
    if not train and len(slices) >= 2:
        *first, last = slices
        halves = cut_by_lines([last], (0.5, 0.5), "data.dir")
        note = f"held-out shards only: {', '.join(p.name for p in first)} as train, {last.name} in halves as valid and test"
        return Sources({"train": [Section(path) for path in first], "valid": halves[0], "test": halves[1]}, (note,))
    raise InputError(
        f"data.dir: lm1b: {candidates[0]} holds {len(train)} training shards and {len(slices)} held-out shards; wanted are "
        "news.en-*-of-00100 with news.en.heldout-00000-of-00050 (test) and -00001- (valid), or, as a slice, "
        "at least two files news.en.heldout-*. Without data.dir the corpus is downloaded."
    )


def _given_files(config: DataConfig, report: Report) -> Sources:
    """The files of `data.name: text`. Splits that are not given are cut from the end of the training lines, 5 % each."""
    base = Path(config.dir).expanduser() if config.dir else Path()
    paths: dict[str, list[Path]] = {}
    digests: dict[str, str] = {}
    notes = []
    for split, given in zip(SPLITS, (config.train, config.valid, config.test), strict=True):
        if given is None:
            continue
        names = [given] if isinstance(given, str) else list(given)
        if not names:
            raise InputError(f"data.{split}: an empty list of files")
        paths[split] = [path for name in names for path in _matching(base / Path(name).expanduser(), f"data.{split}")]
        for path in paths[split]:
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
    return Sources(sections, tuple(notes))


def _matching(path: Path, key: str) -> list[Path]:
    """The file `path`, or with `*`, `?` or `[` in it all files that match, in alphabetical order."""
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not matches:
        raise InputError(f"{key}: no file matches {path}")
    return matches


# text to token ids


def _texts(
    sections: Sequence[Section], settings: Settings, key: str, doing: str, report: Report
) -> Iterator[tuple[str, bool, bool]]:
    """(piece of text, it begins a line, it is the last of its section). In a very long line, pieces begin no line."""
    done, reported = 0, 0
    for section in sections:
        before, begins = None, True
        for text in pieces(section, exact=settings.kind == "byte", key=key):
            if before is not None:
                yield before, begins, False
                begins = before.endswith("\n")
            before = text
            done += len(text)
            if done // _REPORT_EVERY > reported:
                reported = done // _REPORT_EVERY
                report(f"{doing}: {done / 1e6:,.0f} million characters")
        if before is not None:
            yield before, begins, True


def _make_tokenizer(sections: Sequence[Section], settings: Settings, report: Report) -> Tokenizer:
    """The vocabulary of the training split (of its first `max_tokens`; BPE is trained on the whole split).

    Raises InputError if the text has no words.
    """
    if settings.kind == "byte":
        return ByteVocabulary(lowercase=settings.lowercase)
    texts = _texts(sections, settings, "data.train", f"counting {settings.kind}s", report)
    lines = {"line_end": settings.line_end, "line_start": settings.line_start}
    if settings.kind == "bpe":
        size = settings.max_vocabulary or DEFAULT_BPE_SIZE
        return train_bpe((text for text, _, _ in texts), size=size, lowercase=settings.lowercase, **lines)
    min_count, max_vocabulary = settings.min_count, settings.max_vocabulary
    if settings.kind == "character":
        characters = _counted((text.lower() if settings.lowercase else text for text, _, _ in texts), settings)
        return CharacterVocabulary.from_counts(
            characters, min_count=min_count, max_vocabulary=max_vocabulary, lowercase=settings.lowercase
        )
    options: dict[str, Any] = {"lowercase": settings.lowercase, "split": settings.split, **lines}
    splitter = WordVocabulary([EOS, SOS], **options)

    def words() -> Iterator[list[str]]:
        for text, begins, last in texts:
            found = splitter.words(text)
            if settings.line_start and not begins:
                del found[:1]
            if last and settings.line_end and not text.endswith("\n"):
                found.append(EOS)
            yield found

    counts = _counted(words(), settings)
    if not counts.keys() - {EOS, SOS}:
        raise InputError(f"data.train: {', '.join(str(s.path) for s in sections)}: there are no words in this text")
    return WordVocabulary.from_counts(counts, min_count=min_count, max_vocabulary=max_vocabulary, **options)


def _counted(parts: Iterator[Sequence[str]] | Iterator[str], settings: Settings) -> Counter[str]:
    """Counts of each word or character among the first `max_tokens`."""
    counts: Counter[str] = Counter()
    left = settings.max_tokens
    for part in parts:
        counts.update(part if left is None else part[:left])
        if left is not None:
            left -= len(part)
            if left <= 0:
                break
    return counts


class _Tally:
    """Counts of a text that comes in pieces."""

    def __init__(self) -> None:
        self.words = self.characters = self.bytes = 0
        self._inside = False  # the last piece ended inside a word

    def add(self, text: str) -> None:
        self.words += len(text.split()) + text.count("\n")
        if self._inside and text and not text[0].isspace():
            self.words -= 1
        self._inside = bool(text) and not text[-1].isspace()
        self.characters += len(text)
        self.bytes += len(text.encode("utf-8", "surrogateescape"))


def _encode(
    tokenizer: Tokenizer, sections: Sequence[Section], target: Path, settings: Settings, split: str, report: Report
) -> Split:
    """Write the ids of a split to `target` and count it. `max_tokens` cuts the training split.

    Raises InputError for text that cannot be encoded or has no token at all.
    """
    dtype = id_type(len(tokenizer))
    limit = settings.max_tokens if split == "train" else None
    digest, tally, total = hashlib.sha256(), _Tally(), 0
    with target.open("wb") as file:
        for text, begins, last in _texts(sections, settings, f"data.{split}", f"encoding {split}", report):
            ids = tokenizer.encode(text)
            if settings.line_start and not begins:
                del ids[:1]
            open_end = last and not text.endswith("\n")
            if open_end and settings.line_end and tokenizer.eos_id is not None:
                ids.append(tokenizer.eos_id)
            full = limit is not None and total + len(ids) >= limit
            if limit is not None and total + len(ids) > limit:
                ids = ids[: limit - total]
                text, open_end = tokenizer.decode(ids), False
            tally.add(text)
            tally.words += open_end
            data = np.asarray(ids, dtype=dtype).tobytes()
            file.write(data)
            digest.update(data)
            total += len(ids)
            if full:
                break
    if total == 0:
        raise InputError(f"data.{split}: {', '.join(str(s.path) for s in sections)}: there is no token in this text")
    return Split(total, tally.words, tally.characters, tally.bytes, digest.hexdigest())
