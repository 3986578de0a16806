"""Which bottleneck a model is in: training, heads, output layer, memory; each with what to try.

Each check measures the model, and its limits judge the measured value.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fullrank.analysis.context import CONTEXT_TEXTS, find_longest, read_context
from fullrank.analysis.heads import heads, nats_per_token, predictions
from fullrank.analysis.rank import effective_rank, explain_rank, gradient_share, rank
from fullrank.analysis.spectrum import spectrum
from fullrank.comparison.runs import SPLITS, Run, integer, read_counted, read_run
from fullrank.config.load import resolve
from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import STILL_FALLING, measure_late_gain
from fullrank.experiments.analyze import Reading, open_all
from fullrank.files import Entries, read_json
from fullrank.models import LoadedModel
from fullrank.records import find_measurement
from fullrank.render.blocks import Block, Code, Facts, Page, Paragraph, Section, join_words
from fullrank.render.page import build_blocks
from fullrank.text import Text

logger = logging.getLogger(__name__)

TEXTS = 16  # segments whose attention weights are read
_GRADIENTS = 4096  # tokens whose gradient is read
_USEFUL = 0.005  # nats per token
_IDLE = 0.001  # of the perplexity
_QUOTES = 4  # measurements that are quoted for an advice

Verdict = Literal["bottleneck", "perhaps", "no bottleneck", "not measured"]
_MIXTURE = {"kind": "mixture_of_softmaxes", "mixtures": 4}
_LATENT_MIXTURE = [*(f"model.output.{key}={value}" for key, value in _MIXTURE.items()), "model.output.latent=residual"]
_COUPLED = ("sgd", "nag", "adam")  # optimizers that add weight decay to the gradient
_BADGES = {"bottleneck": "bad", "perhaps": "open", "no bottleneck": "good", "not measured": "quiet"}


@dataclass(frozen=True)
class Subject:
    """A model with its text, and its run if it is one. perplexity, unigram: of the model and of counting words."""

    loaded: LoadedModel
    text: Text
    run: Run | None = None
    perplexity: float | None = None
    unigram: float = math.inf

    @property
    def is_undertrained(self) -> bool:
        """True if it is worse than counting words."""
        return self.perplexity is not None and self.perplexity > self.unigram

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole run, whose encoder alone is read if it translates."""
        of_run = None if self.run is None else integer(self.run.get("parameters.total"))
        return of_run or sum(parameter.numel() for parameter in self.loaded.module.parameters())

    @property
    def head_dim(self) -> int:
        config = read_config(self.loaded)
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def write_training(self, overrides: Sequence[str]) -> list[str]:
        """Write the command that trains this run with some settings changed; none where they do not fit it, or are its own."""
        if self.run is None:
            return []
        path = self.run.folder / "config.yaml"
        try:
            changed = resolve(str(path), overrides=overrides).config
        except InputError:  # of fine-tuning, or settings that do not fit
            return []
        if changed == resolve(str(path)).config:
            return []
        key, _, value = overrides[0].partition("=")
        out = f"{self.run.folder}-{key.rpartition('.')[2]}-{value}"
        return [shlex.join(["fullrank", "train", str(path), *overrides, "--out", out])]


@dataclass(frozen=True)
class Finding:
    """The result of a check of a model.

    value: the limits of the check judge it; None: too little was read. sure: compared with the limit of a bottleneck in
    place of `value`. words: sentences for people. figures: the figures for JSON. blocks: tables and plots. trainings:
    to try, each a list of overrides. verdict, advice: set by `Check.examine`; advice is commands and lines of Python.
    """

    value: float | None
    words: Sequence[str]
    figures: Mapping[str, Any] = field(default_factory=dict)
    sure: float | None = None
    blocks: Sequence[Block] = ()
    trainings: Sequence[Sequence[str]] = ()
    verdict: Verdict = "not measured"
    advice: Sequence[str] = ()


@dataclass(frozen=True)
class Check:
    """One possible bottleneck.

    name: in JSON. title: on the page. short: in the headline. measure raises InputError where nothing can be measured.
    bottleneck, perhaps: a value above the limit has this verdict. quantity: the value in words.
    injection: options of `fr.inject` to try.
    """

    name: str
    title: str
    short: str
    quantity: str
    measure: Callable[[Subject], Finding]
    bottleneck: float
    perhaps: float = math.inf
    injection: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        """The limits in words."""
        limits = [("a bottleneck", self.bottleneck), ("perhaps one", self.perhaps)]
        words = [f"{verdict} above {limit:.3g}" for verdict, limit in limits if limit < math.inf]
        return f"Judged by {self.quantity}: {', '.join(words)}."

    def examine(self, subject: Subject) -> Finding:
        """Measure a model and judge it; of one that is worse than counting words only `reading` is judged."""
        try:
            finding = self.measure(subject)
        except InputError as error:
            return Finding(None, [f"{error}."])
        if finding.value is None or (subject.is_undertrained and self.name != "reading"):
            return finding
        if (finding.value if finding.sure is None else finding.sure) > self.bottleneck:
            verdict: Verdict = "bottleneck"
        elif finding.value > self.perhaps:
            verdict = "perhaps"
        else:
            return replace(finding, verdict="no bottleneck")
        advice: list[str] = []
        for overrides in finding.trainings:
            advice += subject.write_training(overrides)
        if self.injection and subject.loaded.fullrank_model is None:
            options = ", ".join(f"{key}={value!r}" for key, value in self.injection.items())
            advice.append(f"fr.inject(model, {options})  # then fine-tune")
        return replace(finding, verdict=verdict, words=[*finding.words, *read_quotes(self.name)], advice=advice)

    def build_section(self, finding: Finding) -> Section:
        """Build the section of a page."""
        sentences = [Paragraph(sentence) for sentence in finding.words]
        advice = [Code(line, "" if index else "What to try") for index, line in enumerate(finding.advice)]
        blocks: list[Block] = [*sentences, Paragraph(self.rule, "note"), *finding.blocks, *advice]
        return Section(self.title, blocks, self.name, finding.verdict, _BADGES[finding.verdict])


@dataclass(frozen=True)
class Diagnosis:
    """The checks of a model, each with what it found."""

    subject: Subject
    findings: Sequence[tuple[Check, Finding]]

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        subject = self.subject
        name = subject.loaded.name
        if subject.is_undertrained:
            return (
                f"{name} is worse than a unigram model (perplexity {subject.perplexity:,.1f}, counts of words "
                f"{subject.unigram:,.1f}): train it first, nothing below tells of a bottleneck yet"
            )
        for verdict, verb in (("bottleneck", "is"), ("perhaps", "may be")):
            if phrases := [check.short for check, finding in self.findings if finding.verdict == verdict]:
                return f"{name} {verb} bound by {join_words(phrases)}"
        return f"No bottleneck was found in {name}"

    def to_dict(self) -> Entries:
        """Return one JSON document."""
        subject = self.subject
        findings = {}
        for check, finding in self.findings:
            content = {key: getattr(finding, key) for key in ("verdict", "words", "figures", "advice")}
            findings[check.name] = {**content, "rule": check.rule}
        return {
            "model": subject.loaded.name,
            "source": subject.loaded.source,
            "text": subject.text.name,
            "parameters": subject.num_parameters,
            "segment_length": subject.text.segment_length,
            "perplexity": subject.perplexity,
            "unigram_perplexity": subject.unigram,
            "undertrained": subject.is_undertrained,
            "headline": self.headline,
            "findings": findings,
        }

    def build_page(self) -> Page:
        """Build the page; equal diagnoses give equal pages."""
        subject = self.subject
        facts = (
            f"Source: {subject.loaded.source}, {subject.num_parameters:,} parameters, read on {subject.text.name} in segments "
            f"of {subject.text.segment_length:,} tokens."
        )
        return Page(
            f"Which bottleneck is {subject.loaded.name} in?",
            "fullrank diagnose",
            self.headline,
            [Paragraph(facts), Facts([(check.title, finding.verdict) for check, finding in self.findings], "tiles")],
            [check.build_section(finding) for check, finding in self.findings],
        )


def diagnose(name: str, reading: Reading) -> Diagnosis:
    """Diagnose a trained model.

    Raises the errors of `open_all`, and InputError for a text shorter than a segment.
    """
    ((model, text),) = open_all([name], reading)
    # enough for the contexts of the rank, which has to be above its bound
    wanted = max(CONTEXT_TEXTS * find_longest(model, text), _GRADIENTS, 6 * (read_config(model).hidden_size + 32))
    tokens = list(itertools.islice(text.ids(), wanted))
    text = replace(text, read=lambda: iter([tokens]))
    run = read_run(model.folder) if model.source == "run" and model.folder is not None else None
    perplexity = None
    if "logits" in model.has:
        perplexity = math.exp(nats_per_token(model, text.rows(TEXTS)).mean())
    subject = Subject(model, text, run, perplexity, unigram_perplexity(tokens))
    findings = []
    for check in CHECKS:
        findings.append((check, check.examine(subject)))
        logger.info(f"{check.title}: {findings[-1][1].verdict}")
    return Diagnosis(subject, findings)


def read_config(model: LoadedModel) -> Any:
    """Return the configuration of the part that reads text."""
    config = (model.fullrank_model or model.module).config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def unigram_perplexity(tokens: Sequence[int]) -> float:
    """Compute the perplexity of each token under the counts of all others plus one.

        exp(-1/N sum_w c_w log(c_w / (N - 1 + C)))

    c_w counts word w, N all tokens, C the different words. The token that is predicted is left out of the counts, so
    that a short text does not flatter the unigram model.
    """
    counts = Counter(tokens)
    total = len(tokens) - 1 + len(counts)
    return math.exp(-sum(count * math.log(count / total) for count in counts.values()) / len(tokens))


def read_quotes(finding: str) -> list[str]:
    """Read what was measured of the mechanisms that a finding advises, as docs/which.md has it."""
    quotes = read_json(Path(__file__).with_name("which.json")).get(finding, [])
    return [
        f"Measured here: {quote['mechanism']}: {quote['measured']}, {quote['verdict']} ({quote['runs']})."
        for quote in quotes[:_QUOTES]
    ]


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure_reading(subject: Subject) -> Finding:
    """Count the signs of too little training, of three."""
    run = subject.run
    words = []
    if subject.is_undertrained:
        words.append(f"Its perplexity is {subject.perplexity:,.1f}, that of counting words {subject.unigram:,.1f}.")
    figures: Entries = {}
    if run is not None:
        fourgrams = {split: read_counted(run, split, "fourgram") for split in SPLITS}
        for split, counted in fourgrams.items():
            perplexity = run.final(split, "perplexity")
            if perplexity is not None and counted is not None and perplexity > counted:
                words.append(f"On its {split} text it has {perplexity:,.1f}, counting 4-grams has {counted:,.1f}.")
        gain = measure_late_gain([*run.read_curve("valid", "ppl").items()])
        if gain is not None and gain > STILL_FALLING:
            words.append(f"Its validation perplexity falls by {gain:.1%} in the last tenth of training.")
        figures = {"fourgram_perplexity": fourgrams, "late_gain": gain}
    steps = run and run.get("steps")
    longer = [[f"train.steps={2 * steps}"]] if steps else []
    signs = len(words)
    return Finding(signs, words or ["It predicts better than counting does."], figures, trainings=longer)


def measure_overfitting(subject: Subject) -> Finding:
    """Measure validation perplexity over that of training."""
    if subject.run is None:
        raise InputError("Only a run has the loss of its training")
    train = subject.run.read_curve("train", "nll")
    valid = subject.run.read_curve("valid", "nll")
    if not train or not valid:
        raise InputError("metrics.jsonl of its run lacks losses of training or validation")
    late = float(np.mean([nll for step, nll in train.items() if step > 0.9 * max(train)]))
    last = valid[max(valid)]
    ratio = math.exp(last - late)
    words = [f"The last validation loss is {last:.3f}, that of training {late:.3f}: {ratio:.2f} of its perplexity."]
    decay = ["train.weight_decay=1.0"]
    if subject.run.settings.get("train.optimizer") in _COUPLED:
        decay.append("train.optimizer=adamw")
    trainings = (decay, ["train.partial_shuffle=true"], ["model.dropout.words=0.2"])
    return Finding(ratio, words, {"train_nll": late, "valid_nll": last, "ratio": ratio}, trainings=trainings)


def measure_attention(subject: Subject) -> Finding:
    """Measure the effective rank of the attention weights over the dimensions of the heads that make them."""
    read = spectrum(subject.loaded, subject.text.rows(TEXTS))
    before = [float(layer.before.effective_rank.mean()) for layer in read.layers]
    after = [float(layer.after.effective_rank.mean()) for layer in read.layers]
    is_mixed = any(layer.after is not layer.before for layer in read.layers)
    dim = subject.head_dim
    mean = float(np.mean(after))
    size = dim * (len(read.layers[0].after.effective_rank) if is_mixed else 1)
    owner = "the mixed heads of a layer have together" if is_mixed else "a head has"
    words = [
        f"The attention weights have an effective rank of {mean:.1f} of {read.length:,} (mean of {len(after)} layers, "
        f"{read.texts} segments); {owner} {size} dimensions. Fewer dimensions than tokens of a segment cannot form every "
        "pattern of attention (Mixhead, Theorem 1)."
    ]
    figures = {
        "head_dim": dim,
        "length": read.length,
        "texts": read.texts,
        "effective_rank": mean,
        "weights": read.weights,
        "effective_rank_by_layer": after,
        "effective_rank_before_mixing_by_layer": before,
    }
    value = mean / size if size < read.length else 0.0
    blocks = build_blocks((), find_measurement("spectrum").plots, list(read.to_records()))
    larger = [["model.attention.mix=position_wise"], [f"model.head_dim={2 * dim}"]]
    return Finding(value, words, figures, blocks=blocks, trainings=larger)


def measure_output(subject: Subject) -> Finding:
    """Measure the effective rank of the log-probabilities without their mean, over the hidden dimensions."""
    rows = subject.text.rows(max(1, _GRADIENTS // subject.text.segment_length))
    batches = [(row[:, :-1], row[:, 1:]) for row in rows]
    if subject.loaded.is_masked:
        batches = predictions(subject.loaded, rows)[1]
    words: list[str] = []
    figures: Entries = {}
    with contextlib.suppress(InputError):  # of an output layer without a gradient for all words
        share = gradient_share(subject.loaded, batches)
        figures = {"gradient_suppressed": 1 - share, "gradient_let_through": share}
        words = [f"The output layer suppresses {1 - share:.1%} of the gradient's norm (arXiv 2603.10145)."]
    try:
        read = rank(subject.loaded, subject.text)
    except InputError as error:
        return Finding(None, [*words, f"{error}."], figures)
    layer = read.layer
    used = float(effective_rank(read.singular_values[1:]))  # the first is their mean
    value: float | None = 0.0
    if layer.exempt is None and read.vocab_size > layer.bound:
        value = used / layer.hidden_size if read.conclusive else None
    words.append(f"Beside their mean, the log-probabilities have an effective rank of {used:.1f}.")
    figures |= {
        "output": layer.kind,
        "d": layer.hidden_size,
        "bound": layer.bound,
        "bound_applies": layer.exempt is None,
        "rank": read.rank,
        "effective_rank": read.effective_rank,
        "contexts": read.contexts,
        "vocab_size": read.vocab_size,
        "effective_rank_beside_mean": used,
    }
    trainings = (_LATENT_MIXTURE, ["model.output.normalize=sigsoftmax"])
    return Finding(value, [*explain_rank(read), *words], figures, trainings=trainings)


def measure_context(subject: Subject) -> Finding:
    """Measure by how many nats per token the last step to more context lowers the nll, and the lower end of its interval."""
    use = read_context(subject.loaded, replace(subject.text, count=None))
    reach = use.reach(_USEFUL)
    gain, interval = [(0.0, None), *use.gains.values()][-1]
    between = "" if interval is None else f" (95 % from {interval.low:+.4f} to {interval.high:+.4f})"
    words = [
        f"{reach:,} tokens of context are enough: more lowers the nll by less than {_USEFUL:g} nats per token.",
        f"The last step to more context lowers the nll by {gain:+.4f}{between}.",
    ]
    perplexity = {str(n): perplexity for n, perplexity in use.perplexity.items()}
    texts = len(use.nll[reach])
    figures = {"perplexity": perplexity, "reach": reach, "scored": use.scored, "texts": texts}
    trainings = []
    if subject.loaded.fullrank_model is not None:
        # a longer memory, and where the order of the text allows none, that order, too
        longer = max(2 * subject.loaded.fullrank_model.config.memory_length, subject.text.segment_length)
        memory = [f"model.memory_length={longer}"]
        trainings = [memory if subject.write_training(memory) else [*memory, "train.order=contiguous"]]
    sure = 0.0 if interval is None else interval.low
    blocks = build_blocks((), find_measurement("context").plots, list(use.to_records()))
    return Finding(gain, words, figures, sure, blocks, trainings)


def measure_heads(subject: Subject) -> Finding:
    """Measure the share of heads that the model does not need."""
    rows = torch.cat(subject.text.rows(TEXTS))
    read = heads(subject.loaded, rows)
    changes = np.concatenate([layer.change for layer in read.layers]) / read.perplexity
    idle = int((changes < _IDLE).sum())
    words = [
        f"{idle} of {len(changes)} heads can be taken out, one at a time, for less than {100 * _IDLE:g} % of perplexity "
        f"({len(rows)} texts, {read.objective})."
    ]
    figures = {
        "change": [layer.change.tolist() for layer in read.layers],
        "perplexity": read.perplexity,
        "idle": idle,
        "similarity": [layer.redundancy for layer in read.layers],
    }
    shown = find_measurement("heads")
    blocks = build_blocks(shown.tables, shown.plots, list(read.to_records()))
    trainings = [["model.attention.cross_head=0.1"]]
    return Finding(idle / len(changes), words, figures, blocks=blocks, trainings=trainings)


# -- the table ---------------------------------------------------------------------------------------------------------

CHECKS = (
    Check(
        "reading", "Reading", "too little reading",
        "signs of it, of perplexity above that of counting words, or 4-grams for its run, and a validation perplexity that "
        f"falls by more than {STILL_FALLING:.0%} in the last tenth of training",
        measure_reading, bottleneck=0,
    ),
    Check(
        "overfits", "Overfitting", "learning its text by heart",
        "the last validation perplexity of its run over that of training in the last tenth of the steps",
        measure_overfitting, bottleneck=2, perhaps=1.5,
    ),
    Check(
        "attention", "Small heads", "heads that are small for the length",
        "the effective rank over the dimensions of a head, where these are fewer than the tokens of a segment",
        measure_attention, bottleneck=1, perhaps=1 / 2, injection={"mix": "position_wise"},
    ),
    Check(
        "output", "Output layer", "a single softmax over the vocabulary",
        "the effective rank beside the mean over the hidden dimensions, of a layer whose rank is bounded",
        measure_output, bottleneck=math.inf, perhaps=1 / 2, injection={"output": _MIXTURE},
    ),
    Check(
        "context", "Context", "the length of its context",
        "nats per token by which the last step to more context lowers the nll; for a bottleneck its whole 95 % interval",
        measure_context, bottleneck=_USEFUL, perhaps=_USEFUL,
    ),
    Check(
        "heads", "Redundant heads", "heads that it does not need", "the share of heads that can be taken out",
        measure_heads, bottleneck=1 / 2, perhaps=1 / 4, injection={"cross_head": 0.1},
    ),
)  # fmt: skip
