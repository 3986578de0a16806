"""Training steps of language models: ours against what PyTorch users write without this package.

nn.TransformerEncoder  embeddings (plus learned positions), nn.TransformerEncoder (pre-norm, ReLU, causal, with `is_causal`),
                       nn.Linear, F.cross_entropy; plain SGD. `step`, and in two sizes with and without dropout `step-sizes`
nanoGPT                its form of GPT-2 (pre-norm, GELU, tied table); AdamW. `small-step`: three sizes, where ours has Mixhead
                       A or B, too, or the positions and the separate table that a newcomer gets

All: forward, backward, gradient clipping, the optimizer (fused); the same dropout at the same places. Matrix products of a step
count attention causally (half of all pairs).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fullrank as fr
from candidates import STEP, Candidate, Comparison, Settings, TrainingStep
from mixing import MIXES

ENCODER = "nn.TransformerEncoder"
PLAIN = "plain"
NANO_GPT = "nanoGPT"


@dataclass(frozen=True)
class Size:
    """A model, and a batch of texts of so many tokens; tokens of its memory."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    vocabulary: int
    inner: int
    dropout: float = 0.0
    memory: int = 0

    def __str__(self) -> str:
        model = f"V {self.vocabulary:,}, {self.layers} x {self.width}, {self.heads} heads"
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        memory = f", memory {self.memory}" if self.memory else ""
        return f"{model}, {self.batch} x {self.length}{dropout}{memory}"

    @property
    def gflop(self) -> float:
        tokens = self.batch * self.length
        of_layer = 4 * self.width**2 + 2 * self.width * self.inner
        weights = self.layers * of_layer + self.vocabulary * self.width
        attention = self.layers * self.length * self.width
        return 6 * tokens * (weights + attention) / 1e9

    def draw(self, settings: Settings, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw random ids and their targets, (B, N)."""
        drawn = torch.randint(self.vocabulary, (self.batch, tokens + 1), generator=generator)
        drawn = drawn.to(settings.torch_device)
        return drawn[:, :-1], drawn[:, 1:]


def make_model(size: Size, mix: str = "none", **config: Any) -> fr.LanguageModel:
    """Make a language model of ours with learned positions and mixing `mix`, if `config` does not say otherwise."""
    dropout = fr.DropoutConfig(
        embedding=size.dropout, attention=size.dropout, activation=size.dropout, residual=size.dropout
    )
    sizes = fr.ModelConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
        max_position_embeddings=size.length,
        memory_length=size.memory,
        dropout=dropout,
        **{"position": "learned", "attention": fr.AttentionConfig(mix=mix), **config},
    )
    return fr.LanguageModel(sizes)


def _make_step(
    make: Callable[[Size], Any],
    optimizer: Callable[..., Any],
    max_norm: float,
    settings: Settings,
    backward: bool,
    size: Size,
) -> TrainingStep:
    """Make a training step of a model with a `loss`, on random tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(size).to(settings.torch_device)
    inputs, targets = size.draw(settings, size.length, torch.Generator().manual_seed(1))

    def loss() -> Tensor:
        with settings.autocast():
            return model.loss(inputs, targets)

    return TrainingStep(model, loss, optimizer(model.parameters()), max_norm)


def _compare(size: Size, candidates: list[Candidate]) -> Comparison:
    tiny = replace(size, layers=2, batch=4, length=29, vocabulary=50)  # whose products go to the same libraries
    return Comparison(size, tiny, size.length, candidates, (STEP,), size.batch * size.length)


# -- against nn.TransformerEncoder -------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A language model as PyTorch users write it without this package."""

    mask: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.randn(size.length, size.width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, size.inner, size.dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)
        self.decoder = nn.Linear(size.width, size.vocabulary)
        self.dropout = nn.Dropout(size.dropout)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.length))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.embedding(inputs) + self.positions)
        x = self.encoder(x, mask=self.mask, is_causal=True)
        return F.cross_entropy(self.decoder(x).flatten(0, 1), targets.flatten())


_PARTS = {  # of a layer, by the names that the peer gives them
    "self_attn.out_proj": "attention.merge",
    "linear1": "feed_forward.up",
    "linear2": "feed_forward.down",
    "norm1": "attention_norm",
    "norm2": "feed_forward_norm",
}


def make_encoder(size: Size) -> Encoder:
    """Make the peer with the parameters of a plain model of ours."""
    ours = make_model(size)
    peer = Encoder(size)
    parts = {"embedding": "embedding", "encoder.norm": "final_norm", "decoder": "output"}
    for layer in range(size.layers):
        for name_of_peer, our_name in _PARTS.items():
            parts[f"encoder.layers.{layer}.{name_of_peer}"] = f"blocks.{layer}.{our_name}"
    for name_of_peer, our_name in parts.items():
        peer.get_submodule(name_of_peer).load_state_dict(ours.get_submodule(our_name).state_dict())
    with torch.no_grad():
        peer.positions.copy_(ours.get_parameter("position.weight"))
        for layer in range(size.layers):
            for kind in ("weight", "bias"):
                project = f"blocks.{layer}.attention.project"
                three = [ours.get_parameter(f"{project}.{part}.{kind}") for part in ("query", "key", "value")]
                joined = peer.get_parameter(f"encoder.layers.{layer}.self_attn.in_proj_{kind}")
                joined.copy_(torch.cat(three))
    return peer


SGD = partial(torch.optim.SGD, lr=1e-3, fused=True)


def _compare_with_encoder(size: Size, mixes: dict[str, str]) -> Comparison:
    def candidate(name: str, make: Callable[[Size], Any], against: tuple[str, ...] = ()) -> Candidate:
        # mixing starts as plain attention, so that all of them compute the same; dropout is drawn differently
        computes = name if size.dropout else "the same model"
        step = partial(_make_step, make, SGD, 0.5)
        return Candidate(name, step, computes, against, gflop=size.gflop)

    candidates = [candidate(PLAIN, make_model, (ENCODER,))]
    for form, mix in mixes.items():
        candidates.append(candidate(f"Mixhead {form}", partial(make_model, mix=mix), (PLAIN, ENCODER)))
    candidates.append(candidate(ENCODER, make_encoder))
    return _compare(size, candidates)


def compare(settings: Settings, length: int) -> list[Comparison]:
    """Compare language models of 6 layers, width 512 and vocabulary 10,000, of segments of `length` tokens."""
    size = Size(6, settings.width, settings.heads, settings.batch or 2, length, 10_000, 2048)
    return [_compare_with_encoder(size, MIXES)]


SIZES = (
    Size(4, 200, 4, 20, 35, 10_000, 200),
    Size(6, 512, 8, 4, 256, 10_000, 2048),
)


def compare_sizes(settings: Settings) -> list[Comparison]:
    """Compare plain models in all `SIZES`, without and with dropout."""
    comparisons = []
    for size in SIZES:
        for dropout in (0.0, 0.2):
            comparisons.append(_compare_with_encoder(replace(size, dropout=dropout), {}))
    return comparisons


# -- against nanoGPT ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, keys, values = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, keys, values)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.merge(y.transpose(1, 2).flatten(2))
        return x + self.shrink(F.gelu(self.grow(self.norms[1](x))))


class GPT(nn.Module):
    """Logits (B, N, V) of the next token, as in nanoGPT: GPT-2 with a tied table.

    It starts as GPT-2 does: N(0, 0.02^2), and what is added to the residual stream less.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if name.endswith(("merge.weight", "shrink.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers))
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


# characters of nanoGPT's Shakespeare
SMALL = (
    Size(6, 384, 6, 16, 256, 65, 4 * 384),
    Size(4, 128, 4, 12, 64, 65, 4 * 128),
    Size(2, 64, 4, 8, 128, 65, 4 * 64),
)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
GPT2 = {"hidden_act": "gelu", "output": fr.OutputConfig(tied=True)}
NEWCOMER = {"hidden_act": "gelu", "position": "rotary"}


def compare_small(settings: Settings) -> list[Comparison]:
    """Compare small models of characters with nanoGPT."""
    makes = {PLAIN: partial(make_model, **GPT2)}
    for form, mix in MIXES.items():
        makes[f"Mixhead {form}"] = partial(make_model, mix=mix, **GPT2)
    makes["rotary, untied"] = partial(make_model, **NEWCOMER)
    comparisons = []
    for size in SMALL:
        candidates = []
        for name, make in makes.items():
            step = partial(_make_step, make, ADAMW, 1.0)
            candidates.append(Candidate(name, step, name, (NANO_GPT,), gflop=size.gflop))
        step = partial(_make_step, GPT, ADAMW, 1.0)
        candidates.append(Candidate(NANO_GPT, step, NANO_GPT, gflop=size.gflop))
        comparisons.append(_compare(size, candidates))
    return comparisons
