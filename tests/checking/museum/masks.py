"""Masks that are not there, not strong enough, or those of something else."""

import leaky_models as leaky
import torch

from museum.exhibit import EVERY_WAY, SCALED, Exhibit, future, later, plainly, with_block


class Gemma2(leaky.Attention):
    """The window is laid over the mask by multiplication, which makes the numbers that forbid the future zero.

    A mask of two dimensions holds ones and zeros; the one of four dimensions holds 0 and a large negative number. Short
    texts are safe: the triangle of the window begins far to the right. Gemma 2 of transformers 4.42.1.
    https://github.com/huggingface/transformers/issues/31673, mended by /pull/31674
    """

    window = 40

    def __init__(self, multiplied):
        super().__init__(leaky.causal)
        self.multiplied = multiplied

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        n = x.shape[1]
        least = torch.finfo(x.dtype).min
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

    def __init__(self, forbidden):
        super().__init__(leaky.causal)
        self.forbidden = forbidden

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
        return scores.masked_fill(~leaky.causal(x.shape[1]), self.forbidden).softmax(-1) @ value


class Unsloth(leaky.Padded):
    """Where a text is padded, the mask of the padding stands in for that of the future. A mask of ones is dropped first.

    Loss 3.93 instead of 7.49. https://github.com/unslothai/unsloth-zoo/pull/963
    """

    def forward(self, input_ids, attention_mask=None):
        padded = attention_mask is not None and not bool(attention_mask.all())
        return super().forward(input_ids, attention_mask if padded else None)


def _padded(model, ids):
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    return plainly(model, ids, attention_mask=mask)


def _scaled(model, ids):
    with torch.no_grad():
        model.blocks[1].attention.project.weight.copy_(
            400 * torch.randn(3 * leaky.WIDTH, leaky.WIDTH, generator=torch.Generator().manual_seed(2))
        )
    return plainly(model, ids)


def _unsloth(instead):
    torch.manual_seed(3)
    return Unsloth(instead)


EXHIBITS = [
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
        "unsloth-zoo: the mask of padding instead of the causal one",
        "https://github.com/unslothai/unsloth-zoo/pull/963",
        lambda: _unsloth(1),
        lambda: _unsloth(None),
        later(_padded),
        future("perturbation, with padding", "perturbation, with padding, training") | {"padding changes nothing"},
    ),
]
