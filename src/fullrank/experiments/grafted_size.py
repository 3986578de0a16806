"""How large a pretrained encoder is with our attention grafted in, from its configuration alone: nothing is downloaded."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.glue import GLUE
from fullrank.core.errors import InputError
from fullrank.experiments.hugging_face import quiet
from fullrank.experiments.pretrained import place_of


def grafted_size(config: FinetuneConfig) -> dict[str, Any]:
    """Parameters of the encoder, of the task's output layers, and of mixing, on the meta device.

    Raises InputError where transformers is missing, and where the configuration of the encoder is not on this machine.
    """
    if importlib.util.find_spec("transformers") is None:
        raise InputError("the size of a pretrained encoder needs transformers; install it: pip install 'fullrank[hf]'")
    import transformers

    labels = None if config.data.answers else GLUE[config.data.task].labels
    kind = "QuestionAnswering" if config.data.answers else "SequenceClassification"
    outputs = {} if config.data.answers else {"num_labels": 1 if labels is None else len(labels)}
    with quiet(transformers):
        known = _configuration(config, outputs)
        with torch.device("meta"):
            model = getattr(transformers, f"AutoModelFor{kind}").from_config(known)
    base = getattr(model, model.base_model_prefix, model)
    encoder, total = (sum(p.numel() for p in part.parameters()) for part in (base, model))
    graft, names = config.model.attention, set[str]()
    if not graft.at_rest:
        from fullrank.hf.inject import inject

        before = {name for name, _ in model.named_parameters()}
        with torch.device("meta"):
            inject(
                model, mix=graft.mix, normalize=graft.normalize, cross_head=graft.cross_head, layers=config.model.layers
            )
        names = {name for name, _ in model.named_parameters()} - before
    grown = dict(model.named_parameters())
    mixing = sum(grown[name].numel() for name in names)
    text = known.get_text_config()
    return {
        "encoder": config.model.pretrained,
        "model": type(base).__name__,
        "task": config.data.name,
        "parameters": {"encoder": encoder, "mixing": mixing, "output": total - encoder, "total": total + mixing},
        "attention": {
            "layers": len(config.model.layers or range(text.num_hidden_layers)),
            "heads": text.num_attention_heads,
        },
    }


def _configuration(config: FinetuneConfig, outputs: dict[str, Any]) -> Any:
    """The encoder's configuration of transformers, from a folder, the cache of the hub, or transformers' own defaults."""
    import transformers

    where, revision = place_of(config.model.pretrained), config.model.revision
    options = {"revision": revision} if revision else {}
    try:
        return transformers.AutoConfig.from_pretrained(
            where, local_files_only=True, trust_remote_code=False, **outputs, **options
        )
    except Exception as error:
        if where == "bert-base-uncased" and revision is None:
            return transformers.BertConfig(**outputs)  # whose defaults are that model's
        raise InputError(
            f"model.pretrained: {where} is not on this machine, and `fullrank info` downloads nothing; give a folder with its "
            "config.json: model.pretrained=FOLDER"
        ) from error
