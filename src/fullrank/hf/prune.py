"""Attention heads taken out of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fullrank.core.errors import InputError
from fullrank.hf.families import HEAD_COUNTS, QUERIES, attention_modules, head_size

_KEYS = ("k_proj", "key", "k_lin", "k", "key_proj")
_VALUES = ("v_proj", "value", "v_lin", "v", "value_proj")
_MERGES = ("o_proj", "out_proj", "c_proj", "out_lin", "o", "dense")


@torch.no_grad()
def keep_heads(model: Any, kept: Sequence[Sequence[int]]) -> Any:
    """Keep these heads of each layer of attention, in the order of the model, and no others; returns the same model.

    Rows of the projections of queries, keys and values go, and columns of the output projection. In the configuration
    `fullrank_heads_by_layer` has the number of heads of each layer, for `load_injected`.
    Raises InputError for a module whose projections are not known, and for a part of the query heads that share keys and
    values; then nothing was changed.
    """
    modules = attention_modules(model)
    changed = [
        (name, module, heads)
        for (name, module), heads in zip(modules.items(), kept, strict=True)
        if len(heads) < head_size(module).num_heads
    ]
    cuts = [cut for name, module, heads in changed for cut in _cuts(model, name, module, heads)]
    for layer, dim, index in cuts:
        _cut(layer, dim, index)
    for _, module, heads in changed:
        width = len(heads) * head_size(module).head_dim
        numbers = {**dict.fromkeys(HEAD_COUNTS, len(heads)), "split_size": width, "all_head_size": width}
        there = {name: number for name, number in numbers.items() if hasattr(module, name)}
        vars(module).update(
            {"num_heads": len(heads), **there}
        )  # where only the configuration had a number, it counts no more
    model.config.fullrank_heads_by_layer = [*map(len, kept)]
    return model


def _cuts(model: nn.Module, name: str, module: Any, heads: Sequence[int]) -> Iterator[tuple[Any, int, Tensor]]:
    """The projections of a module, each with the dimension of its weight that has the heads, and what stays of that."""
    size, groups = head_size(module), getattr(module, "num_key_value_groups", 1)
    shared = sorted({head // groups for head in heads})
    if len(shared) * groups != len(heads):
        raise InputError(f"{name}: {groups} heads share keys and values and go together; given {[*heads]} to keep")

    def entries(numbers: Sequence[int]) -> Tensor:
        return (torch.tensor(numbers)[:, None] * size.head_dim + torch.arange(size.head_dim)).flatten()

    def find(owner: Any, names: Sequence[str]) -> Any:
        return next((part for one in names if (part := getattr(owner, one, None)) is not None), None)

    query, key, width = entries(heads), entries(shared), size.hidden_size
    parent = model.get_submodule(name.rpartition(".")[0])
    merge = find(module, _MERGES) or find(getattr(parent, "output", None), _MERGES)  # BERT has it in the next module
    if isinstance(fused := getattr(module, "c_attn", None), Conv1D):  # GPT-2: queries, keys, values
        cuts = [(fused, 1, torch.cat([query, query + width, query + 2 * width]), 3 * width)]
    else:
        cuts = [(find(module, QUERIES), 0, query, width)]
        cuts += [(find(module, names), 0, key, width // groups) for names in (_KEYS, _VALUES)]
    for layer, dim, index, whole in [*cuts, (merge, int(not isinstance(merge, Conv1D)), query, width)]:
        if not isinstance(layer, nn.Linear | Conv1D) or layer.weight.shape[dim] != whole:
            raise InputError(
                f"{name}: {type(module).__name__} has other projections than by head, so none can be pruned"
            )
        yield layer, dim, index


def _cut(layer: Any, dim: int, index: Tensor) -> None:
    index = index.to(layer.weight.device)
    layer.weight = nn.Parameter(layer.weight.index_select(dim, index), layer.weight.requires_grad)
    of_outputs = dim == int(isinstance(layer, Conv1D))
    if of_outputs and layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias[index], layer.bias.requires_grad)
    if isinstance(layer, Conv1D):
        layer.nx, layer.nf = layer.weight.shape
    else:
        layer.out_features, layer.in_features = layer.weight.shape
