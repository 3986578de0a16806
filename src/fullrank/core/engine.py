"""The seam between the definition and the engines, which compute the same faster (`fullrank/kernels`).

The definition asks the engines first, and computes by itself where they answer None. The package sets `load`, `load_storage`
and `generate`; an exported model has none of them, and works without engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .layout import Layout


@dataclass(frozen=True)
class Distances:
    """The relative term of a score: keys (H, T, D) of the distances in `layout.spans`, the smallest first; u and v (H, D)."""

    keys: Tensor
    u: Tensor
    v: Tensor


@dataclass(frozen=True)
class Problem:
    """One call of weighted attention, as tensors and plain values.

        A_j(n, m) = s Q_j(n) . K_j(m),   with distances  s ((Q_j(n) + u_j) . K_j(m) + (Q_j(n) + v_j) . R_j(p_n - p_m))
        A'_i = sum_j L_ji A_j,   P_j = normalize(A'_j),   P'_i = sum_j M_ji P_j,   O_i = dropout(P'_i) V_i

    query (B, H, N, D), keys and values (B, H, M, D) -> (B, H, N, D), in the dtype of the values.
    mixing: M as (H, H), or (B, N, H, H) where it depends on the query; None is the identity.
    scoring: L, which mixes scores before the mask, in the same shapes.
    key_mixing, key_scoring: what each key adds to M and L, (B, M, H, H); None is nothing.
    convolution: w (H, Q, C) in place of L, A'_j(n, m) = sum_ab w_j(a, b) A_j(n - a, m + b), a = 0 in the last of the Q rows.
    normalize: the name by which engines know the normaliser.
    dropout: the probability p that a mixed weight is dropped; the others are divided by 1 - p. It is 0 outside training.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mixing: Tensor | None
    distances: Distances | None
    layout: Layout
    scale: float
    normalize: str
    dropout: float
    scoring: Tensor | None = None
    key_mixing: Tensor | None = None
    key_scoring: Tensor | None = None
    convolution: Tensor | None = None


@dataclass(frozen=True)
class Pairs:
    """One call of multi-linear attention with a row of its output map for each pair of positions.

        O_i = sum_jm (sum_r q_ir K_jr V_mr) W_jm        over the keys j and the values m that query i sees

    query q (B, N, R), multiplied by the core; keys and values (B, M, R), 0 where a position has no token -> (B, N, E).
    weight W (P, P, E): its leading M x M x E is used.
    causal: query i is position M - N + i, and sees those that are not after it; otherwise it sees all.
    visible (1 or B, N, M): the positions that a query sees, instead of `causal`.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    weight: Tensor
    causal: bool
    visible: Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """Tokens whose decayed sums are asked for, A_s(i) = sum_{j <= i} a_s^(p_i - p_j) x_j for the last N of M.

    tokens x (B, M, R), log_decay log a (S,) -> (B, N, S, R), all in the dtype of the sums.
    The last N tokens stand at consecutive positions.
    before (M - N,): how far each earlier token is from the first of the N, less one.
    state (B, S, R): the sums before the first token; only where M is N.
    """

    tokens: Tensor
    log_decay: Tensor
    before: Tensor
    state: Tensor | None = None


@dataclass(frozen=True)
class Cluster:
    """A part of the vocabulary that shares a softmax: its scores are W x + b with x = dropout(P' h), or x = h without P.

    weight W (V_i, E_i), bias b (V_i,), projection P (E, E_i).
    """

    weight: Tensor
    bias: Tensor | None
    projection: Tensor | None = None
    dropout: float = 0.0  # 0 outside training


@dataclass(frozen=True)
class Components:
    """The K softmaxes of a vocabulary layer for T tokens, as tensors and plain values.

        p(v) = sum_k pi_k p_k(v)
        p_k(v) = head_k(v) for a word of the first cluster, head_k(class i) tail_ik(v) for a word of cluster i > 0

    states (T, K, E). log_prior (T, K) is log pi; None: K is 1. clusters: the first holds its words and then a class for each
    other cluster; a mixture has one. normalize: `softmax`, or `sigsoftmax` = softmax of s + log sigmoid(s).
    """

    states: Tensor
    log_prior: Tensor | None
    clusters: tuple[Cluster, ...]
    normalize: str = "softmax"


class Engines(Protocol):
    """Functions that compute what the definition computes, faster; None where they leave a call to the definition.

    A string in place of a problem is the reason why no engine can compute the call.
    They raise InputError if an engine was asked for by name that computes no such call.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Compute x W' + b (.., V).

        Args:
            x: (.., E).
            weight: W (V, E).
            bias: b (V,); None for 0.
        """

    def attend(self, problem: Problem | str) -> Tensor | None:
        """Compute weighted attention, (B, H, N, D)."""

    def multilinear_pairs(self, problem: Pairs) -> Tensor | None:
        """Compute multi-linear attention over pairs of positions, (B, N, E)."""

    def compute_decayed_sums(self, problem: Tokens | str) -> Tensor | None:
        """Compute decayed sums, (B, N, S, R)."""

    def vocabulary_nll(self, components: Components, ids: Tensor) -> Tensor | None:
        """Compute -log p(ids) (T,) in nats, in fp32 at least.  ids (T,)."""

    def vocabulary_loss(
        self, components: Components, ids: Tensor, scale: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor] | None:
        """Compute sum_t scale_t loss_t and, without gradient, sum_t scale_t nll_t.

        Args:
            components: the softmaxes of the vocabulary layer for T tokens.
            ids: the targets (T,).
            scale: (T,), without gradient.
            label_smoothing: e; the target is (1 - e) [v = ids] + e / V.
        """


class NoEngines(Engines):
    """The definition computes everything, as in an exported model."""


def _needs_package(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError(
        "this needs the package fullrank; an exported model has save_pretrained, from_pretrained and generate of its own"
    )


load: Callable[[], Engines] = NoEngines
load_storage: Callable[[], Any] = _needs_package  # folders of saved models: `fullrank.storage`
generate: Callable[..., Tensor] = _needs_package  # text, for `LanguageModel.generate`
