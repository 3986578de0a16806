"""One way to a prepared corpus: opened where it was prepared before, else built; of text, a megabyte at a time."""

from __future__ import annotations

import dataclasses
import logging
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers

from fullrank.config.run import CorpusInfo, DataConfig, find_corpus
from fullrank.core.errors import InputError, RunError
from fullrank.data.corpora import SPLITS, Sources, find_text
from fullrank.data.pairs import plan_pairs
from fullrank.data.prepared import IDS, Built, Corpus, Plan, id_type, load_corpus, write_corpus
from fullrank.data.tokenizers import (
    DEFAULT_BPE_SIZE,
    LINE_END,
    SOS,
    UNK,
    PretrainedTokenizer,
    Split,
    Tokenizer,
    build_bytes,
    build_characters,
    build_words,
    rank_entries,
    train_bpe,
)
from fullrank.files import (
    Piece,
    Section,
    batched,
    cache_root,
    create_folder,
    map_in_processes,
    open_text,
    read_pieces,
    show_progress,
)

logger = logging.getLogger(__name__)
_BUILTIN_MIN_COUNT = 3
_PIECES_AT_ONCE = 8  # for one process: a text of less is not worth a second one
# ends of labels by the kind of tokens; words have none
_LABELS = {"byte": ", bytes", "character": ", characters", "bpe": ", BPE", "pretrained": ", tokens of the model"}


def prepare(config: DataConfig, *, allow_slice: bool = True, tokenizer: Tokenizer | None = None) -> Corpus:
    """Prepare the corpus of a configuration: find or download it, compare it with published counts, tokenize and keep it.

    A second call with the same text and settings only opens it. Each step, and every departure from the published
    corpus, is logged.

    Args:
        config: section `data` of the configuration.
        allow_slice: False (paper scale) refuses a corpus whose counts differ from the published ones.
        tokenizer: of another text; None makes one from this text.

    Returns:
        The prepared corpus.

    Raises:
        InputError: data or settings are bad, or `allow_slice` refuses the corpus.
        RunError: the download failed, or the disk is full.
    """
    cache = cache_root(config.cache)
    plan = plan_pairs(config, cache) if config.has_pairs else plan_text(config, cache, tokenizer)
    folder = cache / "corpora" / plan.name_folder()
    corpus = None
    if folder.exists():
        try:
            corpus = load_corpus(folder)
        except (InputError, RunError) as error:
            logger.info(f"the prepared corpus cannot be used, preparing it again: {error}")
            shutil.rmtree(folder, ignore_errors=True)
    if corpus is None:
        with create_folder(folder) as new:
            write_corpus(new, plan)
        corpus = load_corpus(folder)
    if corpus.is_slice:
        differs = "; ".join(
            f"{split} has {counts['here']:,} {corpus.details['unit']}, published are {counts['published']:,}"
            for split, counts in corpus.details["differs_from_published"].items()
        )
        if not allow_slice:
            raise InputError(
                f"data.name: {corpus.label} is not the published corpus ({differs}), and the paper scale needs it; give the "
                "full files with --from DIR (data.dir), leave data.max_tokens and data.max_length out, or choose --scale small"
            )
        logger.info(f"{corpus.label}: {differs}; figures are not comparable with published ones")
    return corpus


# text for language models


@dataclass(frozen=True)
class Settings:
    """The choices by which text becomes tokens, none left open."""

    kind: str
    lowercase: bool
    split: Split
    min_count: int
    max_vocabulary: int | None
    max_tokens: int | None  # of the training split
    sos: bool  # <sos> stands before every line


def plan_text(config: DataConfig, cache: Path, tokenizer: Tokenizer | None) -> Plan:
    """Plan how the text of a configuration is prepared.

    Args:
        config: section `data` of the configuration.
        cache: folder in which downloads, and texts made by programs, are kept.
        tokenizer: of another text; None makes one from this text.

    Returns:
        The plan, by which `write_corpus` builds the corpus.

    Raises:
        InputError: data or settings are bad.
        RunError: the download failed.
    """
    info = find_corpus(config.name)
    settings = _resolve_settings(config, info, tokenizer)
    identity = {"tokenizer": None if tokenizer is None else tokenizer.fingerprint}
    if settings.kind in ("bpe", "pretrained"):
        identity["tokenizers"] = tokenizers.__version__
    sources = find_text(config, info, cache)
    build = partial(_build, info, settings, sources, tokenizer)
    return Plan(info, f"{info.name}-{settings.kind}", dataclasses.asdict(settings), sources, identity, build)


def encode_file(path: Path, tokenizer: Tokenizer, folder: Path) -> Corpus:
    """Encode a file as the split `text` of a corpus.

    Args:
        path: the file.
        tokenizer: that of a trained model.
        folder: where the ids are written.

    Returns:
        A corpus with that split alone.

    Raises:
        InputError: the file cannot be read, the tokenizer cannot encode it, or it has no token.
    """
    counts = _encode(tokenizer, [Section(path)], folder / f"text.{IDS}.bin", "--text")
    return Corpus(folder, "text", path.name, False, {"text": counts}, {}, {}, {IDS: tokenizer})


def _resolve_settings(config: DataConfig, info: CorpusInfo, tokenizer: Tokenizer | None) -> Settings:
    """Resolve every `null` of the settings."""
    kind = tokenizer.kind if isinstance(tokenizer, PretrainedTokenizer) else config.unit
    prose = info.name == "builtin" and kind == "word"
    return Settings(
        kind=kind,
        lowercase=config.lowercase or prose,
        split="punctuation" if prose else "whitespace",
        min_count=config.min_count or (_BUILTIN_MIN_COUNT if prose else 1),
        max_vocabulary=config.max_vocabulary,
        max_tokens=config.max_tokens,
        sos=config.sos,
    )


def _build(info: CorpusInfo, settings: Settings, sources: Sources, tokenizer: Tokenizer | None, folder: Path) -> Built:
    """Write the ids of every split."""
    sections = {split: content.columns[0] for split, content in sources.splits.items()}
    if tokenizer is None:
        logger.info(f"{info.name}: making a {settings.kind} vocabulary")
        tokenizer = _make_tokenizer(sections["train"], settings)
    counts = {}
    for split in SPLITS:
        logger.info(f"{info.name}: encoding {split}")
        limit = settings.max_tokens if split == "train" else None
        counts[split] = _encode(tokenizer, sections[split], folder / f"{split}.{IDS}.bin", f"data.{split}", limit)
    marks = []
    if info.name == "builtin":
        marks.append(f"Python {platform.python_version()}")
    if info.name == "text":
        names = list(dict.fromkeys(section.path.name for section in sections["train"]))
        shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
        marks.append(shown + _LABELS.get(settings.kind, ""))
    if settings.sos:
        marks.append(f"with {SOS}")
    if counts["train"]["tokens"] == settings.max_tokens and not info.published:
        marks.append(f"first {settings.max_tokens:,} tokens")
    # a cut inside a character moves to its end
    slack = 3 if info.unit == "bytes" and settings.kind != "byte" else 0
    counted = {split: counts[split][info.unit] for split in SPLITS}
    return Built({IDS: tokenizer}, counts, counted, marks, slack=slack)


def _read(sections: Sequence[Section], kind: str, description: str, key: str) -> Iterator[Piece]:
    """Yield the pieces of all sections, one after another, with a progress bar."""
    for section in sections:
        open_text(section.path, key).close()  # what is missing or empty is an error before the first piece
    pieces = (read_pieces(section, exact=kind == "byte", key=key) for section in sections)
    return show_progress(chain.from_iterable(pieces), description, sum(section.size for section in sections))


def _list_names(sections: Sequence[Section]) -> str:
    return ", ".join(dict.fromkeys(str(section.path) for section in sections))


def _make_tokenizer(sections: Sequence[Section], settings: Settings) -> Tokenizer:
    """Make the vocabulary of the training split (of its first `max_tokens`; BPE is trained on the whole split)."""
    kind = settings.kind
    lowercase = settings.lowercase
    if kind == "byte":
        return build_bytes(lowercase=lowercase)
    pieces = _read(sections, kind, f"counting {kind}s", "data.train")
    if kind == "bpe":
        size = settings.max_vocabulary or DEFAULT_BPE_SIZE
        return train_bpe((piece.text for piece in pieces), size=size, lowercase=lowercase)
    words = partial(build_words, split=settings.split, sos=settings.sos)
    build = words if kind == "word" else build_characters
    marks = [SOS] if settings.sos else []
    counts = _count(pieces, build([UNK, LINE_END, *marks], lowercase=lowercase), settings)
    if kind == "word" and counts.keys() <= {LINE_END, *marks}:
        raise InputError(f"data.train: {_list_names(sections)}: there are no words in this text")
    return build(rank_entries(counts, settings.min_count, settings.max_vocabulary, marks), lowercase=lowercase)


def _count(pieces: Iterator[Piece], tokenizer: Tokenizer, settings: Settings) -> Counter[str]:
    """Count the words or characters of a text, of its first `max_tokens` where that is set."""

    def list_units(piece: Piece) -> Sequence[str]:
        units = tokenizer.cut(_end_lines(piece, tokenizer))
        return units[1:] if settings.sos and not piece.begins else units

    def count(group: Sequence[Piece]) -> Counter[str]:
        return Counter(chain.from_iterable(map(list_units, group)))

    counts: Counter[str] = Counter()
    if settings.max_tokens is None:
        for group_counts in map_in_processes(count, batched(pieces, _PIECES_AT_ONCE)):
            counts.update(group_counts)
        return counts
    for piece in pieces:
        counts.update(list_units(piece)[: settings.max_tokens - counts.total()])
        if counts.total() == settings.max_tokens:
            break
    return counts


def _end_lines(piece: Piece, tokenizer: Tokenizer) -> str:
    """Return the text of a piece; a last line without an end gets its <eos>."""
    return f"{piece.text}\n" if piece.open_end and tokenizer.kind in ("word", "bpe") else piece.text


def _encode(
    tokenizer: Tokenizer, sections: Sequence[Section], file_of_ids: Path, key: str, max_tokens: int | None = None
) -> Mapping[str, int]:
    """Write the ids of a text, of its first `max_tokens` where that is set, and count them. key: names the text in errors.

    Raises InputError for text that cannot be encoded or has no token at all.
    """
    dtype = id_type(len(tokenizer))
    limit = sys.maxsize if max_tokens is None else max_tokens
    has_sos = tokenizer.sos_id is not None

    def encode(piece: Piece) -> tuple[np.ndarray, np.ndarray, bool]:
        ids = tokenizer.encode_array(_end_lines(piece, tokenizer), dtype)
        units = len(ids) if tokenizer.options.get("split") == "whitespace" and not has_sos else None
        if has_sos and not piece.begins:
            ids = ids[1:]
        return ids, _measure(piece.text, piece.begins, piece.open_end, units), piece.begins

    pieces = _read(sections, tokenizer.kind, f"encoding {key}", key)
    encoded = map_in_processes(encode, pieces, _PIECES_AT_ONCE, alone=tokenizer.kind == "byte")
    tokens = 0
    sizes = np.zeros(3, dtype=np.int64)
    with file_of_ids.open("wb") as file:
        for ids, piece_sizes, begins in encoded:
            if tokens + len(ids) > limit:
                ids = ids[: limit - tokens]
                text = tokenizer.decode(ids.tolist())
                if tokenizer.kind == "byte":  # a character may be cut, which `decode` shows as another
                    text = ids.astype(np.uint8).tobytes().decode("utf-8", "surrogateescape")
                piece_sizes = _measure(text, begins, False)
            tokens += len(ids)
            sizes += piece_sizes
            file.write(ids.tobytes())
            if tokens == limit:
                break
    if tokens == 0:
        raise InputError(f"{key}: {_list_names(sections)}: there is no token in this text")
    words, characters, size = sizes.tolist()
    return {"tokens": tokens, "words": words, "characters": characters, "bytes": size}


def _measure(text: str, begins: bool, open_end: bool, units: int | None = None) -> np.ndarray:
    """Count words, characters and bytes of a piece; a word that began in the piece before does not count again.

    units: words and line ends, where they were counted before.
    """
    words = len(text.split()) + text.count("\n") + open_end if units is None else units
    if not begins and not text[:1].isspace():
        words -= 1
    return np.array([words, len(text), len(text.encode("utf-8", "surrogateescape"))])
