"""The model card of an export: what the model is, and the figures that `result.json` holds, no other ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

_PIPELINES = {"causal": "text-generation", "masked": "fill-mask", "translation": "translation"}
_TASKS = {
    "causal": "language model",
    "masked": "masked language model",
    "translation": "translation model",
}
# figures of a split that a card's header may carry, and what they are called there
_HEADER = {"perplexity": "Perplexity", "bits_per_character": "Bits per character", "bits_per_byte": "Bits per byte",
           "bleu": "BLEU"}  # fmt: skip


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
    """`README.md`: a YAML header for the hub, then what a reader wants to know. The licence is left to who publishes it.

    record: the run, None for a model that `model.save` wrote; checkpoint: the one that was exported; without_tokenizer: why
    there is none.
    """
    figures = _figures(record, checkpoint)
    remark = MASKED_TOKEN if objective == "masked" else NOT_NEXT_TOKEN if config.sees_future else None
    parts = [
        f"---\n{_header(title, objective, record, figures, remark)}\n---\n",
        f"# {title}\n",
        f"A {_TASKS[objective]} trained with `fullrank`, exported from its {_named(checkpoint, record)}.\n",
        "## Figures\n",
        *_measured(record, checkpoint, figures, remark),
        "## Model\n",
        *_facts(_of_model(config, record, tensors)),
        *(["## Training\n", *_facts(_of_training(record))] if record is not None else []),
        "## Loading it\n",
        _loading(title, objective, auto, config),
        _tokenizing(title, objective, without_tokenizer),
        "## Licence\n",
        "None is stated here: whoever publishes the weights says which (key `license` in the header above). The code files are "
        "part of `fullrank`, Apache-2.0.\n",
    ]
    return "\n".join(parts)


def _named(checkpoint: str, record: RunRecord | None) -> str:
    return f"checkpoint `{checkpoint}`" if record is not None else "saved weights"


def _figures(record: RunRecord | None, checkpoint: str) -> Mapping[str, Mapping[str, Any]]:
    """By split, what was measured of this very checkpoint."""
    place = {"best": "final", "last": "last"}.get(checkpoint)
    found = mapping(mapping(record.result).get(place)) if record is not None and place else {}
    return {str(split): mapping(values) for split, values in found.items() if mapping(values)}


# -- the header -----------------------------------------------------------------------------------------------------------


def _header(
    title: str,
    objective: str,
    record: RunRecord | None,
    figures: Mapping[str, Mapping[str, Any]],
    remark: str | None,
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    corpus = mapping(mapping(record.result).get("corpus")) if record is not None else {}
    name = str(corpus.get("name") or "unknown")
    results = [
        EvalResult(
            task_type=_PIPELINES[objective],
            dataset_type=name,
            dataset_name=str(corpus.get("label") or name),
            dataset_split=split,
            metric_type=key,
            metric_name=said,
            metric_value=value,
        )
        for split, found in figures.items()
        for key, said in _HEADER.items()
        if (value := number(found.get(key))) is not None
        and remark is None  # nobody ranks by what compares with nothing
    ]
    data = ModelCardData(
        model_name=title if results else None,
        library_name="transformers",
        pipeline_tag=_PIPELINES[objective],
        tags=["fullrank"],
        eval_results=results or None,
    )
    found: str = data.to_yaml()
    return found


# -- figures --------------------------------------------------------------------------------------------------------------


def _measured(
    record: RunRecord | None, checkpoint: str, figures: Mapping[str, Mapping[str, Any]], remark: str | None
) -> list[str]:
    if not figures:
        why = (
            "the model was saved outside a run"
            if record is None
            else "the run had not finished"
            if record.result is None
            else f"a run measures its checkpoints `best` and `last`, and this is `{checkpoint}`"
        )
        return [f"None: {why}.\n"]
    assert record is not None
    result = mapping(record.result)
    corpus = mapping(result.get("corpus"))
    keys = list(dict.fromkeys(key for found in figures.values() for key in found if number(found.get(key)) is not None))
    lines = ["| split | " + " | ".join(key.replace("_", " ") for key in keys) + " |", "| --- |" + " ---: |" * len(keys)]
    lines += [
        f"| {split} | " + " | ".join(_shown(found.get(key)) for key in keys) + " |" for split, found in figures.items()
    ]
    said = [
        f"{corpus.get('label') or corpus.get('name') or 'Unknown corpus'}; {result.get('protocol') or 'no protocol recorded'}."
    ]
    signatures = dict.fromkeys(
        str(found[key]) for found in figures.values() for key in ("bleu_signature",) if key in found
    )
    said += [f"BLEU signature: `{signature}`." for signature in signatures]
    if corpus.get("is_slice"):
        said.append("**A slice** of that corpus: these figures compare with no published ones.")
    if remark is not None:
        said.append(f"**Its perplexity is {remark}**.")
    if result.get("scale") not in (None, "paper"):
        said.append(f"Trained at scale `{result['scale']}`, not at that of the paper.")
    said.append("nll is in nats per token; one seed, so no statement about differences.")
    return ["\n".join(lines) + "\n", " ".join(said) + "\n"]


def _shown(value: Any) -> str:
    whole, found = integer(value), number(value)
    if whole is not None and not isinstance(value, float):
        return f"{whole:,}"
    return "" if found is None else f"{found:.4g}" if abs(found) >= 1000 else f"{found:.4f}".rstrip("0").rstrip(".")


# -- facts ----------------------------------------------------------------------------------------------------------------

_Facts = Iterator[tuple[str, object]]


def _facts(found: _Facts) -> Sequence[str]:
    rows = [f"| {name} | {value} |" for name, value in found if value not in (None, "", {})]
    return ["\n".join(["| | |", "| --- | --- |", *rows]) + "\n"]


def _of_model(config: ModelConfig, record: RunRecord | None, tensors: Mapping[str, Tensor]) -> _Facts:
    counts = mapping(mapping(record.result).get("parameters")) if record is not None else {}
    by_part = ", ".join(f"{key} {value:,}" for key, value in counts.items() if key != "total" and value)
    total = integer(counts.get("total"))
    yield (
        "parameters",
        f"{total:,}" if total is not None else f"{sum(t.numel() for t in tensors.values()):,} (with buffers)",
    )
    yield "by part", by_part.replace("_", " ")
    yield "attention", _mechanism(config.attention, config)
    for place, own in (
        ("encoder attention", config.encoder and config.encoder.attention),
        ("decoder attention", config.decoder and config.decoder.attention),
        ("cross-attention", config.decoder and config.decoder.cross),
    ):
        if isinstance(own, AttentionConfig):
            yield place, _mechanism(own, config)
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


def _of_training(record: RunRecord) -> _Facts:
    result = mapping(record.result)
    environment, corpus = mapping(result.get("environment")), mapping(result.get("corpus"))
    recipe = record.origin("recipe")
    named = (
        Path(recipe).name if recipe.endswith((".yaml", ".yml")) else recipe
    )  # no path of the machine it was trained on
    yield "recipe", " ".join(word for word in (named, record.origin("row"), record.origin("scale")) if word)
    yield "corpus", corpus.get("label") or mapping(record.config.get("data")).get("name")
    yield "tokens of text", ", ".join(_of_splits(mapping(corpus.get("tokens"))))
    yield "seed", record.seed
    yield "steps", result.get("steps")
    yield "tokens seen", result.get("tokens_seen")
    for key in ("fullrank", "commit", "torch", "python", "device", "precision"):
        yield key, environment.get(key)


def _of_splits(tokens: Mapping[str, Any]) -> Iterator[str]:
    for split, count in tokens.items():
        if (found := integer(count)) is not None:
            yield f"{split} {found:,}"


# -- how to load ----------------------------------------------------------------------------------------------------------


def _loading(title: str, objective: str, auto: str, config: ModelConfig) -> str:
    native = {"causal": "LanguageModel", "masked": "MaskedLanguageModel", "translation": "Translator"}[objective]
    text = (
        "```python\n"
        f"from transformers import {auto}\n\n"
        f'model = {auto}.from_pretrained("{title}", trust_remote_code=True)  # torch and transformers are enough\n'
        "```\n\n"
        "With the package `fullrank` installed:\n\n"
        "```python\n"
        "import fullrank as fr\n\n"
        f'model = fr.{native}.load("{title}")  # the model itself, with its fast kernels\n'
        "```\n"
    )
    if config.memory_length and objective == "causal":
        text += (
            "\nThe model remembers. `past_key_values` of one call go into the next, and its layers see "
            f"{config.memory_length} tokens before a segment; `from_pretrained(..., memory_length=...)` changes that.\n"
        )
    if objective == "causal" and config.output.kind != "softmax":
        text += "\nIts `logits` are log-probabilities: their softmax is the distribution.\n"
    return text


def _tokenizing(title: str, objective: str, missing: str | None) -> str:
    if missing is not None:
        return f"There is no tokenizer here: {missing}.\n"
    lines = [f'tokenizer = AutoTokenizer.from_pretrained("{title}", trust_remote_code=True)']
    if objective == "translation":
        lines[0] += "  # of the source"
        lines.append(
            f'target = AutoTokenizer.from_pretrained("{title}", subfolder="target_tokenizer", trust_remote_code=True)'
        )
    return "```python\nfrom transformers import AutoTokenizer\n\n" + "\n".join(lines) + "\n```\n"
