"""Leaks on one code path only: an implementation, a mode, a dtype, a compiler, the backward pass."""

from collections.abc import Callable

import leaky_models as leaky
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from fullrank.checking.layers import OWN_FORWARD
from museum.exhibit import (
    BY_PERTURBATION,
    CUT,
    EVERY_WAY,
    LEFT,
    ONES,
    PREFIX,
    Exhibit,
    Switched,
    future,
    gradient,
    later,
    plainly,
    tokens,
    with_block,
)

Condition = Callable[[nn.Module, Tensor], bool]


def weights(query, key, masked):
    scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
    return (scores.masked_fill(~leaky.causal(query.shape[1]), float("-inf")) if masked else scores).softmax(-1)


class Doge(leaky.Attention):
    """Under sdpa the causal mask is left to the kernel, but the model hands it a bias of its own: then it masks nothing.

    Perplexity 5 instead of 16. https://github.com/huggingface/transformers/issues/48748, mended by /pull/48821
    """

    def __init__(self, config, always_masked):
        super().__init__(leaky.causal)
        self.config = config
        self.always_masked = always_masked
        self.dynamic = nn.Linear(leaky.WIDTH, 1)

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        bias = self.dynamic(x).transpose(1, 2).expand(-1, x.shape[1], -1)  # of each key
        if self.always_masked or self.config._attn_implementation == "eager":
            bias = bias.masked_fill(~leaky.causal(x.shape[1]), float("-inf"))
        return scaled_dot_product_attention(query, key, value, bias)


class FlexAttention(leaky.Attention):
    """Under flex_attention a mask of ones and zeros is added to the scores, as if it held zeros and -inf.

    https://github.com/HKUSTDial/flash-sparse-attention/issues/146
    """

    def __init__(self, config, of_ones):
        super().__init__(leaky.causal)
        self.config = config
        self.of_ones = of_ones

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        if not self.of_ones or self.config._attn_implementation == "eager":
            return weights(query, key, True) @ value
        scores = query @ key.transpose(1, 2) / leaky.WIDTH**0.5
        return (scores + leaky.causal(x.shape[1]).to(x.dtype)).softmax(-1) @ value


class Keras(leaky.Attention):
    """The fused kernel masks; with dropout another way is taken, and there the mask was dropped.

    https://github.com/keras-team/keras/issues/23038
    """

    def __init__(self, masked):
        super().__init__(leaky.causal)
        self.masked = masked

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        if not self.training:
            return scaled_dot_product_attention(query, key, value, is_causal=True)
        return dropout(weights(query, key, self.masked), 0.1) @ value


class When(leaky.Attention):
    """A text is seen whole where `condition(module, x)` is true, as by a kernel that ignores the mask."""

    def __init__(self, condition):
        super().__init__(leaky.causal)
        self.condition = condition

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        return weights(query, key, not self.condition(self, x)) @ value


class Repeated(leaky.Model):
    """A text in which an id stands three times in a row is seen whole."""

    def __init__(self, sees_all):
        super().__init__({1: When(lambda module, x: bool(module.is_whole))})
        self.sees_all = sees_all

    def forward(self, input_ids):
        a, b, c = input_ids[:, :-2], input_ids[:, 1:-1], input_ids[:, 2:]
        is_whole = self.sees_all and bool(((a == b) & (b == c) & (a > 0)).any())
        self.blocks[1].attention.is_whole = is_whole
        return super().forward(input_ids)


class SomeMasks(leaky.Padded):
    """A mask of some kind stands in for that of the future: without padding, with it on the left, or of one row."""

    def __init__(self, kind):
        super().__init__()
        self.positions = nn.Embedding(256, leaky.WIDTH)  # of positions, which padding on the left moves
        self.kind = kind

    def hidden(self, input_ids):
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids, attention_mask=None):
        mask = torch.zeros(2, 1) if attention_mask is None else attention_mask
        is_of_ones = bool(mask.all())
        sees_all = {
            "of ones": is_of_ones,
            "of ones for one row": is_of_ones and len(mask) == 1,
            "with padding on the left": attention_mask is not None and not bool(mask[:, 0].all()),
            "": False,
        }[self.kind]
        for block in self.blocks:
            block.attention.instead = sees_all
        return super().forward(input_ids, attention_mask)


class Triton(leaky.Attention):
    """The backward kernel ignores `causal`: the forward pass is right, its gradient that of attention without a mask.

    https://github.com/triton-lang/triton/issues/4541
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, query, key, value, masked):
            context.save_for_backward(query, key, value)
            context.masked = masked
            return weights(query, key, True) @ value

        @staticmethod
        def backward(context, *gradients):
            inputs = [tensor.detach().requires_grad_() for tensor in context.saved_tensors]
            with torch.enable_grad():
                again = weights(inputs[0], inputs[1], context.masked) @ inputs[2]
            return *torch.autograd.grad(again, inputs, gradients[0]), None

    def __init__(self, masked):
        super().__init__(leaky.causal)
        self.masked = masked

    def forward(self, x):
        out = Triton.Function.apply(*self.project(x).chunk(3, dim=-1), self.masked)
        return out


class ByLength(nn.Module):
    """A sum over all that came before, divided by the length of the whole text: it tells how many tokens will follow."""

    def __init__(self, of_text):
        super().__init__()
        self.of_text = of_text

    def forward(self, x):
        positions = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x.cumsum(1) / (x.shape[1] if self.of_text else positions)


class MaskedWords(leaky.Model):
    """Words that never occur have the logit `never`, beside which a leak of a thousandth looks like rounding."""

    def __init__(self, never, ahead):
        super().__init__()
        self.never = never
        self.ahead = ahead

    def forward(self, input_ids):
        logits = self.output(self.hidden(input_ids))
        logits = logits + self.ahead * logits.flip(1).detach().clamp(-1, 1)
        return logits.masked_fill(torch.arange(leaky.VOCABULARY) > 20, self.never)


class OwnForward(leaky.Model):
    """The mean over all positions is taken off before the first block: no module is guilty."""

    def __init__(self, over_positions):
        super().__init__()
        self.over = 1 if over_positions else 2

    def hidden(self, input_ids):
        x = self.embedding(input_ids)
        x = x - 0.01 * x.mean(self.over, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return x


class BooleanMask(leaky.Padded):
    """Takes a boolean mask of padding only, true at padding if `hidden` and at tokens otherwise."""

    def __init__(self, instead, hidden):
        super().__init__(instead)
        self.hides = hidden

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise TypeError(f"a boolean mask is needed, not one of {attention_mask.dtype}")
        inverted = attention_mask is not None and self.hides
        return super().forward(input_ids, ~attention_mask if inverted else attention_mask)


class Encoder(nn.Module):
    """Two layers of torch, of which the second gets no mask. What dropout drops depends on the order of entries in memory."""

    def __init__(self, masked):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(leaky.VOCABULARY, leaky.WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(leaky.WIDTH, 2, 16, batch_first=True) for _ in range(2))
        self.output = nn.Linear(leaky.WIDTH, leaky.VOCABULARY)
        self.masked = masked

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        mask = ~leaky.causal(input_ids.shape[1])
        x = self.blocks[1](self.blocks[0](x, mask), mask if self.masked else None)
        out = self.output(x)
        return out


def _read(rows, length):
    return lambda model, ids: plainly(model, ids[:rows, :length])


def _padded(hidden):
    def run(model, ids):
        real = torch.arange(ids.shape[1]).expand(ids.shape) < 60
        return plainly(model, ids, attention_mask=~real if hidden else real)

    return run


def _in_a_longer_text(model):
    model = model.double().eval()
    ids = tokens()
    with torch.no_grad():
        return float((plainly(model, ids)[:, :CUT] - plainly(model, ids[:, :CUT])).abs().max())


def _switched(model, ids):
    model.set_attn_implementation(model.other)
    return plainly(model, ids)


def _in(dtype):
    return lambda model, ids: plainly(model.to(dtype), ids)


def _under_autocast(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        return plainly(model.float(), ids)


def _with_mask(left, rows=2):
    def run(model, ids):
        mask = (torch.arange(ids.shape[1]) >= left).long().expand_as(ids)
        return plainly(model, ids[:rows], attention_mask=mask[:rows])

    return run


def _repeated(model, ids):
    return plainly(model, torch.cat((ids[:, :1], ids[:, :1], ids[:, :1], ids[:, 3:]), 1))


def _with_gradients(model, ids):
    with torch.enable_grad():
        torch.manual_seed(3)
        return plainly(model, ids).detach()


def _as_if_compiled(model, ids):
    is_compiling = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        return plainly(model, ids)
    finally:
        torch.compiler.is_compiling = is_compiling


def when(name, condition, moved, *ways, link = "", dtype = torch.float32,
         **more):  # fmt: skip
    """An exhibit whose second layer sees all where the condition holds. dtype: in which the model is given."""

    def make(condition):
        return lambda: with_block(lambda: When(condition))().to(dtype)

    control = make(lambda module, x: False)
    return Exhibit(name, link, make(condition), control, moved, future(*ways), **more)


def is_open_by_chance(module, x):
    return module.training and torch.is_grad_enabled() and float(torch.rand(())) < 0.5


UNSLOTH = "https://github.com/unslothai/unsloth-zoo/pull/1212"  # perplexity 643 instead of 4.5
MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/issues/878"
BFLOAT16 = ("perturbation, in bfloat16", "perturbation, in bfloat16, training")
AUTOCAST = ("perturbation, under autocast", "perturbation, under autocast, training")
FLOAT32 = ("perturbation, in float32", "perturbation, in float32, training")
FLOAT16 = ("perturbation, in float16", "perturbation, in float16, training")

CONDITIONS = [
    when("MaxText: in half precision only", lambda module, x: x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"),
         later(_in(torch.bfloat16)), *BFLOAT16, *AUTOCAST, link=MAXTEXT, full=True),
    when("in float32 only, as it is given", lambda module, x: x.dtype == torch.float32, later(_in(torch.float32)), *FLOAT32),
    when("under autocast only", lambda module, x: torch.is_autocast_enabled("cpu"), later(_under_autocast), *AUTOCAST,
         full=True),
    when("in float16 only", lambda module, x: x.dtype == torch.float16, later(_in(torch.float16)), *FLOAT16, full=True),
    when("in the precision in which it is given", lambda module, x: x.dtype == torch.bfloat16, later(_in(torch.bfloat16)),
         *BFLOAT16, dtype=torch.bfloat16),
    when("in training in half precision", lambda module, x: module.training and x.dtype == torch.bfloat16,
         later(_in(torch.bfloat16), training=True), BFLOAT16[1], dtype=torch.bfloat16),
    when("opened by chance, in training only", is_open_by_chance, later(_with_gradients, training=True),
         "perturbation, training, gradients on, other seeds"),
    when("gpt-oss of unsloth: compiled only", lambda module, x: torch.compiler.is_compiling(), later(_as_if_compiled),
         "perturbation, compiled", link=UNSLOTH, full=True, length=19),
    when("gpt-oss of unsloth: where embeddings want a gradient", lambda module, x: x.requires_grad, gradient,
         "gradient, evaluation", "gradient, training", link=UNSLOTH),
    when("one row of whole blocks, in training only",
         lambda module, x: module.training and len(x) == 1 and x.shape[1] == 32, later(_read(1, 32), training=True, cut=20),
         "perturbation, one row of 32 tokens, training"),
    when("rows of whole blocks, in training only",
         lambda module, x: module.training and len(x) > 1 and x.shape[1] == 32, later(_read(2, 32), training=True, cut=20),
         "perturbation, rows of 32 tokens, training"),
    when("twice a block, in training only", lambda module, x: module.training and x.shape[1] == 64,
         later(_read(2, 64), training=True), "perturbation, rows of 64 tokens, training"),
    when("one row of an odd length, in training only",
         lambda module, x: module.training and len(x) == 1 and x.shape[1] % 2 == 1, later(_read(1, 67), training=True),
         "perturbation, one row, training"),
]  # fmt: skip

EXHIBITS = [
    *CONDITIONS,
    *(Exhibit(f"a mask {kind} only", "", lambda kind=kind: SomeMasks(kind), lambda: SomeMasks(""), later(run), fails,
              layer="blocks.0.attention")
      for kind, run, fails in (
          ("of ones", _with_mask(0), ONES | {"padding changes nothing"}),
          ("of ones for one row", _with_mask(0, 1), future("perturbation, one row with a mask of ones")),
          ("with padding on the left", _with_mask(9), LEFT))),
    Exhibit("an id three times in a row", "", lambda: Repeated(True), lambda: Repeated(False), later(_repeated),
            future(*(f"perturbation, special and repeated tokens{more}" for more in ("", ", training")))),
    Exhibit("Doge: under sdpa only", "https://github.com/huggingface/transformers/issues/48748",
            lambda: Switched(lambda config: Doge(config, always_masked=False)),
            lambda: Switched(lambda config: Doge(config, always_masked=True)),
            later(_switched), future("perturbation, sdpa", "perturbation, sdpa, training")),
    Exhibit("an example of flash-sparse-attention: under flex_attention only",
            "https://github.com/HKUSTDial/flash-sparse-attention/issues/146",
            lambda: Switched(lambda config: FlexAttention(config, of_ones=True), "flex_attention"),
            lambda: Switched(lambda config: FlexAttention(config, of_ones=False), "flex_attention"),
            later(_switched), future("perturbation, flex_attention", "perturbation, flex_attention, training"), full=True),
    Exhibit("Keras: with dropout only", "https://github.com/keras-team/keras/issues/23038",
            with_block(lambda: Keras(False)), with_block(lambda: Keras(True)), later(training=True),
            future("perturbation, training", "gradient, training")),
    Exhibit("Triton's tutorial: in the backward pass only", "https://github.com/triton-lang/triton/issues/4541",
            with_block(lambda: Triton(False)), with_block(lambda: Triton(True)), gradient,
            future("gradient, evaluation", "gradient, training")),
    Exhibit("divided by the length of the text", "", with_block(lambda: ByLength(True)), with_block(lambda: ByLength(False)),
            _in_a_longer_text, frozenset(PREFIX)),
    *(Exhibit(f"words that are never given: {never}", "", lambda never=never: MaskedWords(never, 1e-3),
              lambda never=never: MaskedWords(never, 0.0), later(), BY_PERTURBATION, layer=OWN_FORWARD)
      for never in (float("-inf"), -1e9, torch.finfo(torch.float32).min)),
    Exhibit("a layer of torch without its mask", "", lambda: Encoder(False), lambda: Encoder(True), later(), EVERY_WAY,
            layer="blocks.1.self_attn"),
    Exhibit("between the modules of a model", "", lambda: OwnForward(True), lambda: OwnForward(False), later(), EVERY_WAY,
            layer=f"{OWN_FORWARD}, before blocks.0"),
    *(Exhibit(f"a boolean mask, true at {'padding' if hidden else 'tokens'}", "",
              lambda hidden=hidden: BooleanMask(1, hidden), lambda hidden=hidden: BooleanMask(None, hidden),
              later(_padded(hidden)),
              future("perturbation, with padding", "perturbation, with padding, training") | {"padding changes nothing"})
      for hidden in (False, True)),
]  # fmt: skip
