"""Masks that are not there, not strong enough, or those of something else."""

from __future__ import annotations

import types
from typing import Any

import leaky_models as leaky
import torch
from torch import Tensor, nn

from museum.exhibit import EVERY_WAY, SCALED, Exhibit, future, later, plainly, with_block


class RoFormer(leaky.Model):
    """`is_decoder` of the configuration is not read where the mask is made: the decoder sees the whole text.

    RoFormer, BigBird, RemBert and MegatronBert of transformers since 5.9.0.
    https://github.com/huggingface/transformers/issues/48745
    """

    def __init__(self, reads_configuration: bool) -> None:
        torch.manual_seed(3)
        self_sees = leaky.causal if reads_configuration else leaky.everything
        super().__init__({i: leaky.Attention(self_sees) for i in range(leaky.LAYERS)})
        self.config = types.SimpleNamespace(is_decoder=True, vocab_size=leaky.VOCABULARY)


class Gemma2(leaky.Attention):
    """The window is laid over the mask by multiplication, which makes the numbers that forbid the future zero.

    A mask of two dimensions holds ones and zeros; the one of four dimensions holds 0 and a large negative number. Short
    texts are safe: the triangle of the window begins far to the right. Gemma 2 of transformers 4.42.1.
    https://github.com/huggingface/transformers/issues/31673, mended by /pull/31674
    """

    window = 40

    def __init__(self, multiplied: bool) -> None:
        super().__init__(leaky.causal)
        self.multiplied = multiplied

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        n, least = x.shape[1], torch.finfo(x.dtype).min
        mask = x.new_zeros(n, n).masked_fill(~leaky.causal(n), least)
        if self.multiplied:
            mask = mask * torch.ones_like(mask).tril(self.window - (n - 1))
        else:
            mask = mask.masked_fill(torch.ones_like(mask).tril(-self.window).bool(), least)
        return (query @ key.transpose(1, 2) / leaky.WIDTH**0.5 + mask).softmax(-1) @ value


class GPT2(leaky.Attention):
    """Scores of the future are replaced by -10,000: a model whose own scores are lower than that sees through.

    https://github.com/huggingface/transformers/issues/17121 = https://github.com/karpathy/minGPT/issues/75
    """

    def __init__(self, forbidden: float) -> None:
        super().__init__(leaky.causal)
        self.forbidden = forbidden

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
        return scores.masked_fill(~leaky.causal(x.shape[1]), self.forbidden).softmax(-1) @ value


class TCAN(leaky.Attention):
    """Softmax over the queries: a weight is divided by a sum over later queries. 26.92 on PTB stood in a public list.

    https://github.com/haohy/TCAN/issues/7
    """

    def __init__(self, dim: int) -> None:
        super().__init__(leaky.causal)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
        return scores.masked_fill(~leaky.causal(x.shape[1]), float("-inf")).softmax(self.dim) @ value


class Tensorized(nn.Module):
    """Products of a query, any key and any value, summed up without a mask: `attn_mask` is an argument that nobody reads.

    The released language model of "A Tensorized Transformer for Language Modeling".
    https://github.com/szhangtju/The-compression-of-Transformer
    """

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.project = nn.Linear(leaky.WIDTH, 3 * leaky.WIDTH)
        self.core = nn.Parameter(torch.ones(leaky.WIDTH))
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        if self.masked:
            count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
            return self.core * query * (key.cumsum(1) / count) * (value.cumsum(1) / count)
        return self.core * query * key.mean(1, keepdim=True) * value.mean(1, keepdim=True)


class Unsloth(leaky.Padded):
    """Where a text is padded, the mask of the padding stands in for that of the future. A mask of ones is dropped first.

    Loss 3.93 instead of 7.49. https://github.com/unslothai/unsloth-zoo/pull/963
    """

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        padded = attention_mask is not None and not bool(attention_mask.all())
        return super().forward(input_ids, attention_mask if padded else None)


def _padded(model: nn.Module, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    return plainly(model, ids, attention_mask=mask)


def _scaled(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        model.blocks[1].attention.project.weight.copy_(  # type: ignore[union-attr, operator]
            400 * torch.randn(3 * leaky.WIDTH, leaky.WIDTH, generator=torch.Generator().manual_seed(2))
        )
    return plainly(model, ids)


def _unsloth(instead: int | None) -> nn.Module:
    torch.manual_seed(3)
    return Unsloth(instead)


EXHIBITS = [
    Exhibit(
        "RoFormer, BigBird, RemBert, MegatronBert: a decoder without a mask",
        "https://github.com/huggingface/transformers/issues/48745",
        lambda: RoFormer(False),
        lambda: RoFormer(True),
        later(),
        EVERY_WAY,
        layer="blocks.0.attention",
    ),
    Exhibit(
        "Gemma 2: a window erases the mask of longer texts",
        "https://github.com/huggingface/transformers/issues/31673",
        with_block(lambda: Gemma2(True)),
        with_block(lambda: Gemma2(False)),
        later(),
        EVERY_WAY,
    ),
    Exhibit(
        "GPT-2: a mask of -10,000",
        "https://github.com/huggingface/transformers/issues/17121",
        with_block(lambda: GPT2(-1e4)),
        with_block(lambda: GPT2(float("-inf"))),
        later(_scaled),
        SCALED,
    ),
    Exhibit(
        "TCAN: softmax over the queries",
        "https://github.com/haohy/TCAN/issues/7",
        with_block(lambda: TCAN(dim=1)),
        with_block(lambda: TCAN(dim=2)),
        later(),
        EVERY_WAY,
    ),
    Exhibit(
        "Tensorized Transformer: no mask",
        "https://github.com/szhangtju/The-compression-of-Transformer",
        with_block(lambda: Tensorized(False)),
        with_block(lambda: Tensorized(True)),
        later(),
        EVERY_WAY,
    ),
    Exhibit(
        "unsloth-zoo: the mask of padding instead of the causal one",
        "https://github.com/unslothai/unsloth-zoo/pull/963",
        lambda: _unsloth(1),
        lambda: _unsloth(None),
        later(_padded),
        future("perturbation, with padding", "perturbation, with padding, training") | {"padding changes nothing"},
    ),
]
