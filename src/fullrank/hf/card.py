"""The model card of an export: what the model is, and the figures that `result.json` holds, no other ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import (
    NOT_NEXT_TOKEN,
    AttentionConfig,
    MixtureConfig,
    ModelConfig,
    MultiLinearConfig,
    WeightedConfig,
    stage_name,
)
from fullrank.reporting.runs import RunRecord, integer, mapping, number

# by objective: the pipeline of Hugging Face, words, and our class
_OBJECTIVES = {
    "causal": ("text-generation", "language model", "LanguageModel"),
    "masked": ("fill-mask", "masked language model", "MaskedLanguageModel"),
    "translation": ("translation", "translation model", "Translator"),
}
# figures of a split that a card's header may carry, and their names there
_HEADER = {"perplexity": "Perplexity", "bits_per_character": "Bits per character", "bits_per_byte": "Bits per byte",
           "bleu": "BLEU"}  # fmt: skip
_Facts = Iterator[tuple[str, object]]


def card(
    title: str,
    objective: str,
    auto: str,
    config: ModelConfig,
    record: RunRecord | None,
    checkpoint: str,
    tensors: Mapping[str, Tensor],
    without_tokenizer: str | None = None,
) -> str:
    """`README.md`: a YAML header for the hub, then facts and figures. The licence is left to the publisher.

    record: the run, None for a model that `model.save` wrote; checkpoint: the exported one; without_tokenizer: the reason for
    which there is none.
    """
    result = mapping(record.result) if record is not None else {}
    measured = mapping(result.get({"best": "final", "last": "last"}.get(checkpoint, "")))
    figures = {split: values for split in measured if (values := mapping(measured[split]))}
    remark = MASKED_TOKEN if objective == "masked" else NOT_NEXT_TOKEN if config.sees_future else None
    source = f"checkpoint `{checkpoint}`" if record is not None else "saved weights"
    parts = [
        f"---\n{_header(title, objective, result, figures, remark)}\n---\n",
        f"# {title}\n",
        f"A {_OBJECTIVES[objective][1]} trained with `fullrank`, exported from its {source}.\n",
        "## Figures\n",
        _table(result, figures, remark) if figures else _no_figures(record, checkpoint),
        "## Model\n",
        _facts(_of_model(config, result, tensors)),
        *(["## Training\n", _facts(_of_training(record, result))] if record is not None else []),
        "## Loading it\n",
        _loading(title, objective, auto, config),
        f"There is no tokenizer here: {without_tokenizer}.\n" if without_tokenizer else _tokenizer(title, objective),
        "## Licence\n",
        "None is stated here: the publisher of the weights chooses one (key `license` in the header above). The code files are "
        "part of `fullrank`, Apache-2.0.\n",
    ]
    return "\n".join(parts)


# -- figures --------------------------------------------------------------------------------------------------------------


def _header(
    title: str, objective: str, result: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]], remark: str | None
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    corpus, pipeline = mapping(result.get("corpus")), _OBJECTIVES[objective][0]
    name = str(corpus.get("name") or "unknown")
    results = [
        EvalResult(
            task_type=pipeline,
            dataset_type=name,
            dataset_name=str(corpus.get("label") or name),
            dataset_split=split,
            metric_type=key,
            metric_name=words,
            metric_value=value,
        )
        for split, values in figures.items()
        for key, words in _HEADER.items()
        if (value := number(values.get(key))) is not None
        and remark is None  # a figure that compares with no other is not ranked
    ]
    data = ModelCardData(
        model_name=title if results else None,
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["fullrank"],
        eval_results=results or None,
    )
    header: str = data.to_yaml()
    return header


def _no_figures(record: RunRecord | None, checkpoint: str) -> str:
    if record is None:
        return "None: the model was saved outside a run.\n"
    if record.result is None:
        return "None: the run had not finished.\n"
    return f"None: a run measures its checkpoints `best` and `last`, and this is `{checkpoint}`.\n"


def _table(result: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]], remark: str | None) -> str:
    corpus = mapping(result.get("corpus"))
    keys = list(dict.fromkeys(key for values in figures.values() for key in values if number(values[key]) is not None))
    lines = ["| split | " + " | ".join(key.replace("_", " ") for key in keys) + " |", "| --- |" + " ---: |" * len(keys)]
    lines += [f"| {split} | " + " | ".join(_shown(v.get(key)) for key in keys) + " |" for split, v in figures.items()]
    label = corpus.get("label") or corpus.get("name") or "Unknown corpus"
    notes = [f"{label}; {result.get('protocol') or 'no protocol recorded'}."]
    signatures = dict.fromkeys(str(v["bleu_signature"]) for v in figures.values() if "bleu_signature" in v)
    notes += [f"BLEU signature: `{signature}`." for signature in signatures]
    if corpus.get("is_slice"):
        notes.append("**A slice** of that corpus: these figures compare with no published ones.")
    if remark is not None:
        notes.append(f"**Its perplexity is {remark}**.")
    if result.get("scale") not in (None, "paper"):
        notes.append(f"Trained at scale `{result['scale']}`, not at that of the paper.")
    notes.append("nll is in nats per token; one seed, so no statement about differences.")
    return "\n".join(lines) + "\n\n" + " ".join(notes) + "\n"


def _shown(value: Any) -> str:
    whole, finite = integer(value), number(value)
    if whole is not None and not isinstance(value, float):
        return f"{whole:,}"
    if finite is None:
        return ""
    return f"{finite:.4g}" if abs(finite) >= 1000 else f"{finite:.4f}".rstrip("0").rstrip(".")


# -- facts ----------------------------------------------------------------------------------------------------------------


def _facts(facts: _Facts) -> str:
    rows = [f"| {name} | {value} |" for name, value in facts if value not in (None, "", {})]
    return "\n".join(["| | |", "| --- | --- |", *rows]) + "\n"


def _of_model(config: ModelConfig, result: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Facts:
    counts = mapping(result.get("parameters"))
    total = integer(counts.get("total"))
    known = f"{sum(t.numel() for t in tensors.values()):,} (with buffers)" if total is None else f"{total:,}"
    yield "parameters", known
    by_part = [f"{key} {value:,}" for key, value in counts.items() if key != "total" and value]
    yield "by part", ", ".join(by_part).replace("_", " ")
    yield "attention", _mechanism(config.attention, config)
    if config.encoder is not None and config.encoder.attention is not None:
        yield "encoder attention", _mechanism(config.encoder.attention, config)
    if config.decoder is not None and config.decoder.attention is not None:
        yield "decoder attention", _mechanism(config.decoder.attention, config)
    if config.decoder is not None and config.decoder.cross is not None:
        yield "cross-attention", _mechanism(config.decoder.cross, config)
    yield "layers", config.num_hidden_layers
    yield "hidden size", config.hidden_size
    yield "positions", config.position
    yield "memory", f"{config.memory_length} tokens" if config.memory_length else None
    yield "input", config.input.kind
    tied = ", tied to the input" if config.output.tied else ""
    mixtures = f", {config.output.mixtures} softmaxes" if isinstance(config.output, MixtureConfig) else ""
    yield "output", f"{config.output.kind.replace('_', ' ')}{mixtures}{tied}"
    yield "vocabulary", f"{config.vocab_size:,}" if config.vocab_size else None


def _mechanism(attention: AttentionConfig, config: ModelConfig) -> str:
    if isinstance(attention, MultiLinearConfig):
        seen = ", **tokens see later ones**" if attention.sees_future else ""
        return (
            f"multi-linear, {attention.cores} cores of rank {attention.rank}, output map {attention.output_map}{seen}"
        )
    words = [f"{config.num_attention_heads} heads of {config.head_dim}", f"score {stage_name(attention.score)}"]
    if isinstance(attention, WeightedConfig):
        words += [stage_name(attention.normalize), f"mixed heads: {stage_name(attention.mix)}"]
    if isinstance(attention, WeightedConfig) and attention.cross_head:
        words.append(f"cross-head probability {attention.cross_head} in training")
    return ", ".join(words).replace("_", " ")


def _of_training(record: RunRecord, result: Mapping[str, Any]) -> _Facts:
    environment, corpus = mapping(result.get("environment")), mapping(result.get("corpus"))
    recipe = record.origin("recipe")
    if recipe.endswith((".yaml", ".yml")):
        recipe = Path(recipe).name  # no path of the machine it was trained on
    yield "recipe", " ".join(word for word in (recipe, record.origin("row"), record.origin("scale")) if word)
    yield "corpus", corpus.get("label") or mapping(record.config.get("data")).get("name")
    counts = mapping(corpus.get("tokens"))
    tokens = [f"{split} {count:,}" for split in counts if (count := integer(counts[split])) is not None]
    yield "tokens of text", ", ".join(tokens)
    yield "seed", record.seed
    yield "steps", result.get("steps")
    yield "tokens seen", result.get("tokens_seen")
    for key in ("fullrank", "commit", "torch", "python", "device", "precision"):
        yield key, environment.get(key)


# -- how to load ----------------------------------------------------------------------------------------------------------


def _loading(title: str, objective: str, auto: str, config: ModelConfig) -> str:
    text = (
        "```python\n"
        f"from transformers import {auto}\n\n"
        f'model = {auto}.from_pretrained("{title}", trust_remote_code=True)  # torch and transformers are enough\n'
        "```\n\n"
        "With the package `fullrank` installed:\n\n"
        "```python\n"
        "import fullrank as fr\n\n"
        f'model = fr.{_OBJECTIVES[objective][2]}.load("{title}")  # the model itself, with its fast kernels\n'
        "```\n"
    )
    if config.memory_length and objective == "causal":
        text += (
            "\nThe model has a memory. `past_key_values` of one call go into the next, and its layers see "
            f"{config.memory_length} tokens before a segment; `from_pretrained(..., memory_length=...)` changes that.\n"
        )
    if objective == "causal" and config.output.kind != "softmax":
        text += "\nIts `logits` are log-probabilities: their softmax is the distribution.\n"
    return text


def _tokenizer(title: str, objective: str) -> str:
    of_source, target = "", ""
    if objective == "translation":
        of_source = "  # of the source"
        target = (
            f'target = AutoTokenizer.from_pretrained("{title}", subfolder="target_tokenizer", trust_remote_code=True)\n'
        )
    return (
        "```python\n"
        "from transformers import AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{title}", trust_remote_code=True){of_source}\n'
        f"{target}```\n"
    )
