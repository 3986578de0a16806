"""Translating: sentences as ids to their best translations, and lines of text by a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fullrank.config.run import EvalConfig, RunConfig
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator
from fullrank.data import Language, load_language
from fullrank.data.pair_batches import pad_sentences
from fullrank.decoding import beam_search
from fullrank.decoding.sample import evaluating
from fullrank.experiments.measure import batches_by_length
from fullrank.experiments.run_folder import open_run
from fullrank.kernels import kernel
from fullrank.training.device import choose_device, device_of

SOURCE, TARGET = "tokenizer/source", "tokenizer/target"  # the languages in a run folder
_LONG = 128  # tokens; where sentences are longer, a batch holds fewer of them


@dataclass(frozen=True)
class Search:
    """Beam search for translations.

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

    def __post_init__(self) -> None:
        if not 1 <= self.n_best <= self.beams:
            raise InputError(f"beams, n_best: 1 <= n_best <= beams, given {self.n_best} of {self.beams}")
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
    progress: Callable[[int], None] | None = None,
) -> list[list[Translation]]:
    """Translations of each sentence (ids without <eos>), best first.

    An empty sentence has one translation, the empty one.
    Sentences of like lengths are translated together, at most batch_size, the longest first; `progress` is called with the
    number that is done. Neither their order nor batch_size changes a translation, but for rounding.
    """
    device = device_of(model)
    hypotheses = [[Translation((), 0, 0.0, 0.0)] for _ in sentences]
    filled = [i for i, sentence in enumerate(sentences) if len(sentence)]
    done = len(sentences) - len(filled)
    for positions in batches_by_length([len(sentences[i]) + 1 for i in filled], batch_size, usual=_LONG):
        batch = [filled[position] for position in positions]
        ids, mask = pad_sentences([sentences[i] for i in batch], source_eos)
        with evaluating(model):  # no dropout in the source either
            encoded = model.encode(ids.to(device), None if mask is None else mask.to(device))
            reader = model.of_source(encoded)
        longest = [search.longest(len(sentences[i]) + 1, model.max_length) for i in batch]
        best = beam_search(
            reader,
            torch.full((len(batch), 1), target_eos, device=device),
            beams=search.beams,
            n_best=search.n_best,
            length_penalty=search.length_penalty,
            max_new_tokens=torch.tensor(longest, device=device),
            min_new_tokens=1,
            eos_id=target_eos,
            no_repeat_ngram_size=search.no_repeat_ngram_size,
        )
        columns = (best.ids.tolist(), best.log_probs.tolist(), best.lengths.tolist())
        for i, texts, log_probs, lengths in zip(batch, *columns, strict=True):
            hypotheses[i] = []
            for text, log_prob, length in zip(texts, log_probs, lengths, strict=True):
                if length:
                    words = text[: length - 1] if text[length - 1] == target_eos else text[:length]
                    score = log_prob / length**search.length_penalty
                    hypotheses[i].append(Translation(tuple(words), length, log_prob, score))
        done += len(batch)
        if progress is not None:
            progress(done)
    return hypotheses


def replace_unknown(ids: Sequence[int], language: Language) -> tuple[int, ...]:
    """`ids` with unknown words for entries that only the model has (a larger `vocab_size`)."""
    return tuple(token if token < len(language) else language.unk_id for token in ids)


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

        first: the number of the first line, for warnings. `progress` is called with the number of lines done.
        A line of more tokens than the model takes is translated as far as they go, with a warning.
        """
        encoded = [self.encode(line, first + i) for i, line in enumerate(lines)]
        with kernel(self.kernel_name):
            translations = translate_ids(
                self.model,
                encoded,
                self.search,
                source_eos=self.source.eos_id,
                target_eos=self.target.eos_id,
                batch_size=self.batch_size,
                progress=progress,
            )
        return [[self._decode(one) for one in best] for best in translations]

    def _decode(self, translation: Translation) -> Translation:
        """With its text, a single line, whatever the model wrote."""
        words = self.target.decode(replace_unknown(translation.ids, self.target)).split()
        return replace(translation, text=" ".join(words))

    def encode(self, line: str, number: int = 1) -> list[int]:
        """The ids of a line, without <eos>, at most as many as the model takes; `number` is the line's in a warning."""
        ids, most = self.source.encode(line), self.longest_source - 1
        if len(ids) > most and self._warn is not None:
            self._warn(
                f"line {number}: {len(ids):,} tokens are more than the {most:,} that the model takes; the rest is not "
                "translated"
            )
        return ids[:most]
