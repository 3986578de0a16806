"""`fullrank init`: a configuration with comments for one's own text, every value by a rule, from the text and the time.

    text -> tokens, vocabulary -> the largest size that the time can train -> batch, steps, rate, dropout -> evaluation

What the rules were measured by stands in docs/own_text.md. No torch is imported here: a bad request is refused at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullrank.config.load import merge
from fullrank.config.run import SIZES, DataConfig, RunConfig
from fullrank.core.errors import InputError
from fullrank.data.corpora import files_of
from fullrank.files import format_yaml, open_text, write_text

if TYPE_CHECKING:
    from fullrank.experiments.run import Trial
    from fullrank.experiments.task import Task

logger = logging.getLogger(__name__)

_STARTUP = 6.0  # seconds until training begins, and for the report at the end
_EVALUATIONS = 5  # while training
_STEPS = 2000  # updates below which a batch is not made larger
_LEAST_STEPS = 20  # updates of any training
_BPE_BYTES = 100_000  # of a text: with as many or more, BPE is the default
_LEAST_TOKENS = 2000  # of a training text
_PER_PARAMETER = 2  # tokens to train on, for each parameter outside of the vocabulary
_MOST_EPOCHS = 40
_BUILTIN_BYTES = 3_000_000  # about
_FEW_READINGS = 4  # times through a text, beyond which it is learned by heart
# dropout, up to so many times through the text
_DROPOUT_OF_TEXT = {0.0: 25, 0.1: math.inf}
_DROPOUT_OF_PAIRS = {0.0: 4, 0.1: 12, 0.2: math.inf}

Values = Mapping[str, Any]
Rule = tuple[str, Any, str]  # a key, its value and the reason


@dataclass(frozen=True)
class Amounts:
    """Values that follow the time.

    per_step: tokens of an update. steps: updates. readings: times through the text. evaluated: tokens of an evaluation
    while training.
    """

    per_step: int = 1024
    steps: int = 100
    readings: float = 1.0
    evaluated: int = 4096


def write_configuration(
    texts: Sequence[str],
    out: Path,
    *,
    task: str = "lm",
    tokens: str | None = None,
    size: str | None = None,
    minutes: float = 5.0,
    languages: tuple[str | None, str | None] = (None, None),
    force: bool = False,
) -> RunConfig:
    """Write the configuration that the rules make of a text for a training on this machine.

    A few updates of models of several sizes are timed.

    Args:
        texts: files, folders and patterns of a text; for translation the common prefix of two files, or both of them.
        out: file of the configuration.
        task: `lm` or `translation`.
        tokens: `character`, `byte`, `word` or `bpe`; None for the rule's.
        size: one of `SIZES`; None for the largest that the time can train.
        minutes: time of the training, evaluation included.
        languages: of translation, the suffixes of source and target; None for that of a file.
        force: whether a file that exists is replaced.

    Returns:
        The configuration.

    Raises:
        InputError: the request is bad, the texts are too short, or `out` exists.
    """
    if not 0 < minutes < math.inf:
        raise InputError(f"--minutes: a positive number, given {minutes:g}")
    if task == "translation" and tokens in ("character", "byte"):
        raise InputError(f"--tokens: word or bpe for --task translation, given {tokens}")
    if any(languages) and task != "translation":
        raise InputError(f"--source, --target: for --task translation, given --task {task}; leave them out")
    if out.exists() and not force:
        raise InputError(f"{out} exists already: give --out another file, or --force to replace it")
    has_pairs = task == "translation"
    seconds = 60 * minutes
    data = choose_pairs(texts, languages) if has_pairs else choose_text(texts)
    if tokens:
        data["tokens"] = tokens
    first_rules = list(choose_data(data))
    if has_pairs:
        first_rules.append(("train.batch_tokens", 1024, ""))
    config = _build(data, first_rules)

    import torch

    from fullrank.experiments.run import task_of, try_training

    prepared = task_of(config).prepare()
    have = prepared.corpus.splits["train"]["target_tokens" if has_pairs else "tokens"]
    if have < _LEAST_TOKENS:
        raise InputError(
            f"{prepared.corpus.label}: {have:,} tokens to train on, after validation and test are cut off, are too few; at "
            f"least {_LEAST_TOKENS:,} are needed"
        )

    def attempt(size: str, amounts: Amounts) -> Trial:
        values = choose_values(data, size, amounts, prepared)
        return try_training(_build(data, values), prepared, _EVALUATIONS)

    logger.info("Measuring the speed of this machine ...")
    size, *larger = [size] if size else SIZES
    trial = attempt(size, Amounts())
    for larger_size in larger:
        larger_trial = attempt(larger_size, Amounts())
        body = larger_trial.body
        if _PER_PARAMETER * body > _count_read(larger_trial, seconds, have) or body > 4 * have:
            break
        size = larger_size
        trial = larger_trial
    read = _count_read(trial, seconds, have)
    power = int(math.log2(max(read, 1) / _STEPS))
    amounts = Amounts(
        per_step=2 ** min(max(power, 9), 13),
        readings=read / have,
        evaluated=2048 * max(1, int(0.03 * read / 2048)),
    )
    trial = attempt(size, amounts)  # other batches have another speed
    steps = max(_LEAST_STEPS, round(_count_read(trial, seconds, have) / trial.tokens))
    rules = list(choose_values(data, size, replace(amounts, steps=steps), prepared))
    duration = _STARTUP + steps * trial.step + trial.evaluation
    lines = [
        f"# Written by `fullrank init {' '.join(texts)}`: {trial.parameters:,} parameters, {have:,} tokens to "
        "train on.",
        f"# Takes about {duration / 60:.1f} minutes on this machine with {torch.get_num_threads()} of its threads, "
        "evaluation included:",
        f"#     fullrank train {out}",
        "# Each value is by a rule (docs/own_text.md); change what you like.",
        *_write_table(_lay(data, rules), {key: reason for key, _, reason in rules}),
    ]
    write_text(out, "\n".join(lines) + "\n")
    return _build(data, rules)


def choose_text(texts: Sequence[str]) -> dict[str, Any]:
    """Make the data section of a text; InputError for a file that cannot be read."""
    if [*texts] == ["builtin"] and not Path("builtin").exists():
        return {"name": "builtin"}
    names = [str(Path(text).expanduser().absolute()) for text in texts]
    for path in files_of(DataConfig(name="text", train=names), "train"):
        open_text(path, "TEXT").close()
    return {"name": "text", "train": names[0] if len(names) == 1 else names}


def choose_pairs(texts: Sequence[str], languages: tuple[str | None, str | None]) -> dict[str, Any]:
    """Make the data section of sentence pairs, from prefixes and suffixes of the files.

    Validation and test lie beside training files that have `train` in their name. Raises InputError where there is no
    file for each of two languages.
    """
    paths = [Path(text).expanduser().resolve() for text in texts]
    prefix = paths[0]
    suffixes = languages
    if len(paths) == 2:
        prefix = paths[0].with_suffix("")
        suffixes = paths[0].suffix[1:], paths[1].suffix[1:]
    if len({*suffixes} - {"", None}) != 2 or len(paths) > 2:
        raise InputError(
            "TEXT: a file for each of two languages, whose names differ in their suffix; give both files, or what their names "
            "have in common with the suffixes as --source and --target"
        )
    for suffix in suffixes:
        open_text(Path(f"{prefix}.{suffix}"), "TEXT").close()
    data = {"name": "parallel", "train": str(prefix), "source": suffixes[0], "target": suffixes[1]}
    for split, name in (("valid", "valid"), ("valid", "val"), ("valid", "dev"), ("test", "test")):
        beside = prefix.with_name(prefix.name.replace("train", name))
        if beside != prefix and all(Path(f"{beside}.{suffix}").is_file() for suffix in suffixes):
            data.setdefault(split, str(beside))
    return data


# -- the values -----------------------------------------------------------------------------------------------------------


def _count_read(trial: Trial, seconds: float, have: int) -> float:
    """Count the tokens that are trained on in a training of `seconds`; evaluation takes at most half of them."""
    training = max(seconds - _STARTUP - trial.evaluation, seconds / 2)
    return min(training * trial.tokens / trial.step, _MOST_EPOCHS * have)


def _lay(data: Values, rules: Iterable[Rule]) -> dict[str, dict[str, Any]]:
    """Lay out the values of a configuration by section: what is stated about the data, and the rules."""
    sections = {"model": {}, "data": data, "train": {}, "eval": {}}
    return merge(sections, {key: value for key, value, _ in rules})


def _build(data: Values, rules: Iterable[Rule]) -> RunConfig:
    return RunConfig.from_dict(_lay(data, rules))


def _write_table(values: Mapping[str, Values], reasons: Mapping[str, str]) -> list[str]:
    """Write the values as lines of YAML: key, value and, as a comment, the reason."""
    lines = []
    for section, keys in values.items():
        explained = {}
        for key, value in keys.items():
            line = format_yaml({key: value}, default_flow_style=True, width=10_000)
            explained[key] = line.strip()[1:-1]
        width = min(max(map(len, explained.values())), 44)
        lines.append(f"{section}:")
        for key, words in explained.items():
            reason = reasons.get(f"{section}.{key}", "given")
            lines.append(f"  {words:<{width}}  # {reason}")
    return lines


# -- the rules -----------------------------------------------------------------------------------------------------------


def choose_values(data: Values, size: str, amounts: Amounts, prepared: Task) -> Iterator[Rule]:
    """Choose the values of all sections by the rules, each with its reason.

    Args:
        data: the data section as stated.
        size: one of `SIZES`.
        amounts: values that follow the time.
        prepared: a task with its data, from which sizes are taken.

    Yields:
        A key, its value and the reason.
    """
    corpus = prepared.corpus
    config = prepared.config
    length = 128 if config.data.tokens in ("character", "byte") else 64  # tokens at a time
    yield from choose_data(data)
    yield from _choose_model(size, amounts.readings, corpus)
    yield from _choose_training(SIZES[size]["hidden_size"], length, amounts, corpus.has_pairs)
    yield "eval.every_steps", -(-amounts.steps // _EVALUATIONS), f"{_EVALUATIONS} evaluations"
    if corpus.has_pairs:
        yield "eval.max_sentences", 0, "while training, perplexity alone; BLEU of all sentences at the end"
        yield "eval.beams", 4, "width of the beam at the end"
        return
    valid = corpus.splits["valid"]["tokens"]
    yield "eval.batch_size", 2048 // length, "2,048 tokens at a time"
    yield "eval.max_tokens", min(amounts.evaluated, valid), "while training: about 1 % of the work each; in the end all"


def choose_data(data: Values) -> Iterator[Rule]:
    """Choose unit and vocabulary of one's own text or sentence pairs, and of the built-in text."""
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


def _choose_model(size: str, readings: float, corpus: Any) -> Iterator[Rule]:
    width = SIZES[size]["hidden_size"]
    entries = len(corpus.target if corpus.has_pairs else corpus.tokenizer)
    sizes = f"the largest of {', '.join(SIZES)} that reads {_PER_PARAMETER} tokens for each parameter"
    yield "model.hidden_size", width, sizes
    for key in ("num_hidden_layers", "num_attention_heads"):
        yield f"model.{key}", SIZES[size][key], "by the size"
    yield "model.scale_embedding", True, "embeddings as large as what layers add to them"
    limits = _DROPOUT_OF_PAIRS if corpus.has_pairs else _DROPOUT_OF_TEXT
    dropout = next(rate for rate, most in limits.items() if readings <= most)
    lower = [f"{rate:g} up to {most} times" for rate, most in limits.items() if most < math.inf]
    why = f"{', '.join(lower)} through the text, else {max(limits):g}"
    yield "model.dropout", {"embedding": dropout, "residual": dropout}, why
    if corpus.has_pairs:
        yield "model.hidden_act", "gelu", "usual for translation"
    else:
        yield "model.hidden_act", "swiglu", "learns more from the same text at the same cost"
        yield "model.intermediate_size", 8 * round(width / 3), "8/3 of hidden_size: three matrices as large as two of 4"
    yield "model.position", "rotary", "learns fastest; reads no further than the trained length"
    if entries > 4000 and not corpus.has_pairs:
        adaptive = {"kind": "adaptive", "cutoffs": [entries // 10, entries // 3], "div_val": 2}
        yield "model.input", adaptive, "above 4,000 entries: rare ones get shorter vectors"
        yield "model.output", {**adaptive, "tied": True}, "a softmax over more than 4,000 would be most of the work"
    else:
        yield "model.output", {"tied": True, "bias": True}, "one table reads and writes tokens"
    if corpus.has_pairs:
        yield "model.encoder", {"share_embedding": True}, "both languages have one vocabulary"


def _choose_training(width: int, length: int, amounts: Amounts, has_pairs: bool) -> Iterator[Rule]:
    yield "train.steps", amounts.steps, f"what the time allows; at most {_MOST_EPOCHS} times through the text"
    batch = f"a power of two that leaves {_STEPS:,} updates, from 512 to 8,192 tokens"
    if has_pairs:
        yield "train.batch_tokens", amounts.per_step, batch
        yield "train.label_smoothing", 0.1, "usual for translation"
        yield "train.learning_rate", float(f"{0.5 / width:.3g}"), "0.5 / hidden_size"
        yield "train.weight_decay", 0.1, "usual for adamw"
    else:
        lengths = "128 characters or bytes, 64 words or subwords"
        yield "train.segment_length", length, lengths
        yield "train.batch_size", max(1, amounts.per_step // length), f"times segment_length: {batch}"
        yield "train.order", "shuffled", "another order in every epoch; a memory would need contiguous"
        yield "train.optimizer", "muon", "learns more than adamw in the same time"
        yield "train.learning_rate", float(f"{0.08 / math.sqrt(width):.2g}"), "0.08 / sqrt(hidden_size)"
        decay = 0.1 if amounts.readings <= _FEW_READINGS else 1.0
        yield (
            "train.weight_decay",
            decay,
            f"0.1 up to {_FEW_READINGS} times through the text, else 1: it is learned by heart",
        )
    yield "train.warmup_steps", max(1, amounts.steps // 20), "5 % of the steps"
    yield "train.schedule", "cosine", "down to 0 at the last step"
    yield "train.betas", [0.9, 0.99], "a longer mean of squares than for large batches"
    yield "train.max_grad_norm", 1.0, "a rare large gradient does no harm"
    yield "train.seed", 1, "of every random draw"
