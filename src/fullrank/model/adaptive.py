"""Adaptive softmax: a head of frequent words and one class per tail of rare ones, each tail with its own softmax."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.registry import register
from fullrank.config.schema import ModelConfig, OutputConfig
from fullrank.errors import ConfigError
from fullrank.model.clusters import Clusters
from fullrank.model.cross_entropy import shares, token_nll, weighted_loss
from fullrank.model.dropout import Dropout
from fullrank.model.embedding import AdaptiveInput


class _Grouped(NamedTuple):
    """Targets by cluster. A tail's tokens stand together in `order`, as do those of the head before them."""

    cluster: Tensor  # (T,)
    order: Tensor  # (T,): a permutation of the tokens
    ends: list[int]  # where each cluster ends in `order`


def _softmax(logits: Tensor) -> Tensor:
    """log_softmax in fp32 at least."""
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


@register("output", "adaptive")
class AdaptiveSoftmax(nn.Module):
    """Adaptive softmax (Grave et al. 2017) in fairseq's form or Transformer-XL's.

        log p(v | h) = head(h)_v                                    for a word of cluster 0
                     = head(h)_{class i} + tail_i(h)_{v - start_i}  for a word of cluster i > 0
        head(h)   = log_softmax([W_0; C] h + [b_0; c])              h replaced by P_0' h in Transformer-XL's form
        tail_i(h) = log_softmax(W_i P_i' h + b_i)

    W_i is `weights[i]` (V_i, E // div_val^i), P_i `projections[str(i)]` (E, E // div_val^i), C `class_weight`: one row for each
    tail, in their order. `tied` takes W_i, and `tied_projections` P_i of the tails, from the adaptive input; they are not
    parameters of this layer then. P_0 is never shared. With div_val 1 there are no projections and the forms are one.
    Built from a `ModelConfig`, or from an `OutputConfig` and the sizes it lacks; tied, it needs the `embedding`.
    Differs from Transformer-XL's code: nll is in the order of the tokens, and classes are not stored in reverse. From
    fairseq's: no square projections where its factor is 1.
    """

    def __init__(
        self,
        config: ModelConfig | OutputConfig,
        embedding: nn.Module | None = None,
        *,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(config, ModelConfig):
            if vocab_size is not None or hidden_size is not None:
                raise ConfigError("AdaptiveSoftmax: a ModelConfig has its own sizes; change them there")
            vocab_size, hidden_size, config = config.vocab_size, config.hidden_size, config.output
        if hidden_size is None:
            raise ConfigError("AdaptiveSoftmax: give a ModelConfig, or an OutputConfig with vocab_size and hidden_size")
        self.clusters = Clusters.of("model.output", config.cutoffs, config.div_val or 1, vocab_size, hidden_size)
        if config.tied and not (isinstance(embedding, AdaptiveInput) and embedding.clusters == self.clusters):
            raise ConfigError(
                "model.output.tied: an adaptive softmax is tied to an AdaptiveInput with the same clusters"
            )
        # in a tuple, so that the embedding is not registered as a child and its tensors are saved once
        self._tied: tuple[Any, ...] = (embedding,) if config.tied else ()
        self._tied_projections = bool(config.tied_projections)
        sizes, widths = self.clusters.sizes, self.clusters.widths
        tails = range(1, len(sizes))
        self.weights = nn.ParameterList(
            torch.empty(n, width) for n, width in zip(sizes, widths, strict=True) if not config.tied
        )
        self.biases = nn.ParameterList(torch.empty(n) for n in sizes if config.bias)
        own = [0] if config.form == "transformer_xl" else []
        own += [] if self._tied_projections else list(tails)
        self.projections = nn.ParameterDict(
            {str(i): nn.Parameter(torch.empty(hidden_size, widths[i])) for i in own if self.clusters.projected}
        )
        self.class_weight = nn.Parameter(torch.empty(len(tails), hidden_size))
        self.class_bias = nn.Parameter(torch.empty(len(tails))) if config.bias else None
        self.tail_dropout = Dropout(config.tail_dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in fairseq: matrices Xavier-uniform, an untied head as one matrix; biases, which it lacks, 0."""
        tails, hidden = self.class_weight.shape
        head = (6 / (hidden + tails + (self.clusters.sizes[0] if len(self.weights) else 0))) ** 0.5
        nn.init.uniform_(self.class_weight, -head, head)
        for i, weight in enumerate(self.weights):
            nn.init.uniform_(weight, -head, head) if i == 0 else nn.init.xavier_uniform_(weight)
        for projection in self.projections.values():
            nn.init.xavier_uniform_(projection)
        for bias in (*self.biases, *([] if self.class_bias is None else [self.class_bias])):
            nn.init.zeros_(bias)

    # -- the matrices, wherever they are stored -----------------------------------------------------------------------

    def matrix(self, i: int) -> Tensor:
        """W_i (V_i, E // div_val^i), the own one or the input's."""
        weight: Tensor = self._tied[0].weights[i] if self._tied else self.weights[i]
        return weight

    def bias(self, i: int) -> Tensor | None:
        """b_i (V_i,)"""
        return self.biases[i] if len(self.biases) else None

    def projection(self, i: int) -> Tensor | None:
        """P_i (E, E // div_val^i), the own one or the input's; None where hidden states are read as they are."""
        if str(i) in self.projections:
            return self.projections[str(i)]
        shared = i > 0 and self._tied_projections and self.clusters.projected
        return self._tied[0].projections[i] if shared else None

    def _head(self) -> tuple[Tensor, Tensor | None]:
        """[W_0; C] and [b_0; c]: words of the head, then a row for each tail."""
        bias = self.bias(0)
        if bias is not None:
            assert self.class_bias is not None
            bias = torch.cat((bias, self.class_bias))
        return torch.cat((self.matrix(0), self.class_weight)), bias

    def _read(self, i: int, hidden: Tensor) -> Tensor:
        """What W_i is multiplied with: h, or P_i' h."""
        projection = self.projection(i)
        if projection is None:
            return hidden
        hidden = F.linear(hidden, projection.t())
        return self.tail_dropout(hidden[None])[0] if i > 0 else hidden

    # -- values -------------------------------------------------------------------------------------------------------

    def forward(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (B, N, V), in fp32 at least."""
        return self.log_prob(hidden)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (B, N, V), in fp32 at least: every tail for every token."""
        words = self.clusters.sizes[0]
        head = _softmax(F.linear(self._read(0, hidden), *self._head()))
        parts = [head[..., :words]]
        for i in range(1, len(self.clusters.sizes)):
            tail = _softmax(F.linear(self._read(i, hidden), self.matrix(i), self.bias(i)))
            parts.append(tail + head[..., words + i - 1, None])
        return torch.cat(parts, dim=-1)

    @torch.compiler.disable
    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(B, N) nats, in the order of the tokens; a tail is computed for its own tokens only."""
        rows, ids = hidden.flatten(0, -2), targets.flatten()
        groups = self._grouped(ids)
        weight, bias = self._head()
        head = token_nll(self._read(0, rows), weight, bias, self._head_targets(ids, groups))
        found = [
            token_nll(self._read(i, own), self.matrix(i), self.bias(i), chosen)
            for i, (_, own, chosen) in enumerate(self._tails(rows, ids, groups), start=1)
        ]
        outside = groups.order[groups.ends[0] :]
        return head.index_add(0, outside, torch.cat(found)).view(targets.shape)

    @torch.compiler.disable
    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Weighted means, nats per token, two scalars: the smoothed loss and, without gradient, sum(w nll) / sum(w).

        Gradients are formed in the forward pass. Label smoothing e is that of any softmax over the vocabulary, target
        (1 - e) [v = x] + e / V: exact, but then every token has a say in every tail, so each is computed for all tokens.
        """
        rows, ids, e = hidden.flatten(0, -2), targets.flatten(), label_smoothing
        scale = shares(weights, targets, torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        groups = self._grouped(ids)
        weight, bias = self._head()
        read = self._read(0, rows)
        loss, nll = weighted_loss(read, weight, bias, self._head_targets(ids, groups), scale, e)
        if e:
            loss = loss + e * self._uneven(read, weight, bias, scale)
        for i, (places, own, chosen) in enumerate(self._tails(rows, ids, groups), start=1):
            even = e * self.clusters.sizes[i] / sum(self.clusters.sizes)  # what smoothing gives to this tail
            mass = 1 - e + even
            matrix, bias = self.matrix(i), self.bias(i)
            part, plain = weighted_loss(self._read(i, own), matrix, bias, chosen, scale[places] * mass, even / mass)
            loss, nll = loss + part, nll + plain / mass
            if e:
                others = torch.cat((groups.order[: groups.ends[i - 1]], groups.order[groups.ends[i] :]))
                read, anything = self._read(i, rows.index_select(0, others)), torch.zeros_like(others)
                loss = loss + weighted_loss(read, matrix, bias, anything, scale[others] * even, label_smoothing=1.0)[0]
        return loss, nll

    def _uneven(self, read: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
        """Smoothing over the n entries of the head, corrected for classes that stand for V_i words, words for one:

        sum_v (1 / n - q_v) s_v,   q_v = 1 / V for a word and V_i / V for class i;  linear in the logits s, as sum(q) = 1.
        """
        sizes, count = self.clusters.sizes, weight.shape[0]
        with torch.autocast(read.device.type, enabled=False):
            uneven = scale.new_full((count,), 1 / count - 1 / sum(sizes))
            for i, size in enumerate(sizes[1:]):
                uneven[sizes[0] + i] = 1 / count - size / sum(sizes)
            logits = (scale @ read.to(scale.dtype)) @ (uneven @ weight.to(scale.dtype))  # of the tokens' weighted mean
            return logits if bias is None else logits + scale.sum() * (uneven @ bias.to(scale.dtype))

    # -- targets ------------------------------------------------------------------------------------------------------

    def _grouped(self, ids: Tensor) -> _Grouped:
        """One sort, and the one question that a device has to answer: how many tokens each cluster has."""
        cluster = self.clusters.number(ids)
        ordered, order = cluster.sort(stable=True)
        last = torch.arange(len(self.clusters.sizes), device=ids.device)
        return _Grouped(cluster, order, torch.searchsorted(ordered, last, right=True).tolist())

    def _tails(self, rows: Tensor, ids: Tensor, groups: _Grouped) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each tail its tokens: their places, hidden states and targets, these counted from the tail's first word."""
        places = groups.order[groups.ends[0] :]
        counts = [last - first for first, last in itertools.pairwise(groups.ends)]
        chosen = [ids[own] - start for own, start in zip(places.split(counts), self.clusters.starts[1:], strict=True)]
        return list(zip(places.split(counts), rows.index_select(0, places).split(counts), chosen, strict=True))

    def _head_targets(self, ids: Tensor, groups: _Grouped) -> Tensor:
        return torch.where(groups.cluster == 0, ids, self.clusters.sizes[0] - 1 + groups.cluster)

    def flops_per_token(self) -> float:
        """Multiply-adds, counted as two, of the nll of one token of a text that follows Zipf's law."""
        cost = [
            self.matrix(i).numel() + (0 if (p := self.projection(i)) is None else p.numel())
            for i in range(len(self.clusters.sizes))
        ]
        tails = sum(share * own for share, own in zip(self.clusters.shares()[1:], cost[1:], strict=True))
        return 2.0 * (cost[0] + self.class_weight.numel() + tails)

    def extra_repr(self) -> str:
        tied = f", tied={bool(self._tied)}, tied_projections={self._tied_projections}"
        return f"sizes={list(self.clusters.sizes)}, widths={list(self.clusters.widths)}{tied}"
