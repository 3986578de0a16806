"""What the softmax bottleneck says of an output layer (Transformer-MoS §3; docs/derivations/softmax_bottleneck.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullrank.core.config import ModelConfig, OutputConfig
from fullrank.core.errors import InputError

# where Hugging Face configurations keep a soft-cap on the logits
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class OutputLayer:
    """An output layer, as far as the rank of its log-probabilities goes.

    kind: in words. hidden_size d: the width of what its matrix is multiplied with. bias: whether logits have one.
    clusters: softmaxes that a word's probability may be taken from, 1 but for an adaptive softmax.
    exempt: why log-probabilities of this model are not bounded, None where they are.
    normed: a LayerNorm stands right before the layer, so that hidden states lie in a plane of d - 1 dimensions.
    """

    kind: str
    hidden_size: int
    bias: bool
    clusters: int = 1
    exempt: str | None = None
    normed: bool = False

    @property
    def bound(self) -> int:
        """The largest rank of A = H W' + 1 b' - log Z 1', contexts by words: d + 1, and one more with an output bias.

        In an adaptive softmax every cluster has a log Z of its own: d + clusters, and one more with biases.
        """
        return self.hidden_size + self.clusters + self.bias

    @property
    def in_words(self) -> str:
        """The bound as a sum: `d + 2`."""
        return f"d + {self.clusters + self.bias}"


def of_config(config: ModelConfig) -> OutputLayer:
    """The output layer of a `LanguageModel`."""
    out = config.output
    latent = out.kind == "mixture_of_softmaxes" and out.latent is not False
    return OutputLayer(
        kind=_kind(out),
        hidden_size=config.hidden_size,
        bias=bool(out.bias),
        clusters=len(out.cutoffs or ()) + 1 if out.adaptive else 1,
        exempt=_exempt(out),
        normed=(bool(config.final_norm) or config.norm == "post") and not latent,
    )


def _kind(out: OutputConfig) -> str:
    words = {"softmax": "softmax", "adaptive": "adaptive softmax"}.get(out.kind, out.kind)
    if out.kind == "mixture_of_softmaxes":
        plain = "softmax" if out.components == "softmax" else "adaptive softmax"
        words = f"mixture of {out.mixtures} {plain}es" if out.mixtures != 1 else f"{plain} of a latent state"
        if out.latent is False:
            words = plain
    return words.replace("softmax", "sigsoftmax") if out.normalize == "sigsoftmax" else words


def _exempt(out: OutputConfig) -> str | None:
    if out.kind not in ("softmax", "adaptive", "mixture_of_softmaxes"):
        return f"no bound is known for output layers of kind '{out.kind}'"
    if out.kind == "mixture_of_softmaxes" and out.mixtures != 1:
        return "the logarithm of a sum of softmaxes is not linear in their logits"
    if out.normalize == "sigsoftmax":
        return "sigsoftmax adds log sigmoid(z) to every logit z, which is not linear"
    if out.epsilon:
        return f"log(p + {out.epsilon:g}) is not linear in the logits"
    return None


def of_hugging_face(model: Any) -> OutputLayer:
    """The output layer of a causal model of Hugging Face: its output embedding, and a soft-cap that its configuration names.

    What else stands between the output embedding and the logits shows only when the model is run.
    Raises InputError for a model without output embedding.
    """
    head = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise InputError(
            f"{type(model).__name__} has no output embedding; give a causal language model (AutoModelForCausalLM)"
        )
    width = getattr(head, "in_features", None) or head.weight.shape[-1]
    cap = soft_cap(model.config)
    return OutputLayer(
        kind="softmax" if cap is None else f"softmax, soft-cap {cap:g}",
        hidden_size=int(width),
        bias=getattr(head, "bias", None) is not None,
        exempt=None if cap is None else f"the soft-cap {cap:g} tanh(z / {cap:g}) of every logit z is not linear",
    )


def soft_cap(config: Any) -> float | None:
    """The soft-cap on the logits that a Hugging Face configuration, or the one of its text model, asks for."""
    read = getattr(config, "get_text_config", None)
    for owner in (config, read() if callable(read) else None):
        for key in _SOFT_CAPS:
            if value := getattr(owner, key, None):
                return float(value)
    return None
