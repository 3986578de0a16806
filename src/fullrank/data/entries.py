"""The entries of a vocabulary: the marks among them, their order, and ids that are in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from fullrank.core.errors import InputError

UNK, EOS, SOS = "<unk>", "<eos>", "<sos>"
MASK = "<mask>"  # beside the vocabulary: a masked language model has one entry more than its text, the last


def check_ids(ids: Sequence[int], size: int) -> None:
    """InputError unless every id is in [0, size)."""
    if len(ids) and (min(ids) < 0 or max(ids) >= size):
        bad = next(i for i in ids if not 0 <= i < size)
        raise InputError(f"token id {bad} is not in this vocabulary of {size:,} entries (ids 0 to {size - 1})")


def digest(kind: str, entries: Iterable[str]) -> str:
    """sha256 of a vocabulary: its kind and its entries in order."""
    return hashlib.sha256("\0".join((kind, *entries)).encode()).hexdigest()


def ranked(
    counts: Mapping[str, int], *, keep: Sequence[str], unk: bool, min_count: int, max_vocabulary: int | None
) -> tuple[list[str], list[int]]:
    """Entries and counts, most frequent first, ties alphabetically. `keep` are entries that never drop out.

    What is rarer than `min_count` or beyond `max_vocabulary` entries is counted under `<unk>`.
    Raises InputError if something drops out and `unk` is False, or if there is no room for the entries in `keep`.
    """
    always = [UNK, *keep] if unk else list(keep)
    if max_vocabulary is not None and max_vocabulary <= len(always):
        raise InputError(
            f"data.max_vocabulary: more than {len(always)} ({', '.join(map(repr, always))}), given {max_vocabulary}"
        )
    table = dict.fromkeys(always, 0) | dict(counts)
    free = sorted(
        ((count, entry) for entry, count in table.items() if entry not in always and count >= min_count),
        key=lambda item: (-item[0], item[1]),
    )
    kept = free if max_vocabulary is None else free[: max_vocabulary - len(always)]
    lost = sum(table.values()) - sum(table[entry] for entry in always) - sum(count for count, _ in kept)
    if unk:
        table[UNK] += lost
    elif lost:
        raise InputError(
            f"a vocabulary without {UNK} cannot leave entries out (min_count {min_count}, max_vocabulary {max_vocabulary})"
        )
    kept = sorted([*kept, *((table[entry], entry) for entry in always)], key=lambda item: (-item[0], item[1]))
    return [entry for _, entry in kept], [count for count, _ in kept]


def index(entries: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    """The id of every entry; InputError for an entry that stands twice, or for another number of counts."""
    if len(counts) != len(entries):
        raise InputError(f"a vocabulary of {len(entries)} entries with {len(counts)} counts")
    ids = {entry: i for i, entry in enumerate(entries)}
    if len(ids) != len(entries):
        twice = next(entry for i, entry in enumerate(entries) if ids[entry] != i)
        raise InputError(f"the entry {twice!r} stands twice in the vocabulary")
    return ids
