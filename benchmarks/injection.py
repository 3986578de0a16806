"""Cost of injection: one layer of a Hugging Face BERT and Llama, against its own eager and SDPA attention.

The layer is the whole module, projections included, with the smallest feed-forward part there is; the input is embeddings.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from candidates import BOTH, FORWARD, Candidate, Comparison, Pass, Settings, Shape, explain_missing
from layers import make_pass

EAGER = "own eager"
SDPA = "own SDPA"
# arguments of `fr.inject`, by the name of the candidate
INJECTED = {
    "Mixhead A": {"mix": "position_independent"},
    "Mixhead B": {"mix": "position_wise"},
    "cross-head": {"cross_head": 0.1},
}
_SAME = "attention as it was pretrained"
_VISIBLE = {"BERT": "bidirectional", "Llama": "causal"}


@dataclass(frozen=True)
class Layer(Shape):
    """The layer of a kind of model."""

    kind: str

    def __str__(self) -> str:
        return f"{self.kind} ({_VISIBLE[self.kind]}), {super().__str__()}"


def _make_model(layer: Layer, implementation: str) -> Any:
    import transformers

    common = {
        "vocab_size": 16,
        "hidden_size": layer.heads * layer.size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.heads,
        "intermediate_size": 16,
        "max_position_embeddings": layer.tokens,
        "attn_implementation": implementation,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if layer.kind == "BERT":
            silent = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return transformers.BertModel(transformers.BertConfig(**common, **silent), add_pooling_layer=False)
        return transformers.LlamaModel(transformers.LlamaConfig(**common, use_cache=False))


def _make(
    implementation: str, injected: dict[str, Any] | None, settings: Settings, backward: bool, layer: Layer
) -> Pass:
    model = _make_model(layer, implementation)
    if injected is not None:
        from fullrank.hf.inject import inject

        inject(model, **injected)
    model = model.to(settings.torch_device).train(backward)

    def run(x: Tensor) -> Tensor:
        return model(inputs_embeds=x).last_hidden_state

    return make_pass(settings, backward, run, model, layer)


def compare(settings: Settings, length: int) -> list[Comparison]:
    """Compare one layer of each kind, injected, with its own attention."""
    absent = explain_missing("transformers")
    comparisons = []
    for kind in _VISIBLE:
        layer = Layer(settings.batch or 1, settings.heads, length, settings.head_dim, kind)
        for what in (FORWARD, BOTH):
            candidates = []
            for name, arguments in INJECTED.items():
                # a permutation of heads is drawn while training: then it computes something else
                computes = name if "cross_head" in arguments and what == BOTH else _SAME
                candidates.append(Candidate(name, partial(_make, "sdpa", arguments), computes, (EAGER, SDPA), absent))
            for name, implementation in ((EAGER, "eager"), (SDPA, "sdpa")):
                candidates.append(Candidate(name, partial(_make, implementation, None), _SAME, absent=absent))
            tiny = dataclasses.replace(layer, tokens=13)
            comparisons.append(Comparison(layer, tiny, length, candidates, (what,)))
    return comparisons
