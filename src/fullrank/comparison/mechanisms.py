"""The mechanisms of a configuration in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fullrank.comparison.runs import mapping, number, sequence
from fullrank.config.load import flatten

# settings that make a row, in words; those of a plain Transformer need none, others are stages of one's own
_WORDS = {
    "attention.kind": {
        "weighted": "",
        "multilinear": "multi-linear attention: sums over pairs of tokens in place of attention weights",
    },
    "attention.score": {
        "dot_product": "",
        "relative": "scores of content and distance (Transformer-XL)",
        "dense_synthesizer": "each query makes its scores without keys (dense synthesizer)",
        "random_synthesizer": "scores are learned parameters, the same for every text (random synthesizer)",
    },
    "attention.mix": {
        "none": "",
        "position_independent": "Mixhead A: heads exchange attention weights by one learned matrix",
        "position_wise": "Mixhead B: each query decides how heads exchange attention weights",
        "random": "heads exchange attention weights by a fixed random matrix",
        "average": "every head uses the mean of all heads' attention weights",
    },
    "attention.gate": {"none": "", "head": "each query scales the output of each head (output gates)"},
    "normalize": {"softmax": "", "sigsoftmax": "sigsoftmax in place of softmax"},
    "output.kind": {
        "softmax": "",
        "adaptive": "adaptive softmax: rare words have smaller vectors",
        "mixture_of_softmaxes": "a mixture of {mixtures} softmaxes in place of one",
    },
}


def describe_mechanisms(config: Mapping[str, Any]) -> str:
    """The mechanisms of a configuration: `Mixhead B: each query decides ..; sigsoftmax in place of softmax`."""
    words = dict.fromkeys([*_describe_model(mapping(config.get("model"))), *_describe_training(config)])
    return "; ".join(words) or "plain multi-head attention and one softmax over the vocabulary"


def _describe_model(model: Mapping[str, Any]) -> Iterator[str]:
    layers = model.get("layers")
    if isinstance(layers, list):
        model = {**model, "layers": dict(enumerate(layers))}
    settings = {key.removesuffix(".name"): value for key, value in flatten(model).items()}
    for ending, words in _WORDS.items():
        for key, value in settings.items():
            if not key.endswith(ending) or not isinstance(value, str):
                continue
            own_stage = f"{ending.removesuffix('.kind').rpartition('.')[2]}: {value} (a stage of your own)"
            sentence = words.get(value, own_stage)
            if sentence:
                yield sentence.format(mixtures=settings.get(key.replace("kind", "mixtures")))
    beta = max((number(value) or 0.0 for key, value in settings.items() if key.endswith("cross_head")), default=0.0)
    if beta:
        yield f"keys and values of heads change places in training with probability {beta:g}"
    if any(value is True for key, value in settings.items() if key.endswith("attention.value_residual")):
        yield "values take a learned share of the first layer's values (value residuals)"


def _describe_training(config: Mapping[str, Any]) -> Iterator[str]:
    train = mapping(config.get("train"))
    teacher = mapping(train.get("distill"))
    if teacher:
        yield f"distilled from {Path(str(teacher.get('run'))).name} with weight {teacher.get('weight')}"
    skips = [mapping(phase).get("skip") for phase in sequence(train.get("phases"))]
    if any(mapping(skip).get("name", skip) not in (None, "none") for skip in skips):
        yield "layers are skipped at random in a phase of training (Skip-Retain)"
