"""Output layers: hidden states to the log-probabilities of words, their nll and the training loss, as the equations read.

    p(v | g) = sum_k pi_k p(v | h_k)                         a mixture of K softmaxes (Transformer-MoS §3; Yang et al. 2018)
    p(v | h) = softmax(z_0)_v                                for a word of the first cluster (Grave et al. 2017)
             = softmax(z_0)_{class i} softmax(z_i)_v         for a word of cluster i > 0
    z_i      = s_i, or s_i + log sigmoid(s_i)                softmax, or sigsoftmax (Kanai et al. 2018)
    s_i      = W_i P_i' h + b_i

A plain softmax has K = 1 and one cluster. B batch, N tokens, T = B N, E width of the model, V vocabulary, K softmaxes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import engine
from .compressed_embedding import AdaptiveInput, Clusters
from .config import AdaptiveConfig, MixtureConfig, ModelConfig, OutputConfig
from .draws import dropout, make_dropout
from .embedding import Linear, TokenEmbedding, check_ids, linear, start_normal, with_sizes
from .engine import Cluster, Components
from .errors import ConfigError, InputError
from .registry import register


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, normalize: str) -> Tensor:
    """Compute the logits z, of which the probabilities are softmax(z).

    Args:
        hidden: (..., E).
        weight: (V, E).
        bias: (V,); None without.
        normalize: `softmax` or `sigsoftmax`.

    Returns:
        z (..., V), in fp32 at least.
    """
    scores = linear(hidden, weight, bias)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return scores + F.logsigmoid(scores) if normalize == "sigsoftmax" else scores


def project_states(cluster: Cluster, states: Tensor) -> Tensor:
    """Project states h (..., E) to P' h with dropout (..., E_i); they stay h where the cluster has no projection."""
    if cluster.projection is None:
        return states
    return dropout(linear(states, cluster.projection.t()), cluster.dropout)


def log_probabilities(components: Components) -> Tensor:
    """Compute log p(v) (T, V), in fp32 at least, by way of (T, K, V)."""
    parts = []
    for cluster in components.clusters:
        states = project_states(cluster, components.states)
        z = logits(states, cluster.weight, cluster.bias, components.normalize)
        parts.append(torch.log_softmax(z, dim=-1))
    head, *tails = parts
    words = head.shape[-1] - len(tails)
    tail_log_probs = [tail + head[..., words + i, None] for i, tail in enumerate(tails)]
    word_log_probs = head[..., :words]
    log_probs = torch.cat((word_log_probs, *tail_log_probs), dim=-1) if tails else head  # (T, K, V)
    if components.log_prior is None:
        return log_probs.squeeze(1)
    return torch.logsumexp(components.log_prior[:, :, None] + log_probs, dim=1)


def weigh_losses(log_prob: Tensor, ids: Tensor, scale: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Sum the smoothed loss of tokens and their nll, each with its weight.

        sum_t c_t (-(1 - e) log p(x_t) - e mean_v log p(v))        and, without gradient,  sum_t -c_t log p(x_t)

    Not by a matrix product, which autocast would round to its dtype.

    Args:
        log_prob: log p (T, V).
        ids: targets x (T,).
        scale: weights c (T,).
        label_smoothing: e.

    Returns:
        Loss and nll, two scalars.
    """
    nll = -log_prob.gather(1, ids[:, None]).squeeze(1)
    loss = (1 - label_smoothing) * nll - label_smoothing * log_prob.mean(1) if label_smoothing else nll
    return (loss * scale).sum(), (nll.detach() * scale).sum()


IGNORED = -100  # the target of a token that does not count, as in `torch.nn.functional.cross_entropy`


class Output(nn.Module):
    """Contract of an output layer: a subclass says its `components` and their cost; the rest is written here once.

    Registered with `@register("output", name)`, it is built from `(config: ModelConfig, embedding: nn.Module)`, and may be tied
    to the second; its own keys are those of a nested `Config`, a subclass of `OutputConfig`. A layer whose probabilities are
    no mixture of softmaxes overrides `log_prob`, `nll` and `loss`.
    """

    def components(self, hidden: Tensor) -> Components:
        """Return the softmaxes of hidden states (..., E), in `hidden.shape[:-1].numel()` tokens."""
        raise NotImplementedError(f"{type(self).__name__} must define components(hidden)")

    def flops_per_token(self) -> float:
        """Count multiply-adds, each as two, of the nll of one token; `nn.Linear` layers inside are counted elsewhere."""
        raise NotImplementedError(f"{type(self).__name__} must define flops_per_token()")

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits (..., V), which softmax makes probabilities: here the log-probabilities themselves."""
        return self.log_prob(hidden)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Compute log-probabilities (..., V), in fp32 at least."""
        log_prob = log_probabilities(self.components(hidden))
        return log_prob.view(*hidden.shape[:-1], log_prob.shape[-1])

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Compute -log p(targets) (B, N) in nats, 0 at targets -100, of hidden states (B, N, E) and targets (B, N).

        Its gradients are exact under any cotangent. Raises InputError for targets of another shape, or that are no ids.
        """
        components = self.components(hidden)
        ids, counts = _flat(hidden, targets, components)
        nll = engine.load().vocabulary_nll(components, ids)
        if nll is None:
            nll = -log_probabilities(components).gather(1, ids[:, None]).squeeze(1)
        return nll.masked_fill(~counts, 0).view(targets.shape)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Compute the weighted mean of the loss over tokens.

        An engine forms gradients in the forward pass.

        Args:
            hidden: hidden states (B, N, E).
            targets: ids (B, N); -100 has weight 0.
            weights: w (B, N), without gradient; None: 1 everywhere.
            label_smoothing: e, with which the target is (1 - e) [v = x] + e / V.

        Returns:
            The smoothed loss and, without gradient, sum(w nll) / sum(w): two scalars in nats per token.

        Raises:
            InputError: shapes do not fit, a target is no id, weights take gradients, or e is not from 0 to below 1.
        """
        components = self.components(hidden)
        ids, counts = _flat(hidden, targets, components)
        if not 0 <= label_smoothing < 1:
            raise InputError(f"label_smoothing: at least 0 and below 1, given {label_smoothing}")
        scale = scale_tokens(hidden, counts.view(targets.shape), weights)
        losses = engine.load().vocabulary_loss(components, ids, scale, label_smoothing)
        return weigh_losses(log_probabilities(components), ids, scale, label_smoothing) if losses is None else losses


def _flat(hidden: Tensor, targets: Tensor, components: Components) -> tuple[Tensor, Tensor]:
    """Flatten targets (B, N) to ids (T,), 0 where they do not count, and return which count.

    Raises InputError unless there is one for each hidden state.
    """
    if targets.shape != hidden.shape[:-1]:
        raise InputError(
            f"targets {tuple(targets.shape)}: one for each hidden state, of which there are {tuple(hidden.shape[:-1])}"
        )
    flat_targets = targets.flatten()
    counts = flat_targets != IGNORED
    ids = flat_targets.masked_fill(~counts, 0)
    sizes = [len(cluster.weight) for cluster in components.clusters]
    vocab_size = sum(sizes) - len(sizes) + 1  # the first has a class for each of the others
    check_ids(ids, vocab_size, f"targets (or {IGNORED}, which does not count)")
    return ids.long(), counts


def scale_tokens(hidden: Tensor, counts: Tensor, weights: Tensor | None) -> Tensor:
    """Compute the factor w_t / sum(w) of each token in a weighted mean.

    Args:
        hidden: hidden states, whose dtype decides between fp32 and fp64.
        counts: (B, N), False for tokens that do not count: their factor is 0.
        weights: w (B, N), without gradient; None: 1 everywhere.

    Returns:
        Factors (T,).

    Raises:
        InputError: weights are not of the shape of targets, or take gradients.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if weights is not None and weights.shape != counts.shape:
        raise InputError(f"weights {tuple(weights.shape)} must have the shape of targets {tuple(counts.shape)}")
    if weights is not None and weights.requires_grad:
        raise InputError("weights of a loss take no gradient; pass weights.detach(), or weigh the nll of each token")
    counted = counts if weights is None else weights.masked_fill(~counts, 0)
    scale = counted.flatten().to(dtype)
    total = scale.sum()
    return scale / torch.where(total == 0, 1, total)


def _flatten_hidden(hidden: Tensor, width: int) -> Tensor:
    """Flatten hidden states (B, N, E) to the states (T, 1, E) of one softmax."""
    if hidden.dim() < 2 or hidden.shape[-1] != width:
        raise InputError(f"hidden states: (B, N, {width}), of the layer's hidden_size; given {tuple(hidden.shape)}")
    return hidden.flatten(0, -2)[:, None]


class Tempered(Output):
    """An output layer whose logits are divided by a temperature T: softmax(z / T) in every softmax that it has.

    The prior of a mixture stays. z / T = W (P' h / T) + b / T, so that an engine computes it as it computes T = 1.
    Raises ConfigError for sigsoftmax, which is not linear, and for a layer that has an nll of its own.
    """

    def __init__(self, layer: Output, temperature: float) -> None:
        super().__init__()
        if getattr(layer, "normalize", "softmax") != "softmax" or type(layer).nll is not Output.nll:
            raise ConfigError(
                f"a temperature divides the logits of softmaxes; {type(layer).__name__} has sigsoftmax or an nll of its own"
            )
        self.layer = layer
        self.temperature = temperature

    def components(self, hidden: Tensor) -> Components:
        plain = self.layer.components(hidden)
        scale = 1 / self.temperature
        clusters = []
        for cluster in plain.clusters:
            bias = None if cluster.bias is None else cluster.bias * scale
            clusters.append(replace(cluster, bias=bias))
        return replace(plain, states=plain.states * scale, clusters=tuple(clusters))


class SizedOutput(Output):
    """An output layer that is built from a `ModelConfig`, or from an `OutputConfig` and the sizes it lacks.

    Options: the class of its keys. Tied, it needs the `embedding`.
    """

    Options: ClassVar[type[OutputConfig]] = OutputConfig

    def __init__(
        self,
        config: ModelConfig | OutputConfig,
        embedding: nn.Module | None = None,
        *,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
    ) -> None:
        super().__init__()
        config, options, vocab_size = with_sizes(self, config, self.Options, vocab_size, hidden_size)
        self.build(options, vocab_size, config.hidden_size, embedding)

    def build(self, options: Any, vocab_size: int, hidden_size: int, embedding: nn.Module | None) -> None:
        """Make the parameters.

        Args:
            options: the output section, an instance of `Options`.
            vocab_size: V.
            hidden_size: E.
            embedding: the input layer, for a tied output; None without.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build")


@register("output", "softmax")
class SoftmaxOutput(SizedOutput):
    """One softmax over the vocabulary: p(v | h) = softmax(W h + b)_v.

    weight (V, E) is the layer's own, or with `tied: true` the embedding's (then this layer holds no weight of its own).
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def build(self, options: Any, vocab_size: int, hidden_size: int, embedding: nn.Module | None) -> None:
        self._tied: TokenEmbedding | None = None
        if options.tied:
            if not isinstance(embedding, TokenEmbedding):
                raise ConfigError(
                    f"model.output.tied: a {options.kind.replace('_', ' ')} is tied to `model.input.kind: token` only; an "
                    "adaptive input goes with `model.output.kind: adaptive`"
                )
            if embedding.weight.shape != (vocab_size, hidden_size):
                raise ConfigError(
                    f"model.output.tied: the embedding has a table {tuple(embedding.weight.shape)}, the output asks for "
                    f"vocab_size {vocab_size} and hidden_size {hidden_size}"
                )
            vars(self)["_tied"] = embedding  # no submodule, so that its weight is saved once
        self.normalize = options.normalize
        weight = None if options.tied else nn.Parameter(torch.empty(vocab_size, hidden_size))
        bias = nn.Parameter(torch.zeros(vocab_size)) if options.bias else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    @property
    def matrix(self) -> Tensor:
        """W (V, E), the layer's own or the embedding's."""
        weight = self.weight if self._tied is None else self._tied.weight
        assert weight is not None
        return weight

    def components(self, hidden: Tensor) -> Components:
        states = _flatten_hidden(hidden, self.matrix.shape[1])
        return Components(states, None, (Cluster(self.matrix, self.bias),), self.normalize)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits (B, N, V), for a plain softmax in the dtype of the hidden states."""
        _flatten_hidden(hidden, self.matrix.shape[1])
        if self.normalize == "softmax":
            return linear(hidden, self.matrix, self.bias)
        return logits(hidden, self.matrix, self.bias, self.normalize)

    def flops_per_token(self) -> float:
        return 2.0 * self.matrix.numel()


class Latents(nn.Module):
    """The states and the prior of a mixture of softmaxes (Transformer-MoS §3; Yang et al. 2018, §2.3).

        h_k = tanh(W_k g + b_k)         pi = softmax(P g)         latent: true, as published
        h_k = g + tanh(W_k g + b_k)                               latent: residual

    g (B, N, E) -> h (T, K, E) and log pi (T, K), in fp32 at least.  `latent` holds the W_k (E, E) and b_k one under the
    other, `prior` P (K, E), without bias; dropout acts on the tanh alone.
    The residual form starts at W_k = b_k = 0, where every softmax is the one of g. P is random: the gradient of W_k is pi_k
    times one that all components share, so that with P = 0 they would never part. Parameters: K E^2 + 2 K E.
    """

    def __init__(self, config: MixtureConfig, hidden_size: int) -> None:
        super().__init__()
        self.mixtures = config.mixtures
        self.residual = config.latent == "residual"
        self.latent = Linear(hidden_size, self.mixtures * hidden_size)
        self.prior = Linear(hidden_size, self.mixtures, bias=False)
        self.dropout = make_dropout(config.latent_dropout)
        self.reset_residual()

    def reset_residual(self) -> None:
        """Start the residual form as a single softmax; the published form keeps what its initialiser drew."""
        if self.residual:
            nn.init.zeros_(self.latent.weight)
            nn.init.zeros_(self.latent.bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden.flatten(0, -2)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        latent = torch.tanh(self.latent(hidden))
        states = self.dropout(latent).unflatten(-1, (self.mixtures, -1))
        if self.residual:
            states = hidden[:, None] + states
        return states, torch.log_softmax(self.prior(hidden).to(dtype), dim=-1)


@register("output", "mixture_of_softmaxes")
class MixtureOfSoftmaxes(SoftmaxOutput):
    """Mixture of softmaxes (Transformer-MoS §3; Yang et al. 2018): K softmaxes share one matrix, each with a hidden state.

        p(v | g) = sum_k pi_k softmax(W h_k + b)_v        h_k = tanh(W_k g + b_k),  pi = softmax(P g)

    `mixture` holds W_k, b_k and P (`Latents`); weight W (V, E) is the layer's own, or with `tied: true` the embedding's.
    Computed with logarithms throughout: an improbable word keeps its gradient.
    """

    Options = MixtureConfig

    def build(self, options: Any, vocab_size: int, hidden_size: int, embedding: nn.Module | None) -> None:
        super().build(options, vocab_size, hidden_size, embedding)
        self.mixture = Latents(options, hidden_size)
        if self.weight is not None:
            start_normal(self.weight, hidden_size**-0.5)

    def components(self, hidden: Tensor) -> Components:
        plain = super().components(hidden)
        states, log_prior = self.mixture(hidden)
        return replace(plain, states=states, log_prior=log_prior)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute log-probabilities (B, N, V), in fp32 at least."""
        return self.log_prob(hidden)

    def flops_per_token(self) -> float:
        return self.mixture.mixtures * super().flops_per_token()


@register("output", "adaptive")
class AdaptiveSoftmax(SizedOutput):
    """Adaptive softmax (Grave et al. 2017) in fairseq's form or Transformer-XL's.

        p(v | h)  = head(h)_v                               for a word of cluster 0
                  = head(h)_{class i} tail_i(h)_{v - start_i}  for a word of cluster i > 0
        head(h)   = softmax([W_0; C] h + [b_0; c])          h replaced by P_0' h in Transformer-XL's form
        tail_i(h) = softmax(W_i P_i' h + b_i)

    W_i is `weights[i]` (V_i, E // div_val^i), P_i `projections[str(i)]` (E, E // div_val^i), C `class_weight`, a row for each
    tail. `tied` takes W_i, and `tied_projections` P_i of the tails, from the adaptive input. P_0 is never shared. With div_val
    1 there are no projections and the forms are one.
    Differs from Transformer-XL's code: classes are not stored in reverse. From fairseq's: no square projections.
    """

    Options = AdaptiveConfig

    def build(self, options: Any, vocab_size: int, hidden_size: int, embedding: nn.Module | None) -> None:
        self.clusters = Clusters.from_cutoffs(
            "model.output", options.cutoffs, options.div_val or 1, vocab_size, hidden_size
        )
        self._tied: AdaptiveInput | None = None
        if options.tied:
            if not isinstance(embedding, AdaptiveInput) or embedding.clusters != self.clusters:
                raise ConfigError(
                    "model.output.tied: an adaptive softmax is tied to an AdaptiveInput with the same clusters"
                )
            vars(self)["_tied"] = embedding  # no submodule, so that its tensors are saved once
        entries = self.clusters.sizes
        widths = self.clusters.widths
        tails = range(1, len(entries))
        shapes = [] if options.tied else [*zip(entries, widths, strict=True)]
        self.weights = nn.ParameterList(map(torch.empty, shapes))
        self.biases = nn.ParameterList(torch.empty(size) for size in entries if options.bias)
        projected = [0] if options.form == "transformer_xl" else []
        projected += [] if options.tied_projections else list(tails)
        self.projections = nn.ParameterDict(
            {str(i): nn.Parameter(torch.empty(hidden_size, widths[i])) for i in projected if self.clusters.projected}
        )
        self.class_weight = nn.Parameter(torch.empty(len(tails), hidden_size))
        self.class_bias = nn.Parameter(torch.empty(len(tails))) if options.bias else None
        self.tail_dropout = options.tail_dropout
        self.normalize = options.normalize
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as in fairseq: matrices Xavier-uniform, an untied head as one matrix; biases, which it lacks, 0."""
        tails, hidden = self.class_weight.shape
        words = self.clusters.sizes[0] if len(self.weights) else 0
        head = (6 / (hidden + tails + words)) ** 0.5
        nn.init.uniform_(self.class_weight, -head, head)
        for i, weight in enumerate(self.weights):
            nn.init.uniform_(weight, -head, head) if i == 0 else nn.init.xavier_uniform_(weight)
        for projection in self.projections.values():
            nn.init.xavier_uniform_(projection)
        for bias in self.biases:
            nn.init.zeros_(bias)
        if self.class_bias is not None:
            nn.init.zeros_(self.class_bias)

    def _find_matrices(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Find the weight of each cluster, without those of classes, and the projections by the number of their cluster."""
        projections: dict[int, Tensor] = {int(i): projection for i, projection in self.projections.items()}
        if self._tied is None:
            return [*self.weights], projections
        shared: dict[int, Tensor] = {i: projection for i, projection in enumerate(self._tied.projections) if i > 0}
        return [*self._tied.weights], shared | projections

    def components(self, hidden: Tensor) -> Components:
        states = _flatten_hidden(hidden, self.class_weight.shape[1])
        weights, projections = self._find_matrices()
        biases: list[Tensor | None] = [*self.biases] or [None] * len(weights)
        weights[0] = torch.cat((weights[0], self.class_weight))
        if self.class_bias is not None:
            biases[0] = torch.cat((self.biases[0], self.class_bias))
        dropout = self.tail_dropout if self.training else 0.0
        clusters = tuple(
            Cluster(weight, bias, projections.get(i), dropout if i > 0 else 0.0)
            for i, (weight, bias) in enumerate(zip(weights, biases, strict=True))
        )
        return Components(states, None, clusters, self.normalize)

    def flops_per_token(self) -> float:
        """Count operations per token of a text that follows Zipf's law."""
        shares = [1.0, *self.clusters.shares()[1:]]  # every token reads the head
        weights, projections = self._find_matrices()
        costs = [weight.numel() for weight in weights]
        costs[0] += self.class_weight.numel()
        for i, projection in projections.items():
            costs[i] += projection.numel()
        return 2.0 * sum(share * cost for share, cost in zip(shares, costs, strict=True))
