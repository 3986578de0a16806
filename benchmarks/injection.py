"""Cost of injection: one layer of a Hugging Face BERT and Llama, against its own eager and SDPA attention.

The layer is the whole module, projections included, with the smallest feed-forward part there is; the input is embeddings.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from candidates import BOTH, FORWARD, Candidate, Comparison, Measured, Pass, Settings, missing

EAGER, SDPA = "own eager", "own SDPA"
# arguments of `fr.inject`, by the name of the candidate
INJECTED: dict[str, dict[str, Any]] = {
    "Mixhead A": {"mix": "position_independent"},
    "Mixhead B": {"mix": "position_wise"},
    "cross-head": {"cross_head": 0.1},
}
_SAME = "attention as it was pretrained"
_KINDS = {"BERT": "bidirectional", "Llama": "causal"}


def _model(kind: str, settings: Settings, length: int, implementation: str) -> Any:
    import transformers

    width = settings.heads * settings.head_dim
    common: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": settings.heads,
        "intermediate_size": 16,
        "max_position_embeddings": length,
        "attn_implementation": implementation,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "BERT":
            silent = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return transformers.BertModel(transformers.BertConfig(**common, **silent), add_pooling_layer=False)
        return transformers.LlamaModel(transformers.LlamaConfig(**common, use_cache=False))


def _pass(
    kind: str, settings: Settings, length: int, what: str, implementation: str, injected: dict[str, Any] | None
) -> Measured:
    model = _model(kind, settings, length, implementation)
    if injected is not None:
        from fullrank.hf.inject import inject

        inject(model, **injected)
    model = model.to(settings.torch_device).train(what == BOTH)
    generator = torch.Generator().manual_seed(1)
    shape = (settings.batch or 1, length, settings.heads * settings.head_dim)
    inputs = torch.randn(shape, generator=generator).to(settings.torch_device).requires_grad_(what == BOTH)
    cotangent = torch.randn(shape, generator=generator).to(settings.torch_device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("key.bias"))  # its gradient is zero but for rounding
    leaves = {"inputs": inputs} | {name: p for name, p in model.named_parameters() if p.requires_grad}

    def forward() -> torch.Tensor:
        with settings.autocast():
            out: torch.Tensor = model(inputs_embeds=inputs).last_hidden_state
        return out

    return Pass(forward, leaves, cotangent, backward=what == BOTH)


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    """One layer of each kind, forward, and forward and backward."""
    absent = missing("transformers")
    made = []
    for kind, visible in _KINDS.items():
        shape = f"{kind} ({visible}), {settings.heads} x {settings.head_dim}, {settings.batch or 1} x {length}"
        for what in (FORWARD, BOTH):

            def candidate(
                name: str,
                implementation: str,
                against: tuple[str, ...] = (),
                kind: str = kind,
                what: str = what,
                computes: str = _SAME,
            ) -> Candidate:
                make: Callable[[], Measured] = functools.partial(
                    _pass, kind, settings, length, what, implementation, INJECTED.get(name)
                )
                return Candidate(name, make, computes, against, absent)

            ours = [
                # a permutation of heads is drawn while training: then it computes something else
                candidate(
                    name,
                    "sdpa",
                    (EAGER, SDPA),
                    computes=name if "cross_head" in INJECTED[name] and what == BOTH else _SAME,
                )
                for name in INJECTED
            ]
            own = [candidate(EAGER, "eager"), candidate(SDPA, "sdpa")]
            made.append(Comparison(shape, length, what, (*ours, *own)))
    return made
