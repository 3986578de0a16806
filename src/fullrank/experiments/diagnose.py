"""Which bottleneck a model is in: training, heads, output layer, memory, parameters; each with what to try."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullrank.analysis import GradientShare, context_use, gradient_share, heads, rank, spectrum
from fullrank.analysis.heads import nats_per_token, predictions
from fullrank.analysis.rank import effective_rank, explain_rank
from fullrank.analysis.size import parameters_by_part
from fullrank.comparison.runs import SPLITS, Run, number, read_run
from fullrank.config.recipe import resolve
from fullrank.core.errors import ConfigError, InputError
from fullrank.core.model import Model
from fullrank.evaluation.statistics import STILL_FALLING, measure_late_gain
from fullrank.experiments.analyze import Reading, open_all
from fullrank.experiments.diagnosis import Diagnosis, Finding, Verdict, examines, record_curve
from fullrank.files import read_json
from fullrank.models import LoadedModel
from fullrank.records import Column, Lines, Record, Table
from fullrank.text import Text

TEXTS = 16  # segments whose attention weights are read
_GRADIENTS, _CONTEXTS = 4096, 64  # tokens whose gradient is read; segments over which the use of context is measured
_USEFUL = 0.005  # rules behind the verdicts, stated with them: nats per token
_IDLE = 0.001  # of the perplexity
_ATTENTION, _VOCABULARY = 1 / 3, 1 / 2  # shares of all parameters
_BY_HEART, _PERHAPS_BY_HEART = 2.0, 1.5  # ratios of the perplexities of validation and training
_QUOTES = 4  # measurements that are quoted for an advice


@dataclass(frozen=True)
class _Subject:
    """A model with its text."""

    loaded: LoadedModel
    text: Text
    perplexity: float | None = None
    unigram: float = math.inf

    @cached_property
    def run(self) -> Run | None:
        """Its run; None for a model of another source."""
        folder = self.loaded.folder
        return read_run(folder) if self.loaded.source == "run" and folder is not None else None

    @property
    def model(self) -> Any:
        return self.loaded.module

    @property
    def own(self) -> Model | None:
        """The model of ours, also inside an exported one; None for any other."""
        own: Model | None = self.loaded.own
        return own

    @property
    def length(self) -> int:
        return self.text.segment_length

    @property
    def masked(self) -> bool:
        """Tokens are predicted from both sides."""
        return self.loaded.mask_id is not None or self.loaded.predicts == "masked tokens"

    def trained_with(self, *overrides: str) -> list[str]:
        """The command that trains this run with some settings changed; none where they do not fit it, or are its own."""
        folder = self.loaded.folder
        if self.loaded.source != "run" or folder is None:
            return []
        path = folder / "config.yaml"
        try:
            changed = resolve(str(path), overrides=overrides).config
        except ConfigError:
            return []
        if changed == resolve(str(path)).config:
            return []
        change = overrides[0].rpartition(".")[2].replace("=", "-")
        return [f"fullrank train {path} {' '.join(overrides)} --out {folder}-{change}"]

    def injected(self, **options: object) -> list[str]:
        """The line that injects stages into a model of Hugging Face."""
        if self.own is not None:
            return []
        return [
            f"fr.inject(model, {', '.join(f'{key}={value!r}' for key, value in options.items())})  # then fine-tune"
        ]


def diagnose(name: str, reading: Reading) -> Diagnosis:
    """The diagnosis of a trained model; the errors of `open_all`, and InputError for a text shorter than a segment."""
    ((model, text),) = open_all([name], reading)
    # enough for the contexts of the rank, which has to be above its bound
    wanted = max(_CONTEXTS * _longest(model, text), _GRADIENTS, 6 * (_width(model.module) + 32))
    tokens = list(itertools.islice(text.ids(), wanted))
    text = replace(text, read=lambda: iter([tokens]))
    subject, length = _Subject(model, text), text.segment_length
    text.rows(1)
    perplexity, unigram = _perplexity(subject), unigram_perplexity(tokens)
    subject = replace(subject, perplexity=perplexity, unigram=unigram)
    undertrained = perplexity is not None and perplexity > unigram
    findings = []
    for examine in (_reading, _overfits, _attention, _output, _memory, _heads, _parameters):
        finding = examine(subject)
        if undertrained and examine is not _reading:
            finding = replace(finding, verdict="not measured", advice=())
        if finding.verdict in ("bottleneck", "perhaps"):
            finding = replace(finding, words=[*finding.words, *_quote(finding.name)])
        reading.say(f"{finding.title}: {finding.verdict}")
        findings.append(finding)
    parameters = sum(parameter.numel() for parameter in model.module.parameters())
    return Diagnosis(
        model.name, model.source, text.name, parameters, length, findings, perplexity, unigram, undertrained
    )


def _perplexity(subject: _Subject) -> float | None:
    """Perplexity on the first texts; None for a model that gives no probabilities of tokens."""
    loaded, rows = subject.loaded, subject.text.rows(TEXTS)
    try:
        return math.exp(nats_per_token(loaded, rows).mean())
    except InputError:
        return None


def unigram_perplexity(tokens: Sequence[int]) -> float:
    """Perplexity of each token under the counts of all others plus one: exp(-1/N sum_w c_w log(c_w / (N - 1 + C))).

    c_w counts word w, N all tokens, C the different words. The token that is predicted is left out of the counts, so that a
    short text does not flatter the unigram model.
    """
    counts = Counter(tokens)
    total = len(tokens) - 1 + len(counts)
    return math.exp(-sum(count * math.log(count / total) for count in counts.values()) / len(tokens))


def _width(model: Any) -> int:
    config = model.config
    return int((config.get_text_config() if hasattr(config, "get_text_config") else config).hidden_size)


def _judge(value: float, bottleneck: float, perhaps: float) -> Verdict:
    if value > bottleneck:
        return "bottleneck"
    return "perhaps" if value > perhaps else "no bottleneck"


def _quote(finding: str) -> list[str]:
    """What was measured of the mechanisms that a finding advises, as docs/which.md has it."""
    quotes = read_json(Path(__file__).with_name("which.json")).get(finding, [])
    return [
        f"Measured here: {quote['mechanism']}: {quote['measured']}, {quote['verdict']} ({quote['runs']})."
        for quote in quotes[:_QUOTES]
    ]


# -- training ----------------------------------------------------------------------------------------------------------


@examines(
    "reading",
    "Reading",
    "too little reading",
    "A bottleneck where the perplexity of its run is above that of counting 4-grams, where that here is above that of "
    f"counting words, or where its validation perplexity falls by more than {STILL_FALLING:.0%} in the last tenth of training.",
)
def _reading(subject: _Subject) -> Finding:
    run, words, advice = subject.run, [], []
    if subject.perplexity is not None and subject.perplexity > subject.unigram:
        words.append(f"Its perplexity is {subject.perplexity:,.1f}, that of counting words {subject.unigram:,.1f}.")
    if run is None:
        return Finding("bottleneck" if words else "no bottleneck", words or ["It predicts better than counting words."])
    fourgrams = {split: number(run.get(f"corpus.fourgram_perplexity.{split}")) for split in SPLITS}
    for split, counted in fourgrams.items():
        perplexity = run.final(split, "perplexity")
        if perplexity is not None and counted is not None and perplexity > counted:
            words.append(f"On its {split} text it has {perplexity:,.1f}, counting 4-grams has {counted:,.1f}.")
    gain = measure_late_gain(_read_curve(run, "valid", "ppl"))
    if gain is not None and gain > STILL_FALLING:
        words.append(f"Its validation perplexity falls by {gain:.1%} in the last tenth of training.")
        advice.append(f"fullrank train {run.folder} --more '5 minutes' --out {run.folder}-more")
    figures = {"fourgram_perplexity": fourgrams, "late_gain": gain}
    verdict: Verdict = "bottleneck" if words else "no bottleneck"
    return Finding(verdict, words or ["It predicts better than counting, and has stopped learning."], figures, advice)


@examines(
    "overfits",
    "Overfitting",
    "learning its text by heart",
    f"A bottleneck where the last validation perplexity of its run is more than {_BY_HEART:g} times the perplexity of training "
    f"in the last tenth of the steps; perhaps where it is more than {_PERHAPS_BY_HEART:g} times that.",
)
def _overfits(subject: _Subject) -> Finding:
    if subject.run is None:
        raise InputError("Only a run has the loss of its training")
    train, valid = _read_curve(subject.run, "train", "nll"), _read_curve(subject.run, "valid", "nll")
    if not train or not valid:
        raise InputError("metrics.jsonl of its run lacks losses of training or validation")
    last = float(np.mean([nll for step, nll in train if step > 0.9 * train[-1][0]]))
    ratio = math.exp(valid[-1][1] - last)
    verdict = _judge(ratio, _BY_HEART, _PERHAPS_BY_HEART)
    words = [
        f"The last validation loss is {valid[-1][1]:.3f}, that of training {last:.3f}: {ratio:.2f} of its perplexity."
    ]
    figures = {"train_nll": last, "valid_nll": valid[-1][1], "ratio": ratio}
    changes = (
        ("train.weight_decay=1.0", "train.optimizer=adamw"),
        ("train.partial_shuffle=true",),
        ("model.dropout.words=0.2",),
    )
    advice = (
        [] if verdict == "no bottleneck" else [line for change in changes for line in subject.trained_with(*change)]
    )
    return Finding(verdict, words, figures, advice)


def _read_curve(run: Run, split: str, key: str) -> list[tuple[float, float]]:
    """Steps and values of a figure in metrics.jsonl."""
    points = [(number(line.get("step")), number(line.get(key))) for line in run.metrics if line.get("split") == split]
    return [(step, value) for step, value in points if step is not None and value is not None]


# -- small heads -------------------------------------------------------------------------------------------------------


@examines(
    "attention",
    "Small heads",
    "heads that are small for the length",
    "A bottleneck where the effective rank reaches the dimensions of a head, which are fewer than the tokens of a segment; "
    "perhaps where it reaches half of them.",
)
def _attention(subject: _Subject) -> Finding:
    read = spectrum(subject.loaded, subject.text.rows(TEXTS))
    before = [float(layer.before.effective_rank.mean()) for layer in read.layers]
    after = [float(layer.after.effective_rank.mean()) for layer in read.layers]
    mixes = any(layer.after is not layer.before for layer in read.layers)
    dim = _head_dim(subject)
    mean = float(np.mean(after))
    size = dim * (len(read.layers[0].after.effective_rank) if mixes else 1)
    verdict: Verdict = "no bottleneck" if size >= read.length else _judge(mean / size, 1, 1 / 2)
    owner = f"the {size // dim} mixed heads of a layer have together" if mixes else "a head has"
    words = [
        f"The attention weights have an effective rank of {mean:.1f} of {read.length:,} (mean of {len(after)} layers, "
        f"{read.texts} segments); {owner} {size} dimensions. Fewer dimensions than tokens of a segment cannot form every "
        "pattern of attention (Mixhead, Theorem 1)."
    ]
    if mixes:
        words.append(f"Before mixing the effective rank is {np.mean(before):.1f}.")
    shares = np.arange(1, read.layers[0].after.curves.shape[1] + 1) / read.length
    records: list[Record] = []
    for index, layer in enumerate(read.layers):
        points = zip(shares, layer.after.curves.mean(0), strict=True)
        records += record_curve("share of their sum", "share of the singular values", points, layer=index)
    plot = Lines(
        "share of the singular values", series=(), band="layer", from_zero=True, title="Sum of the largest singular values",
        subtitle="Mean over the layers, in a band of ± their standard deviation. Attention that spreads over all singular "
        "values evenly would be the diagonal.",
    )  # fmt: skip
    advice = [] if verdict == "no bottleneck" else _mixing(subject)
    figures = {
        "head_dim": dim, "length": read.length, "texts": read.texts, "effective_rank": mean, "weights": read.weights,
        "effective_rank_by_layer": after, "effective_rank_before_mixing_by_layer": before,
    }  # fmt: skip
    return Finding(verdict, words, figures, advice, records, plots=(plot,))


def _head_dim(subject: _Subject) -> int:
    if subject.own is not None:
        assert subject.own.config.head_dim is not None
        return subject.own.config.head_dim
    config = subject.model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _mixing(subject: _Subject) -> list[str]:
    if subject.own is None:
        return subject.injected(mix="position_wise")
    return subject.trained_with("model.attention.mix=position_wise") + subject.trained_with(
        f"model.head_dim={2 * _head_dim(subject)}"
    )


# -- the output layer --------------------------------------------------------------------------------------------------


@examines(
    "output",
    "Output layer",
    "a single softmax over the vocabulary",
    "Perhaps a bottleneck where the effective rank reaches half of the hidden dimensions: the model spreads its predictions "
    "over all that it has. That the rank has a bound is true of every softmax and says nothing of a model.",
)
def _output(subject: _Subject) -> Finding:
    share = _gradient(subject)
    words = [
        f"Of the gradient's norm the output layer lets {100 * share.let_through:.1f} % through and suppresses "
        f"{100 * share.suppressed:.1f} % ({share.tokens:,} tokens; 95 to 99 % in large models, arXiv 2603.10145); of a "
        f"random direction {100 * min(share.width / share.vocab_size, 1) ** 0.5:.1f} % would pass, the root of d / V."
    ]
    content: dict[str, Any] = {
        "gradient_suppressed": share.suppressed,
        "gradient_let_through": share.let_through,
    }
    try:
        figures = rank(subject.loaded, subject.text)
    except InputError as error:
        return Finding("not measured", [*words, f"{error}."], content)
    layer = figures.layer
    used = float(effective_rank(figures.singular_values[1:]))  # the first is their mean
    verdict: Verdict = "no bottleneck"
    if layer.exempt is None and figures.vocab_size > layer.bound:
        crowded = used >= layer.hidden_size / 2
        verdict = ("perhaps" if crowded else "no bottleneck") if figures.conclusive else "not measured"
    ranks = (
        f"The log-probabilities have rank {figures.rank:,} after {figures.contexts:,} contexts, with {layer.hidden_size:,} "
        f"hidden dimensions and {figures.vocab_size:,} words ({layer.kind}). Beside the mean the effective rank is "
        f"{used:.1f}."
    )
    advice = []
    if verdict == "perhaps":
        words.append("Four softmaxes take about 2.4 of the time of one; mixtures=1 is the control.")
        mixture = {"kind": "mixture_of_softmaxes", "mixtures": 4, "latent": "residual"}
        advice = subject.trained_with(*(f"model.output.{key}={value}" for key, value in mixture.items()))
        advice += subject.trained_with("model.output.normalize=sigsoftmax")
        advice += subject.injected(output={"kind": "mixture_of_softmaxes", "mixtures": 4})
    content |= {
        "segment_length": subject.length, "output": layer.kind, "d": layer.hidden_size, "bias": layer.bias,
        "bound": layer.bound, "bound_applies": layer.exempt is None, "rank": figures.rank,
        "effective_rank": figures.effective_rank, "full": figures.full, "conclusive": figures.conclusive,
        "contexts": figures.contexts, "repeated_contexts": figures.repeats, "columns": figures.columns,
        "vocab_size": figures.vocab_size, "exempt": layer.exempt, "rounding": figures.eps, "tolerance": figures.tolerance,
        "singular_values": figures.singular_values.tolist(),
    }  # fmt: skip
    content["effective_rank_beside_mean"] = used
    return Finding(verdict, [ranks, *explain_rank(figures), *words], content, advice)


def _gradient(subject: _Subject) -> GradientShare:
    """The share of the gradient of the nll of the predicted tokens that the output layer lets through."""
    rows = subject.text.rows(max(1, _GRADIENTS // subject.length))
    loaded = subject.loaded
    if not subject.masked:
        return gradient_share(loaded, [(row[:, :-1], row[:, 1:]) for row in rows])
    return gradient_share(loaded, predictions(loaded, rows)[1])


# -- memory ------------------------------------------------------------------------------------------------------------


def _longest(model: LoadedModel, text: Text) -> int:
    """Tokens of the longest text that the use of context is measured on: a segment and its memory."""
    length = text.segment_length + getattr(model.own, "memory_length", 0)
    return min(length, model.max_length or length)


@examines(
    "context",
    "Context",
    "the length of its context",
    f"A bottleneck where the last step lowers the nll by more than {_USEFUL:g} nats per token, with its whole 95 % interval "
    "over texts; perhaps where the interval includes less.",
)
def _memory(subject: _Subject) -> Finding:
    if subject.masked:
        raise InputError("The model reads a text from both sides")
    longest = _longest(subject.loaded, subject.text)
    scored = max(longest // 8, 1)
    rows = list(itertools.chain.from_iterable(batch.split(1) for batch in subject.text.with_length(longest).segments()))
    rows = [row for row in rows if row.shape[1] == longest][:_CONTEXTS]
    if len(rows) < 2:
        raise InputError(f"The text has fewer than two segments of {longest:,} tokens")
    use = context_use(subject.loaded, rows, scored=scored, opening=subject.text.bos_id is not None)
    lengths = [*use.nll]
    gain, interval, reach = use.last_gain, use.interval, use.reach(_USEFUL)
    verdict: Verdict = "no bottleneck"
    if gain > _USEFUL:
        verdict = "bottleneck" if interval is not None and interval.low > _USEFUL else "perhaps"
    words = [
        f"{reach:,} tokens of context are enough: more lowers the nll by less than {_USEFUL:g} nats per token.",
    ]
    if len(lengths) > 1:
        sure = "" if interval is None else f" (95 % from {interval.low:+.4f} to {interval.high:+.4f})"
        words.append(f"The step from {lengths[-2]:,} to {lengths[-1]:,} tokens lowers it by {gain:+.4f}{sure}.")
    records = record_curve("perplexity", "tokens of context", use.perplexity.items())
    note = f"The last {scored:,} tokens of {len(rows)} texts, read with so many tokens before them."
    plot = Lines("tokens of context", series=(), title="Perplexity by context", subtitle=note)
    plots = (plot,) if len(lengths) > 1 else ()
    advice = [] if verdict == "no bottleneck" else _longer(subject, longest)
    figures = {
        "perplexity": {str(n): perplexity for n, perplexity in use.perplexity.items()},
        "reach": reach,
        "scored": scored,
        "texts": len(rows),
    }
    return Finding(verdict, words, figures, advice, records, plots=plots)


def _longer(subject: _Subject, longest: int) -> list[str]:
    own = subject.own
    if own is None:
        positions = subject.loaded.max_length
        return (
            [f"read longer segments: --segment-length {2 * longest}"] if positions and positions >= 2 * longest else []
        )
    remember = f"model.memory_length={max(2 * own.config.memory_length, subject.length)}"
    return subject.trained_with(remember) or subject.trained_with(remember, "train.order=contiguous")


# -- redundant heads ---------------------------------------------------------------------------------------------------


@examines(
    "heads",
    "Redundant heads",
    "heads that it does not need",
    "A bottleneck where more than half of the heads can be taken out; perhaps where more than a quarter can.",
)
def _heads(subject: _Subject) -> Finding:
    loaded = subject.loaded
    rows = torch.cat(subject.text.rows(TEXTS))
    read = heads(loaded, rows)
    changes = np.concatenate([layer.change for layer in read.layers]) / read.perplexity
    idle = int((changes < _IDLE).sum())
    alike = [layer.redundancy for layer in read.layers if layer.redundancy is not None]
    share = idle / len(changes)
    verdict = _judge(share, 1 / 2, 1 / 4)
    words = [
        f"{idle} of {len(changes)} heads can be taken out, one at a time, for less than {100 * _IDLE:g} % of perplexity "
        f"({len(rows)} texts, {read.objective})."
    ]
    if alike:
        words.append(f"Two heads of a layer have outputs that are alike by {np.mean(alike):.2f} (linear CKA, mean).")
    advice = []
    if verdict != "no bottleneck":
        advice = subject.trained_with("model.attention.cross_head=0.1") + subject.injected(cross_head=0.1)
    records: list[Record] = []
    for index, layer in enumerate(read.layers):
        points = enumerate(100 * np.sort(layer.change / read.perplexity), start=1)
        records += record_curve("percent", "heads", points, layer=index)
    note = "Each layer's heads, ordered by what the model loses without them."
    plot = Lines("heads", title="Rise of perplexity without a head", subtitle=note)
    figures = {
        "change": [layer.change.tolist() for layer in read.layers], "perplexity": read.perplexity, "idle": idle,
        "similarity": [layer.redundancy for layer in read.layers],
    }  # fmt: skip
    return Finding(verdict, words, figures, advice, records, plots=(plot,))


# -- parameters --------------------------------------------------------------------------------------------------------


@examines(
    "parameters",
    "Parameters",
    "parameters that stand in the wrong place",
    f"A bottleneck where the vocabulary takes more than {100 * _VOCABULARY:.0f} % of all parameters; perhaps where "
    f"attention takes more than {100 * _ATTENTION:.0f} %.",
)
def _parameters(subject: _Subject) -> Finding:
    parts = _parts(subject)
    total = sum(parts.values())
    shares = {part: size / total for part, size in parts.items()}
    vocabulary = sum(shares.get(part, 0.0) for part in ("embedding", "output", "vocabulary"))
    attention = shares.get("attention", 0.0)
    advice: list[str] = []
    verdict: Verdict = "no bottleneck"
    short = ""
    if vocabulary > _VOCABULARY:
        verdict, short = "bottleneck", "the size of its vocabulary layers"
        advice = subject.trained_with("model.output.tied=true") + _adaptive(subject)
    elif attention > _ATTENTION:
        verdict, short = "perhaps", "the parameters of its attention"
        advice = subject.trained_with("model.attention.kind=multilinear")
    words = [
        f"Of {total:,} parameters attention has {100 * attention:.0f} %, the vocabulary's layers {100 * vocabulary:.0f} %."
    ]
    records: list[Record] = []
    for part, size in parts.items():
        if size:
            labels = {"part": part.replace("_", " ")}
            records += [Record(labels, "parameters", size), Record(labels, "share", shares[part])]
    columns = (Column("parameters", format=",d"), Column("share", format=".1%"))
    table = Table("part", columns, "Parameters by part")
    return Finding(verdict, words, {"parts": parts, "total": total}, advice, records, tables=(table,), short=short)


def _parts(subject: _Subject) -> dict[str, int]:
    if subject.own is not None:
        return {part: size for part, size in parameters_by_part(subject.own).items() if part != "total"}
    from fullrank.hf.families import attention_modules

    model = subject.model
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    vocabulary = {parameter for one in tables if one is not None for parameter in one.parameters()}
    attention = {parameter for module in attention_modules(model).values() for parameter in module.parameters()}
    rest = {*model.parameters()} - vocabulary - attention
    named = (("vocabulary", vocabulary), ("attention", attention - vocabulary), ("feed_forward_and_others", rest))
    return {part: sum(parameter.numel() for parameter in members) for part, members in named}


def _adaptive(subject: _Subject) -> list[str]:
    if subject.own is None or (size := subject.own.config.vocab_size) is None:
        return []
    cutoffs = f"[{size // 10},{size // 3}]"
    both = (f"model.{part}.{key}" for part in ("input", "output") for key in ("kind=adaptive", f"cutoffs={cutoffs}"))
    return subject.trained_with(*both)
