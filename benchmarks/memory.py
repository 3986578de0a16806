"""Whole models with memory: evaluation against Transformer-XL's published scheme, and what skipped layers save in training.

    python benchmarks/memory.py [--rounds 9] [--threads 1] [--only evaluation | skip] [--json FILE]

Evaluation: tokens in a row through a model with a full memory, no gradients, loss included.
    published scheme    keys and values of the memory computed again from its hidden states in every layer and segment, keys of
                        all distances too, and the published formula: (N, M, B, H) scores shifted by a column of zeros
                        (Dai et al. 2019, appendix B; written anew, with the same weights, feed-forward and loss)
    ..., all queries    the same, and queries of the memory, which nobody reads: the released code computes them
    fullrank            the model as it is: keys, values and keys of distances are kept
    ..., reference      the same, but scores are gathered by distance
    ..., recomputed     the same, but keys and values of the memory are computed again
All of them are first compared: the losses per token agree.

Skip: a step of training (forward, backward, clipping, fused Adam) of 8 layers with Skip-Retain `linear` against the same with
all layers kept, and with all layers resting, which is what cannot be saved.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import fullrank as fr
from closer import parse, save, table
from fullrank.core.memory import Memory
from fullrank.core.skip_retain import SkipRetain
from relative import published
from timing import Peak, Timing

OURS, PUBLISHED = "fullrank", "published scheme"
STEPS = 16  # of training, in one timing


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    inner: int
    segment: int
    memory: int
    batch: int = 1
    vocabulary: int = 256

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, d {self.width}, H {self.heads}, ff {self.inner}, V {self.vocabulary}, "
            f"segment {self.segment}, memory {self.memory}, batch {self.batch}"
        )

    def model(self) -> fr.LanguageModel:
        torch.manual_seed(0)
        model = fr.LanguageModel(
            fr.ModelConfig(
                vocab_size=self.vocabulary,
                hidden_size=self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                intermediate_size=self.inner,
                memory_length=self.memory,
                position="relative",
                norm="post",
                attention=fr.AttentionConfig(score="relative"),
                dropout=fr.DropoutConfig(embedding=0.0, attention=0.0, activation=0.0, residual=0.0),
            )
        )
        with torch.no_grad():  # a start so small that all weights are equal would hide mistakes
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        return model


EVALUATION = [
    Size(4, 410, 10, 2100, 64, 640),
    Size(4, 410, 10, 2100, 128, 1600),
    Size(4, 410, 10, 2100, 150, 150, 4),
    Size(4, 410, 10, 2100, 1, 640),
]
SKIP = Size(8, 256, 8, 1024, 64, 64, 4)


Published = Callable[[Tensor, Tensor, list[Tensor] | None], tuple[Tensor, list[Tensor]]]


def as_published(model: fr.LanguageModel, all_queries: bool = False) -> Published:
    """(ids, targets, hidden states of every layer) -> (nll per token, the next hidden states), with the model's weights."""
    length, shared = model.memory_length, model.position.biases  # u and v, of all layers
    biases = (shared.content_bias, shared.position_bias)

    def sinusoids(count: int, width: int) -> Tensor:
        frequency = 1 / 10000 ** (torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(count - 1, -1, -1.0), frequency)  # the farthest first
        return torch.cat((angle.sin(), angle.cos()), dim=1)

    def run(ids: Tensor, targets: Tensor, memory: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        # PyTorch's own products: our layers choose the library of fp32 products themselves
        with torch.backends.mkldnn.flags(enabled=torch.is_autocast_enabled("cpu")):
            return read(ids, targets, memory)

    def read(ids: Tensor, targets: Tensor, memory: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        x = model.embedding(ids)
        after = []
        queries = x.shape[1]
        known = 0 if memory is None else memory[0].shape[1]
        table = sinusoids(known + queries, x.shape[2])
        for i, block in enumerate(model.blocks):
            attention = block.attention
            split = attention.project.split
            whole = x if memory is None else torch.cat((memory[i], x), dim=1)
            after.append(whole[:, -length:])
            query = attention.project.query(whole)[:, -queries:] if all_queries else attention.project.query(x)
            key, value = attention.project.key(whole), attention.project.value(whole)
            far = split(nn.functional.linear(table, attention.project.relative.weight)[None])[0].flip(1)
            out = published(split(query), split(key), split(value), far, *biases)
            x = block.attention_norm(x + attention.merge(out.transpose(1, 2).flatten(2)))
            x = block.feed_forward_norm(x + block.feed_forward(x))
        return model.output.nll(model.final_norm(x), targets), after

    return run


class Reader:
    """Reads a random text segment by segment; each call reads one segment, or eight of a single token."""

    def __init__(self, size: Size, step: Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]], bf16: bool) -> None:
        self.size, self.step, self.bf16 = size, step, bf16
        self.generator, self.memory = torch.Generator().manual_seed(1), None
        self.segments = 8 if size.segment == 1 else 1

    def __call__(self) -> Tensor:
        return torch.cat([self.read(self.size.segment) for _ in range(self.segments)], dim=1)

    def read(self, tokens: int) -> Tensor:
        """The next segment's negative log-likelihoods."""
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            drawn = torch.randint(self.size.vocabulary, (self.size.batch, tokens + 1), generator=self.generator)
            nll, self.memory = self.step(drawn[:, :-1], drawn[:, 1:], self.memory)
        return nll

    def fill(self) -> Tensor:
        """Read until the memory is full, and once more."""
        tokens = max(64, self.size.segment)
        losses = [self.read(tokens) for _ in range(-(-self.size.memory // tokens))]
        return torch.cat((*losses, self()), dim=1)


def evaluation(size: Size, rounds: int) -> dict[str, Any]:
    model = size.model().eval()

    def ours(kernel: str = "auto", recompute: bool = False) -> Callable[[Tensor, Tensor, Memory | None], Any]:
        def step(ids: Tensor, targets: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
            if recompute and memory is not None:
                memory = replace(memory, layers=tuple(replace(layer, heads=None) for layer in memory.layers))
            with fr.kernel(kernel):
                nll = model.nll(ids, targets, memory)
            return nll.per_token, nll.memory

        return step

    steps = {
        PUBLISHED: as_published(model),
        "published, all queries": as_published(model, True),
        OURS: ours(),
        "fullrank, reference": ours("reference"),
        "fullrank, recomputed": ours(recompute=True),
    }
    candidates = {
        f"{name} {'bf16' if bf16 else 'fp32'}": Reader(size, step, bf16)
        for bf16 in (False, True)
        for name, step in steps.items()
    }
    first = {name: reader.fill().float() for name, reader in candidates.items()}
    for name, losses in first.items():
        off = float((losses - first[f"{PUBLISHED} fp32"]).abs().mean())
        assert off < (0.05 if name.endswith("bf16") else 1e-4), f"{name} is off by {off:.1e}"

    def figures(timing: Timing, peak: Peak) -> dict[str, float | None]:
        return {"tokens_per_second": candidates[timing.name].segments * size.segment * size.batch / timing.seconds}

    return table(f"evaluation: {size}", candidates, f"{PUBLISHED} fp32", rounds, figures)


def training(size: Size, rounds: int) -> dict[str, Any]:
    schedule = SkipRetain("linear", num_layers=size.layers)
    drawn = [schedule.skipped(1, step) for step in range(1, STEPS + 1)]
    expected = 1 - sum(schedule.probabilities) / size.layers
    runs = 1 - sum(len(layers) for layers in drawn) / (STEPS * size.layers)
    every = frozenset(range(size.layers))

    def steps(resting: list[frozenset[int]]) -> Callable[[], None]:
        model = size.model().train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        generator, state = torch.Generator().manual_seed(2), {"memory": None}

        def run() -> None:
            for skip in resting:
                ids = torch.randint(size.vocabulary, (size.batch, size.segment + 1), generator=generator)
                optimizer.zero_grad(set_to_none=True)
                parts = model.loss_parts(ids[:, :-1], ids[:, 1:], memory=state["memory"], skip=skip)
                parts.loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
                state["memory"] = parts.memory

        return run

    candidates = {
        "all layers kept": steps([frozenset()] * STEPS),
        "Skip-Retain linear": steps(drawn),
        "all layers resting": steps([every] * STEPS),
    }
    title = (
        f"training: {size}; {runs:.3f} of the layers run in the {STEPS} steps, {expected:.3f} expected of the schedule"
    )
    timed = table(
        title,
        candidates,
        "all layers kept",
        rounds,
        lambda timing, peak: {"ms_per_step": 1000 * timing.seconds / STEPS},
        warm_up=1,
    )
    rest = next(row["ratio"] for row in timed["candidates"] if row["name"] == "all layers resting")
    predicted = rest + (1 - rest) * runs
    print(f"  that share of what layers cost, and the rest in full: {predicted:.3f}", flush=True)
    return {**timed, "layers_run": runs, "layers_run_by_schedule": expected, "predicted_ratio": predicted}


def main() -> None:
    given = parse(__doc__, only={"choices": ["evaluation", "skip"]})
    results: dict[str, Any] = {}
    if given.only != "skip":
        results["evaluation"] = {str(size): evaluation(size, given.rounds) for size in EVALUATION}
    if given.only != "evaluation":
        results["training"] = {str(SKIP): training(SKIP, given.rounds)}
    save(given.json, "models with memory", given.rounds, results)


if __name__ == "__main__":
    main()
