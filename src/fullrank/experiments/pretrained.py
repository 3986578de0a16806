"""Pretrained encoders for fine-tuning: an output layer for the task, and our attention injected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fullrank.config.finetune import GLUE, FinetuneConfig, PretrainedConfig, TextFinetuneConfig
from fullrank.core.errors import InputError
from fullrank.data.invented import WORDS
from fullrank.files import Entries

_ENCODERS = "; give a folder with config.json, weights and tokenizer, a name on the hub, minilm, or random"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")  # of the random encoder
_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "answers": "AutoModelForQuestionAnswering",
    "causal": "AutoModelForCausalLM",
}


class PretrainedEncoder(NamedTuple):
    """An encoder with an output layer for a task, and its tokenizer.

    fresh: names of parameters that were not pretrained.
    """

    model: Any
    tokenizer: Any = None
    fresh: tuple[str, ...] = ()


def load_pretrained(
    config: PretrainedConfig, kind: str, num_labels: int = 2, labels: Sequence[str] | None = None
) -> PretrainedEncoder:
    """Load an encoder with an output layer for a kind of task, fp32, in evaluation mode; its code is never run.

    The fresh parameters are drawn from torch's random numbers: seed them first. An output layer that is there already
    is kept where it has the right shape, and takes the labels in their order. Our attention is injected where it is
    asked for. A checkpoint that holds it already keeps it, and has to be asked for it.

    Args:
        config: model section, which names the encoder and our attention.
        kind: `classification` or `answers`.
        num_labels: outputs of a classification.
        labels: names of the outputs, in their order; None for numbers, or ends of answers, which have no names.

    Returns:
        The model with its tokenizer, and the names of its fresh parameters.

    Raises:
        InputError: transformers is missing, there is no such encoder or tokenizer, or the checkpoint holds another
            attention of ours than `config` says.
    """
    import transformers

    from fullrank.hf import load
    from fullrank.hf.causal import holds_injected, inject_configured

    outputs = _describe_outputs(kind, num_labels)
    key = f"model.pretrained: {config.pretrained}"
    with load.explain_errors(f"{key}: no encoder", _ENCODERS):
        model_config = _read_configuration(config, outputs)
        if config.pretrained == "random":
            auto = _CLASSES[kind].replace("AutoModel", "Bert")
            where = None
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # weights without an output layer, the same ones every time
                options = {"state_dict": transformers.BertModel(_read_configuration(config, {})).state_dict()}
            words = {word: number for number, word in enumerate(_SPECIAL + WORDS)}
            tokenizer = transformers.BertTokenizer(vocab=words, do_lower_case=False, mask_token=None)
        else:
            auto = _CLASSES[kind]
            where = load.location_of(config.pretrained)
            options = {"revision": config.revision} if config.revision else {}
            tokenizer = load.read_part("AutoTokenizer", where, **options)
        injected = holds_injected(config, model_config)
        model, loading = load.load_weights(
            getattr(transformers, auto), where, model_config, torch.float32, ignore_mismatched_sizes=True, **options
        )
    mismatched = [str(name) for name, *_ in loading["mismatched_keys"]]
    inside = [name for name in mismatched if name.startswith(f"{model.base_model_prefix}.")]  # not of an output layer
    if inside:
        raise InputError(f"{key}: its config.json does not fit its weights ({', '.join(inside[:3])})")
    fresh = {*loading["missing_keys"], *mismatched}
    if not dict(model.named_parameters()).keys() - fresh:
        raise InputError(f"{key} holds no weight of {type(model).__name__}")
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"{key} has a tokenizer without a fast version; fine-tuning needs tokenizer.json")
    _set_padding(config.pretrained, model, tokenizer)
    if labels:
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {name: i for i, name in enumerate(labels)}
    if not injected:
        inject_configured(model, config)
    return PretrainedEncoder(model.eval(), tokenizer, tuple(sorted(fresh)))


def _read_configuration(config: PretrainedConfig, outputs: Mapping[str, Any]) -> Any:
    """Read the configuration of transformers, with entries about its output layer.

    `random` is a BERT of 2 layers that knows the words of invented sentences.
    """
    import transformers

    from fullrank.hf.load import read_part

    if config.pretrained == "random":
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
        return transformers.BertConfig(vocab_size=len(_SPECIAL + WORDS), **sizes, **outputs)
    return read_part("AutoConfig", config.pretrained, revision=config.revision or "main", **outputs)


def _describe_outputs(kind: str, num_labels: int) -> dict[str, Any]:
    """Return entries of a configuration of transformers about its output layer, whatever task it was saved for."""
    problem = None
    if kind == "classification":
        problem = "regression" if num_labels == 1 else "single_label_classification"
    return {"num_labels": num_labels, "problem_type": problem}


def _set_padding(name: str, model: Any, tokenizer: Any) -> None:
    """Set the same padding token for model and tokenizer, by default the end of a text.

    A decoder is read at its last token that is no padding.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token
    if tokenizer.pad_token_id is None:
        raise InputError(
            f"model.pretrained: {name}: its tokenizer has no padding token; set pad_token and save it there"
        )
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def padding_of(tokenizer: Any) -> dict[str, int]:
    """Return the value that fills the end of a shorter row, by input of the model."""
    return {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id, "attention_mask": 0}


def measure_pretrained_size(config: FinetuneConfig | TextFinetuneConfig) -> Entries:
    """Measure the size of a pretrained model with our attention injected, on the meta device: only its configuration is read.

    Counted are the parameters of the model without its output layers, of those, and of mixing.
    Raises InputError where transformers is missing, and where there is no configuration of that name.
    """
    import transformers

    from fullrank.hf import load
    from fullrank.hf.causal import inject_configured

    name = config.model.pretrained
    if isinstance(config, TextFinetuneConfig):
        kind = "causal"
        outputs = dict[str, Any]()
        task = config.data.name
    else:
        kind = "answers" if config.data.answers else "classification"
        task = config.data.label
        outputs = _describe_outputs(kind, 2 if config.data.answers else GLUE[config.data.task].outputs)
    with load.explain_errors(f"model.pretrained: {name}: no configuration", _ENCODERS):
        if name == "bert-base-uncased":
            model_config = transformers.BertConfig(**outputs)  # whose defaults are that model's
        else:
            model_config = _read_configuration(config.model, outputs)
        with torch.device("meta"):
            model = getattr(transformers, _CLASSES[kind]).from_config(model_config)
            plain = model.num_parameters()
            base = model.base_model
            encoder = base.num_parameters()
            inject_configured(model, config.model)
    total = model.num_parameters()
    text = model_config.get_text_config()
    return {
        "encoder": name,
        "model": type(base).__name__,
        "task": task,
        "parameters": {"encoder": encoder, "mixing": total - plain, "output": plain - encoder, "total": total},
        "attention": {
            "layers": len(config.model.layers or range(text.num_hidden_layers)),
            "heads": text.num_attention_heads,
        },
    }
