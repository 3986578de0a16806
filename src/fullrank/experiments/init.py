"""A configuration with comments for one's own text: every value by a rule, from the amount of text and the time.

    text -> data -> the largest size that the time can train -> batch, steps, dropout -> evaluation -> YAML

The rules stand beside their values here, in the comments of the file that is written, and in docs/own_text.md.
"""

from __future__ import annotations

import dataclasses
import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from fullrank.analysis.size import parameters_by_part
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator
from fullrank.data.files import open_text
from fullrank.data.prepared import Corpus, PairCorpus
from fullrank.experiments.run import TEXT_TASKS
from fullrank.experiments.speed import Speed, clock_for, measure_speed
from fullrank.experiments.task import Prepared, Say
from fullrank.experiments.translate import Search
from fullrank.experiments.translation import translated
from fullrank.files import write_text
from fullrank.training.device import choose_device

SIZES = {"tiny": (64, 2, 2), "small": (128, 4, 4), "medium": (256, 4, 8), "large": (512, 6, 8)}  # width, layers, heads
TOKENS = ("character", "word", "bpe", "byte")
_STARTUP = 6.0  # seconds until training begins, and for the report at the end
_EVALUATIONS = 5
_STEPS = 2000  # updates below which a batch is not made larger
_BPE_BYTES = 100_000  # of a text: with as many or more, BPE is the default (docs/own_text.md)
_LEAST_TOKENS = 2000  # of a training text
_PER_PARAMETER = 2  # tokens to train on, for each parameter outside of the vocabulary

_MOST_EPOCHS = 40
_BUILTIN_BYTES = 3_000_000  # about
_DROPOUT = ((4, 0.0), (12, 0.1), (math.inf, 0.2))  # times through the text up to which a rate is used

Keys = dict[str, tuple[Any, str]]  # a section: key -> value and its reason


@dataclass(frozen=True)
class Request:
    """Options of `fullrank init`. `texts`: a text; for translation the common prefix of two files, or both of them."""

    texts: Sequence[str]
    task: str = "lm"
    tokens: str | None = None
    size: str | None = None
    minutes: float = 5.0
    memory: bool = False
    languages: tuple[str, str] | None = None  # suffixes of source and target


@dataclass(frozen=True)
class _Amounts:
    """Choices that depend on the time: tokens of an update, updates, dropout, tokens of an evaluation while training."""

    per_step: int = 1024
    steps: int = 100
    dropout: float = 0.0
    evaluated: int = 4096


@dataclass(frozen=True)
class _Trial:
    """A size on this machine: parameters (in all, and outside of its vocabulary), speed, seconds of the final figures."""

    parameters: int
    body: int
    speed: Speed
    final: float

    def training(self, request: Request) -> float:
        """The seconds that evaluation leaves for training: at least half."""
        seconds = request.minutes * 60
        return max(seconds - _STARTUP - self.final - _EVALUATIONS * self.speed.evaluation, seconds / 2)

    def reads(self, request: Request, have: int) -> int:
        """The tokens of training in that time, over a text of `have` tokens."""
        return int(min(self.training(request) * self.speed.tokens / self.speed.step, _MOST_EPOCHS * have))


def write_configuration(request: Request, out: Path, *, force: bool = False, say: Say = print) -> RunConfig:
    """Write the configuration to `out` and return it. InputError for bad requests or texts, and where `out` exists."""
    for name, given, allowed in (
        ("--task", request.task, ("lm", "translation")),
        ("--tokens", request.tokens or TOKENS[0], TOKENS),
        ("--size", request.size or "tiny", tuple(SIZES)),
    ):
        if given not in allowed:
            raise InputError(f"{name}: one of {', '.join(allowed)}, given '{given}'")
    if not 0 < request.minutes < math.inf:
        raise InputError(f"--minutes: a positive number, given {request.minutes:g}")
    if request.task == "translation" and (request.memory or request.tokens in ("character", "byte")):
        raise InputError("--task translation: sentence pairs take --tokens word or bpe, and no --memory")
    if len(request.texts) > (2 if request.task == "translation" else 1):
        raise InputError(f"TEXT: one file (of translations, a prefix or two files), given {len(request.texts)}")
    if out.exists() and not force:
        raise InputError(f"{out} exists already: give --out another file, or --force to replace it")
    data = _pairs(request) if request.task == "translation" else _text(request)
    config = _configuration({"data": data, "train": {} if request.task == "lm" else {"batch_tokens": (1024, "")}})
    prepared = TEXT_TASKS[config.task].prepare(config, {}, True, say)
    text = prepared.corpus.splits["train"]
    have = text.tokens if request.task == "lm" else text.target_tokens
    if have < _LEAST_TOKENS:
        raise InputError(
            f"{' '.join(request.texts)}: {have:,} tokens to train on, after validation and test are cut off, are too few; "
            f"at least {_LEAST_TOKENS:,} are needed"
        )
    say("Measuring the speed of this machine ...")
    size, trial = request.size or "tiny", None
    for name in [size] if request.size else SIZES:
        attempt = _try(request, data, name, _Amounts(), prepared)
        if trial and not (_PER_PARAMETER * attempt.body <= attempt.reads(request, have) and attempt.body <= 4 * have):
            break
        size, trial = name, attempt
    assert trial is not None
    reads = trial.reads(request, have)
    amounts = _Amounts(
        per_step=2 ** min(max(int(math.log2(max(reads, 1) / _STEPS)), 9 + request.memory), 13),
        dropout=next(rate for most, rate in _DROPOUT if reads <= most * have),
        evaluated=2048 * max(1, int(0.01 * trial.training(request) / trial.speed.evaluation * 2)),  # of 4,096 tokens
    )
    trial = _try(request, data, size, amounts, prepared)  # other batches have another speed
    steps = max(20, int(trial.reads(request, have) / trial.speed.tokens))
    sections = _sections(request, data, size, dataclasses.replace(amounts, steps=steps), prepared.corpus)
    evaluations = trial.final + _EVALUATIONS * trial.speed.evaluation
    minutes = (_STARTUP + steps * trial.speed.step + evaluations) / 60
    given = "".join(c if c.isprintable() else "?" for c in " ".join(request.texts))
    lines = [
        f"# Written by `fullrank init {given}`: {trial.parameters:,} parameters, {have:,} tokens to train on.",
        f"# Takes about {minutes:.1f} minutes on this machine with {torch.get_num_threads()} of its threads, "
        f"{evaluations / 60:.1f} of them for evaluation:",
        f"#     fullrank train {out}",
        "# Each value is by a rule (docs/own_text.md); change what you like.",
    ]
    for section, keys in sections.items():
        lines.append(f"{section}:")
        stated = {f"{key}: {_on_one_line(value)}": why for key, (value, why) in keys.items()}
        width = min(max(map(len, stated)), 44)
        lines += [f"  {words:<{width}}  # {why}" for words, why in stated.items()]
    write_text(out, "\n".join(lines) + "\n")
    return _configuration(sections)


def _configuration(sections: Mapping[str, Keys]) -> RunConfig:
    values = {section: {key: value for key, (value, _) in keys.items()} for section, keys in sections.items()}
    return RunConfig.from_dict(values)


def _on_one_line(value: Any) -> str:
    style = '"' if isinstance(value, str) and not value.isprintable() else None  # such names stay on one line
    text: str = yaml.safe_dump(value, default_flow_style=True, default_style=style, allow_unicode=True, width=10_000)
    return text.removesuffix("\n...\n").strip()


# -- the text ----------------------------------------------------------------------------------------------------------


def _text(request: Request) -> Keys:
    path = Path(request.texts[0]).expanduser()
    if builtin := str(path) == "builtin" and not path.exists():
        size = _BUILTIN_BYTES
    else:
        open_text(path, "TEXT").close()
        size = path.stat().st_size
    tokens = request.tokens or ("character" if size < _BPE_BYTES else "bpe")
    data: Keys = {
        "name": ("text", "valid and test: the last lines of the text, 5 % each; or give files of them as valid, test"),
        "train": (str(path.resolve()), "the text"),
        "tokens": (tokens, "bpe; character for texts below 100 kB; or word, byte"),
    }
    if builtin:
        data = {"name": ("builtin", "the documentation of this Python's standard library"), "tokens": data["tokens"]}
    if tokens == "bpe":
        data["max_vocabulary"] = (_entries(size), "an entry for each 1,000 bytes of text, from 500 to 16,000")
    if tokens == "word":
        data["min_count"] = (2, "a word that occurs once cannot be learned: it becomes <unk>")
        data["max_vocabulary"] = (10_000, "the vocabulary layer is most of the work: rarer words become <unk>")
    return data


def _entries(size: int) -> int:
    return min(max(size // 100_000 * 100, 500), 16_000)


def _pairs(request: Request) -> Keys:
    """Prefixes and suffixes of the files. Validation and test lie beside training files that have `train` in their name."""
    paths = [Path(text).expanduser().resolve() for text in request.texts]
    prefix = paths[0]
    suffixes: Sequence[str] = request.languages or ()
    if len(paths) == 2:
        prefix, suffixes = paths[0].with_suffix(""), tuple(path.suffix[1:] for path in paths)
    suffixes = suffixes or sorted(path.suffix[1:] for path in prefix.parent.glob(f"{glob.escape(prefix.name)}.*"))
    if len(set(suffixes) - {""}) != 2:
        raise InputError(
            f"TEXT: {prefix}.* are {len(suffixes)} files ({', '.join(suffixes) or 'none'}), not one for each of two languages; "
            "give both files, or the suffixes as --source and --target"
        )
    sides = [Path(f"{prefix}.{suffix}") for suffix in suffixes]
    for side in sides:
        open_text(side, "TEXT").close()
    data: Keys = {
        "name": ("parallel", "a file for each language; line k of the one is the translation of line k of the other"),
        "train": (str(prefix), "the common prefix of both files"),
    }
    for split, names in (("valid", ("valid", "val", "dev")), ("test", ("test", "test*"))):
        patterns = [glob.escape(prefix.name).replace("train", name) for name in names if "train" in prefix.name]
        for pattern in patterns:
            found = sorted(path.with_suffix("") for path in prefix.parent.glob(f"{pattern}.{suffixes[0]}"))
            found = [path for path in found if Path(f"{path}.{suffixes[1]}").is_file()]
            if found and split not in data:
                data[split] = (str(found[0]), "beside the training files")
    if not {"valid", "test"} <= data.keys():
        data["name"] = ("parallel", "splits without files: the last training pairs, 5 % each, at most 1,000")
    data["source"], data["target"] = (suffixes[0], "its suffix"), (suffixes[1], "its suffix")
    data["tokens"] = (request.tokens or "bpe", "subwords of both languages")
    size = _entries(sum(side.stat().st_size for side in sides)) if data["tokens"][0] == "bpe" else 10_000
    data["max_vocabulary"] = (size, "an entry for each 1,000 bytes of text, from 500 to 16,000; of words, 10,000")
    data["vocabulary"] = ("joint", "one for both languages, so that names and numbers are the same token")
    return data


# -- a size on this machine ----------------------------------------------------------------------------------------------


def _try(request: Request, data: Keys, size: str, amounts: _Amounts, prepared: Prepared[RunConfig, Any]) -> _Trial:
    """Build the model and time it. Raises InputError where the text is shorter than a batch."""
    corpus = prepared.corpus
    config = _configuration(_sections(request, data, size, amounts, corpus))
    task = TEXT_TASKS[config.task]
    sized = task.prepare(config, prepared.identity, True, lambda line: None)
    parts = task.parts(sized, Path(), choose_device(config.train.device))
    if parts.batches.batches_per_epoch < 1:
        raise InputError(
            f"{' '.join(request.texts)}: shorter than one batch of {amounts.per_step:,} tokens; give more text"
        )
    speed = measure_speed(parts)
    counts = parameters_by_part(parts.model)
    if isinstance(corpus, Corpus):
        judged = corpus.splits["valid"].tokens + corpus.splits["test"].tokens
        final = speed.evaluation * judged / min(amounts.evaluated, corpus.splits["valid"].tokens)
    else:
        assert isinstance(parts.model, Translator)
        judged, some = corpus.splits["valid"].pairs + corpus.splits["test"].pairs, min(16, corpus.splits["valid"].pairs)
        clock = clock_for(parts.model)
        began = clock()
        translated(parts.model, corpus, "valid", Search.of(config.eval), some)
        searched = clock() - began
        final = speed.evaluation * judged / corpus.splits["valid"].pairs + searched * judged / some
    return _Trial(counts["total"], counts["total"] - counts["embedding"] - counts["output"], speed, final)


# -- the rules -----------------------------------------------------------------------------------------------------------


def _sections(
    request: Request, data: Keys, size: str, amounts: _Amounts, corpus: Corpus | PairCorpus
) -> dict[str, Keys]:
    """Every value with its reason."""
    width, layers, heads = SIZES[size]
    pairs = isinstance(corpus, PairCorpus)
    entries = len(corpus.tokenizer if isinstance(corpus, Corpus) else corpus.target)
    seen = 128 if data["tokens"][0] in ("character", "byte") else 64
    length = seen // 4 if request.memory else seen
    names = ", ".join(SIZES)
    model: Keys = {
        "hidden_size": (
            width,
            f"size {size} of {names}: the largest that reads {_PER_PARAMETER} tokens for each parameter",
        ),
        "num_hidden_layers": (layers, "by the size" + ", in the encoder and in the decoder" * pairs),
        "num_attention_heads": (heads, "by the size"),
        "hidden_act": ("gelu", "usual"),
        "position": ("rotary", "learns fastest, and reads on past the trained length"),
        "scale_embedding": (True, "embeddings as large as what layers add to them"),
        "output": (
            {"tied": True, "bias": True},
            "one table reads and writes tokens: half the parameters of a vocabulary",
        ),
        "dropout": (
            {"embedding": amounts.dropout, "residual": amounts.dropout},
            "0 up to 4 times through the text, 0.1 up to 12 times, else 0.2",
        ),
    }
    if pairs:
        model["encoder"] = ({"share_embedding": True}, "both languages have one vocabulary")
    elif entries > 4000:
        clusters = {"kind": "adaptive", "cutoffs": [entries // 10, entries // 3], "div_val": 2}
        model["input"] = (clusters, "above 4,000 entries: rare ones get shorter vectors")
        model["output"] = ({**clusters, "tied": True}, "and cost less: a softmax over all would be most of the work")
    if request.memory:
        model["memory_length"] = (seen - length, "three segments")
    train: Keys = {"steps": (amounts.steps, f"what the time allows; at most {_MOST_EPOCHS} times through the text")}
    why = f"a power of two that leaves {_STEPS:,} updates, from 512 (with a memory 1,024) to 8,192 tokens"
    if pairs:
        train["batch_tokens"] = (amounts.per_step, why)
        train["label_smoothing"] = (0.1, "usual for translation")
    else:
        train["segment_length"] = (
            length,
            "128 characters or bytes, 64 words or subwords" + "; with a memory a quarter" * request.memory,
        )
        train["batch_size"] = (amounts.per_step // length, f"times segment_length: {why}")
        train["order"] = ("contiguous" if request.memory else "shuffled", "a memory needs the text in order")
    train |= {
        "learning_rate": (round(0.5 / width, 5), "0.5 / hidden_size"),
        "warmup_steps": (max(1, amounts.steps // 20), "5 % of the steps"),
        "schedule": ("cosine", "down to 0 at the last step"),
        "weight_decay": (0.1, "usual for adamw"),
        "betas": ([0.9, 0.99], "a longer mean of squares than for large batches"),
        "max_grad_norm": (1.0, "a rare large gradient does no harm"),
        "seed": (1, "of every random draw"),
    }
    evaluate: Keys = {"every_steps": (-(-amounts.steps // _EVALUATIONS), f"{_EVALUATIONS} evaluations")}
    if isinstance(corpus, PairCorpus):
        evaluate["max_sentences"] = (0, "while training, perplexity alone; BLEU of all sentences at the end")
        evaluate["beams"] = (4, "width of the beam at the end")
    else:
        rows = 2048 // length
        if request.memory:
            rows = min(rows, max(1, corpus.splits["valid"].tokens // (20 * length)))
        evaluate["batch_size"] = (
            rows,
            "2,048 tokens at a time" + "; a memory begins empty in each row" * request.memory,
        )
        most = min(amounts.evaluated, corpus.splits["valid"].tokens)
        evaluate["max_tokens"] = (most, "while training: at most 1 % of the time each; the final figures use all")
    return {"model": model, "data": data, "train": train, "eval": evaluate}
