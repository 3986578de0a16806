"""The rules of `fullrank init`: every value of a training from its text, a size and the time, each with its reason.

    text -> tokens, vocabulary -> the largest size that the time can train -> batch, steps, rate, dropout -> evaluation

What they were measured by stands in docs/own_text.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from fullrank.analysis.size import parameters_by_part
from fullrank.config.data import DataConfig
from fullrank.config.run import RunConfig
from fullrank.config.training import SIZES
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator
from fullrank.data.sources import files_of
from fullrank.experiments.speed import measure_speed
from fullrank.experiments.task import Prepared, Say, TextTask
from fullrank.experiments.translate import Search
from fullrank.experiments.translation import translate_split
from fullrank.files import silent
from fullrank.training.device import choose_device

_STARTUP = 6.0  # seconds until training begins, and for the report at the end
_EVALUATIONS = 5
_STEPS = 2000  # updates below which a batch is not made larger
_LEAST_STEPS = 20  # updates of any training
_BPE_BYTES = 100_000  # of a text: with as many or more, BPE is the default
_LEAST_TOKENS = 2000  # of a training text
_PER_PARAMETER = 2  # tokens to train on, for each parameter outside of the vocabulary
_MOST_EPOCHS = 40
_BUILTIN_BYTES = 3_000_000  # about
_DROPOUT = ((4, 0.0), (12, 0.1), (math.inf, 0.2))  # times through the text up to which a rate is used

Values = Mapping[str, Any]
Rule = tuple[str, Any, str]  # a key, its value and the reason


@dataclass(frozen=True)
class Amounts:
    """Values that follow the time: tokens of an update, updates, dropout, tokens of an evaluation while training."""

    per_step: int = 1024
    steps: int = 100
    dropout: float = 0.0
    evaluated: int = 4096


@dataclass(frozen=True)
class Trial:
    """A model on this machine: parameters (in all, and outside of its vocabulary), tokens and seconds of an update.

    judging: seconds of all evaluation.
    """

    parameters: int
    body: int
    tokens: float
    step: float
    judging: float

    def read(self, seconds: float, have: int) -> float:
        """Tokens that are trained on in a training of `seconds`; evaluation takes at most half of them."""
        training = max(seconds - _STARTUP - self.judging, seconds / 2)
        return min(training * self.tokens / self.step, _MOST_EPOCHS * have)


@dataclass(frozen=True)
class Settled:
    """A configuration by the rules, as lines of YAML with the reasons. have: tokens to train on; seconds: of all of it."""

    config: RunConfig
    lines: list[str]
    parameters: int
    have: int
    seconds: float


def settle(
    data: Values, size: str | None, memory: bool, seconds: float, task: TextTask[Any, Any, Any], say: Say
) -> Settled:
    """The configuration that the rules make of a text for a training of `seconds` on this machine.

    data: what is stated about the text. size: None is the largest that the time can train. memory: of the segments before.
    With one thread the seconds are of the processor, which other programs do not change.
    Raises InputError for texts that are too short.
    """
    device = choose_device("auto")
    is_alone = torch.get_num_threads() == 1 and device.type == "cpu"
    clock = time.process_time if is_alone else time.perf_counter
    has_pairs = data["name"] == "parallel"
    first_rules = list(choose_data(data))
    if has_pairs:
        first_rules.append(("train.batch_tokens", 1024, ""))
    config = _build(data, first_rules)
    prepared = task.prepare(config, {}, True, say)
    have = prepared.corpus.splits["train"]["target_tokens" if has_pairs else "tokens"]
    if have < _LEAST_TOKENS:
        raise InputError(
            f"{prepared.label}: {have:,} tokens to train on, after validation and test are cut off, are too few; at least "
            f"{_LEAST_TOKENS:,} are needed"
        )

    def attempt(size: str, amounts: Amounts) -> Trial:
        rules = _choose(data, size, memory, amounts, prepared)
        return _try(_build(data, rules), task, prepared, device, clock)

    say("Measuring the speed of this machine ...")
    size, *larger = [size] if size else SIZES
    trial = attempt(size, Amounts())
    for other_size in larger:
        other = attempt(other_size, Amounts())
        if _PER_PARAMETER * other.body > other.read(seconds, have) or other.body > 4 * have:
            break
        size, trial = other_size, other
    read = trial.read(seconds, have)
    amounts = Amounts(
        per_step=2 ** min(max(int(math.log2(max(read, 1) / _STEPS)), 9 + memory), 13),
        dropout=next(rate for most, rate in _DROPOUT if read <= most * have),
        evaluated=2048 * max(1, int(0.03 * read / 2048)),
    )
    trial = attempt(size, amounts)  # other batches have another speed
    amounts = replace(amounts, steps=max(_LEAST_STEPS, round(trial.read(seconds, have) / trial.tokens)))
    rules = list(_choose(data, size, memory, amounts, prepared))
    reasons = {key: reason for key, _, reason in rules}
    lines = _write_table(_lay(data, rules), reasons)
    duration = _STARTUP + amounts.steps * trial.step + trial.judging
    return Settled(_build(data, rules), lines, trial.parameters, have, duration)


def _lay(data: Values, rules: Iterable[Rule]) -> dict[str, dict[str, Any]]:
    """The values of a configuration by section: what is stated about the data, and the rules."""
    values: dict[str, dict[str, Any]] = {"model": {}, "data": dict(data), "train": {}, "eval": {}}
    for key, value, _ in rules:
        section, _, name = key.partition(".")
        values[section][name] = value
    return values


def _build(data: Values, rules: Iterable[Rule]) -> RunConfig:
    return RunConfig.from_dict(_lay(data, rules))


def _write_table(values: Mapping[str, Values], reasons: Mapping[str, str]) -> list[str]:
    """The values as lines of YAML: key, value and, as a comment, the reason."""
    lines = []
    for section, keys in values.items():
        stated = {key: f"{key}: {_write_value(value)}" for key, value in keys.items()}
        width = min(max(map(len, stated.values())), 44)
        lines.append(f"{section}:")
        for key, words in stated.items():
            reason = reasons.get(f"{section}.{key}", "given")
            lines.append(f"  {words:<{width}}  # {reason}")
    return lines


def _write_value(value: Any) -> str:
    style = '"' if isinstance(value, str) and not value.isprintable() else None  # such names stay on one line
    text: str = yaml.safe_dump(value, default_flow_style=True, default_style=style, allow_unicode=True, width=10_000)
    return text.removesuffix("\n...\n").strip()


def _try(
    config: RunConfig,
    task: TextTask[Any, Any, Any],
    prepared: Prepared[RunConfig, Any],
    device: torch.device,
    clock: Callable[[], float],
) -> Trial:
    """Build the model, and time it by `clock`."""
    corpus = prepared.corpus
    parts = task.parts(task.prepare(config, prepared.identity, True, silent), Path(), device)
    counts = parameters_by_part(parts.model)
    speed = measure_speed(parts, clock)
    unit = "pairs" if corpus.has_pairs else "tokens"
    valid, test = (corpus.splits[split][unit] for split in ("valid", "test"))
    final = speed.evaluation * (valid + test) / min(config.eval.max_tokens or valid, valid)
    if isinstance(parts.model, Translator):
        some = min(16, valid)
        began = clock()
        translate_split(parts.model, corpus, "valid", Search.of(config.eval), some)
        final += (clock() - began) * (valid + test) / some
    return Trial(
        parameters=counts["total"],
        body=counts["total"] - counts["embedding"] - counts["output"],
        tokens=parts.batches.tokens_per_epoch / parts.batches.batches_per_epoch,
        step=speed.step,
        judging=final + _EVALUATIONS * speed.evaluation,
    )


# -- the rules -----------------------------------------------------------------------------------------------------------


def _choose(
    data: Values, size: str, memory: bool, amounts: Amounts, prepared: Prepared[RunConfig, Any]
) -> Iterator[Rule]:
    """The values of all sections by the rules, each with its reason."""
    corpus, config = prepared.corpus, prepared.config
    seen = 128 if config.data.tokens in ("character", "byte") else 64  # tokens at a time
    length = seen // 4 if memory else seen
    yield from choose_data(data)
    yield from _choose_model(size, 3 * length if memory else 0, amounts.dropout, corpus)
    yield from _choose_training(SIZES[size]["hidden_size"], length, memory, amounts, corpus.has_pairs)
    yield "eval.every_steps", -(-amounts.steps // _EVALUATIONS), f"{_EVALUATIONS} evaluations"
    if corpus.has_pairs:
        yield "eval.max_sentences", 0, "while training, perplexity alone; BLEU of all sentences at the end"
        yield "eval.beams", 4, "width of the beam at the end"
        return
    valid = corpus.splits["valid"]["tokens"]
    rows = min(2048 // length, max(1, valid // (20 * length))) if memory else 2048 // length
    yield "eval.batch_size", rows, "2,048 tokens at a time; a memory begins empty in each row"
    yield "eval.max_tokens", min(amounts.evaluated, valid), "while training: about 1 % of the work each; in the end all"


def choose_data(data: Values) -> Iterator[Rule]:
    """Unit and vocabulary of one's own text or sentence pairs, and of the built-in text."""
    config = DataConfig.from_dict(data)
    has_pairs = config.name == "parallel"
    size = _BUILTIN_BYTES
    if config.name != "builtin":
        size = sum(path.stat().st_size for path in files_of(config, "train") if path.is_file())
    tokens = config.tokens or ("bpe" if has_pairs or size >= _BPE_BYTES else "character")
    yield "data.name", config.name, "one's own text or sentence pairs, or builtin: the documentation of Python"
    yield "data.tokens", tokens, "bpe; character for texts below 100 kB; or word, byte"
    if tokens == "bpe":
        entries = min(max(size // 100_000 * 100, 500), 16_000)
        yield "data.max_vocabulary", entries, "subwords: an entry for each 1,000 bytes of text, from 500 to 16,000"
    if tokens == "word":
        yield "data.max_vocabulary", 10_000, "rarer words become <unk>"
        if not has_pairs:
            yield "data.min_count", 2, "a word that occurs once cannot be learned: it becomes <unk>"
    if has_pairs:
        yield "data.vocabulary", "joint", "one for both languages, so that names and numbers are the same token"


def _choose_model(size: str, memory_length: int, dropout: float, corpus: Any) -> Iterator[Rule]:
    width = SIZES[size]["hidden_size"]
    entries = len(corpus.target if corpus.has_pairs else corpus.tokenizer)
    sizes = f"the largest of {', '.join(SIZES)} that reads {_PER_PARAMETER} tokens for each parameter"
    yield "model.hidden_size", width, sizes
    yield "model.num_hidden_layers", SIZES[size]["num_hidden_layers"], "by the size"
    yield "model.num_attention_heads", SIZES[size]["num_attention_heads"], "by the size"
    yield "model.scale_embedding", True, "embeddings as large as what layers add to them"
    rates = {"embedding": dropout, "residual": dropout}
    yield "model.dropout", rates, "0 up to 4 times through the text, 0.1 up to 12 times, else 0.2"
    if corpus.has_pairs:
        yield "model.hidden_act", "gelu", "usual for translation"
    else:
        yield "model.hidden_act", "swiglu", "learns more from the same text at the same cost"
        yield "model.intermediate_size", 8 * round(width / 3), "8/3 of hidden_size: three matrices as large as two of 4"
    yield "model.position", "rotary", "learns fastest, and reads on past the trained length"
    if memory_length:
        yield "model.memory_length", memory_length, "three segments"
    if entries > 4000 and not corpus.has_pairs:
        adaptive = {"kind": "adaptive", "cutoffs": [entries // 10, entries // 3], "div_val": 2}
        yield "model.input", adaptive, "above 4,000 entries: rare ones get shorter vectors"
        yield "model.output", {**adaptive, "tied": True}, "a softmax over more than 4,000 would be most of the work"
    else:
        yield "model.output", {"tied": True, "bias": True}, "one table reads and writes tokens"
    if corpus.has_pairs:
        yield "model.encoder", {"share_embedding": True}, "both languages have one vocabulary"


def _choose_training(width: int, length: int, memory: bool, amounts: Amounts, has_pairs: bool) -> Iterator[Rule]:
    yield "train.steps", amounts.steps, f"what the time allows; at most {_MOST_EPOCHS} times through the text"
    batch = f"a power of two that leaves {_STEPS:,} updates, from 512 (with a memory 1,024) to 8,192 tokens"
    if has_pairs:
        yield "train.batch_tokens", amounts.per_step, batch
        yield "train.label_smoothing", 0.1, "usual for translation"
    else:
        lengths = "128 characters or bytes, 64 words or subwords; with a memory a quarter"
        yield "train.segment_length", length, lengths
        yield "train.batch_size", max(1, amounts.per_step // length), f"times segment_length: {batch}"
        yield "train.order", "contiguous" if memory else "shuffled", "a memory needs the text in order"
    yield "train.learning_rate", float(f"{0.5 / width:.3g}"), "0.5 / hidden_size"
    yield "train.warmup_steps", max(1, amounts.steps // 20), "5 % of the steps"
    yield "train.schedule", "cosine", "down to 0 at the last step"
    yield "train.weight_decay", 0.1, "usual for adamw"
    yield "train.betas", [0.9, 0.99], "a longer mean of squares than for large batches"
    yield "train.max_grad_norm", 1.0, "a rare large gradient does no harm"
    yield "train.seed", 1, "of every random draw"
