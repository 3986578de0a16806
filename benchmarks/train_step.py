"""One training step of ours against an `nn.TransformerEncoder` language model of the same size.

Peer: embeddings (plus learned positions) -> nn.TransformerEncoder (pre-norm, ReLU, causal, with `is_causal`) -> nn.Linear ->
F.cross_entropy. Both: forward, backward, gradient clipping, plain SGD (fused); the same dropout at the same places.
`fullrank bench step` compares them. As a script this file looks closer, at dropout, bf16 and the share of the machine's peak:

    python benchmarks/train_step.py [--rounds 9] [--threads 1] [--dropout 0 0.2] [--only small] [--json FILE]
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from candidates import Candidate, Comparison, Settings
from closer import parse, save, table
from fullrank.core.config import AttentionConfig, DropoutConfig, ModelConfig
from fullrank.core.decoder import LanguageModel
from mixing import STAGES
from timing import Peak, Timing

PEER, PLAIN = "nn.TransformerEncoder", "plain"
STEP = "training step"


@dataclass(frozen=True)
class Size:
    vocabulary: int
    width: int
    inner: int
    heads: int
    layers: int
    batch: int
    length: int

    def __str__(self) -> str:
        return f"V {self.vocabulary:,}, d {self.width}, {self.layers} layers, {self.batch} x {self.length}"

    def gflop(self) -> float:
        """Matrix products of a step, forward and backward; attention counted causally (half of all pairs)."""
        tokens = self.batch * self.length
        weights = self.layers * (4 * self.width**2 + 2 * self.width * self.inner) + self.vocabulary * self.width
        return (6 * tokens * weights + 6 * self.layers * tokens * self.length * self.width) / 1e9


class Peer(nn.Module):
    """A language model as PyTorch users write it without this package."""

    mask: Tensor

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.randn(size.length, size.width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, size.inner, dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)
        self.decoder, self.dropout = nn.Linear(size.width, size.vocabulary), nn.Dropout(dropout)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.length))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.embedding(inputs) + self.positions)
        x = self.encoder(x, mask=self.mask, is_causal=True)
        return F.cross_entropy(self.decoder(x).flatten(0, 1), targets.flatten())

    def copy_from(self, model: LanguageModel) -> None:
        """Copy the parameters of a plain model of ours."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            self.embedding.weight.copy_(parameters["embedding.weight"])
            self.positions.copy_(parameters["position.weight"])
            for i, own in enumerate(self.encoder.layers):
                theirs: dict[str, Tensor] = {name: parameters[f"blocks.{i}.{ours}"] for name, ours in _NAMES.items()}
                for kind in ("weight", "bias"):
                    three: list[Tensor] = [
                        parameters[f"blocks.{i}.attention.project.{part}.{kind}"] for part in ("query", "key", "value")
                    ]
                    theirs[f"self_attn.in_proj_{kind}"] = torch.cat(three)
                own.load_state_dict(theirs)
            for name, part in (("final_norm", self.encoder.norm), ("output", self.decoder)):
                assert isinstance(part, nn.Module)
                part.load_state_dict({kind: parameters[f"{name}.{kind}"] for kind in ("weight", "bias")})


_PARTS = {
    "self_attn.out_proj": "attention.merge", "linear1": "feed_forward.up", "linear2": "feed_forward.down",
    "norm1": "attention_norm", "norm2": "feed_forward_norm",
}  # fmt: skip
_NAMES = {f"{peer}.{kind}": f"{ours}.{kind}" for peer, ours in _PARTS.items() for kind in ("weight", "bias")}


class Ours(nn.Module):
    def __init__(self, size: Size, dropout: float, attention: AttentionConfig | None = None) -> None:
        super().__init__()
        everywhere = DropoutConfig(embedding=dropout, attention=dropout, activation=dropout, residual=dropout)
        self.model = LanguageModel(
            ModelConfig(
                vocab_size=size.vocabulary,
                hidden_size=size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                intermediate_size=size.inner,
                position="learned",
                max_position_embeddings=size.length,
                dropout=everywhere,
                attention=attention or AttentionConfig(),
            )
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(inputs, targets)


class Step:
    """One update of `model`; in narrow dtypes as autocast does it, with fp32 parameters."""

    def __init__(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, autocast: Callable[[], torch.autocast]
    ) -> None:
        self.model, self.inputs, self.targets, self.autocast = model, inputs, targets, autocast
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    def __call__(self) -> None:
        self._gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def _gradients(self) -> Tensor:
        self.clear()
        with self.autocast():
            loss: Tensor = self.model(self.inputs, self.targets)
        loss.backward()
        return loss

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def values(self) -> dict[str, Tensor]:
        """The loss, and the norm of the gradients of all parameters but those of mixing; nothing is updated.

        Only the norm: where rounding moves a unit across the kink of ReLU, the gradients of its weights jump.
        """
        loss = self._gradients().detach()
        shared = [
            p.grad.norm() for name, p in self.model.named_parameters() if ".mix." not in name and p.grad is not None
        ]
        return {"output": loss, "gradients": torch.stack(shared).norm()}


def _step(settings: Settings, size: Size, model: Callable[[], nn.Module]) -> Step:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = model().to(settings.torch_device)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(size.vocabulary, (2, size.batch, size.length), generator=generator).to(
        settings.torch_device
    )
    return Step(made, inputs, targets, settings.autocast)


def _peer(size: Size) -> Peer:
    ours, peer = Ours(size, 0.0), Peer(size, 0.0)
    peer.copy_from(ours.model)
    return peer


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    """A language model of 6 layers, width 512 and vocabulary 10,000, of segments of `length` tokens."""
    size = Size(10_000, settings.heads * settings.head_dim, 2048, settings.heads, 6, settings.batch or 2, length)

    def candidate(name: str, model: Callable[[], nn.Module], against: tuple[str, ...] = ()) -> Candidate:
        # mixing starts as plain attention, so that all of them compute the same
        return Candidate(name, functools.partial(_step, settings, size, model), "the same model", against)

    candidates = [candidate(PLAIN, functools.partial(Ours, size, 0.0), (PEER,))]
    for form, mix in STAGES.items():
        model = functools.partial(Ours, size, 0.0, AttentionConfig(mix=mix))
        candidates.append(candidate(f"Mixhead {form}", model, (PLAIN, PEER)))
    candidates.append(candidate(PEER, functools.partial(_peer, size)))
    return [Comparison(str(size), length, STEP, tuple(candidates))]


# the closer look

REFERENCE = "fullrank fp32"
SIZES = {"small": Size(10_000, 200, 200, 4, 4, 20, 35), "large": Size(10_000, 512, 2048, 8, 6, 4, 256)}


def closer_look(size: Size, title: str, dropout: float, rounds: int) -> dict[str, Any]:
    """Both models in fp32 and bf16: also tokens/s, GFLOP/s and the share of the machine's peak."""
    torch.manual_seed(0)
    inputs, targets = torch.randint(size.vocabulary, (2, size.batch, size.length))
    models = {PEER: Peer(size, dropout), "fullrank": Ours(size, dropout)}
    assert len({sum(p.numel() for p in model.parameters()) for model in models.values()}) == 1
    steps = {
        f"{name} {dtype}": Step(model, inputs, targets, Settings(dtype=dtype).autocast)
        for name, model in models.items()
        for dtype in ("fp32", "bf16")
    }
    gflop = size.gflop()

    def figures(timing: Timing, peak: Peak) -> dict[str, float | None]:
        speed = gflop / timing.seconds
        return {
            "tokens_per_second": size.batch * size.length / timing.seconds,
            "gflop_per_second": speed,
            "share_of_peak": speed / (peak.bf16 if timing.name.endswith("bf16") else peak.fp32),
        }

    timed = table(f"{title}: {size}, {gflop:.1f} GFLOP a step", steps, REFERENCE, rounds, figures)
    peaks = timed["peak_gflop_per_second"]
    peaks["bf16_over_fp32"] = peaks["bf16"] / peaks["fp32"]
    ours = next(row["seconds"] for row in timed["candidates"] if row["name"] == REFERENCE)
    # the bf16 step cannot be shorter than its products at the bf16 peak
    highest = ours * peaks["bf16"] / gflop
    print(f"  bf16 can be at most {highest:.2f} times as fast as our fp32")
    return {"size": str(size), "gflop_per_step": gflop, **timed, "highest_possible_bf16_speedup": highest}


def main() -> None:
    given = parse(__doc__, dropout={"type": float, "nargs": "+", "default": [0.0, 0.2]}, only={"choices": list(SIZES)})
    titles = {
        f"{name}, dropout {p:g}": (name, p) for name in SIZES for p in given.dropout if given.only in (None, name)
    }
    results = {title: closer_look(SIZES[name], title, p, given.rounds) for title, (name, p) in titles.items()}
    save(given.json, "one training step", given.rounds, results)


if __name__ == "__main__":
    main()
