"""The rules of the defaults: every value of a training from its text, its size and its budget, each with its reason.

    text -> tokens, vocabulary -> the largest size that the budget can train -> batch, steps, rate, dropout -> evaluation

`fullrank init` writes the values into a YAML, `train.budget` applies them where a run begins. A key that is stated by
hand wins, and other values follow it. The rules and what they were measured by stand in docs/own_text.md.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
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
from fullrank.data.prepared import Corpus
from fullrank.data.sources import files_of
from fullrank.experiments.speed import measure_speed
from fullrank.experiments.task import Prepared, Say, TextTask
from fullrank.experiments.translate import Search
from fullrank.experiments.translation import translated
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

Keys = dict[str, tuple[Any, str]]  # a section: key -> value and its reason
Sections = dict[str, Keys]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Settled:
    """A configuration by the rules. have: tokens to train on. seconds: of the whole training; None for a budget in tokens."""

    config: RunConfig
    sections: Sections
    parameters: int
    have: int
    seconds: float | None = None


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
    reasons: Mapping[str, str] | None = None,
    begun: bool = True,
) -> Settled:
    """The configuration that the rules make of what is `stated`, as in a YAML. Without one of a size, `budget` chooses.

    tasks: by `RunConfig.task`. reasons: why a stated key (`data.train`) has its value. begun: the time that is spent here,
    for the data and for speed measurements, belongs to the budget.
    Raises InputError for texts that are too short, and ConfigError for values that do not go together.
    """
    data = data_rules(stated.get("data") or {})
    pairs = DataConfig.from_dict(stated.get("data") or {}).has_pairs
    config = _config({"data": data, "train": {"batch_tokens": (1024, "")} if pairs else {}}, stated)
    device, optimizer = choose_device(config.train.device), config.train.optimizer
    if budget.cpu and device.type != "cpu":
        raise InputError("train.budget: CPU minutes are for training on a CPU; give minutes, or train.device: cpu")
    if optimizer != "adamw" and "learning_rate" not in (stated.get("train") or {}):
        raise InputError(f"train.learning_rate: the rules are for adamw; give one for {optimizer}")
    clock: Callable[[], float] = time.process_time if budget.cpu else time.perf_counter
    start = 0.0 if budget.cpu else clock()
    task = tasks[config.task]
    prepared = task.prepare(config, {}, True, say)
    text = prepared.corpus.splits["train"]
    have = text.target_tokens if pairs else text.tokens
    if have < _LEAST_TOKENS:
        raise InputError(
            f"{prepared.label}: {have:,} tokens to train on, after validation and test are cut off, are too few; at least "
            f"{_LEAST_TOKENS:,} are needed"
        )

    def attempt(size: str | None, amounts: _Amounts) -> tuple[_Trial, int]:
        """A trial, and the tokens that it can read."""
        config = _config(_sections(stated, data, size, amounts, prepared), stated)
        trial = _try(config, task, prepared, device, clock if budget.seconds else None)
        return trial, trial.reads(budget, clock() - start if begun else 0.0, have)

    if budget.seconds is not None:
        say("Measuring the speed of this machine ...")
    size, (trial, read) = None, (None, 0)
    has_size = bool({"hidden_size", "num_hidden_layers"} & (stated.get("model") or {}).keys())
    for candidate in [None] if has_size else SIZES:
        other, reads = attempt(candidate, _Amounts())
        if trial is not None and not (_PER_PARAMETER * other.body <= reads and other.body <= 4 * have):
            break
        size, trial, read = candidate, other, reads
    least = 9 + bool(config.model.memory_length)
    amounts = _Amounts(
        per_step=2 ** min(max(int(math.log2(max(read, 1) / _STEPS)), least), 13, int(math.log2(have))),
        dropout=next(rate for most, rate in _DROPOUT if read <= most * have),
        evaluated=2048 * max(1, int(0.03 * read / 2048)),
    )
    trial, read = attempt(size, amounts)  # other batches have another speed
    steps = trial.steps_of_budget(budget) or max(20, round(read / trial.tokens))
    sections = _sections(stated, data, size, dataclasses.replace(amounts, steps=steps), prepared)
    settled = Settled(_config(sections, stated), _with_stated(sections, stated, reasons or {}), trial.parameters, have)
    if budget.seconds is None:
        return settled
    seconds = (clock() - start if begun else 0.0) + _STARTUP + steps * trial.step + trial.judging
    return dataclasses.replace(settled, seconds=seconds)


def table(sections: Sections) -> list[str]:
    """The sections as lines of YAML: key, value and, as a comment, the reason."""
    lines = []
    for section, keys in sections.items():
        lines.append(f"{section}:")
        stated = {f"{key}: {_on_one_line(value)}": why for key, (value, why) in keys.items()}
        width = min(max(map(len, stated)), 44)
        lines += [f"  {words:<{width}}  # {why}" for words, why in stated.items()]
    return lines


def _on_one_line(value: Any) -> str:
    style = '"' if isinstance(value, str) and not value.isprintable() else None  # such names stay on one line
    text: str = yaml.safe_dump(value, default_flow_style=True, default_style=style, allow_unicode=True, width=10_000)
    return text.removesuffix("\n...\n").strip()


# -- what is stated ----------------------------------------------------------------------------------------------------


def _merged(sections: Sections, stated: Settings) -> dict[str, dict[str, Any]]:
    """The values by the rules with what is stated laid on them, but for the budget."""
    values = {section: {key: value for key, (value, _) in keys.items()} for section, keys in sections.items()}
    merged = merge(values, {section: keys or {} for section, keys in stated.items()})
    merged.get("train", {}).pop("budget", None)
    return merged


def _config(sections: Sections, stated: Settings) -> RunConfig:
    return RunConfig.from_dict(_merged(sections, stated))


def _with_stated(sections: Sections, stated: Settings, reasons: Mapping[str, str]) -> Sections:
    """The sections with what is stated in them; of data that comes first."""
    laid: Sections = {}
    for section, keys in _merged(sections, stated).items():
        given = stated.get(section) or {}
        order = {**(given if section == "data" else {}), **keys}
        why = {key: reason for key, (_, reason) in sections[section].items()}
        why |= {key: reasons.get(f"{section}.{key}", "given") for key in given}
        laid[section] = {key: (keys[key], why[key]) for key in order}
    return laid


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
    if isinstance(corpus, Corpus):
        judged, some = sum(corpus.splits[split].tokens for split in ("valid", "test")), corpus.splits["valid"].tokens
        final = speed.evaluation * judged / min(config.eval.max_tokens or some, some)
    else:
        assert isinstance(parts.model, Translator)
        judged, some = corpus.splits["valid"].pairs + corpus.splits["test"].pairs, min(16, corpus.splits["valid"].pairs)
        began = clock()
        translated(parts.model, corpus, "valid", Search.of(config.eval), some)
        searched = clock() - began
        final = speed.evaluation * judged / corpus.splits["valid"].pairs + searched * judged / some
    step = speed.step * config.train.gradient_accumulation_steps
    return dataclasses.replace(trial, step=step, evaluation=speed.evaluation, final=final)


# -- the rules -----------------------------------------------------------------------------------------------------------


def data_rules(stated: Settings) -> Keys:
    """Unit and vocabulary of one's own text or sentence pairs; a corpus with a name has its usual ones."""
    config = DataConfig.from_dict(stated)
    name, pairs = config.name, config.name == "parallel"
    about = {
        "text": ("one's own text", "bpe; character for texts below 100 kB; or word, byte"),
        "builtin": ("the documentation of this Python's standard library", "bpe; or character, word, byte"),
        "parallel": ("one's own sentence pairs", "subwords of both languages; or word"),
    }
    if name not in about:
        return {}
    paths = [] if name == "builtin" else files_of(config, "train")
    size = sum(path.stat().st_size for path in paths if path.is_file()) if paths else _BUILTIN_BYTES
    tokens = stated.get("tokens") or ("bpe" if pairs or size >= _BPE_BYTES else "character")
    keys: Keys = {"name": (name, about[name][0]), "tokens": (tokens, about[name][1])}
    if tokens in ("bpe", "unigram") and "codes" not in stated:
        keys["max_vocabulary"] = (vocabulary_entries(size), "an entry for each 1,000 bytes of text, from 500 to 16,000")
    if tokens == "word":
        if not pairs:
            keys["min_count"] = (2, "a word that occurs once cannot be learned: it becomes <unk>")
        keys["max_vocabulary"] = (10_000, "the vocabulary layer is most of the work: rarer words become <unk>")
    if pairs:
        keys["vocabulary"] = ("joint", "one for both languages, so that names and numbers are the same token")
    return keys


def vocabulary_entries(size: int) -> int:
    """Entries of a BPE vocabulary of a text of `size` bytes."""
    return min(max(size // 100_000 * 100, 500), 16_000)


def reach(tokens: str | None) -> int:
    """Tokens that a model without memory sees at a time."""
    return 128 if tokens in ("character", "byte") else 64


def _sections(
    stated: Settings, data: Keys, size: str | None, amounts: _Amounts, prepared: Prepared[RunConfig, Any]
) -> Sections:
    """The values of model, training and evaluation by the rules, each with its reason. size: None where it is stated."""
    corpus, given, config = prepared.corpus, stated.get("model") or {}, prepared.config
    pairs, memory = config.data.has_pairs, bool(config.model.memory_length)
    entries = len(corpus.target if pairs else corpus.tokenizer)
    shape = {**SIZES[size or "small"], **given}
    width, names = shape["hidden_size"], ", ".join(SIZES)
    heads = next(number for number in (8, 4, 2, 1) if width % (32 * number) == 0 or number == 1)
    train = stated.get("train") or {}
    length = train.get("segment_length") or reach(config.data.tokens) // (4 if memory else 1)
    model: Keys = {
        "hidden_size": (width, f"{size} of {names}: the largest that reads {_PER_PARAMETER} tokens for each parameter"),
        "num_hidden_layers": (shape["num_hidden_layers"], "by the size"),
        "num_attention_heads": (heads, "by the size"),
        "scale_embedding": (True, "embeddings as large as what layers add to them"),
        "dropout": (
            {"embedding": amounts.dropout, "residual": amounts.dropout},
            "0 up to 4 times through the text, 0.1 up to 12 times, else 0.2",
        ),
    }
    if pairs or given.get("hidden_act", "swiglu") != "swiglu":
        model["hidden_act"] = ("gelu", "usual")
    else:
        model["hidden_act"] = ("swiglu", "learns more than gelu from the same text, at the same cost")
        model["intermediate_size"] = (8 * round(width / 3), "8/3 of hidden_size: three matrices as large as two of 4")
    if "attention" not in given:
        model["position"] = ("rotary", "learns fastest, and reads on past the trained length")
    if not {"input", "output"} & given.keys():
        why = "one table reads and writes tokens: half the parameters of a vocabulary"
        model["output"] = ({"tied": True, "bias": True}, why)
        if entries > 4000 and not pairs and not config.masks:
            clusters = {"kind": "adaptive", "cutoffs": [entries // 10, entries // 3], "div_val": 2}
            model["input"] = (clusters, "above 4,000 entries: rare ones get shorter vectors")
            why = "and cost less: a softmax over all would be most of the work"
            model["output"] = ({**clusters, "tied": True}, why)
    if pairs and data.get("vocabulary", ("",))[0] == "joint" and stated["data"].get("vocabulary") != "separate":
        model["encoder"] = ({"share_embedding": True}, "both languages have one vocabulary")
    why = f"what the budget allows; of time, at most {_MOST_EPOCHS} times through the text"
    rules: Keys = {"steps": (amounts.steps, why)}
    why = f"a power of two that leaves {_STEPS:,} updates, from 512 (with a memory 1,024) to 8,192 tokens"
    if pairs:
        rules["batch_tokens"] = (amounts.per_step, why)
        rules["label_smoothing"] = (0.1, "usual for translation")
    else:
        quarter = "; with a memory a quarter" * memory
        rules["segment_length"] = (length, f"128 characters or bytes, 64 words or subwords{quarter}")
        rules["batch_size"] = (max(1, amounts.per_step // length), f"times segment_length: {why}")
        streams = memory or any(train.get(key) for key in STREAM_KEYS)
        rules["order"] = ("contiguous" if streams else "shuffled", "a memory needs the text in order")
    rules["learning_rate"] = (float(f"{0.5 / width:.3g}"), "0.5 / hidden_size")
    rules["warmup_steps"] = (max(1, amounts.steps // 20), "5 % of the steps")
    rules["schedule"] = ("cosine", "down to 0 at the last step")
    if train.get("optimizer", "adamw") == "adamw":
        rules["weight_decay"] = (0.1, "usual for adamw")
        rules["betas"] = ([0.9, 0.99], "a longer mean of squares than for large batches")
    rules["max_grad_norm"] = (1.0, "a rare large gradient does no harm")
    rules["seed"] = (1, "of every random draw")
    judging: Keys = {}
    if "every_epochs" not in (stated.get("eval") or {}):
        judging["every_steps"] = (-(-amounts.steps // _EVALUATIONS), f"{_EVALUATIONS} evaluations")
    if pairs:
        judging["max_sentences"] = (0, "while training, perplexity alone; BLEU of all sentences at the end")
        judging["beams"] = (4, "width of the beam at the end")
    else:
        valid = corpus.splits["valid"].tokens
        rows = max(1, 2048 // length)
        rows = min(rows, max(1, valid // (20 * length))) if memory else rows
        judging["batch_size"] = (rows, "2,048 tokens at a time" + "; a memory begins empty in each row" * memory)
        most = min(amounts.evaluated, valid)
        judging["max_tokens"] = (most, "while training: about 1 % of the work each; the final figures use all")
    return {"model": model, "data": data, "train": rules, "eval": judging}
