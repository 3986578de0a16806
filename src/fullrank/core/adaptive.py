"""Adaptive softmax: a head of frequent words and one class per tail of rare ones, each tail with its own softmax."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fullrank.core.clusters import Clusters
from fullrank.core.config import ModelConfig, OutputConfig
from fullrank.core.dropout import Dropout
from fullrank.core.embedding import AdaptiveInput
from fullrank.core.errors import ConfigError
from fullrank.core.latents import Components, Latents
from fullrank.core.registry import register
from fullrank.core.vocabulary_layer import sizes_of
from fullrank.kernels.cross_entropy import Form, counted, flat, token_nll, weighted_loss
from fullrank.kernels.cross_entropy_reference import logits, mix, weighted


class _Grouped(NamedTuple):
    """Targets by cluster. A tail's tokens stand together in `order`, as do those of the head before them."""

    cluster: Tensor  # (T,)
    order: Tensor  # (T,): a permutation of the tokens
    ends: list[int]  # where each cluster ends in `order`


_SCRATCH = 1 << 23  # log-probabilities of all components that a mixture holds at a time


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
    As a mixture of softmaxes (`components: adaptive`), log p(v | g) = log sum_k pi_k p(v | h_k) with the h_k and pi of
    `mixture` (`Latents`): the class of a word and the word in its tail are of one component.
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
        config, vocab_size, hidden_size = sizes_of("AdaptiveSoftmax", config, vocab_size, hidden_size)
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
        self.form = Form(config.normalize, config.epsilon)
        self.mixture = Latents(config, hidden_size) if config.kind == "mixture_of_softmaxes" else None
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
        """Log-probabilities (B, N, V), in fp32 at least: every tail for every token; of a mixture a few tokens at a time."""
        if self.mixture is None:
            return self._each_log_prob(hidden)
        return self._few_by_few(self.mixture(hidden)).view(*hidden.shape[:-1], sum(self.clusters.sizes))

    @torch.compiler.disable
    def _few_by_few(self, components: Components) -> Tensor:
        return torch.cat([self._checkpointed(self._mixed_log_prob, *some) for some in self._few(components)])

    def _each_log_prob(self, hidden: Tensor) -> Tensor:
        """log p(v | h), hidden (..., E) -> (..., V)."""
        words = self.clusters.sizes[0]

        def softmax(i: int, weight: Tensor, bias: Tensor | None) -> Tensor:
            return torch.log_softmax(logits(self._read(i, hidden), weight, bias, self.form.normalize), dim=-1)

        head = softmax(0, *self._head())
        parts = [head[..., :words]]
        for i in range(1, len(self.clusters.sizes)):
            parts.append(softmax(i, self.matrix(i), self.bias(i)) + head[..., words + i - 1, None])
        return torch.cat(parts, dim=-1)

    def _mixed_log_prob(self, hidden: Tensor, log_prior: Tensor) -> Tensor:
        """log sum_k pi_k p(v | h_k), hidden (T, K, E), log_prior (T, K) -> (T, V)."""
        return mix(self._each_log_prob(hidden), log_prior, self.form.epsilon)

    def _few(self, components: Components) -> Iterator[tuple[Tensor, Tensor]]:
        hidden, log_prior = components
        tokens = max(1, _SCRATCH // (sum(self.clusters.sizes) * log_prior.shape[1]))
        return zip(hidden.split(tokens), log_prior.split(tokens), strict=True)

    def _checkpointed(self, compute: Callable[..., Any], *given: Any) -> Any:
        """`compute(*given)`, of which only what is given is kept for the backward pass."""
        return checkpoint(compute, *given, use_reentrant=False) if torch.is_grad_enabled() else compute(*given)

    @torch.compiler.disable
    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(B, N) nats, in the order of the tokens; a tail is computed for its own tokens only."""
        ids = flat(hidden, targets)
        groups = self._grouped(ids)
        states, log_prior = self._components(hidden)
        inside = self._inside(states, ids, groups)
        weight, bias = self._head()
        of = self._head_targets(ids, groups)
        if log_prior is None:
            found = token_nll(self._read(0, states[:, 0]), weight, bias, of, form=self.form) + inside[:, 0]
        else:
            found = token_nll(self._read(0, states), weight, bias, of, log_prior=log_prior - inside, form=self.form)
        return found.view(targets.shape)

    def _components(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states (T, K, E), and the log-prior of a mixture."""
        return self.mixture(hidden) if self.mixture is not None else (hidden.flatten(0, -2)[:, None], None)

    def _inside(self, states: Tensor, ids: Tensor, groups: _Grouped) -> Tensor:
        """(T, K): nll of each target within its tail, of each component; 0 for words of the head."""
        form, mixtures = Form(self.form.normalize), states.shape[1]
        found = [
            token_nll(
                self._read(i, own.flatten(0, 1)),
                self.matrix(i),
                self.bias(i),
                chosen.repeat_interleave(mixtures),
                form=form,
            )
            for i, (_, own, chosen) in enumerate(self._tails(states, ids, groups), start=1)
        ]
        outside, nll = groups.order[groups.ends[0] :], torch.cat(found).view(-1, mixtures)
        return nll.new_zeros(states.shape[:2]).index_add(0, outside, nll)

    @torch.compiler.disable
    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Weighted means, nats per token, two scalars: the smoothed loss and, without gradient, sum(w nll) / sum(w).

        Gradients are formed in the forward pass. Label smoothing e is that of any softmax over the vocabulary, target
        (1 - e) [v = x] + e / V: exact, but then every token has a say in every tail, so each is computed for all tokens (of a
        mixture a few tokens at a time, and once more in the backward pass).
        """
        e = label_smoothing
        ids, scale = counted(hidden, targets, weights, e)
        states, log_prior = self._components(hidden)
        if log_prior is None:
            return self._loss(states[:, 0], ids, scale, e)
        if e:
            return self._smoothed_loss(Components(states, log_prior), ids, scale, e)
        groups = self._grouped(ids)
        joint = log_prior - self._inside(states, ids, groups)
        weight, bias = self._head()
        of = self._head_targets(ids, groups)
        return weighted_loss(self._read(0, states), weight, bias, of, scale, log_prior=joint, form=self.form)

    def _loss(self, rows: Tensor, ids: Tensor, scale: Tensor, e: float) -> tuple[Tensor, Tensor]:
        """`loss` without a mixture: rows (T, E), and how much each token counts (T,)."""
        sizes, form = self.clusters.sizes, self.form
        groups = self._grouped(ids)
        weight, bias = self._head()
        # words of each entry of the head, filled in where they are: a copy from here would wait for a GPU
        counts = torch.cat((scale.new_ones(sizes[0]), *(scale.new_full((1,), size) for size in sizes[1:])))
        of = self._head_targets(ids, groups)
        loss, nll = weighted_loss(
            self._read(0, rows), weight, bias, of, scale, e, spread=counts / sum(sizes), form=form
        )
        for i, (places, own, chosen) in enumerate(self._tails(rows, ids, groups), start=1):
            even = e * sizes[i] / sum(sizes)  # what smoothing gives to this tail
            mass = 1 - e + even
            matrix, bias = self.matrix(i), self.bias(i)
            part, plain = weighted_loss(
                self._read(i, own), matrix, bias, chosen, scale[places] * mass, even / mass, form=form
            )
            loss, nll = loss + part, nll + plain / mass
            if e:
                others = torch.cat((groups.order[: groups.ends[i - 1]], groups.order[groups.ends[i] :]))
                read, anything = self._read(i, rows.index_select(0, others)), torch.zeros_like(others)
                loss = loss + weighted_loss(read, matrix, bias, anything, scale[others] * even, 1.0, form=form)[0]
        return loss, nll

    def _smoothed_loss(self, components: Components, ids: Tensor, scale: Tensor, e: float) -> tuple[Tensor, Tensor]:
        """Of a mixture with label smoothing: which component explains a word depends on the word, in every tail."""

        def few(hidden: Tensor, log_prior: Tensor, ids: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            log_prob = self._mixed_log_prob(hidden, log_prior)
            return weighted(log_prob, ids, scale, e, None), weighted(log_prob.detach(), ids, scale, 0.0, None)

        loss, nll, start = scale.new_zeros(()), scale.new_zeros(()), 0
        for hidden, log_prior in self._few(components):
            at = slice(start, start := start + len(hidden))
            more = self._checkpointed(few, hidden, log_prior, ids[at], scale[at])
            loss, nll = loss + more[0], nll + more[1].detach()
        return loss, nll

    # -- targets ------------------------------------------------------------------------------------------------------

    def _grouped(self, ids: Tensor) -> _Grouped:
        """One sort, and the one question that a device has to answer: how many tokens each cluster has."""
        cluster = self.clusters.number(ids)
        ordered, order = cluster.sort(stable=True)
        last = torch.arange(len(self.clusters.sizes), device=ids.device)
        return _Grouped(cluster, order, torch.searchsorted(ordered, last, right=True).tolist())

    def _tails(self, rows: Tensor, ids: Tensor, groups: _Grouped) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each tail its tokens: places, hidden states (rows of `rows`) and targets, counted from the tail's first word."""
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
        mixtures = 1 if self.mixture is None else self.mixture.mixtures
        return 2.0 * mixtures * (cost[0] + self.class_weight.numel() + tails)

    def extra_repr(self) -> str:
        tied = f", tied={bool(self._tied)}, tied_projections={self._tied_projections}"
        return f"sizes={list(self.clusters.sizes)}, widths={list(self.clusters.widths)}{tied}"
