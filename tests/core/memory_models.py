"""Small models with memory, texts, and a long pass in which it is written down who sees whom."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

import fullrank as fr
from fullrank.core.memory import Memory

V, E, H, LAYERS = 11, 12, 3, 3
POSITIONS = ["sinusoidal", "learned", "relative", "rotary", "none"]


def model(
    position: str = "sinusoidal", *, memory_length: int = 5, score: Any = None, seed: int = 0, **parts: Any
) -> Any:
    attention = {
        "score": score or ("relative" if position == "relative" else "dot_product"),
        **{key: parts.pop(key) for key in ("mix", "normalize", "cross_head", "bias") if key in parts},
    }
    config = fr.ModelConfig(
        vocab_size=V, hidden_size=E, num_hidden_layers=parts.pop("layers", LAYERS), num_attention_heads=H,
        intermediate_size=16, position=position, memory_length=memory_length, max_position_embeddings=64,
        attention=fr.AttentionConfig(**attention), **parts,
    )  # fmt: skip
    torch.manual_seed(seed)
    made = fr.LanguageModel(config).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():  # nothing may hide behind zeros, identities and small numbers
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def ages(memory: Memory, layer: int) -> Tensor:
    """Distances from the remembered tokens of `layer` to the next token, 1 for the token directly before it."""
    known = memory.layers[layer]
    if known.positions is not None:  # rows differ
        assert memory.lengths is not None
        return memory.lengths[:, None] - known.positions
    runs = [memory.length - torch.arange(start, start + size) for start, size in known.runs]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)


def text(rows: int = 2, tokens: int = 19, seed: int = 1) -> Tensor:
    return torch.randint(V, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def in_segments(made: Any, ids: Tensor, sizes: list[int], **more: Any) -> tuple[Tensor, Memory]:
    memory, parts = None, []
    for first, end in pairwise([0, *accumulate(sizes)]):
        out = made(ids[:, first:end], memory, **more)
        parts.append(out.logits)
        memory = out.memory
    return torch.cat(parts, dim=1), memory


@dataclass(frozen=True)
class Seen(fr.Layout):
    """A layout that is told who sees whom."""

    pairs: Tensor | None = None

    def visible(self) -> Tensor:
        assert self.pairs is not None
        return self.pairs[None, None]


def one_pass(made: Any, ids: Tensor, sizes: list[int], memory_length: int, *, same_length: bool = False) -> Tensor:
    """All tokens at once through the reference kernel; who sees whom is written down pair by pair."""
    total = sum(sizes)
    begins = [first for first, size in zip([0, *accumulate(sizes)][:-1], sizes, strict=True) for _ in range(size)]
    pairs = torch.zeros(total, total, dtype=torch.bool)
    for query in range(total):
        for key in range(query + 1):
            pairs[query, key] = query - key < memory_length if same_length else key >= begins[query] - memory_length
    places = torch.arange(total)
    layout = Seen(places, places, pairs=pairs)
    x = made.position(made.embedding(ids), places)
    layout = made.position.place(layout, x)
    with fr.kernel("reference"):
        for block in made.blocks:
            x = block(x, layout)
    return made.output(made.final_norm(x))
