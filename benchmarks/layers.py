"""A layer of attention with its projections, with each mixer of heads, against layers around PyTorch's fused kernel.

`layer` compares Mixhead A and B with a layer as PyTorch users write it. `mixers` compares a layer with each mixer with the same
`fullrank.Attention` without one, over F.scaled_dot_product_attention. All are causal. The second differential attention has
twice the query heads. Talking heads stand beside those of x-transformers, the first differential attention beside its
authors' form for fused kernels, inside the same layer.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fullrank as fr
from candidates import (
    Candidate,
    Comparison,
    Pass,
    Settings,
    Shape,
    explain_missing,
    import_talking_heads,
)
from fullrank.core.stages import Heads
from mixing import MIXES

PEER = "SDPA layer"
SDPA = "plain, SDPA"
X_TRANSFORMERS = "x-transformers"
AUTHORS = "authors' code"
MIXERS = {
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
_PEERS = {"talking heads": X_TRANSFORMERS, "differential": AUTHORS}
_KEPT = 12  # tensors of all weights that x-transformers holds at once


def make_pass(
    settings: Settings, backward: bool, layer: Callable[[Tensor], Tensor], module: nn.Module, shape: Shape
) -> Pass:
    """Make a pass of a layer, whose input is random.

    Args:
        settings: sizes, dtype and device.
        backward: whether the gradients are computed, too.
        layer: of an input (B, N, E).
        module: the module whose parameters the layer computes with.
        shape: of the heads.
    """
    dims = (shape.batch, shape.tokens, settings.width)
    inputs = settings.randn(*dims, seed=1).requires_grad_(backward)
    leaves = {"inputs": inputs}
    for name, parameter in module.named_parameters():
        if name.endswith("key.bias"):
            parameter.requires_grad_(False)  # its gradient is zero but for rounding
        else:
            leaves[name] = parameter

    return Pass(partial(layer, inputs), leaves, settings.randn(*dims, seed=2), backward, settings)


def make_attention(settings: Settings, attention: dict[str, Any]) -> fr.Attention:
    """Make a layer of attention with these options, always with the same random parameters."""
    shared = settings.heads
    heads = 2 * shared if attention.get("gate") == "differential" else shared
    config = fr.ModelConfig(
        hidden_size=settings.width,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=settings.head_dim,
        position="none",
        attention=fr.AttentionConfig(**attention),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return fr.Attention(config)


# -- against a layer as PyTorch users write it -------------------------------------------------------------------------


class Layer(nn.Module):
    """Causal attention as PyTorch users write it."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        width = heads * size
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, N, 3, H, D)
        query, keys, values = heads.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        return self.merge(out.transpose(1, 2).flatten(2))


def _make_layer(mix: str, settings: Settings, backward: bool, shape: Shape) -> Pass:
    module = make_attention(settings, {"mix": mix}).to(settings.torch_device)
    return make_pass(settings, backward, module, module, shape)


def _make_peer(settings: Settings, backward: bool, shape: Shape) -> Pass:
    """Make a pass of the peer with the same numbers."""
    ours = make_attention(settings, {"mix": "none"})
    peer = Layer(settings.heads, settings.head_dim)
    parts = ours.project.layers()
    with torch.no_grad():
        peer.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
        peer.qkv.bias.copy_(torch.cat([part.bias for part in parts]))
    peer.merge.load_state_dict(ours.merge.state_dict())
    peer.to(settings.torch_device)
    return make_pass(settings, backward, peer, peer, shape)


def compare(settings: Settings, length: int) -> list[Comparison]:
    """Compare Mixhead A and B, which start as plain attention, so that all of them compute the same."""
    candidates = []
    for form, mix in MIXES.items():
        candidates.append(Candidate(f"Mixhead {form}", partial(_make_layer, mix), "attention", (PEER,)))
    candidates.append(Candidate(PEER, _make_peer, "attention"))
    return [_make_comparison(settings, length, candidates)]


def _make_comparison(settings: Settings, length: int, candidates: list[Candidate]) -> Comparison:
    shape = Shape(settings.batch or 1, settings.heads, length, settings.head_dim)
    return Comparison(shape, dataclasses.replace(shape, tokens=13), length, candidates)


# -- with each mixer ---------------------------------------------------------------------------------------------------


def attend_as_x_transformers(attend: Any, heads: Heads) -> Tensor:
    """Compute talking heads by x-transformers: 1 x 1 convolutions, the first of which is added to the scores."""
    make = import_talking_heads()
    theirs = make(heads=heads.values.shape[1], causal=True, pre_talking_heads=True, post_talking_heads=True)
    of_scores = attend.mix_scores.mixing
    added = of_scores - torch.eye(len(of_scores)).to(of_scores)
    _set_convolution(theirs.pre_softmax_talking_heads, added, heads)
    _set_convolution(theirs.post_softmax_talking_heads, attend.mix.mixing, heads)
    return theirs(heads.scored, heads.keys, heads.values)[0]


def _set_convolution(convolution: Any, matrix: Tensor, heads: Heads) -> None:
    del convolution.weight
    convolution.weight = matrix.T[:, :, None, None].to(heads.values.dtype)


def attend_as_differential_authors(attend: Any, heads: Heads) -> Tensor:
    """Compute both maps of a pair over both halves of its values.

    As microsoft/unilm Diff-Transformer/multihead_flashdiff_2.py does.
    """
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
    return attend.mix.finish(pairs)


_ATTENDS = {
    X_TRANSFORMERS: attend_as_x_transformers,
    AUTHORS: attend_as_differential_authors,
}


def _make_mixer(name: str, kernel: str, peer: str, settings: Settings, backward: bool, shape: Shape) -> Pass:
    """Make a pass of a layer with the mixer `name`, whose heads are attended to by the code of a peer if one is given."""
    module = make_attention(settings, {"bias": False, **MIXERS.get(name, {})}).to(settings.torch_device)
    if peer:
        attend = module.attend
        attend.forward = lambda heads, layout, trace=None: _ATTENDS[peer](attend, heads)

    def layer(x: Tensor) -> Tensor:
        with fr.kernel(kernel):
            return module(x)

    return make_pass(settings, backward, layer, module, shape)


def compare_mixers(settings: Settings, length: int) -> list[Comparison]:
    """Compare every mixer with no mixer, and two of them with peers."""

    def candidate(mixer: str, kernel: str = "auto", peer: str = "", **options: Any) -> Candidate:
        return Candidate(peer or mixer, partial(_make_mixer, mixer, kernel, peer), mixer, **options)

    candidates = [candidate(SDPA, "sdpa")]
    for mixer in MIXERS:
        against = (SDPA, _PEERS[mixer]) if mixer in _PEERS else (SDPA,)
        candidates.append(candidate(mixer, against=against))
    takes = 4 * _KEPT * (settings.batch or 1) * settings.heads * length**2
    absent = explain_missing("x_transformers")
    candidates += [
        candidate("talking heads", peer=X_TRANSFORMERS, takes=takes, absent=absent),
        candidate("differential", peer=AUTHORS),
    ]
    return [_make_comparison(settings, length, candidates)]
