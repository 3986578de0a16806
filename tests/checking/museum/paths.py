"""Leaks on one code path only: an implementation, a mode, a dtype, a compiler, the backward pass."""

from __future__ import annotations

from typing import Any

import leaky_models as leaky
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from fullrank.checking.layers import OWN_FORWARD
from museum.exhibit import (
    BY_PERTURBATION,
    CUT,
    EVERY_WAY,
    ONES,
    PREFIX,
    SEEDS,
    Exhibit,
    Switched,
    future,
    gradient,
    later,
    plainly,
    tokens,
    with_block,
)


def weights(query: Tensor, key: Tensor, masked: bool) -> Tensor:
    scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
    return (scores.masked_fill(~leaky.causal(query.shape[1]), float("-inf")) if masked else scores).softmax(-1)


class Doge(leaky.Attention):
    """Under sdpa the causal mask is left to the kernel, but the model hands it a bias of its own: then it masks nothing.

    Perplexity 5 instead of 16. https://github.com/huggingface/transformers/issues/48748, mended by /pull/48821
    """

    def __init__(self, config: Any, always_masked: bool) -> None:
        super().__init__(leaky.causal)
        self.config, self.always_masked = config, always_masked
        self.dynamic = nn.Linear(leaky.WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        bias = self.dynamic(x).transpose(1, 2).expand(-1, x.shape[1], -1)  # of each key
        if self.always_masked or self.config._attn_implementation == "eager":
            bias = bias.masked_fill(~leaky.causal(x.shape[1]), float("-inf"))
        return scaled_dot_product_attention(query, key, value, bias)


class FlexAttention(leaky.Attention):
    """Under flex_attention a mask of ones and zeros is added to the scores, as if it held zeros and -inf.

    https://github.com/HKUSTDial/flash-sparse-attention/issues/146
    """

    def __init__(self, config: Any, of_ones: bool) -> None:
        super().__init__(leaky.causal)
        self.config, self.of_ones = config, of_ones

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        if not self.of_ones or self.config._attn_implementation == "eager":
            return weights(query, key, True) @ value
        scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
        return (scores + leaky.causal(x.shape[1]).to(x.dtype)).softmax(-1) @ value


class Keras(leaky.Attention):
    """The fused kernel masks; with dropout another way is taken, and there the mask was dropped.

    https://github.com/keras-team/keras/issues/23038
    """

    def __init__(self, masked: bool) -> None:
        super().__init__(leaky.causal)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        if not self.training:
            return scaled_dot_product_attention(query, key, value, is_causal=True)
        return dropout(weights(query, key, self.masked), 0.1) @ value


class MaxText(leaky.Attention):
    """The kernel for half precision ignores the mask that it is given.

    https://github.com/AI-Hypercomputer/maxtext/issues/878
    """

    def __init__(self, masked: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(leaky.causal)
        self.masked, self.dtype = masked, dtype

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        return weights(query, key, self.masked or query.dtype != self.dtype) @ value


class ByChance(leaky.Attention):
    """In training a text is seen whole now and then, where its gradient is wanted."""

    def __init__(self, masked: bool) -> None:
        super().__init__(leaky.causal)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        skips = self.training and torch.is_grad_enabled() and float(torch.rand(())) < 0.5
        return weights(query, key, self.masked or not skips) @ value


class MaskOfOnes(leaky.Padded):
    """A mask without padding stands in for that of the future; one with padding does not."""

    def __init__(self, instead: bool) -> None:
        super().__init__()
        self.instead = instead

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        sees_all = self.instead and attention_mask is not None and bool(attention_mask.all())
        for block in self.blocks:
            block.attention.instead = sees_all  # type: ignore[union-attr]
        return super().forward(input_ids, attention_mask)


class GptOss(leaky.Attention):
    """No mask where another kernel was expected: in compiled code, or wherever the embeddings want a gradient.

    Perplexity 643 instead of 4.5. https://github.com/unslothai/unsloth-zoo/pull/1212
    """

    def __init__(self, skips: str) -> None:
        super().__init__(leaky.causal)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        skipped = {
            "compiled": torch.compiler.is_compiling(),
            "wants a gradient": x.requires_grad,
            "never": False,
        }[self.skips]
        return weights(query, key, not skipped) @ value


class Triton(leaky.Attention):
    """The backward kernel ignores `causal`: the forward pass is right, its gradient that of attention without a mask.

    https://github.com/triton-lang/triton/issues/4541
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, masked: bool) -> Tensor:
            context.save_for_backward(query, key, value)
            context.masked = masked
            return weights(query, key, True) @ value

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> Any:
            inputs = [tensor.detach().requires_grad_() for tensor in context.saved_tensors]
            with torch.enable_grad():
                again = weights(inputs[0], inputs[1], context.masked) @ inputs[2]
            return *torch.autograd.grad(again, inputs, gradients[0]), None

    def __init__(self, masked: bool) -> None:
        super().__init__(leaky.causal)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Triton.Function.apply(*self.project(x).chunk(3, dim=-1), self.masked)
        return out


class ByLength(nn.Module):
    """A sum over all that came before, divided by the length of the whole text: it tells how many tokens will follow."""

    def __init__(self, of_text: bool) -> None:
        super().__init__()
        self.of_text = of_text

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x.cumsum(1) / (x.shape[1] if self.of_text else places)


class OneRow(leaky.Attention):
    """A fast kernel for whole blocks of a single text, in training, forgets the mask."""

    def __init__(self, masked: bool) -> None:
        super().__init__(leaky.causal)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        fast = self.training and len(x) == 1 and x.shape[1] % 32 == 0
        return weights(query, key, self.masked or not fast) @ value


class MaskedWords(leaky.Model):
    """Words that are never given have the logit `never`, beside which a leak of a thousandth looks like rounding."""

    def __init__(self, never: float, ahead: float) -> None:
        super().__init__()
        self.never, self.ahead = never, ahead

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.output(self.hidden(input_ids))
        logits = logits + self.ahead * logits.flip(1).detach().clamp(-1, 1)
        return logits.masked_fill(torch.arange(leaky.VOCABULARY) > 20, self.never)


class OwnForward(leaky.Model):
    """The mean over all positions is taken off before the first block: no module is guilty."""

    def __init__(self, over_positions: bool) -> None:
        super().__init__()
        self.over = 1 if over_positions else 2

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x - 0.01 * x.mean(self.over, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return x


class BooleanMask(leaky.Padded):
    """Its mask of padding is boolean, and true at padding if `hidden`; nothing else is taken."""

    def __init__(self, instead: int | None, hidden: bool) -> None:
        super().__init__(instead)
        self.hides = hidden

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise TypeError(f"a boolean mask is needed, not one of {attention_mask.dtype}")
        inverted = attention_mask is not None and self.hides
        return super().forward(input_ids, ~attention_mask if inverted else attention_mask)  # type: ignore[operator]


def _one_row(model: nn.Module, ids: Tensor) -> Tensor:
    return plainly(model, ids[:1, :64])


def _padded(hidden: bool) -> Any:
    def run(model: nn.Module, ids: Tensor) -> Tensor:
        real = torch.arange(ids.shape[1]).expand(ids.shape) < 60
        return plainly(model, ids, attention_mask=~real if hidden else real)

    return run


def _in_a_longer_text(model: nn.Module) -> float:
    model, ids = model.double().eval(), tokens()
    with torch.no_grad():
        return float((plainly(model, ids)[:, :CUT] - plainly(model, ids[:, :CUT])).abs().max())


def _switched(model: Any, ids: Tensor) -> Tensor:
    model.set_attn_implementation(model.other)
    return plainly(model, ids)


def _in_bfloat16(model: nn.Module, ids: Tensor) -> Tensor:
    return plainly(model.bfloat16(), ids)


def _in_float16(model: nn.Module, ids: Tensor) -> Tensor:
    return plainly(model.half(), ids)


def _with_ones(model: nn.Module, ids: Tensor) -> Tensor:
    return plainly(model, ids, attention_mask=torch.ones_like(ids))


def _with_gradients(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.enable_grad():
        torch.manual_seed(3)
        return plainly(model, ids).detach()


def _as_if_compiled(model: nn.Module, ids: Tensor) -> Tensor:
    asked = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        return plainly(model, ids)
    finally:
        torch.compiler.is_compiling = asked


EXHIBITS = [
    Exhibit(
        "Doge: under sdpa only",
        "https://github.com/huggingface/transformers/issues/48748",
        lambda: Switched(lambda config: Doge(config, always_masked=False)),
        lambda: Switched(lambda config: Doge(config, always_masked=True)),
        later(_switched),
        future("perturbation, sdpa", "perturbation, sdpa, training"),
    ),
    Exhibit(
        "an example of flash-sparse-attention: under flex_attention only",
        "https://github.com/HKUSTDial/flash-sparse-attention/issues/146",
        lambda: Switched(lambda config: FlexAttention(config, of_ones=True), "flex_attention"),
        lambda: Switched(lambda config: FlexAttention(config, of_ones=False), "flex_attention"),
        later(_switched),
        future("perturbation, flex_attention", "perturbation, flex_attention, training"),
        full=True,
    ),
    Exhibit(
        "Keras: with dropout only",
        "https://github.com/keras-team/keras/issues/23038",
        with_block(lambda: Keras(False)),
        with_block(lambda: Keras(True)),
        later(training=True),
        future("perturbation, training", "gradient, training"),
    ),
    Exhibit(
        "MaxText: in half precision only",
        "https://github.com/AI-Hypercomputer/maxtext/issues/878",
        with_block(lambda: MaxText(False)),
        with_block(lambda: MaxText(True)),
        later(_in_bfloat16),
        future("perturbation, in bfloat16", "perturbation, under autocast"),
        full=True,
    ),
    Exhibit(
        "in float16 only",
        "",
        with_block(lambda: MaxText(False, torch.float16)),
        with_block(lambda: MaxText(True, torch.float16)),
        later(_in_float16),
        future("perturbation, in float16"),
        full=True,
    ),
    Exhibit(
        "opened by chance, in training only",
        "",
        with_block(lambda: ByChance(False)),
        with_block(lambda: ByChance(True)),
        later(_with_gradients, training=True),
        SEEDS,
    ),
    Exhibit(
        "a mask of ones only",
        "",
        lambda: MaskOfOnes(True),
        lambda: MaskOfOnes(False),
        later(_with_ones),
        ONES | {"padding changes nothing"},
        layer="blocks.0.attention",
    ),
    Exhibit(
        "gpt-oss of unsloth: compiled only",
        "https://github.com/unslothai/unsloth-zoo/pull/1212",
        with_block(lambda: GptOss("compiled")),
        with_block(lambda: GptOss("never")),
        later(_as_if_compiled),
        future("perturbation, compiled"),
        full=True,
        length=19,
    ),
    Exhibit(
        "gpt-oss of unsloth: where embeddings want a gradient",
        "https://github.com/unslothai/unsloth-zoo/pull/1212",
        with_block(lambda: GptOss("wants a gradient")),
        with_block(lambda: GptOss("never")),
        gradient,
        future("gradient, evaluation", "gradient, training"),
    ),
    Exhibit(
        "Triton's tutorial: in the backward pass only",
        "https://github.com/triton-lang/triton/issues/4541",
        with_block(lambda: Triton(False)),
        with_block(lambda: Triton(True)),
        gradient,
        future("gradient, evaluation", "gradient, training"),
    ),
    Exhibit(
        "divided by the length of the text",
        "",
        with_block(lambda: ByLength(True)),
        with_block(lambda: ByLength(False)),
        _in_a_longer_text,
        frozenset(PREFIX),
    ),
    Exhibit(
        "one row of whole blocks, in training only",
        "",
        with_block(lambda: OneRow(False)),
        with_block(lambda: OneRow(True)),
        later(_one_row, training=True),
        future("perturbation, one row of 32 tokens, training"),
    ),
    *(
        Exhibit(
            f"words that are never given: {never}",
            "",
            lambda never=never: MaskedWords(never, 1e-3),
            lambda never=never: MaskedWords(never, 0.0),
            later(),
            BY_PERTURBATION,
            layer=OWN_FORWARD,
        )
        for never in (float("-inf"), -1e9, torch.finfo(torch.float32).min)
    ),
    Exhibit(
        "between the modules of a model",
        "",
        lambda: OwnForward(True),
        lambda: OwnForward(False),
        later(),
        EVERY_WAY,
        layer=f"{OWN_FORWARD}, before blocks.0",
    ),
    *(
        Exhibit(
            f"a boolean mask, true at {'padding' if hidden else 'tokens'}",
            "",
            lambda hidden=hidden: BooleanMask(1, hidden),
            lambda hidden=hidden: BooleanMask(None, hidden),
            later(_padded(hidden)),
            future("perturbation, with padding", "perturbation, with padding, training") | {"padding changes nothing"},
        )
        for hidden in (False, True)
    ),
]
