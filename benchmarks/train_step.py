"""One training step of ours against an `nn.TransformerEncoder` language model of the same size.

    python benchmarks/train_step.py [--rounds 9] [--threads 1] [--dropout 0 0.2] [--only small] [--json FILE]

Peer: embeddings (plus learned positions) -> nn.TransformerEncoder (pre-norm, ReLU, causal, `is_causal` given) -> nn.Linear ->
F.cross_entropy. Both: forward, backward, gradient clipping, plain SGD (fused); the same dropout at the same places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fullrank as fr
from harness import Peak, Timing, interleave, options, save

REFERENCE = "fullrank fp32"


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


SIZES = {"small": Size(10_000, 200, 200, 4, 4, 20, 35), "large": Size(10_000, 512, 2048, 8, 6, 4, 256)}


class Peer(nn.Module):
    """What a PyTorch user writes without us."""

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


class Ours(nn.Module):
    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        places = fr.DropoutConfig(embedding=dropout, attention=dropout, activation=dropout, residual=dropout)
        self.model = fr.LanguageModel(
            fr.ModelConfig(
                vocab_size=size.vocabulary,
                hidden_size=size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                intermediate_size=size.inner,
                position="learned",
                max_position_embeddings=size.length,
                dropout=places,
            )
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(inputs, targets)


def step(model: nn.Module, inputs: Tensor, targets: Tensor, bf16: bool) -> Callable[[], None]:
    """One update; in bf16 as autocast does it, with fp32 parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return run


def measure(size: Size, dropout: float, rounds: int) -> tuple[list[Timing], Peak]:
    torch.manual_seed(0)
    inputs, targets = torch.randint(size.vocabulary, (2, size.batch, size.length))
    peer, ours = Peer(size, dropout), Ours(size, dropout)
    assert sum(p.numel() for p in peer.parameters()) == sum(p.numel() for p in ours.parameters())
    candidates = {
        "nn.TransformerEncoder fp32": step(peer, inputs, targets, False),
        "nn.TransformerEncoder bf16": step(peer, inputs, targets, True),
        "fullrank fp32": step(ours, inputs, targets, False),
        "fullrank bf16": step(ours, inputs, targets, True),
    }
    return interleave(candidates, REFERENCE, rounds=rounds)


def summary(size: Size, timings: list[Timing], peak: Peak) -> dict[str, Any]:
    """The figures of one configuration: for each candidate also tokens/s, GFLOP/s and its share of the peak."""
    tokens, gflop = size.batch * size.length, size.gflop()
    rows = []
    for timing in timings:
        speed = gflop / timing.seconds
        share = speed / (peak.bf16 if timing.name.endswith("bf16") else peak.fp32)
        rows.append(
            {
                **dataclasses.asdict(timing),
                "tokens_per_second": tokens / timing.seconds,
                "gflop_per_second": speed,
                "share_of_peak": share,
            }
        )
    peaks = {**dataclasses.asdict(peak), "bf16_over_fp32": peak.bf16 / peak.fp32}
    found = {"size": str(size), "gflop_per_step": gflop, "peak_gflop_per_second": peaks, "candidates": rows}
    ours = next(timing for timing in timings if timing.name == REFERENCE)
    # the bf16 step cannot be shorter than its products at the bf16 peak
    found["highest_possible_bf16_speedup"] = ours.seconds * peak.bf16 / gflop
    return found


def show(title: str, found: dict[str, Any]) -> None:
    peaks = found["peak_gflop_per_second"]
    print(f"{title}: {found['size']}, {found['gflop_per_step']:.1f} GFLOP a step")
    print(f"  peak of matrix products: fp32 {peaks['fp32']:.0f}, bf16 {peaks['bf16']:.0f} GFLOP/s", end="; ")
    print(f"bf16 can be at most {found['highest_possible_bf16_speedup']:.2f} times as fast as our fp32")
    print(f"  {'':<28} {'ms':>7}  time / {REFERENCE} [quartiles]  tokens/s  share of peak")
    for row in found["candidates"]:
        quartiles = f"[{row['low']:.3f}, {row['high']:.3f}]"
        figures = f"{row['ratio']:9.3f} {quartiles}  {row['tokens_per_second']:14.0f} {row['share_of_peak']:14.0%}"
        print(f"  {row['name']:<28} {1000 * row['seconds']:7.0f}  {figures}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.2])
    parser.add_argument("--only", choices=SIZES)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    results = {}
    for name, size in SIZES.items():
        if given.only in (None, name):
            for dropout in given.dropout:
                title = f"{name}, dropout {dropout:g}"
                results[title] = summary(size, *measure(size, dropout, given.rounds))
                show(title, results[title])
    save(given.json, {"what": "one training step", "rounds": given.rounds, "results": results})


if __name__ == "__main__":
    main()
