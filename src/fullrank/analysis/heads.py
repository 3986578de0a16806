"""Attention heads one by one: what a model loses without each (Skip Cross-head Table 3), and how alike their outputs are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.core.errors import InputError
from fullrank.core.output import IGNORED
from fullrank.core.trace import LayerTrace
from fullrank.evaluation.statistics import Interval, compute_paired_interval
from fullrank.models import LoadedModel, open_model
from fullrank.records import Column, HeatMap, Record, Table, measurement
from fullrank.text import Text, rows_of

MASKED_SHARE = 0.15  # of the tokens of a text, where masked ones are predicted
_AT_ONCE = 1024  # tokens that a model reads in one pass


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """The heads of one layer.

    nll (H, S): nats per token of each text without the head. change (H,): of the perplexity of all texts.
    intervals: 95 % intervals of the changes over the choice of texts, None where there are too few or all are equal.
    similarity (H, H): linear CKA of the outputs of two heads, from 0 to 1 (the same but for rotation and scale).
    """

    nll: np.ndarray
    change: np.ndarray
    intervals: tuple[Interval | None, ...]
    similarity: np.ndarray

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation (n - 1) of the changes over heads, as in Table 3; None for one head."""
        return self.change.std(ddof=1) if len(self.change) > 1 else None

    @property
    def redundancy(self) -> float | None:
        """Mean similarity of two different heads; None for one head."""
        heads = len(self.similarity)
        if heads < 2:
            return None
        of_pairs = self.similarity.sum() - np.trace(self.similarity)
        return of_pairs / (heads * (heads - 1))


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of a model, in the order of its layers.

    nll (S,): nats per token of each of S texts of `length` tokens, all heads in place. objective: the tokens that count.
    weights: how attention was computed.
    """

    layers: tuple[LayerHeads, ...]
    nll: np.ndarray
    objective: str
    length: int
    weights: str

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll.mean())

    def to_records(self) -> Iterator[Record]:
        protocol = f"{self.objective}, weights {self.weights}"
        yield Record({}, "perplexity", self.perplexity, "perplexity", protocol=protocol)
        for number, layer in enumerate(self.layers):
            labels = {"layer": number}
            changes = zip(layer.change, layer.intervals, strict=True)
            for head, (change, interval) in enumerate(changes):
                of_head = {**labels, "head": head}
                yield Record(of_head, "change", change, "perplexity", interval, protocol)
            if layer.deviation is not None:
                yield Record(labels, "deviation", layer.deviation, "perplexity", protocol=protocol)
                yield Record(labels, "similarity", layer.redundancy)
            for (head, other), value in np.ndenumerate(layer.similarity):
                yield Record({**labels, "head": head, "other head": other}, "similarity", value)


@contextmanager
def ablate_head(mix: Any, head: int) -> Iterator[None]:
    """Run the block with one head that puts out nothing, O_i = 0.

    Other heads go on reading its weights.
    """
    finish = mix.finish
    mix.finish = lambda out: finish(out).index_fill(1, torch.tensor(head, device=out.device), 0)
    try:
        yield
    finally:
        del mix.finish


def heads(model: nn.Module | LoadedModel, input_ids: Tensor | Iterable[Tensor]) -> Heads:
    """Measure what a model loses without each of its heads, and how alike their outputs are.

        change_i = exp(nats_i) - exp(nats)     with nats per token over all texts

    A head i is ablated where heads are merged: its output O_i = P'_i V_i is zero, as if its columns of the output
    projection were. With mixing, P'_i is its mixed weights. Other heads go on reading P_i. The interval of a change is
    Student's of the differences of nats over texts (paired), put into the same equation. Similarity is linear CKA
    (Kornblith et al. 2019, §3), ||C_ij||^2 / (||C_ii|| ||C_jj||) with the covariances C of O_i and O_j over all tokens.

    model and input_ids are as for `spectrum`. Each text is read by itself, and its first token is not predicted. A
    model with memory reads the texts as one text in segments. A model with a `LoadedModel.mask_id` predicts 15 % of the
    tokens of each text, read as <mask>. They are chosen once for all heads and never among its marks.
    Raises InputError for models without attention weights or vocabulary layer, for models that predict masked tokens
    and have no `mask_id`, for texts of one token, and for the texts that `spectrum` refuses.
    """
    loaded = open_model(model)
    texts = rows_of(input_ids)
    loaded.require({"attention", "logits"}, "heads")
    objective, batches = predictions(loaded, texts)
    similarities = _similarities(loaded.attentions(texts))
    attention = loaded.attention_layers
    ablated = open_model(attention.module)
    nll = _nll(ablated, batches)
    layers = []
    for stage, similarity in zip(attention.stages, similarities, strict=True):
        without = []
        for head in range(stage.size.num_heads):
            with ablate_head(stage.mix, head):
                without.append(_nll(ablated, batches))
        layers.append(_compare(nll, np.stack(without), similarity))
    return Heads(tuple(layers), nll, objective, texts[0].shape[1], attention.weights)


def nats_per_token(model: LoadedModel, input_ids: Tensor | Iterable[Tensor]) -> np.ndarray:
    """Measure the nats per token of each text (S,), of the tokens that `heads` looks at."""
    return _nll(model, predictions(model, rows_of(input_ids))[1])


def _compare(nll: np.ndarray, without: np.ndarray, similarity: np.ndarray) -> LayerHeads:
    perplexity = math.exp(nll.mean())
    intervals: list[Interval | None] = []
    for of_head in without:
        interval = compute_paired_interval(nll.tolist(), of_head.tolist())
        if interval is not None:
            ends = [perplexity * math.expm1(end) for end in interval]
            interval = Interval(*ends)
        intervals.append(interval)
    differences = (without - nll).mean(axis=1)
    change = perplexity * np.expm1(differences)
    return LayerHeads(without, change, tuple(intervals), similarity)


Batch = tuple[Tensor, Tensor]  # inputs and targets (B, N); -100 at targets that do not count


def predictions(model: LoadedModel, texts: list[Tensor]) -> tuple[str, list[Batch]]:
    """Choose the tokens of texts (1, N) that are predicted (see `heads`).

    Returns what they are in words, and the batches in which they are predicted.
    Raises InputError for a model that predicts masked tokens and has no `mask_id`, and for texts of one token.
    """
    tokens = torch.cat(texts).cpu()
    length = tokens.shape[1]
    if model.mask_id is None and model.is_masked:
        raise InputError(
            f"{model.name}: predicts masked tokens; open it with its tokenizer, or set mask_id of fr.open_model(...)"
        )
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    objective = "next tokens"
    along = 0  # rows
    size = max(1, _AT_ONCE // length)
    if getattr(model.fullrank_model, "memory_length", 0):
        stream = tokens.flatten()[None]
        inputs, targets = stream[:, :-1], stream[:, 1:]
        objective = "next tokens, with memory"
        along = 1  # segments
        size = length
    elif model.mask_id is not None:
        count = max(1, round(MASKED_SHARE * length))
        masked = _choose_masked(tokens, count, model.marks)
        inputs = tokens.masked_fill(masked, model.mask_id)
        targets = tokens.masked_fill(~masked, IGNORED)
        objective = f"{count} masked tokens a text"
    elif length < 2:
        raise InputError("input_ids: texts of two tokens or more, as the first one is not predicted; given 1")
    batches = zip(inputs.split(size, along), targets.split(size, along), strict=True)
    return objective, list(batches)


def _choose_masked(tokens: Tensor, count: int, marks: Sequence[int]) -> Tensor:
    """Choose which tokens (B, N) are masked: `count` of each row, always the same ones, and marks after all others."""
    draws = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0))
    draws[torch.isin(tokens, torch.tensor([*marks]))] = 2.0
    chosen = draws.argsort(1)[:, :count]
    return torch.zeros_like(tokens, dtype=torch.bool).scatter(1, chosen, True)


def _nll(model: LoadedModel, batches: list[Batch]) -> np.ndarray:
    means = []
    for nll, (_, targets) in zip(model.nlls(batches), batches, strict=True):
        counted = nll.cpu()[targets != IGNORED].double()
        means.append(counted.view(len(targets), -1).mean(1))
    return torch.cat(means).numpy()


def _similarities(traces: Iterable[Sequence[LayerTrace]]) -> list[np.ndarray]:
    """Compute the linear CKA (H, H) of the outputs O_i = P'_i V_i of heads, for every layer, over the tokens of all texts."""
    tokens = 0
    totals: defaultdict[int, Any] = defaultdict(int)  # by layer, (H D,)
    products: defaultdict[int, Any] = defaultdict(int)  # by layer, (H D, H D)
    for layers in traces:
        for number, layer in enumerate(layers):
            assert layer.values is not None
            out = layer.mixed.double() @ layer.values.double()
            flat = out.transpose(1, 2).flatten(0, 1).flatten(1)  # (B N, H D)
            totals[number] += flat.sum(0)
            products[number] += flat.T @ flat
        tokens += len(flat)
    similarities = []
    for number, layer in enumerate(layers):
        sizes = (layer.mixed.shape[1], -1)
        mean_product = torch.outer(totals[number], totals[number]) / tokens
        covariance = products[number] - mean_product
        blocks = covariance.unflatten(0, sizes).unflatten(2, sizes)
        square = blocks.square().sum((1, 3))
        norm = square.diagonal().sqrt()
        norms = torch.outer(norm, norm).clamp_min(1e-300)
        similarities.append((square / norms).cpu().numpy())
    return similarities


def compare_deviations(first: list[Record], other: list[Record]) -> Iterator[Record]:
    """Yield the change of the deviation over heads from the first model to another, in percent, by layer (Table 3)."""
    before = {record.labels["layer"]: record.value for record in first if record.measure == "deviation"}
    for record in other:
        former = before.get(record.labels.get("layer"))
        if record.measure == "deviation" and record.value is not None and former:
            change = 100 * (record.value / former - 1)
            yield Record(record.labels, "deviation change", change, "%")


@measurement(
    "heads",
    needs={"attention", "logits"},
    texts=16,
    compare=compare_deviations,
    table=(
        Table(rows="layer", columns="head", measure="change", format="+.3f", title="Change without a head"),
        Table(
            rows="layer",
            columns=(
                Column("deviation", "deviation over heads", format=".3f"),
                Column("deviation change", format="+.1f"),
                Column("similarity", "mean similarity", format=".2f"),
            ),
        ),
    ),
    plot=(
        HeatMap("head", "layer", "change", ("model",), title="What a model loses without each head"),
        HeatMap("other head", "head", "similarity", title="How alike the outputs of two heads are (linear CKA)"),
    ),
)
def measure_heads(model: LoadedModel, text: Text) -> Iterator[Record]:
    """Ablate each head in turn: the change of perplexity by layer and head (Skip Cross-head Table 3).

    A head is ablated where heads are merged: its output is zero; other heads go on reading its weights where they are mixed.
    Deviation: over the heads of a layer. Similarity: linear CKA of the outputs of two heads. Intervals: 95 %, over segments.
    An encoder predicts masked tokens, 15 % of each segment.
    """
    return heads(model, text).to_records()
