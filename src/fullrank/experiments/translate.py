"""Translating: sentences as ids to their best translations, and lines of text by a run."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fullrank.config.run import EvalConfig, RunConfig
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator
from fullrank.data import Language, load_language
from fullrank.data.pair_batches import pad_sentences
from fullrank.decoding import beam_search, sample
from fullrank.decoding.sample import evaluating
from fullrank.experiments.measure import batches_by_length
from fullrank.experiments.run_folder import open_run
from fullrank.kernels import kernel
from fullrank.training.device import choose_device, device_of

SOURCE, TARGET = "tokenizer/source", "tokenizer/target"  # the languages in a run folder
_LONG = 128  # tokens; where sentences are longer, a batch holds fewer of them


@dataclass(frozen=True)
class Sampling:
    """Draw translations instead of searching for the best: see `fullrank.decoding.sample`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Search:
    """Search for translations: beam search, or `sampling`.

    score = log p / tokens^length_penalty, with <eos> among the tokens (see `fullrank.decoding.beam_search`). Of M source
    tokens come at most max_length_a M + max_length_b, each with its <eos>, and at least one before <eos>: as with fairseq's
    `min_len`, no translation is empty. n_best: translations of each sentence.
    """

    beams: int = 5
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    max_length_a: float = 1.2
    max_length_b: int = 10
    n_best: int = 1
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise InputError(f"beams: one or more, given {self.beams}")
        if self.n_best < 1 or (self.sampling is None and self.n_best > self.beams):
            raise InputError(
                f"n_best: from 1 to the number of beams ({self.beams}), given {self.n_best}; widen the beam, or sample"
            )
        if not (0 <= self.max_length_a < math.inf and self.max_length_b >= 0):
            raise InputError(
                f"max_length_a and max_length_b: zero or more, given {self.max_length_a} and {self.max_length_b}"
            )

    @classmethod
    def of(cls, config: EvalConfig) -> Search:
        """The search of a run's eval section."""
        keys = ("beams", "length_penalty", "no_repeat_ngram_size", "max_length_a", "max_length_b")
        return cls(**{key: getattr(config, key) for key in keys})

    def in_words(self) -> str:
        """The search and the figures of translations, as a sentence for people."""
        beam = "greedy search" if self.beams == 1 else f"beam {self.beams}, length penalty {self.length_penalty:g}"
        repeat = f", no {self.no_repeat_ngram_size}-gram twice" if self.no_repeat_ngram_size else ""
        return (
            f"{beam}{repeat}, at most {self.max_length_a:g} M + {self.max_length_b} tokens; BLEU of detokenised text by "
            "sacreBLEU; perplexity of every target token, <eos> included, given the source and the target tokens before it"
        )

    def longest(self, source: int, limit: int | None) -> int:
        """The most tokens of a translation of `source` tokens, from a model that takes `limit`."""
        wanted = int(min(self.max_length_a * source + self.max_length_b, 2**31 - 1))
        return max(1, wanted if limit is None else min(wanted, limit - 1))  # a start token stands before them


@dataclass(frozen=True)
class Translation:
    """A translation: ids without <eos>; tokens, which count <eos> where the model wrote it; log_prob in nats; score; text.

    Translations are ranked by `score`. `text` is that of a line; sentences that are given as ids have none.
    """

    ids: tuple[int, ...]
    tokens: int
    log_prob: float
    score: float
    text: str = ""


def translate_ids(
    model: Translator,
    sentences: Sequence[Sequence[int]],
    search: Search,
    *,
    source_eos: int,
    target_eos: int,
    batch_size: int = 64,
    first: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[list[Translation]]:
    """Translations of each sentence (ids without <eos>), best first; drawn ones in the order of their draws.

    An empty sentence has one translation, the empty one.
    Sentences of like lengths are translated together, at most batch_size, the longest first; `progress` is called with the
    number that is done. Neither their order nor batch_size changes a translation, but for rounding.
    first: the number of the first sentence; draws depend on the number of their sentence and on the seed alone.
    """
    device = device_of(model)
    seed = secrets.randbits(62) if search.sampling is None or search.sampling.seed is None else search.sampling.seed
    hypotheses = [[Translation((), 0, 0.0, 0.0)] for _ in sentences]
    filled = [i for i, sentence in enumerate(sentences) if len(sentence)]
    done = len(sentences) - len(filled)
    for positions in batches_by_length([len(sentences[i]) + 1 for i in filled], batch_size, usual=_LONG):
        batch = [filled[position] for position in positions]
        rows = [i for i in batch for _ in range(search.n_best if search.sampling else 1)]
        ids, mask = pad_sentences([sentences[i] for i in rows], source_eos)
        limits = torch.tensor([search.longest(len(sentences[i]) + 1, model.max_length) for i in rows], device=device)
        with evaluating(model):  # no dropout in the source either
            encoded = model.encode(ids.to(device), None if mask is None else mask.to(device))
            reader = model.of_source(encoded)
        start = torch.full((len(rows), 1), target_eos, device=device)
        rules: dict[str, Any] = {
            "max_new_tokens": limits,
            "min_new_tokens": 1,
            "eos_id": target_eos,
            "no_repeat_ngram_size": search.no_repeat_ngram_size,
        }
        if search.sampling is None:
            best = beam_search(
                reader, start, beams=search.beams, n_best=search.n_best, length_penalty=search.length_penalty, **rules
            )
            ids, log_probs, lengths = best.ids, best.log_probs, best.lengths
        else:
            seeds = [_seed(seed, first + i, k) for i in batch for k in range(search.n_best)]
            drawn = sample(reader, start, **{**vars(search.sampling), "seed": seeds}, **rules)
            ids, log_probs, lengths = (
                values.unflatten(0, (len(batch), search.n_best))
                for values in (drawn.ids, drawn.log_probs.sum(1), drawn.lengths)
            )
        for i, *of_one in zip(batch, ids.tolist(), log_probs.tolist(), lengths.tolist(), strict=True):
            hypotheses[i] = [
                _translation(text[:length], total, search.length_penalty, target_eos)
                for text, total, length in zip(*of_one, strict=True)
                if length
            ]
        done += len(batch)
        if progress is not None:
            progress(done)
    return hypotheses


def named(ids: Sequence[int], language: Language) -> tuple[int, ...]:
    """`ids` with unknown words for entries that only the model has (a larger `vocab_size`)."""
    return tuple(token if token < len(language) else language.unk_id for token in ids)


def _translation(ids: list[int], log_prob: float, length_penalty: float, eos: int) -> Translation:
    words = ids[:-1] if ids[-1] == eos else ids
    return Translation(tuple(words), len(ids), log_prob, log_prob / len(ids) ** length_penalty)


def _seed(seed: int, number: int, draw: int) -> int:
    """A seed of its own for each draw of each sentence."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number} {draw}".encode(), digest_size=7).digest())


# -- lines of text by a run ---------------------------------------------------------------------------------------------


def open_translation_run(folder: Path) -> RunConfig:
    """The configuration of the translation run in `folder`; InputError if it holds none."""
    config = open_run(folder)[0]
    if not config.data.has_pairs:
        raise InputError(
            f"{folder}: a run on {config.data.name}, which is text of one language, translates nothing; a language model "
            "writes with `fullrank generate`"
        )
    return config


class LineTranslator:
    """The run in `folder` as a translator of lines.

        LineTranslator(Path("runs/mine"), Search(beams=4)).translate(["Ein Mann schläft ."])[0][0].text

    search: None: that of the run's eval section. `warn` is called for lines that are too long. `config`, `model`, `source`
    and `target` may be read.
    Raises InputError for a folder without a translation run, RunError for one whose files are damaged.
    """

    def __init__(
        self,
        folder: Path,
        search: Search | None = None,
        *,
        checkpoint: str = "best",
        batch_size: int = 64,
        device_name: str = "auto",
        kernel_name: str = "auto",
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.config = open_translation_run(folder)
        self.source, self.target = load_language(folder / SOURCE), load_language(folder / TARGET)
        device = choose_device(device_name, "--device")
        self.model = Translator.load(folder, checkpoint).to(device)
        self.search = Search.of(self.config.eval) if search is None else search
        self.batch_size, self.kernel_name, self._warn = batch_size, kernel_name, warn

    @property
    def longest_source(self) -> int:
        """The most tokens of a line that the model reads, <eos> included."""
        limit, configured = self.model.max_source_length, self.config.model.max_position_embeddings
        return configured if limit is None else min(limit, configured)

    def translate(
        self, lines: Sequence[str], *, first: int = 1, progress: Callable[[int], None] | None = None
    ) -> list[list[Translation]]:
        """The `search.n_best` translations of each line, best first; of an empty line the empty text.

        first: the number of the first line, for warnings and samples. `progress` is called with the number of lines done.
        A line of more tokens than the model takes is translated as far as they go, with a warning.
        """
        encoded = [self.encoded(line, first + i) for i, line in enumerate(lines)]
        with kernel(self.kernel_name):
            translations = translate_ids(
                self.model,
                encoded,
                self.search,
                source_eos=self.source.eos_id,
                target_eos=self.target.eos_id,
                batch_size=self.batch_size,
                first=first,
                progress=progress,
            )
        return [[self._decode(one) for one in best] for best in translations]

    def _decode(self, translation: Translation) -> Translation:
        """With its text, a single line, whatever the model wrote."""
        words = self.target.decode(named(translation.ids, self.target)).split()
        return replace(translation, text=" ".join(words))

    def encoded(self, line: str, number: int = 1) -> list[int]:
        """The ids of a line, without <eos>, at most as many as the model takes; `number` is the line's in a warning."""
        ids, most = self.source.encode(line), self.longest_source - 1
        if len(ids) > most and self._warn is not None:
            self._warn(
                f"line {number}: {len(ids):,} tokens are more than the {most:,} that the model takes; the rest is not "
                "translated"
            )
        return ids[:most]
