"""A layer of attention with each mixer of heads against the same layer without one, over PyTorch's fused attention.

All are one `fullrank.Attention`, causal, projections included, computed by the kernel that is chosen. The second differential
attention has twice the query heads. Talking heads stand beside those of x-transformers, the first differential attention beside
its authors' form for fused kernels, inside the same layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fullrank as fr
from candidates import BOTH, FORWARD, Candidate, Comparison, Pass, Settings, missing, talking_heads
from fullrank.core.stages import Heads

SDPA, X_TRANSFORMERS, AUTHORS = "plain, SDPA", "x-transformers", "authors' code"
MIXERS: dict[str, dict[str, Any]] = {
    "Mixhead A": {"mix": "position_independent"},
    "Mixhead B": {"mix": "position_wise"},
    "low rank": {"mix": "low_rank"},
    "differential": {"mix": "differential"},
    "differential 2": {"gate": "differential"},
    "dynamic, by the query": {"mix": {"name": "dynamic", "keys": False}},
    "knocking": {"mix_qkv": "knocking"},
    "interleaved, P = 2": {"mix_qkv": "interleaved"},
    "gate of heads": {"gate": "head"},
    "gate of numbers": {"gate": "elementwise"},
    "exclusive": {"gate": "exclusive"},
    "talking heads": {"mix_scores": "talking_heads", "mix": "talking_heads"},
    "multi-token": {"mix_scores": "multi_token"},
    "dynamic": {"mix_scores": "dynamic", "mix": "dynamic"},
}
_KEPT = {FORWARD: 4, BOTH: 12}  # tensors of all weights that x-transformers holds at once
_PEERS = {"talking heads": X_TRANSFORMERS, "differential": AUTHORS}
_Attend = Callable[[Any, Heads], Tensor]  # of a layer's `attend`, and heads


def layer_of(settings: Settings, attention: dict[str, Any]) -> fr.Attention:
    shared = settings.heads
    heads = 2 * shared if attention.get("gate") == "differential" else shared
    config = fr.ModelConfig(
        hidden_size=shared * settings.head_dim, num_attention_heads=heads, num_key_value_heads=shared,
        head_dim=settings.head_dim, position="none", attention=fr.AttentionConfig(bias=False, **attention),
    )  # fmt: skip
    torch.manual_seed(0)
    return fr.Attention(config).to(settings.torch_device, settings.torch_dtype)


def attend_as_x_transformers(attend: Any, heads: Heads) -> Tensor:
    """Talking heads by the attention of x-transformers: 1 x 1 convolutions, the first of which is added to the scores."""
    theirs = talking_heads()(heads=heads.values.shape[1], causal=True, pre_talking_heads=True, post_talking_heads=True)
    of_scores = attend.mix_scores.mixing
    added = of_scores - torch.eye(len(of_scores)).to(of_scores)
    for convolution, matrix in (
        (theirs.pre_softmax_talking_heads, added),
        (theirs.post_softmax_talking_heads, attend.mix.mixing),
    ):
        del convolution.weight
        convolution.weight = matrix.T[:, :, None, None]
    out: Tensor = theirs(heads.scored, heads.keys, heads.values)[0]
    return out


def attend_as_differential_authors(attend: Any, heads: Heads) -> Tensor:
    """microsoft/unilm Diff-Transformer/multihead_flashdiff_2.py: both maps of a pair over both halves of its values."""
    assert heads.scored is not None
    assert heads.keys is not None
    lambda_full = -attend.mix.matrix(None)[1, 0]
    parts = []
    for half in (0, 1):
        values = heads.values[:, half::2]
        first, second = (
            F.scaled_dot_product_attention(heads.scored[:, i::2], heads.keys[:, i::2], values, is_causal=True)
            for i in (0, 1)
        )
        parts.append(first - lambda_full * second)
    pairs = torch.stack(parts, dim=2).flatten(1, 2)
    out: Tensor = attend.mix.finish(pairs)
    return out


_ATTENDS: dict[str, _Attend] = {X_TRANSFORMERS: attend_as_x_transformers, AUTHORS: attend_as_differential_authors}


def _pass(
    settings: Settings, batch: int, length: int, attention: dict[str, Any], kernel: str, backward: bool, peer: str = ""
) -> Pass:
    layer, width = layer_of(settings, attention), settings.heads * settings.head_dim
    if peer:
        attend: Any = layer.attend
        attend.forward = lambda heads, layout, trace=None: _ATTENDS[peer](attend, heads)
    x = settings.randn(batch, length, width, seed=1).requires_grad_()

    def forward() -> Tensor:
        with fr.kernel(kernel):
            return layer(x)

    leaves = {"x": x, **dict(layer.named_parameters())}
    return Pass(forward, leaves, settings.randn(batch, length, width, seed=2), backward)


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    """Forward alone, and with backward."""
    batch = settings.batch or 1
    shape = f"B {batch}, H {settings.heads}, N {length:,}, D {settings.head_dim}"
    made = []
    for what in (FORWARD, BOTH):
        weights = batch * settings.heads * length**2 * settings.torch_dtype.itemsize

        def candidate(name: str, kernel: str, peer: str = "", what: str = what, **more: Any) -> Candidate:
            attention = MIXERS.get(name, {})
            make = functools.partial(_pass, settings, batch, length, attention, kernel, what == BOTH, peer)
            return Candidate(peer or name, make, name, **more)

        held = _KEPT[what] * weights
        candidates = [candidate(SDPA, "sdpa")]
        for name in MIXERS:
            against = (SDPA, _PEERS[name]) if name in _PEERS else (SDPA,)
            candidates.append(candidate(name, "auto", against=against))
        absent = missing("x_transformers")
        candidates.append(candidate("talking heads", "auto", X_TRANSFORMERS, takes=held, absent=absent))
        candidates.append(candidate("differential", "auto", AUTHORS))
        made.append(Comparison(shape, length, what, tuple(candidates)))
    return made
