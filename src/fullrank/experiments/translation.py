"""Translation: a configuration becomes sentence pairs, model and training, and ends in perplexity and BLEU; lines by a run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fullrank.config.run import SEARCH_KEYS, EvalConfig, RunConfig
from fullrank.core.config import EncoderConfig
from fullrank.core.draws import evaluating
from fullrank.core.errors import ConfigError, InputError
from fullrank.core.model import longest
from fullrank.core.translator import Translator
from fullrank.data import Corpus, Language, Pairs, load_language
from fullrank.data.padded_batches import PairBatch, PairBatches, batches_by_length, pad_sentences
from fullrank.decoding import Ensemble, beam_search
from fullrank.decoding.sample import log_normalized
from fullrank.evaluation.tasks import bleu_of, tokenised_bleu, translation_scores
from fullrank.experiments.measure import Evaluation, Tally, figures
from fullrank.experiments.run_folder import open_run
from fullrank.experiments.task import TextTask, begin_pass, finish_loss
from fullrank.files import Entries, write_text
from fullrank.kernels import kernel
from fullrank.training.device import choose_device, device_of, merge_shares, rank, share_of_process
from fullrank.training.values import Carry, Loss, TrainingPosition

logger = logging.getLogger(__name__)

# the languages in a run folder
SOURCE = "tokenizer/source"
TARGET = "tokenizer/target"
_LONG = 128  # tokens; where sentences are longer, a batch holds fewer of them


# -- sentences as ids ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """Beam search for translations.

    score = log p / tokens^length_penalty, with <eos> among the tokens (see `fullrank.decoding.beam_search`). M source
    tokens give at most max_length_a M + max_length_b tokens, <eos> counted on both sides. At least one token stands
    before <eos>: as with fairseq's `min_len`, no translation is empty. n_best: translations of each sentence.
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

    @classmethod
    def from_config(cls, config: EvalConfig) -> Search:
        """Build the search of a run's eval section."""
        return cls(**{key: getattr(config, key) for key in SEARCH_KEYS})

    def in_words(self) -> str:
        """Describe the search and the figures of translations in a sentence, for people."""
        beam = "greedy search" if self.beams == 1 else f"beam {self.beams}, length penalty {self.length_penalty:g}"
        repeat = f", no {self.no_repeat_ngram_size}-gram twice" if self.no_repeat_ngram_size else ""
        return (
            f"{beam}{repeat}, at most {self.max_length_a:g} M + {self.max_length_b} tokens; BLEU of detokenised text by "
            "sacreBLEU; perplexity of every target token, <eos> included, given the source and the target tokens before it"
        )

    def longest(self, source: int, limit: int | None) -> int:
        """Compute the most tokens of a translation of `source` tokens, from a model that takes `limit`."""
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


def read_sources(models: Sequence[Translator], sentences: Sequence[Sequence[int]], source_eos: int) -> Any:
    """Encode sentences for a decoder that writes their translations; several models form an ensemble.

    Args:
        models: models of one vocabulary.
        sentences: source ids without <eos>.
        source_eos: <eos> of the source.

    Returns:
        What `fullrank.decoding` reads: a target token by token, given the sources (a row for each).
    """
    ids, mask = pad_sentences(sentences, source_eos)
    readers = []
    for model in models:
        device = device_of(model)
        with evaluating(model):  # no dropout in the source either
            encoded = model.encode(ids.to(device), None if mask is None else mask.to(device))
            readers.append(model.of_source(encoded))
    return readers[0] if len(readers) == 1 else Ensemble(readers)


def translate_ids(
    model: Translator | Sequence[Translator],
    sentences: Sequence[Sequence[int]],
    search: Search,
    *,
    source_eos: int,
    target_eos: int,
    batch_size: int = 64,
) -> list[list[Translation]]:
    """Translate sentences.

    Sentences of like lengths are translated together, the longest first. Neither their order nor batch_size changes a
    translation, but for rounding.

    Args:
        model: a model, or several as an ensemble.
        sentences: source ids without <eos>.
        search: how translations are searched.
        source_eos: <eos> of the source.
        target_eos: <eos> of the target.
        batch_size: most sentences at a time.

    Returns:
        Translations of each sentence, best first. An empty sentence has one, the empty one.
    """
    models = [model] if isinstance(model, Translator) else model
    device = device_of(models[0])
    hypotheses = [[Translation((), 0, 0.0, 0.0)] for _ in sentences]
    filled = [i for i, sentence in enumerate(sentences) if len(sentence)]
    for positions in batches_by_length([len(sentences[i]) + 1 for i in filled], batch_size, usual=_LONG):
        batch = [filled[position] for position in positions]
        reader = read_sources(models, [sentences[i] for i in batch], source_eos)
        most_tokens = [search.longest(len(sentences[i]) + 1, reader.max_length) for i in batch]
        best = beam_search(
            reader,
            torch.full((len(batch), 1), target_eos, device=device),
            beams=search.beams,
            n_best=search.n_best,
            length_penalty=search.length_penalty,
            max_new_tokens=torch.tensor(most_tokens, device=device),
            min_new_tokens=1,
            eos_id=target_eos,
            no_repeat_ngram_size=search.no_repeat_ngram_size,
        )
        columns = (best.ids.tolist(), best.log_probs.tolist(), best.lengths.tolist())
        for i, *of_sentence in zip(batch, *columns, strict=True):
            hypotheses[i] = []
            for ids, log_prob, length in zip(*of_sentence, strict=True):
                if length:
                    words = tuple(token for token in ids[:length] if token != target_eos)
                    score = log_prob / length**search.length_penalty
                    hypotheses[i].append(Translation(words, length, log_prob, score))
    return hypotheses


def replace_unknown(ids: Sequence[int], language: Language) -> tuple[int, ...]:
    """Replace ids that only the model has (a larger `vocab_size`) by that of `<unk>`."""
    return tuple(token if token < len(language) else language.unk_id for token in ids)


# -- the task ------------------------------------------------------------------------------------------------------------


class TranslationTask(TextTask):
    """The task of translation models.

    `objective` is the mean nll of the target tokens, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20 over
    all attention.
    """

    model_class = Translator
    name = "translation"

    def protocol(self, split: str = "test") -> Any:
        return Search.from_config(self.config.eval)

    def save(self, folder: Path) -> None:
        self.corpus.source.save(folder / SOURCE)
        self.corpus.target.save(folder / TARGET)

    def with_sizes(self) -> RunConfig:
        """Return the configuration with `model.vocab_size`, the target's, and `model.encoder.vocab_size` filled in.

        A size that is given stays: entries that the corpus has no piece for are never read, and a translation learns
        not to write them.
        Raises ConfigError where a given size is too small, or where one table is asked for and each language has its
        own vocabulary.
        """
        config = self.config
        corpus = self.corpus
        bleu_of(config.eval.bleu_tokenize, corpus.target.name)  # an error here, not after training
        model = config.model
        encoder = config.model.encoder or EncoderConfig()
        target = model.vocab_size or len(corpus.target)
        source = encoder.vocab_size or model.vocab_size or len(corpus.source)
        problems = [
            f"{key}: {size}, but the {language.name} of {corpus.label} has {len(language)} entries; set it to null or at "
            f"least {len(language)}, or make the vocabulary smaller with data.max_vocabulary"
            for key, size, language in (
                ("model.vocab_size", target, corpus.target),
                ("model.encoder.vocab_size", source, corpus.source),
            )
            if size < len(language)
        ]
        if encoder.share_embedding and corpus.source.fingerprint != corpus.target.fingerprint:
            problems.append(
                f"model.encoder.share_embedding: one table for both languages, and in {corpus.label} each has a vocabulary of "
                "its own; set data.vocabulary: joint, or model.encoder.share_embedding: false"
            )
        if problems:
            raise ConfigError(*problems)
        encoder = model.encoder if source == target else dataclasses.replace(encoder, vocab_size=source)
        return dataclasses.replace(config, model=dataclasses.replace(model, vocab_size=target, encoder=encoder))

    def describe(self) -> Entries:
        corpus = self.corpus
        tokens = {}
        for split, counts in corpus.splits.items():
            tokens[split] = {side: counts[f"{side}_tokens"] for side in corpus.tokenizers}
        return {
            **super().describe(),
            "pairs": {split: counts["pairs"] for split, counts in corpus.splits.items()},
            "tokens": tokens,
            "vocabulary": {"source": len(corpus.source), "target": len(corpus.target)},
            "languages": {"source": corpus.source.name, "target": corpus.target.name},
            "fingerprint": corpus.vocabulary,
        }

    def connect(self) -> None:
        options = self.options
        for split in self.corpus.splits:
            check_lengths(self.model, self.corpus.pairs(split))
        self.batches = PairBatches(self.corpus.pairs("train"), batch_tokens=options.batch_tokens, seed=options.seed)

    def evaluate(self, model: Any) -> Evaluation:
        validation = self.corpus.pairs("valid")
        total = self.score(model, validation)
        references = validation.target.read_lines()[: self.config.eval.max_sentences]
        if not references:
            return total
        greedy = replace(self.protocol(), beams=1)
        # one token at a time: casting weights would cost the most
        with torch.autocast(device_of(model).type, enabled=False):
            texts, _ = translate_split(model, self.corpus, "valid", greedy, len(references))
        return replace(total, scores={"bleu": self.score_texts(texts, references)["bleu"]})

    def objective(self, batch: PairBatch, carry: Carry, position: TrainingPosition) -> Loss:
        options = self.options
        trace = begin_pass(options, batch)
        on_device = batch.to(device_of(self.model))
        value, nll, _ = self.model.loss_parts(
            on_device.source_ids,
            on_device.inputs,
            on_device.targets,
            on_device.weights,
            on_device.source_mask,
            # padding comes last: models that do not see the future do not see it
            on_device.weights if self.sees_future else None,
            label_smoothing=options.label_smoothing,
            trace=trace,
        )
        return finish_loss(value, nll, batch, trace, options)

    @property
    def sees_future(self) -> bool:
        """True if target tokens see later ones."""
        return bool(self.config.model.get_decoder_config().sees_future)

    def score(self, model: Translator, pairs: Pairs) -> Evaluation:
        """Sum the nll of every target token of sentence pairs.

        The model is put into evaluation mode, and its mode is restored. The precision is that around the call.
        """
        longest = int(max(pairs.source.lengths.max(), pairs.target.lengths.max())) + 1
        most = max(self.config.train.batch_tokens or 4096, longest)
        batches = PairBatches(pairs, batch_tokens=most, seed=0, shuffle=False)
        device = device_of(model)
        tally = Tally(device)
        with evaluating(model):
            for index in share_of_process(batches.batches_per_epoch):
                batch = batches.batch(0, index).to(device)
                seen = batch.weights if self.sees_future else None
                nll = model.nll(batch.source_ids, batch.inputs, batch.targets, batch.source_mask, seen)
                tally.add(nll.per_token[batch.weights != 0])
        return tally.total()

    def describe_evaluation(self) -> Entries:
        config = self.config
        bleu = ""
        if (sentences := config.eval.max_sentences) is not None:
            bleu = f", BLEU of the first {sentences:,} sentences" if sentences else ", without BLEU"
        return {
            "protocol": f"greedy search, nll of every target token{bleu}",
            "metric": config.eval.metric,
            "next_token": not self.sees_future,
        }

    def score_texts(self, texts: Sequence[str], references: Sequence[str]) -> Entries:
        """Score translations beside references."""
        tokenize = self.config.eval.bleu_tokenize
        return translation_scores(texts, references, tokenize=tokenize, language=self.corpus.target.name)

    def figures(self, model: Any, split: str, protocol: Search, keep: Path | None = None) -> Entries:
        """Measure the figures of a split, in fp32.

        Args:
            model: trained model.
            split: `valid`, `test` or another of the corpus.
            protocol: how translations are searched.
            keep: run folder for translations and references, a sentence a line; None: nothing is written.

        Returns:
            Perplexity, BLEU and chrF; where the target is tokenised (Moses), also tokenised BLEU.
        """
        corpus = self.corpus
        pairs = corpus.pairs(split)
        measured = figures(self.score(model, pairs))
        texts, tokens = translate_split(model, corpus, split, protocol)
        references = pairs.target.read_lines()
        measured |= self.score_texts(texts, references)
        if corpus.target.moses:  # else tokens are not what fairseq counted
            measured |= tokenised_bleu(tokens, pairs.target.read_tokens())
        if keep is not None and rank() == 0:
            from fullrank.comparison.runs import TRANSLATIONS

            keep = keep / TRANSLATIONS
            keep.mkdir(parents=True, exist_ok=True)
            for name, lines in ((f"{split}.txt", texts), (f"{split}.reference.txt", references)):
                write_text(keep / name, "".join(" ".join(line.split()) + "\n" for line in lines))
        return measured


def check_lengths(model: Translator, pairs: Pairs) -> None:
    """Raise InputError where a sentence is longer than the positions of encoder or decoder."""
    for side, lengths, limit in (
        ("source", pairs.source.lengths, model.max_source_length),
        ("target", pairs.target.lengths, model.max_length),
    ):
        most = int(lengths.max(initial=0)) + 1
        if limit is not None and most > limit:
            raise InputError(
                f"sentence {int(lengths.argmax()) + 1:,} of {pairs.split} has {most:,} tokens on the {side} side, and this "
                f"model has {limit:,} positions; raise model.max_position_embeddings, or lower data.max_length (training pairs "
                "longer than so many words are left out)"
            )


def translate_split(
    model: Translator, corpus: Corpus, split: str, search: Search, limit: int | None = None
) -> tuple[list[str], list[str]]:
    """Translate sentences of a split.

    Args:
        model: translation model.
        corpus: corpus of sentence pairs.
        split: `valid`, `test` or another of the corpus.
        search: how translations are searched.
        limit: how many sentences, the first ones; None: all.

    Returns:
        Translations as people read them, and as the tokens that tokenised BLEU compares.
    """
    pairs = corpus.pairs(split)
    target = corpus.target
    share = share_of_process(len(pairs) if limit is None else limit)
    sentences = [pairs.source[i].tolist() for i in share]
    best = translate_ids(model, sentences, search, source_eos=corpus.source.eos_id, target_eos=target.eos_id)
    ids = merge_shares([replace_unknown(translations[0].ids, target) for translations in best])
    return [target.decode(line) for line in ids], [target.tokens(line) for line in ids]


# -- lines of text by a run ---------------------------------------------------------------------------------------------


def open_translation_run(folder: Path) -> RunConfig:
    """Read the configuration of the translation run in `folder`; InputError if it holds none."""
    config = open_run(folder)[0]
    if not config.data.has_pairs:
        raise InputError(
            f"{folder}: a run on {config.data.name}, which is text of one language, translates nothing; a language model "
            "writes with `fullrank generate`"
        )
    return config


class LineTranslator:
    """A translator of lines by the run in `folder`; by several runs or checkpoints (`best,last`) the mean of probabilities.

        LineTranslator(Path("runs/mine"), Search(beams=4)).translate(["Ein Mann schläft ."])[0][0].text

    `config`, `model` (the first), `models`, `source` and `target` may be read. A line that is too long is cut, and the
    log warns of it.

    Args:
        folder: folder of a translation run, or several.
        search: how translations are searched; None for the search of the first run's eval section.
        checkpoint: checkpoint of each run, or several, as in `best,last`.
        batch_size: most lines at a time.
        device_name: device, as for `--device`.
        kernel_name: kernel of attention, as for `--kernel`.

    Raises:
        InputError: a folder holds no translation run, or vocabularies differ.
        RunError: a file is damaged.
    """

    def __init__(
        self,
        folder: Path | Sequence[Path],
        search: Search | None = None,
        *,
        checkpoint: str = "best",
        batch_size: int = 64,
        device_name: str = "auto",
        kernel_name: str = "auto",
    ) -> None:
        folders = [folder] if isinstance(folder, Path) else list(folder)
        self.config, *_ = map(open_translation_run, folders)
        languages = [(load_language(folder / SOURCE), load_language(folder / TARGET)) for folder in folders]
        self.source, self.target = languages[0]
        if len({(source.fingerprint, target.fingerprint) for source, target in languages}) > 1:
            listed = ", ".join(map(str, folders))
            raise InputError(f"{listed}: their vocabularies differ; several runs translate together if they have one")
        device = choose_device(device_name, "--device")
        names = [name.strip() for name in checkpoint.split(",")]
        self.models = [Translator.load(folder, name).to(device) for folder in folders for name in names]
        self.model = self.models[0]
        self.search = Search.from_config(self.config.eval) if search is None else search
        self.batch_size = batch_size
        self.kernel_name = kernel_name

    def translate(self, lines: Sequence[str], *, first: int = 1) -> list[list[Translation]]:
        """Translate lines: the `search.n_best` translations of each, best first; of an empty line the empty text.

        A line of more tokens than the model takes is translated as far as they go, with a warning.
        first: the number of the first line, for these warnings.
        """
        encoded = [self.encode(line, first + i) for i, line in enumerate(lines)]
        with kernel(self.kernel_name):
            translations = translate_ids(
                self.models,
                encoded,
                self.search,
                source_eos=self.source.eos_id,
                target_eos=self.target.eos_id,
                batch_size=self.batch_size,
            )
        return [list(map(self._decode, best)) for best in translations]

    def score(self, lines: Sequence[str], translations: Sequence[str]) -> list[list[float]]:
        """Score the translation of each line by forced decoding: -log p in nats of every token, <eos> the last.

        Raises InputError for other numbers of lines, and for a translation longer than the model writes.
        """
        if len(lines) != len(translations):
            raise InputError(
                f"--score: {len(translations):,} translations of {len(lines):,} lines; give one of each line"
            )
        sources = [self.encode(line, number) for number, line in enumerate(lines, start=1)]
        targets = [self.target.encode(line) for line in translations]
        scores: dict[int, list[float]] = {}
        with kernel(self.kernel_name), torch.no_grad():
            for batch in batches_by_length([len(target) + 1 for target in targets], self.batch_size, usual=_LONG):
                reader = read_sources(self.models, [sources[i] for i in batch], self.source.eos_id)
                ids, _ = pad_sentences([targets[i] for i in batch], self.target.eos_id)
                if reader.max_length is not None and ids.shape[1] > reader.max_length:
                    raise InputError(
                        f"--score: line {batch[0] + 1} has {ids.shape[1]:,} tokens with <eos>, and the model writes at most "
                        f"{reader.max_length:,}; shorten it"
                    )
                inputs = ids.roll(1, dims=1)
                inputs[:, 0] = self.target.eos_id
                device = device_of(self.model)
                with evaluating(reader):
                    out = reader(inputs.to(device), attention_mask=None, cache=reader.new_cache())
                log_p = log_normalized(out.logits)
                nll = -log_p.double().gather(2, ids.to(device)[..., None])[..., 0]
                for row, i in enumerate(batch):
                    scores[i] = nll[row, : len(targets[i]) + 1].tolist()
        return [scores[i] for i in range(len(lines))]

    def _decode(self, translation: Translation) -> Translation:
        """Decode the text of a translation: a single line, whatever the model wrote."""
        words = self.target.decode(replace_unknown(translation.ids, self.target)).split()
        return replace(translation, text=" ".join(words))

    def encode(self, line: str, number: int = 1) -> list[int]:
        """Encode a line, without <eos>, in at most as many ids as the model takes.

        number: that of the line, for a warning.
        """
        ids = self.source.encode(line)
        limits = [model.max_source_length for model in self.models]
        most = (longest(self.config.model.max_position_embeddings, *limits) or 1) - 1
        if len(ids) > most:
            logger.warning(
                f"line {number}: {len(ids):,} tokens are more than the {most:,} that the model takes; the rest is not "
                "translated"
            )
        return ids[:most]
