"""Whole models with memory: evaluation against Transformer-XL's published scheme, and what skipped layers save in training.

`evaluation`: tokens in a row through a model with a full memory, no gradients, loss included.

published scheme        keys and values of the memory computed again from its hidden states in every layer and segment, keys of
                        all distances too, and the published formula: (N, M, B, H) scores shifted by a column of zeros
                        (Dai et al. 2019, appendix B; written anew, with the same weights, feed-forward and loss)
published, all queries  the same, and queries of the memory, which nobody reads: the released code computes them
fullrank                the model as it is: keys, values and keys of distances are kept
fullrank, reference     the same, but scores are gathered by distance
fullrank, recomputed    the same, but keys and values of the memory are computed again

`skip`: sixteen steps of training (forward, backward, clipping, fused Adam) of 8 layers with Skip-Retain `linear` against the
same with all layers kept, and with all layers resting, which is what cannot be saved.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fullrank as fr
import train_step
from candidates import FORWARD, Candidate, Comparison, Settings, TrainingStep
from fullrank.core.memory import Memory
from fullrank.core.skip_retain import SkipRetain
from relative import published
from train_step import Size

PUBLISHED = "published scheme"
ALL_QUERIES = "published, all queries"
KEPT = "all layers kept"
SKIPPED = "Skip-Retain linear"
RESTING = "all layers resting"
STEPS = 16  # of training, in one timing


def make_model(size: Size, settings: Settings) -> fr.LanguageModel:
    """Make a model of Transformer-XL's form, away from its start."""
    torch.manual_seed(0)
    attention = fr.AttentionConfig(score="relative")
    model = train_step.make_model(size, attention=attention, position="relative", norm="post")
    with torch.no_grad():  # a start so small that all weights are equal would hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.to(settings.torch_device)


# -- evaluation --------------------------------------------------------------------------------------------------------

# (ids, targets, the memory) -> (nll per token, the next memory)
Read = Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]]


def read_as_published(model: fr.LanguageModel, all_queries: bool) -> Read:
    """Make a reader by the published scheme with the model's weights. Its memory is the hidden states of every layer."""
    length = model.memory_length
    shared = model.position.biases  # u and v, of all layers

    def make_sinusoids(count: int, width: int) -> Tensor:
        frequency = 1 / 10000 ** (torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(count - 1, -1, -1.0), frequency)  # the farthest first
        return torch.cat((angle.sin(), angle.cos()), dim=1)

    def read(ids: Tensor, targets: Tensor, memory: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        x = model.embedding(ids)
        after = []
        queries = x.shape[1]
        earlier = 0 if memory is None else memory[0].shape[1]
        table = make_sinusoids(earlier + queries, x.shape[2]).to(x.device)
        for i, block in enumerate(model.blocks):
            attention = block.attention
            project = attention.project
            split = project.split
            states = x if memory is None else torch.cat((memory[i], x), dim=1)
            after.append(states[:, -length:])
            query = project.query(states)[:, -queries:] if all_queries else project.query(x)
            far = split(nn.functional.linear(table, project.relative.weight)[None])[0].flip(1)
            heads = (split(query), split(project.key(states)), split(project.value(states)))
            out = published(*heads, far, shared.content_bias, shared.position_bias)
            x = block.attention_norm(x + attention.merge(out.transpose(1, 2).flatten(2)))
            x = block.feed_forward_norm(x + block.feed_forward(x))
        return model.output.nll(model.final_norm(x), targets), after

    def read_with_own_products(*segment: Any) -> tuple[Tensor, list[Tensor]]:
        # PyTorch's own: our layers choose the library of fp32 products themselves
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of GPUs
            with torch.backends.mkldnn.flags(enabled=torch.is_autocast_enabled("cpu")):
                return read(*segment)

    return read_with_own_products


def read_as_it_is(model: fr.LanguageModel, kernel: str, recompute: bool) -> Read:
    """Make a reader by the model as it is; with `recompute` keys and values of the memory are computed again."""

    def read(ids: Tensor, targets: Tensor, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        if recompute and memory is not None:
            forgotten = tuple(replace(layer, heads=None) for layer in memory.layers)
            memory = replace(memory, layers=forgotten)
        with fr.kernel(kernel):
            nll = model.nll(ids, targets, memory)
        return nll.per_token, nll.memory

    return read


class Reader:
    """Reads a random text segment by segment; its memory is full, and each call reads the next segment."""

    def __init__(
        self, make: Callable[[fr.LanguageModel], Read], settings: Settings, backward: bool, size: Size
    ) -> None:
        self.settings = settings
        self.size = size
        self.read_segment = make(make_model(size, settings).eval())
        self.generator = torch.Generator().manual_seed(1)
        self.memory = None
        tokens = max(64, size.length)
        segments = math.ceil(size.memory / tokens)
        self.first = torch.cat([self.read(tokens) for _ in range(segments)], dim=1)

    def __call__(self) -> Tensor:
        return self.read(self.size.length)

    def read(self, tokens: int) -> Tensor:
        """Read the next segment, and return its negative log-likelihoods."""
        ids, targets = self.size.draw(self.settings, tokens, self.generator)
        with torch.no_grad(), self.settings.autocast():
            nll, self.memory = self.read_segment(ids, targets, self.memory)
        return nll

    def clear(self) -> None:
        pass

    def values(self) -> dict[str, Tensor]:
        """Return the losses while the memory was filled, and of one more segment."""
        return {"output": torch.cat((self.first, self()), dim=1)}


EVALUATION = (
    Size(4, 410, 10, 1, 64, 256, 2100, memory=640),
    Size(4, 410, 10, 1, 128, 256, 2100, memory=1600),
    Size(4, 410, 10, 4, 150, 256, 2100, memory=150),
    Size(4, 410, 10, 1, 1, 256, 2100, memory=640),
)


def compare_evaluation(settings: Settings) -> list[Comparison]:
    """Compare ways of evaluation with a memory in four sizes."""
    ours = {
        "fullrank": partial(read_as_it_is, kernel="auto", recompute=False),
        "fullrank, reference": partial(read_as_it_is, kernel="reference", recompute=False),
        "fullrank, recomputed": partial(read_as_it_is, kernel="auto", recompute=True),
    }
    peers = {
        PUBLISHED: partial(read_as_published, all_queries=False),
        ALL_QUERIES: partial(read_as_published, all_queries=True),
    }
    comparisons = []
    for size in EVALUATION:
        candidates = []
        for name, make in (ours | peers).items():
            against = tuple(peers) if name in ours else ()
            candidates.append(Candidate(name, partial(Reader, make), "losses", against))
        tiny = replace(size, layers=1, length=8, memory=16)
        tokens = size.batch * size.length
        comparisons.append(Comparison(size, tiny, size.length, candidates, (FORWARD,), tokens))
    return comparisons


# -- training with skipped layers --------------------------------------------------------------------------------------


class SkippingSteps(TrainingStep):
    """Steps of training with a memory; each of `resting` are the layers that one of them skips."""

    def __init__(self, settings: Settings, size: Size, resting: Sequence[frozenset[int]]) -> None:
        model = make_model(size, settings).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        super().__init__(model, self.compute_loss, optimizer, 0.25)
        self.settings = settings
        self.size = size
        self.resting = resting
        self.skip = resting[0]
        self.generator = torch.Generator().manual_seed(2)
        self.memory = None

    def __call__(self) -> None:
        for skip in self.resting:
            self.skip = skip
            super().__call__()

    def compute_loss(self) -> Tensor:
        ids, targets = self.size.draw(self.settings, self.size.length, self.generator)
        with self.settings.autocast():
            parts = self.model.loss_parts(ids, targets, memory=self.memory, skip=self.skip)
        self.memory = parts.memory
        return parts.loss


def list_skipped(kind: str, layers: int) -> list[frozenset[int]]:
    """List the layers that each step skips."""
    if kind == SKIPPED:
        schedule = SkipRetain("linear", num_layers=layers)
        return [schedule.skipped(1, step) for step in range(1, STEPS + 1)]
    return [frozenset(range(layers) if kind == RESTING else ())] * STEPS


def _make_steps(kind: str, settings: Settings, backward: bool, size: Size) -> SkippingSteps:
    return SkippingSteps(settings, size, list_skipped(kind, size.layers))


SKIP = Size(8, 256, 8, 4, 64, 256, 1024, memory=64)


def compare_skipping(settings: Settings) -> list[Comparison]:
    """Compare steps of training with and without skipped layers.

    A step with the schedule should take the share of layers that run, of what layers cost, and all of the rest.
    """
    candidates = [
        Candidate(SKIPPED, partial(_make_steps, SKIPPED), SKIPPED, (KEPT, RESTING)),
        Candidate(RESTING, partial(_make_steps, RESTING), RESTING, (KEPT,)),
        Candidate(KEPT, partial(_make_steps, KEPT), KEPT),
    ]
    skipped = sum(map(len, list_skipped(SKIPPED, SKIP.layers)))
    runs = 1 - skipped / (STEPS * SKIP.layers)
    what = f"{STEPS} training steps, {runs:.3f} of the layers run"
    tokens = STEPS * SKIP.batch * SKIP.length
    tiny = replace(SKIP, batch=1, length=8, memory=8)
    return [Comparison(SKIP, tiny, SKIP.length, candidates, (what,), tokens)]
