"""A layer of attention with its projections: Mixhead A and B against the same layer around PyTorch's fused kernel.

Mixhead A, B    `fr.Attention`, which starts as plain attention, so that all of them compute the same
SDPA layer      one product for queries, keys and values, F.scaled_dot_product_attention, the output projection
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from candidates import BOTH, FORWARD, Candidate, Comparison, Pass, Settings
from fullrank.core.attention import Attention
from fullrank.core.config import AttentionConfig
from mixing import STAGES

PEER = "SDPA layer"


class Layer(nn.Module):
    """Causal attention as PyTorch users write it."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        width = heads * size
        self.heads = heads
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, keys, values = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        merged: Tensor = self.merge(out.transpose(1, 2).flatten(2))
        return merged


def _ours(settings: Settings, mix: str) -> Attention:
    heads, size = settings.heads, settings.head_dim
    config = AttentionConfig(mix=mix)
    return Attention(config, hidden_size=heads * size, num_attention_heads=heads, head_dim=size)


def _layer(settings: Settings, mix: str | None) -> nn.Module:
    """A layer with the mixing `mix`, or the peer with the same numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = _ours(settings, mix or "none")
    if mix is not None:
        return made
    peer, parts = Layer(settings.heads, settings.head_dim), made.project.layers()
    with torch.no_grad():
        peer.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
        peer.qkv.bias.copy_(torch.cat([part.bias for part in parts]))
    peer.merge.load_state_dict(made.merge.state_dict())
    return peer


def _pass(settings: Settings, length: int, what: str, mix: str | None) -> Pass:
    layer = _layer(settings, mix).to(settings.torch_device)
    shape = (settings.batch or 1, length, settings.heads * settings.head_dim)
    fp32 = Settings(device=settings.device)
    inputs = fp32.randn(*shape, seed=1).requires_grad_(what == BOTH)
    leaves = {"inputs": inputs} | dict(layer.named_parameters())
    for name in [name for name in leaves if name.endswith("key.bias")]:
        leaves.pop(name).requires_grad_(False)  # its gradient is zero but for rounding

    def forward() -> Tensor:
        with settings.autocast():
            out: Tensor = layer(inputs)
        return out

    return Pass(forward, leaves, fp32.randn(*shape, seed=2), what == BOTH)


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    """Forward alone, and with backward."""
    shape = f"{settings.batch or 1} x {length:,}, {settings.heads} heads of {settings.head_dim}"
    made = []
    for what in (FORWARD, BOTH):
        candidates = []
        for form, mix in STAGES.items():
            make = functools.partial(_pass, settings, length, what, mix)
            candidates.append(Candidate(f"Mixhead {form}", make, "attention", (PEER,)))
        candidates.append(Candidate(PEER, functools.partial(_pass, settings, length, what, None), "attention"))
        made.append(Comparison(shape, length, what, tuple(candidates)))
    return made
