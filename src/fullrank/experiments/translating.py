"""A translation run at work: lines of text in, their best translations out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator
from fullrank.data import Language, load_language
from fullrank.experiments.run_folder import open_run
from fullrank.experiments.translation_search import Found, Search, named, translate_ids
from fullrank.kernels import kernel
from fullrank.training.device import choose_device

SOURCE, TARGET = "tokenizer/source", "tokenizer/target"  # the languages in a run folder


def open_translation_run(folder: Path) -> RunConfig:
    """The configuration of the translation run in `folder`; InputError if it holds none."""
    config = open_run(folder)[0]
    if not config.data.has_pairs:
        raise InputError(
            f"{folder}: a run on {config.data.name}, which is text of one language, translates nothing; a language model "
            "writes with `fullrank generate`"
        )
    return config


def load_languages(folder: Path) -> tuple[Language, Language]:
    """Source and target of the run in `folder`; InputError if its vocabulary files are missing."""
    missing = [name for name in (SOURCE, TARGET) if not (folder / name).is_dir()]
    if missing:
        raise InputError(
            f"{folder}: the vocabulary is missing ({' and '.join(missing)}); copy the run folder whole, or train again"
        )
    return load_language(folder / SOURCE), load_language(folder / TARGET)


@dataclass(frozen=True)
class Translation:
    """text of a translation and its ids; tokens count <eos>; log_prob in nats; score is what translations are ranked by."""

    text: str
    ids: tuple[int, ...]
    tokens: int
    log_prob: float
    score: float


class Translating:
    """The run in `folder` as a function from lines to translations.

        Translating(Path("runs/mine"), Search(beams=4)).translate(["Ein Mann schläft ."])[0][0].text

    search: how; None: as the run is judged (the `eval` section). `warn` hears of lines that are too long, and `config`,
    `model`, `source` and `target` are there to be read.
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
        self.source, self.target = load_languages(folder)
        device = choose_device(device_name, "--device")
        self.model = Translator.load(folder, checkpoint).to(device)
        for side, language, known in (
            ("source", self.source, self.model.encoder.config.vocab_size),
            ("target", self.target, self.model.config.vocab_size),
        ):
            if known is None or len(language) > known:  # spare entries of the model name nothing
                raise InputError(
                    f"{folder}: the {side} vocabulary has {len(language):,} entries, the model {known:,}; were files of "
                    "another run copied here?"
                )
        self.search = Search.of(self.config.eval) if search is None else search
        self.batch_size, self.kernel_name, self._warn = batch_size, kernel_name, warn

    @property
    def longest_source(self) -> int:
        """Tokens of a line that the model reads, <eos> included; what follows is left out."""
        limit, configured = self.model.max_source_length, self.config.model.max_position_embeddings
        return configured if limit is None else min(limit, configured)

    def translate(
        self, lines: Sequence[str], *, first: int = 1, progress: Callable[[int], None] | None = None
    ) -> list[list[Translation]]:
        """The `search.n_best` translations of each line, best first; of an empty line the empty text.

        first: the number of the first line, for warnings and samples. `progress` hears how many lines are done.
        A line of more tokens than the model takes is translated as far as they go, with a warning.
        """
        encoded = [self.encoded(line, first + i) for i, line in enumerate(lines)]
        filled = [i for i, ids in enumerate(encoded) if ids]
        empty = len(lines) - len(filled)
        with kernel(self.kernel_name):
            found = translate_ids(
                self.model,
                [encoded[i] for i in filled],
                self.search,
                source_eos=self.source.eos_id,
                target_eos=self.target.eos_id,
                batch_size=self.batch_size,
                numbers=[first + i for i in filled],
                progress=None if progress is None else lambda done: progress(empty + done),
            )
        texts = [[Translation("", (), 0, 0.0, 0.0)] for _ in lines]
        for i, best in zip(filled, found, strict=True):
            texts[i] = [self._text(one) for one in best]
        return texts

    def encoded(self, line: str, number: int = 1) -> list[int]:
        """The ids of a line, without <eos>, as many as the model takes; `number` is what a warning calls it."""
        ids, most = self.source.encode(line), self.longest_source - 1
        if len(ids) > most and self._warn is not None:
            self._warn(
                f"line {number}: {len(ids):,} tokens are more than the {most:,} that the model takes; the rest is not "
                "translated"
            )
        return ids[:most]

    def _text(self, found: Found) -> Translation:
        text = " ".join(
            self.target.decode(named(found.ids, self.target)).split()
        )  # a translation is one line, whatever was written
        return Translation(text, found.ids, found.tokens, found.log_prob, found.score)
