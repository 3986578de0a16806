"""The rules of the defaults: every value of a training from its text, its size and its budget, each with its reason.

    text -> tokens, vocabulary -> the largest size that the budget can train -> batch, steps, rate, dropout -> evaluation

`fullrank init` writes the values into a YAML, `train.budget` applies them where a run begins. A key that is stated by
hand wins, and other values follow it. The rules and what they were measured by stand in docs/own_text.md.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from fullrank.analysis.size import parameters_by_part
from fullrank.config.data import DataConfig
from fullrank.config.load import merge
from fullrank.config.run import RunConfig
from fullrank.config.training import SIZES, STREAM_KEYS, Budget
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator
from fullrank.data.sources import files_of
from fullrank.experiments.speed import measure_speed
from fullrank.experiments.task import Prepared, Say, TextTask
from fullrank.experiments.translate import Search
from fullrank.experiments.translation import translate_split
from fullrank.training.device import choose_device
from fullrank.training.phases import make_plan

_STARTUP = 6.0  # seconds until training begins, and for the report at the end
_EVALUATIONS = 5
_STEPS = 2000  # updates below which a batch is not made larger
_BPE_BYTES = 100_000  # of a text: with as many or more, BPE is the default
_LEAST_TOKENS = 2000  # of a training text
_PER_PARAMETER = 2  # tokens to train on, for each parameter outside of the vocabulary
_MOST_EPOCHS = 40  # of a training whose budget is time
_BUILTIN_BYTES = 3_000_000  # about
_DROPOUT = ((4, 0.0), (12, 0.1), (math.inf, 0.2))  # times through the text up to which a rate is used

Settings = Mapping[str, Any]
Rule = tuple[str, Any, str]  # a key, its value and the reason


@dataclass(frozen=True)
class Settled:
    """A configuration by the rules. values: what is in it, reasons: of each key by a rule; have: tokens to train on.

    seconds: of the whole training; None for a budget in tokens.
    """

    config: RunConfig
    values: Mapping[str, Settings]
    reasons: Mapping[str, str]
    parameters: int
    have: int
    seconds: float | None = None

    def table(self) -> list[str]:
        """The values as lines of YAML: key, value and, as a comment, the reason."""
        lines = []
        for section, values in self.values.items():
            stated = {key: f"{key}: {_write_line(value)}" for key, value in values.items()}
            width = min(max(map(len, stated.values())), 44)
            lines.append(f"{section}:")
            for key, words in stated.items():
                lines.append(f"  {words:<{width}}  # {self.reasons.get(f'{section}.{key}', 'given')}")
        return lines


def _write_line(value: Any) -> str:
    style = '"' if isinstance(value, str) and not value.isprintable() else None  # such names stay on one line
    text: str = yaml.safe_dump(value, default_flow_style=True, default_style=style, allow_unicode=True, width=10_000)
    return text.removesuffix("\n...\n").strip()


@dataclass(frozen=True)
class _Amounts:
    """Values that depend on the budget: tokens of an update, updates, dropout, tokens of an evaluation while training."""

    per_step: int = 1024
    steps: int = 100
    dropout: float = 0.0
    evaluated: int = 4096


@dataclass(frozen=True)
class _Trial:
    """A model on this machine: parameters (in all, and outside of its vocabulary), tokens of an update, updates of an epoch;
    where they were measured, seconds of an update, an evaluation and the final figures."""

    parameters: int
    body: int
    tokens: float
    per_epoch: int = 1
    step: float = 0.0
    evaluation: float = 0.0
    final: float = 0.0

    @property
    def judging(self) -> float:
        """Seconds of all evaluation."""
        return self.final + _EVALUATIONS * self.evaluation

    def steps_of_budget(self, budget: Budget) -> int | None:
        """The updates of a budget that counts them, or epochs."""
        return budget.steps if budget.epochs is None else max(1, round(budget.epochs * self.per_epoch))

    def reads(self, budget: Budget, spent: float, have: int) -> int:
        """Tokens to train on: those of the budget, or what its time allows; evaluation takes at most half of that."""
        if (steps := self.steps_of_budget(budget)) is not None:
            return round(steps * self.tokens)
        if budget.seconds is None:
            return budget.tokens
        seconds = max(budget.seconds - spent - _STARTUP - self.judging, (budget.seconds - spent) / 2, 0)
        return int(min(seconds * self.tokens / self.step, _MOST_EPOCHS * have))


def settle(
    stated: Settings,
    budget: Budget,
    tasks: Mapping[str, TextTask[Any, Any, Any]],
    say: Say,
    *,
    begun: bool = True,
) -> Settled:
    """The configuration that the rules make of what is `stated`, as in a YAML. Without one of a size, `budget` chooses.

    tasks: by `RunConfig.task`. begun: the time that is spent here, for the data and for speed measurements, belongs to the
    budget.
    Raises InputError for texts that are too short, and ConfigError for values that do not go together.
    """
    has_pairs = DataConfig.from_dict(stated.get("data") or {}).has_pairs
    rules = [*_choose_data(stated.get("data") or {}), *([("train.batch_tokens", 1024, "")] if has_pairs else [])]
    config = _lay(rules, stated)[0]
    device, optimizer = choose_device(config.train.device), config.train.optimizer
    if budget.cpu and device.type != "cpu":
        raise InputError("train.budget: CPU minutes are for training on a CPU; give minutes, or train.device: cpu")
    if optimizer != "adamw" and "learning_rate" not in (stated.get("train") or {}):
        raise InputError(f"train.learning_rate: the rules are for adamw; give one for {optimizer}")
    clock: Callable[[], float] = time.process_time if budget.cpu else time.perf_counter
    start = 0.0 if budget.cpu else clock()
    task = tasks[config.task]
    prepared = task.prepare(config, {}, True, say)
    have = prepared.corpus.splits["train"]["target_tokens" if has_pairs else "tokens"]
    if have < _LEAST_TOKENS:
        raise InputError(
            f"{prepared.label}: {have:,} tokens to train on, after validation and test are cut off, are too few; at least "
            f"{_LEAST_TOKENS:,} are needed"
        )

    def attempt(size: str | None, amounts: _Amounts) -> tuple[_Trial, int]:
        """A trial, and the tokens that it can read."""
        config = _lay(_apply_rules(stated, size, amounts, prepared), stated)[0]
        trial = _try(config, task, prepared, device, clock if budget.seconds else None)
        return trial, trial.reads(budget, clock() - start if begun else 0.0, have)

    if budget.seconds is not None:
        say("Measuring the speed of this machine ...")
    has_size = bool({"hidden_size", "num_hidden_layers"} & (stated.get("model") or {}).keys())
    size = None if has_size else next(iter(SIZES))
    trial, read = attempt(size, _Amounts())
    for larger in [] if has_size else list(SIZES)[1:]:
        other, reads = attempt(larger, _Amounts())
        if _PER_PARAMETER * other.body > reads or other.body > 4 * have:
            break
        size, trial, read = larger, other, reads
    least = 9 + bool(config.model.memory_length)
    amounts = _Amounts(
        per_step=2 ** min(max(int(math.log2(max(read, 1) / _STEPS)), least), 13, int(math.log2(have))),
        dropout=next(rate for most, rate in _DROPOUT if read <= most * have),
        evaluated=2048 * max(1, int(0.03 * read / 2048)),
    )
    trial, read = attempt(size, amounts)  # other batches have another speed
    steps = trial.steps_of_budget(budget) or max(20, round(read / trial.tokens))
    rules = list(_apply_rules(stated, size, dataclasses.replace(amounts, steps=steps), prepared))
    config, values = _lay(rules, stated)
    seconds = None
    if budget.seconds is not None:
        seconds = (clock() - start if begun else 0.0) + _STARTUP + steps * trial.step + trial.judging
    given = {f"{section}.{key}" for section, keys in stated.items() for key in keys or {}}
    reasons = {key: reason for key, _, reason in rules if key not in given}
    return Settled(config, values, reasons, trial.parameters, have, seconds)


def _lay(rules: Iterable[Rule], stated: Settings) -> tuple[RunConfig, dict[str, Any]]:
    """What is stated, but for the budget, laid on the values by the rules: as a configuration and as values."""
    values: dict[str, Any] = {"model": {}, "data": {**(stated.get("data") or {})}, "train": {}, "eval": {}}
    for key, value, _ in rules:
        section, _, name = key.partition(".")
        values[section][name] = value
    merged = merge(values, {section: keys or {} for section, keys in stated.items()})
    merged["train"].pop("budget", None)
    return RunConfig.from_dict(merged), {section: keys for section, keys in merged.items() if keys}


# -- a model on this machine -------------------------------------------------------------------------------------------


def _try(
    config: RunConfig,
    task: TextTask[Any, Any, Any],
    prepared: Prepared[RunConfig, Any],
    device: torch.device,
    clock: Callable[[], float] | None,
) -> _Trial:
    """Build the model, and time it by `clock`. Raises InputError where the text is shorter than a batch."""
    corpus = prepared.corpus
    parts = task.parts(task.prepare(config, prepared.identity, True, lambda line: None), Path(), device)
    counts, plan = parameters_by_part(parts.model), make_plan(parts.options, parts.eval_options, parts.batches)
    tokens = parts.batches.tokens_per_epoch / plan.steps_per_epoch
    body = counts["total"] - counts["embedding"] - counts["output"]
    trial = _Trial(counts["total"], body, tokens, plan.steps_per_epoch)
    if clock is None:
        return trial
    speed = measure_speed(parts, clock)
    unit = "pairs" if corpus.has_pairs else "tokens"
    valid, test = (corpus.splits[split][unit] for split in ("valid", "test"))
    judged = valid + test
    if not corpus.has_pairs:
        final = speed.evaluation * judged / min(config.eval.max_tokens or valid, valid)
    else:
        assert isinstance(parts.model, Translator)
        some = min(16, valid)
        began = clock()
        translate_split(parts.model, corpus, "valid", Search.of(config.eval), some)
        searched = clock() - began
        final = speed.evaluation * judged / valid + searched * judged / some
    step = speed.step * config.train.gradient_accumulation_steps
    return dataclasses.replace(trial, step=step, evaluation=speed.evaluation, final=final)


# -- the rules -----------------------------------------------------------------------------------------------------------


def choose_data(stated: Settings) -> dict[str, Any]:
    """Unit and vocabulary of one's own text or sentence pairs; a corpus with a name has its usual ones."""
    return {key.removeprefix("data."): value for key, value, _ in _choose_data(stated)}


def choose_reach(tokens: str | None) -> int:
    """Tokens that a model without memory sees at a time."""
    return 128 if tokens in ("character", "byte") else 64


def _apply_rules(
    stated: Settings, size: str | None, amounts: _Amounts, prepared: Prepared[RunConfig, Any]
) -> Iterator[Rule]:
    """The values of all sections by the rules, each with its reason. size: None where it is stated."""
    shape = {**SIZES[size or "small"], **(stated.get("model") or {})}
    yield from _choose_data(stated.get("data") or {})
    yield from _choose_model(stated.get("model") or {}, shape, amounts, prepared)
    yield from _choose_training(stated.get("train") or {}, shape["hidden_size"], amounts, prepared.config)
    yield from _choose_evaluation(stated, amounts, prepared)


def _choose_data(stated: Settings) -> Iterator[Rule]:
    config = DataConfig.from_dict(stated)
    has_pairs = config.name == "parallel"
    if config.name not in ("text", "builtin", "parallel"):
        return
    size = _BUILTIN_BYTES
    if config.name != "builtin":
        size = sum(path.stat().st_size for path in files_of(config, "train") if path.is_file())
    tokens = stated.get("tokens") or ("bpe" if has_pairs or size >= _BPE_BYTES else "character")
    yield "data.name", config.name, "one's own text or sentence pairs, or builtin: the documentation of Python"
    yield "data.tokens", tokens, "bpe; character for texts below 100 kB; or word, byte"
    if tokens in ("bpe", "unigram") and "codes" not in stated:
        entries = min(max(size // 100_000 * 100, 500), 16_000)
        yield "data.max_vocabulary", entries, "subwords: an entry for each 1,000 bytes of text, from 500 to 16,000"
    if tokens == "word":
        yield "data.max_vocabulary", 10_000, "rarer words become <unk>"
        if not has_pairs:
            yield "data.min_count", 2, "a word that occurs once cannot be learned: it becomes <unk>"
    if has_pairs:
        yield "data.vocabulary", "joint", "one for both languages, so that names and numbers are the same token"


def _choose_model(
    stated: Settings, shape: Settings, amounts: _Amounts, prepared: Prepared[RunConfig, Any]
) -> Iterator[Rule]:
    corpus, data = prepared.corpus, prepared.config.data
    entries = len(corpus.target if data.has_pairs else corpus.tokenizer)
    width, dropout = shape["hidden_size"], amounts.dropout
    heads = next(heads for heads in (8, 4, 2, 1) if width % (32 * heads) == 0 or heads == 1)
    sizes = f"the largest of {', '.join(SIZES)} that reads {_PER_PARAMETER} tokens for each parameter"
    yield "model.hidden_size", width, sizes
    yield "model.num_hidden_layers", shape["num_hidden_layers"], "by the size"
    yield "model.num_attention_heads", heads, "by the size"
    yield "model.scale_embedding", True, "embeddings as large as what layers add to them"
    rates = {"embedding": dropout, "residual": dropout}
    yield "model.dropout", rates, "0 up to 4 times through the text, 0.1 up to 12 times, else 0.2"
    if data.has_pairs or stated.get("hidden_act", "swiglu") != "swiglu":
        yield "model.hidden_act", "gelu", "usual for translation"
    else:
        yield "model.hidden_act", "swiglu", "learns more from the same text at the same cost"
        yield "model.intermediate_size", 8 * round(width / 3), "8/3 of hidden_size: three matrices as large as two of 4"
    if "attention" not in stated:
        yield "model.position", "rotary", "learns fastest, and reads on past the trained length"
    if not {"input", "output"} & stated.keys():
        if entries > 4000 and not data.has_pairs and not prepared.config.masks:
            adaptive = {"kind": "adaptive", "cutoffs": [entries // 10, entries // 3], "div_val": 2}
            yield "model.input", adaptive, "above 4,000 entries: rare ones get shorter vectors"
            yield "model.output", {**adaptive, "tied": True}, "a softmax over more than 4,000 would be most of the work"
        else:
            yield "model.output", {"tied": True, "bias": True}, "one table reads and writes tokens"
    if data.name == "parallel" and data.vocabulary == "joint":
        yield "model.encoder", {"share_embedding": True}, "both languages have one vocabulary"


def _choose_length(stated: Settings, config: RunConfig) -> int:
    """Tokens of a segment; with a memory a quarter of what is seen at a time."""
    usual = choose_reach(config.data.tokens) // (4 if config.model.memory_length else 1)
    return stated.get("segment_length") or usual


def _choose_training(stated: Settings, width: int, amounts: _Amounts, config: RunConfig) -> Iterator[Rule]:
    yield (
        "train.steps",
        amounts.steps,
        f"what the budget allows; of time, at most {_MOST_EPOCHS} times through the text",
    )
    batch = f"a power of two that leaves {_STEPS:,} updates, from 512 (with a memory 1,024) to 8,192 tokens"
    if config.data.has_pairs:
        yield "train.batch_tokens", amounts.per_step, batch
        yield "train.label_smoothing", 0.1, "usual for translation"
    else:
        length = _choose_length(stated, config)
        is_ordered = config.model.memory_length or any(stated.get(key) for key in STREAM_KEYS)
        lengths = "128 characters or bytes, 64 words or subwords; with a memory a quarter"
        yield "train.segment_length", length, lengths
        yield "train.batch_size", max(1, amounts.per_step // length), f"times segment_length: {batch}"
        yield "train.order", "contiguous" if is_ordered else "shuffled", "a memory needs the text in order"
    yield "train.learning_rate", float(f"{0.5 / width:.3g}"), "0.5 / hidden_size"
    yield "train.warmup_steps", max(1, amounts.steps // 20), "5 % of the steps"
    yield "train.schedule", "cosine", "down to 0 at the last step"
    if stated.get("optimizer", "adamw") == "adamw":
        yield "train.weight_decay", 0.1, "usual for adamw"
        yield "train.betas", [0.9, 0.99], "a longer mean of squares than for large batches"
    yield "train.max_grad_norm", 1.0, "a rare large gradient does no harm"
    yield "train.seed", 1, "of every random draw"


def _choose_evaluation(stated: Settings, amounts: _Amounts, prepared: Prepared[RunConfig, Any]) -> Iterator[Rule]:
    config = prepared.config
    if "every_epochs" not in (stated.get("eval") or {}):
        yield "eval.every_steps", -(-amounts.steps // _EVALUATIONS), f"{_EVALUATIONS} evaluations"
    if config.data.has_pairs:
        yield "eval.max_sentences", 0, "while training, perplexity alone; BLEU of all sentences at the end"
        yield "eval.beams", 4, "width of the beam at the end"
        return
    valid, length = prepared.corpus.splits["valid"]["tokens"], _choose_length(stated.get("train") or {}, config)
    rows = max(1, 2048 // length)
    if config.model.memory_length:
        rows = min(rows, max(1, valid // (20 * length)))
    yield "eval.batch_size", rows, "2,048 tokens at a time; a memory begins empty in each row"
    yield "eval.max_tokens", min(amounts.evaluated, valid), "while training: about 1 % of the work each; in the end all"
