"""BPE over characters by a list of merges, exactly as subword-nmt applies its codes files (Sennrich et al. 2016)."""

from __future__ import annotations

import heapq
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fullrank.core.errors import InputError
from fullrank.data.text import open_text
from fullrank.data.word_cache import WordCache

_END, _GLUE = "</w>", "@@"
_VERSION = "#version: 0.2"


class Codes:
    """Pieces of words: characters, joined by the merges in the order in which they were learned.

    `merges`: pairs of symbols, best first; of a pair that stands twice the first counts. The last symbol of a word carries
    `</w>`, in pieces every other one carries `@@` instead: "lo@@ wer". `old`: codes of version 0.1, where `</w>` is a symbol
    of its own. A character that is in no merge is a piece by itself.
    """

    kind = "codes"
    pieces: list[str] | None = None

    def __init__(self, merges: Sequence[tuple[str, str]], *, old: bool = False) -> None:
        self._merges, self._old = list(merges), old
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(self._merges)))}
        self._words = WordCache(lambda words: [self._pieces(word) for word in words])

    def __len__(self) -> int:
        """How many merges there are."""
        return len(self._merges)

    def segment(self, lines: Sequence[str]) -> list[list[str]]:
        return self._words.segment(lines)

    def join(self, pieces: Sequence[str]) -> str:
        return " ".join(pieces).replace(f"{_GLUE} ", "").removesuffix(_GLUE)

    def state(self) -> str:
        """A codes file."""
        first = [] if self._old else [_VERSION]
        return "".join(f"{line}\n" for line in [*first, *(" ".join(pair) for pair in self._merges)])

    def _pieces(self, word: str) -> list[str]:
        *inner, last = self._merged(word)
        return [*(symbol + _GLUE for symbol in inner), last]

    def _merged(self, word: str) -> list[str]:
        """The symbols of a word when no merge is left, in n log n steps.

        The pair of the best rank is merged wherever it stands, from left to right; then the next best that is there. A heap
        holds the pairs by rank and place, `after` and `before` link the symbols that are left.
        """
        if len(word) == 1:
            return [word]
        symbols = [*word, _END] if self._old else [*word[:-1], word[-1] + _END]
        size, ranks = len(symbols), self._ranks
        after, before = list(range(1, size + 1)), list(range(-1, size - 1))
        alive = [True] * size
        heap: list[tuple[int, int]] = []

        def offer(at: int) -> None:
            if at >= 0 and after[at] < size:
                rank = ranks.get((symbols[at], symbols[after[at]]))
                if rank is not None:
                    heapq.heappush(heap, (rank, at))

        for at in range(size - 1):
            offer(at)
        while heap:
            best, touched = heap[0][0], []
            pair = self._merges[best]
            while heap and heap[0][0] == best:
                at = heapq.heappop(heap)[1]
                right = after[at]
                if not alive[at] or right >= size or (symbols[at], symbols[right]) != pair:
                    continue  # one of the two went into another merge
                symbols[at] = "".join(pair)
                alive[right] = False
                after[at] = after[right]
                if after[at] < size:
                    before[after[at]] = at
                touched.append(at)
            for at in touched:  # new neighbours are looked at when the pair is merged everywhere
                offer(before[at])
                offer(at)
        left = list(itertools.compress(symbols, alive))
        if left[-1] == _END:
            left.pop()
        else:
            left[-1] = left[-1].removesuffix(_END)
        return left


def read_codes(text: str, name: str) -> Codes:
    """The merges of a codes file; InputError names the line that is none."""
    rows = text.rstrip("\n").split("\n")
    old = not rows[0].startswith("#version:")
    if not old:
        version = re.sub(r"(\.0+)*$", "", rows[0].split()[-1])
        if version not in ("0.1", "0.2"):
            raise InputError(f"data.codes: {name}: version {version} of BPE codes; known are 0.1 and 0.2")
        old = version == "0.1"
        rows = rows[1:]
    merges = []
    for number, row in enumerate(rows, start=len(text.rstrip("\n").split("\n")) - len(rows) + 1):
        pair = row.strip("\r ").split(" ")
        if len(pair) != 2:
            raise InputError(
                f"data.codes: {name}: line {number} is {row!r}; a merge is two symbols with a space between, as "
                "subword-nmt learn-bpe writes them"
            )
        merges.append((pair[0], pair[1]))
    return Codes(merges, old=old)


def codes_file(path: Path) -> Codes:
    """The codes file of `data.codes`; InputError if it is missing, not text or no codes file."""
    with open_text(path, "data.codes") as file:
        data = file.read()
    try:
        return read_codes(data.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise InputError(f"data.codes: {path} is not UTF-8 text ({error.reason} at byte {error.start:,})") from None


def learn_codes(lines: Callable[[], Iterable[str]], merges: int) -> Codes:
    """At most `merges` merges, of pairs seen at least twice, learned by Hugging Face `tokenizers`. `lines` are read twice."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    characters: set[str] = set()
    for line in lines():
        characters.update(line)
    backend = Tokenizer(models.BPE(end_of_word_suffix=_END))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(  # its size counts characters too, with and without </w>
        vocab_size=merges + 2 * len(characters), min_frequency=2, special_tokens=[], end_of_word_suffix=_END,
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(lines(), trainer)
    learned = json.loads(backend.to_str())["model"]["merges"]
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in learned[:merges]]
    return Codes([(left, right) for left, right in pairs])
