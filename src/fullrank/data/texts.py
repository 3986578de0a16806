"""Text for language models: found or downloaded, divided into splits, counted, and made token ids, a megabyte at a time."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fullrank.config.data import DataConfig
from fullrank.core.errors import ConfigError, InputError
from fullrank.data import builtin, prepared
from fullrank.data.corpora import CorpusInfo, text_corpus
from fullrank.data.files import Piece, Report, Section, cache_root, note_returns, open_text, read_pieces
from fullrank.data.marks import EOS, SOS
from fullrank.data.parallel import in_processes, progress
from fullrank.data.prepared import Corpus, Split
from fullrank.data.sources import SPLITS, TextSources, find_text, report_unread_folder
from fullrank.data.tokenizers import (
    DEFAULT_BPE_SIZE,
    ByteVocabulary,
    CharacterVocabulary,
    Tokenizer,
    WordVocabulary,
    train_bpe,
)  # fmt: skip
from fullrank.files import silent

_BUILTIN_MIN_COUNT = 3
_LABELS = {"byte": "bytes", "character": "characters", "bpe": "BPE"}  # of tokens, in a label; words are the usual


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


def prepare(
    config: DataConfig, *, report: Report | None = None, allow_slice: bool = True, tokenizer: Tokenizer | None = None
) -> Corpus:
    """The text of a configuration: found or downloaded, checked against published counts, tokenized, and kept.

    A second call with the same text and settings only opens it. `report` is called with a line at each step and with
    every departure from the published corpus. `allow_slice=False` (paper scale) refuses a corpus whose counts differ.
    tokenizer: of another text, in place of one that is made from this one.
    Raises InputError for bad data or settings, RunError for a failed download or a full disk.
    """
    say = report or silent
    info = text_corpus(config.name)
    settings = _settings(config, info)
    cache = cache_root(config.cache)
    found = None if info.name == "builtin" else find_text(config, info, cache, say)
    sources = [] if found is None else found.rows()
    identity = {} if tokenizer is None else {"tokenizer": tokenizer.fingerprint}
    returns: tuple[str, ...] = ()
    if found is not None and settings.kind != "byte":
        paths = {section.path for sections in found.sections.values() for section in sections}
        returns = note_returns(sorted(paths), "data.train")
        found = dataclasses.replace(found, notes=(*found.notes, *returns))
    if info.name == "builtin":
        report_unread_folder(config, say)
        extraction = hashlib.sha256(Path(builtin.__file__).read_bytes()).hexdigest()
        identity |= {"python": builtin.signature(), "extraction": extraction}
    key = prepared.key_of(info, dataclasses.asdict(settings), sources, learned=settings.kind == "bpe", **identity)
    folder = cache / "corpora" / f"{info.name}-{settings.kind}-{key}"

    def build(target: Path) -> None:
        for note in returns:
            say(note)
        _build(target, info, settings, found, sources, say, tokenizer)

    return prepared.open_or_build(folder, prepared.load_corpus, build, say, allow_slice=allow_slice)


def encode_file(path: Path, tokenizer: Tokenizer, folder: Path, report: Report) -> Corpus:
    """A file as the split `text` of a corpus, in the tokens of a trained model; its ids are written into `folder`.

    Raises InputError for a file that cannot be read, that the tokenizer cannot encode, or that has no token.
    """
    line_end, line_start = (bool(getattr(tokenizer, name, False)) for name in ("line_end", "line_start"))
    settings = Settings(tokenizer.kind, tokenizer.lowercase, line_end, "whitespace", 1, None, None, line_start)
    split = _encode(tokenizer, [Section(path)], folder, settings, "text", report, key="--text")
    return Corpus(folder, "text", path.name, False, {"text": split}, {}, tokenizer)


def _settings(config: DataConfig, info: CorpusInfo) -> Settings:
    """Every `null` resolved; InputError for keys that the kind of tokens has no use for."""
    kind = config.tokens or info.tokens
    if problems := [*config.problems_of_tokens(kind)]:  # of a corpus of one's own, whose tokens are known here only
        raise ConfigError(*problems)
    line_end = kind in ("word", "bpe") if config.eos is None else config.eos
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


def _build(
    folder: Path,
    info: CorpusInfo,
    settings: Settings,
    found: TextSources | None,
    sources: Sequence[Mapping[str, Any]],
    report: Report,
    tokenizer: Tokenizer | None = None,
) -> None:
    extracted: Mapping[str, Any] = {}
    if found is None:
        report("builtin: reading the documentation of the running Python")
        extracted = builtin.write(folder)
        found = TextSources({split: [Section(folder / f"{split}.txt")] for split in SPLITS})
    if tokenizer is None:
        report(f"{info.name}: making a {settings.kind} vocabulary")
        tokenizer = _make_tokenizer(found.sections["train"], settings, report)
    tokenizer.save(folder)
    splits = {}
    for split in SPLITS:
        report(f"{info.name}: encoding {split}")
        splits[split] = _encode(tokenizer, found.sections[split], folder, settings, split, report)
    if info.name == "builtin":
        for split in SPLITS:
            (folder / f"{split}.txt").unlink()
    # a cut inside a character moves to its end
    slack = 3 if info.unit == "bytes" and settings.kind != "byte" else 0
    differs = prepared.differences(info, {split: getattr(counts, info.unit) for split, counts in splits.items()}, slack)
    marks = [] if info.name != "builtin" else [f"Python {extracted['python']}"]
    if info.name == "text":
        names = list(dict.fromkeys(section.path.name for section in found.sections["train"]))
        kinds = [_LABELS[settings.kind]] if settings.kind in _LABELS else []
        marks.append(", ".join([", ".join(names[:3]) + (" ..." if len(names) > 3 else ""), *kinds]))
    if differs:
        marks = ["slice"]
    if settings.line_start:
        marks.append(f"with {SOS}")
    if splits["train"].tokens == settings.max_tokens and not differs:
        marks.append(f"first {settings.max_tokens:,} tokens")
    prepared.write_record(
        folder, info, marks, splits, sources=sources, settings=dataclasses.asdict(settings), notes=found.notes,
        differs=differs, **extracted,
    )  # fmt: skip


# text to token ids


def _read(sections: Sequence[Section], settings: Settings, doing: str, key: str, report: Report) -> Iterator[Piece]:
    """The pieces of all sections, one after another, with a progress bar."""
    total = 0
    for section in sections:
        open_text(section.path, key).close()  # what is missing or empty is an error before the first piece
        total += (section.end or section.path.stat().st_size) - section.start
    with progress(doing, total, report) as advance:
        for section in sections:
            for piece in read_pieces(section, exact=settings.kind == "byte", key=key):
                yield piece
                advance(piece.size)


def _names(sections: Sequence[Section]) -> str:
    return ", ".join(dict.fromkeys(str(section.path) for section in sections))


def _make_tokenizer(sections: Sequence[Section], settings: Settings, report: Report) -> Tokenizer:
    """The vocabulary of the training split (of its first `max_tokens`; BPE is trained on the whole split).

    Raises InputError if the text has no words.
    """
    options: dict[str, Any] = {"lowercase": settings.lowercase}
    if settings.kind == "byte":
        return ByteVocabulary(**options)
    pieces = _read(sections, settings, f"counting {settings.kind}s", "data.train", report)
    if settings.kind == "character":
        vocabulary: type[WordVocabulary | CharacterVocabulary] = CharacterVocabulary
        counts = _count(pieces, str.lower if settings.lowercase else str, settings)
    else:
        options |= {"line_end": settings.line_end, "line_start": settings.line_start}
        if settings.kind == "bpe":
            size = settings.max_vocabulary or DEFAULT_BPE_SIZE
            return train_bpe((piece.text for piece in pieces), size=size, **options)
        options["split"] = settings.split
        vocabulary = WordVocabulary
        counts = _count(pieces, WordVocabulary([EOS, SOS], **options).words, settings)
        if counts.total() == counts[EOS] + counts[SOS]:
            raise InputError(f"data.train: {_names(sections)}: there are no words in this text")
    return vocabulary.from_counts(
        counts, min_count=settings.min_count, max_vocabulary=settings.max_vocabulary, **options
    )


def _count(pieces: Iterator[Piece], split_up: Callable[[str], Sequence[str]], settings: Settings) -> Counter[str]:
    """Counts of the words or characters of a text, of its first `max_tokens` where that is set."""

    def units_of(piece: Piece) -> Sequence[str]:
        ended = settings.kind == "word" and settings.line_end and piece.open_end
        units = split_up(piece.text + "\n" * ended)
        return units[1:] if settings.line_start and not piece.begins else units

    counts: Counter[str] = Counter()
    if settings.max_tokens is None:
        for counted in in_processes(lambda piece: Counter(units_of(piece)), pieces):
            counts.update(counted)
        return counts
    left = settings.max_tokens
    for piece in pieces:
        units = units_of(piece)[:left]
        counts.update(units)
        left -= len(units)
        if left == 0:
            break
    return counts


def _encode(
    tokenizer: Tokenizer,
    sections: Sequence[Section],
    folder: Path,
    settings: Settings,
    split: str,
    report: Report,
    key: str | None = None,
) -> Split:
    """Write the ids of a split into `folder` and count it. `max_tokens` cuts the training split.

    key: names the text in errors, `data.<split>` if not given.

    Raises InputError for text that cannot be encoded or has no token at all.
    """
    dtype, key = prepared.id_type(len(tokenizer)), key or f"data.{split}"
    left = settings.max_tokens if split == "train" else None

    def encode(piece: Piece) -> tuple[np.ndarray, np.ndarray, bool]:
        ids = tokenizer.encode_array(piece.text + "\n" * (piece.open_end and settings.line_end), dtype)
        if settings.line_start and not piece.begins:
            ids = ids[1:]
        return ids, _sizes(piece.text, piece.begins, piece.open_end), piece.begins

    pieces = _read(sections, settings, f"encoding {split}", key, report)
    tokens, sizes, digest = 0, np.zeros(3, dtype=np.int64), hashlib.sha256()
    with (folder / f"{split}.bin").open("wb") as file:
        for ids, piece_sizes, begins in in_processes(encode, pieces, alone=settings.kind == "byte"):
            if left is not None:
                if len(ids) > left:
                    ids = ids[:left]
                    piece_sizes = _sizes(tokenizer.decode(ids.tolist()), begins, False)
                left -= len(ids)
            tokens += len(ids)
            sizes += piece_sizes
            data = ids.tobytes()
            file.write(data)
            digest.update(data)
            if left == 0:
                break
    if tokens == 0:
        raise InputError(f"{key}: {_names(sections)}: there is no token in this text")
    words, characters, size = sizes.tolist()
    return Split(tokens, words, characters, size, digest.hexdigest())


def _sizes(text: str, begins: bool, open_end: bool) -> np.ndarray:
    """Words, characters and bytes of a piece; a word that began in the piece before does not count again."""
    words = len(text.split()) + text.count("\n") + open_end
    if not begins and not text[:1].isspace():
        words -= 1
    return np.array([words, len(text), len(text.encode("utf-8", "surrogateescape"))])
