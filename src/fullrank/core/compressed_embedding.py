"""Input layers with fewer numbers than a vector for each token: adaptive inputs, with their clusters, and tensor trains."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .embedding import Input, check_ids, linear, start_normal, with_sizes
from .errors import ConfigError
from .kinds import AdaptiveInputConfig, InputConfig, TensorTrainConfig
from .registry import register


@dataclass(frozen=True)
class Clusters:
    """Cluster i holds the ids from starts[i] up to starts[i] + sizes[i], as vectors of widths[i] = E // div_val^i."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    projected: bool  # div_val is not 1, so that vectors are not of the model's width

    @classmethod
    def from_cutoffs(
        cls, key: str, cutoffs: list[int] | None, div_val: int, vocab_size: int, hidden_size: int
    ) -> Clusters:
        """Make the clusters of a vocabulary.

        Args:
            key: section that errors name, `model.input` or `model.output`.
            cutoffs: ids at which clusters end; the last cluster ends at `vocab_size`.
            div_val: how many times narrower each cluster is than the one before.
            vocab_size: entries of the vocabulary V.
            hidden_size: width E of the model, and of the first cluster.

        Raises:
            ConfigError: there are no cutoffs, or not all are below `vocab_size`, or a cluster is left without a dimension.
        """
        if not cutoffs or cutoffs[-1] >= vocab_size:
            raise ConfigError(
                f"{key}.cutoffs: an adaptive layer needs the ids at which its clusters end, below model.vocab_size "
                f"{vocab_size}, which ends the last one; given {cutoffs}"
            )
        if hidden_size < div_val ** len(cutoffs):
            raise ConfigError(
                f"{key}.div_val: the last of {len(cutoffs) + 1} clusters would have {hidden_size} / {div_val}^{len(cutoffs)} "
                f"< 1 dimensions; lower {key}.div_val or give fewer {key}.cutoffs"
            )
        bounds = (0, *cutoffs, vocab_size)
        sizes = tuple(end - start for start, end in itertools.pairwise(bounds))
        widths = tuple(hidden_size // div_val**i for i in range(len(sizes)))
        return cls(bounds[:-1], sizes, widths, div_val != 1)

    def number(self, ids: Tensor) -> Tensor:
        """Return the cluster of each id, int64 of the same shape; an id outside the vocabulary gets the nearest."""
        cluster = (ids >= self.starts[1]).long()
        for start in self.starts[2:]:
            cluster += ids >= start
        return cluster

    def shares(self) -> list[float]:
        """Return the share of each cluster in a text by Zipf's law: the word of rank r is as frequent as 1 / r."""
        shares = []
        total = before = 0.0
        for start, size in zip(self.starts, self.sizes, strict=True):
            total = math.log(2 * (start + size) + 1)
            shares.append(total - before)
            before = total
        return [share / total for share in shares]


@register("input", "adaptive")
class AdaptiveInput(Input):
    """Adaptive input (Baevski & Auli 2019): a rare word has a shorter vector, projected to the width of the model.

        x = P_i W_i[id - start_i]        for an id of cluster i, times sqrt(E) if `scale_embedding`

    input_ids (B, N) -> (B, N, E).  W_i is `weights[i]` (V_i, E // div_val^i) and P_i `projections[i]` (E, E // div_val^i),
    also for i = 0; with div_val 1 every width is E and there are no projections.
    Built from a `ModelConfig`, or from an `InputConfig` and the sizes it lacks; ids are sorted by frequency. Looks every token
    up in every cluster and keeps the right one, so that no device is waited for.
    Differs from fairseq, which keeps square projections where its factor is 1.
    """

    def __init__(
        self, config: ModelConfig | InputConfig, *, vocab_size: int | None = None, hidden_size: int | None = None
    ) -> None:
        super().__init__()
        config, options, vocab_size = with_sizes(self, config, AdaptiveInputConfig, vocab_size, hidden_size)
        hidden_size = config.hidden_size
        self.clusters = Clusters.from_cutoffs("model.input", options.cutoffs, options.div_val, vocab_size, hidden_size)
        widths = self.clusters.widths
        self.weights = nn.ParameterList(map(torch.empty, zip(self.clusters.sizes, widths, strict=True)))
        self.projections = nn.ParameterList(
            torch.empty(hidden_size, width) for width in widths if self.clusters.projected
        )
        self.scale = hidden_size**0.5 if config.scale_embedding else 1.0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as in fairseq: vectors N(0, 1 / width), projections Xavier-uniform."""
        for weight in self.weights:
            start_normal(weight, weight.shape[1] ** -0.5)
        for projection in self.projections:
            nn.init.xavier_uniform_(projection)

    def forward(self, input_ids: Tensor) -> Tensor:
        check_ids(input_ids, sum(self.clusters.sizes), "input ids")
        cluster = self.clusters.number(input_ids)
        out: Tensor | None = None
        for i, (start, weight) in enumerate(zip(self.clusters.starts, self.weights, strict=True)):
            in_cluster = cluster == i
            vectors = F.embedding(torch.where(in_cluster, input_ids - start, 0), weight)
            vectors = vectors.masked_fill(~in_cluster[..., None], 0)  # (B, N, width)
            if self.clusters.projected:
                vectors = linear(vectors, self.projections[i])  # (B, N, E)
            vectors = vectors.to(weight.dtype)  # under autocast too, as other embeddings are
            out = vectors if out is None else out + vectors
        assert out is not None
        return out * self.scale if self.scale != 1 else out

    def flops_per_token(self) -> float:
        hidden = self.weights[0].shape[1]
        return 2.0 * hidden * sum(self.clusters.widths) * self.clusters.projected


def factorize(size: int, count: int, *, exact: bool) -> list[int]:
    """Split a size into nearly equal factors.

    They are taken one after the other. Each is the largest divisor of what is left that is not above its root, or without
    `exact` the smallest number that is not below the root.

    Args:
        size: product of the factors.
        count: number of factors.
        exact: whether the product is `size`. Otherwise it may be a greater number, whose factors differ less.

    Returns:
        The factors in ascending order.
    """
    factors = []
    for left in range(count, 1, -1):
        if exact:
            factor = max(n for n in range(1, size + 1) if n**left <= size and size % n == 0)
        else:
            factor = next(n for n in itertools.count(1) if n**left >= size)
        factors.append(factor)
        size = -(-size // factor)
    return sorted([*factors, size])


@register("input", "tensor_train")
class TensorTrainInput(Input):
    """Tensor-train embedding (Khrulkov et al. 2019): the table of vectors is a product of N small tensors.

        X[(i_1 .. i_N), (j_1 .. j_N)] = G_1[:, i_1, j_1, :] G_2[:, i_2, j_2, :] .. G_N[:, i_N, j_N, :]

    input_ids (B, N) -> (B, N, E), times sqrt(E) if `scale_embedding`.  Core k is (r_{k-1}, v_k, e_k, r_k) with r_0 = r_N = 1;
    i_k are the digits of an id and j_k those of a dimension, the first ones count most. The v_k multiply to V or more, the e_k
    to E (`factorize`).
    Cores start normal, so that entries of X have the variance that a plain table starts with (alone: 2 / (V + E), as in the
    paper). An output cannot be tied to it: scores of all words would need all of X.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        _, options, vocab_size = with_sizes(self, config, TensorTrainConfig)
        hidden_size = config.hidden_size
        words = factorize(vocab_size, options.cores, exact=False)
        widths = factorize(hidden_size, options.cores, exact=True)
        ranks = [1, *[options.rank] * (options.cores - 1), 1]
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.scale = hidden_size**0.5 if config.scale_embedding else 1.0
        shapes = zip(ranks[:-1], words, widths, ranks[1:], strict=True)
        self.cores = nn.ParameterList(map(torch.empty, shapes))
        self.start((2 / (vocab_size + hidden_size)) ** 0.5)

    def start(self, std: float) -> None:
        """Fill the cores so that entries of the table, sums of products over all ranks, have variance std^2."""
        paths = math.prod(core.shape[3] for core in self.cores)
        core_std = (std * paths**-0.5) ** (1 / len(self.cores))
        for core in self.cores:
            start_normal(core, core_std)

    def forward(self, input_ids: Tensor) -> Tensor:
        check_ids(input_ids, self.vocab_size, "input ids")
        place_value = math.prod(core.shape[1] for core in self.cores)
        remainder = input_ids
        out = self.cores[0].new_ones(*input_ids.shape, 1, 1)
        for core in self.cores:
            before, words, width, after = core.shape
            place_value //= words
            table = core.transpose(0, 1).flatten(1)
            rows = F.embedding(remainder // place_value, table)
            remainder = remainder % place_value
            product = out @ rows.unflatten(-1, (before, width * after))
            out = product.reshape(*input_ids.shape, -1, after)
        out = out.squeeze(-1).to(self.cores[0].dtype)  # under autocast too, as other embeddings are
        return out * self.scale if self.scale != 1 else out

    def flops_per_token(self) -> float:
        total = 0.0
        width_so_far = 1
        for before, _, width, after in (core.shape for core in self.cores):
            total += 2.0 * width_so_far * before * width * after
            width_so_far *= width
        return total
