"""The softmax bottleneck, measured (Transformer-MoS §3): rank of log-probabilities, and the gradient that is let through.

The derivation of the bound: docs/derivations/softmax_bottleneck.md.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.core.config import AdaptiveConfig, MixtureConfig
from fullrank.core.errors import InputError, RunError
from fullrank.core.output import IGNORED
from fullrank.forward import check_ids
from fullrank.models import LoadedModel, open_model
from fullrank.records import Column, Lines, Record, Table, measurement
from fullrank.text import Text

_CHUNK = 1 << 23  # numbers of the gradient that are held at a time
MOST_BYTES = 1 << 30  # of the matrix, beyond which a part of the vocabulary is looked at, no fewer words than contexts


@dataclass(frozen=True)
class OutputLayer:
    """An output layer, reduced to the facts that bound the rank of its log-probabilities.

    kind: in words. hidden_size d: the width of what its matrix is multiplied with. bias: whether logits have one.
    clusters: softmaxes that a word's probability may be taken from, 1 but for an adaptive softmax.
    exempt: why log-probabilities of this model are not bounded, None where they are.
    """

    kind: str
    hidden_size: int
    bias: bool
    clusters: int = 1
    exempt: str | None = None

    @property
    def bound(self) -> int:
        """The largest rank of A = H W' + 1 b' - log Z 1', contexts by words: d + 1, and one more with an output bias.

        In an adaptive softmax every cluster has a log Z of its own: d + clusters, and one more with biases.
        """
        return self.hidden_size + self.clusters + self.bias

    @property
    def in_words(self) -> str:
        return f"d + {self.clusters + self.bias}"


def effective_rank(singular_values: np.ndarray) -> np.ndarray:
    """Compute how many equal singular values have the same entropy: exp(-sum_i q_i log q_i), q_i = s_i / sum(s).

    singular_values (..., R) -> (...).
    """
    from scipy.special import xlogy  # a long import, for measurements alone

    q = singular_values / singular_values.sum(-1, keepdims=True)
    entropy = -xlogy(q, q).sum(-1)
    return np.exp(entropy)


@dataclass(frozen=True, eq=False)
class LogProbRank:
    """The spectrum of A (contexts T, columns C), log p of the words at C columns after each of T contexts.

    singular_values (min(T, C),), largest first; eps: the rounding of A's entries (double precision: 2.2e-16).
    vocab_size V: C is smaller where not all words were looked at. repeats: contexts left out, as they stood there before.
    """

    layer: OutputLayer
    singular_values: np.ndarray
    contexts: int
    columns: int
    vocab_size: int
    eps: float
    repeats: int

    @property
    def tolerance(self) -> float:
        """Bound above which a singular value counts: s_max max(T, C) eps, as in `numpy.linalg.matrix_rank`."""
        return self.singular_values[0] * max(self.contexts, self.columns) * self.eps

    @property
    def rank(self) -> int:
        """The numerical rank: how many singular values are above `tolerance`."""
        return int((self.singular_values > self.tolerance).sum())

    @property
    def effective_rank(self) -> float:
        return float(effective_rank(self.singular_values))

    @property
    def conclusive(self) -> bool:
        """True if the matrix is large enough to have a rank above the bound."""
        return min(self.contexts, self.columns) > self.layer.bound


def rank(
    model: nn.Module | LoadedModel,
    input_ids: Tensor | Iterable[Tensor],
    *,
    contexts: int | None = None,
    most_bytes: int = MOST_BYTES,
    seed: int = 0,
) -> LogProbRank:
    """Measure the rank of the log-probabilities of a model after many contexts, beside the bound of its output layer.

        A = log p(v | context),  T contexts by V words        a plain softmax:  A = H W' + 1 b' - log Z 1'

    The rank of A is at most d + 1, and d + 2 with an output bias, however many contexts are read. A context is a token
    and all before it in its row. Contexts that repeat an earlier one are left out.

    Args:
        model: a `LanguageModel` or any causal model of Hugging Face. It is read in double precision and evaluation
            mode, on a copy.
        input_ids: token ids (B, N) int64, or several of them, read until there are enough contexts. Every row is read
            on its own, without memory.
        contexts: T, at most what input_ids hold; None for 2 (d + 2) + 32.
        most_bytes: a larger matrix is made of fewer words, but not of fewer words than contexts.
        seed: seed of the words that are drawn then.

    Returns:
        The singular values of A, with the facts that bound their rank.

    Raises:
        InputError: the model is of another kind, input_ids are no tensors of integers (B, N), or there are too few contexts.
        RunError: a log-probability is not finite.
    """
    if contexts is not None and contexts < 2:
        raise InputError(f"contexts: two or more, given {contexts}")
    source = open_model(model)
    source.require({"logits", "hidden"}, "rank")
    if source.predicts == "masked tokens":
        raise InputError(f"rank: give a causal model, of fullrank or of transformers; given a {source.name}")
    double = open_model(_convert_to_double(source.module))
    layer = describe_output(double)
    wanted = contexts or 2 * (layer.hidden_size + 2) + 32
    chosen, repeats = _choose_contexts([input_ids] if isinstance(input_ids, Tensor) else input_ids, wanted)
    count = sum(len(positions) for _, positions in chosen)
    if count < 2:
        raise InputError(f"the text has {count} different contexts; a rank needs two or more")
    parts: list[Tensor] = []
    most = max(most_bytes // (8 * count), count)
    for ids, positions in chosen:
        logits = double.logits(ids)
        eps = torch.finfo(logits.dtype).eps
        vocab_size = logits.shape[2]
        drawn = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
        columns = drawn[:most].sort().values.to(double.device)
        of_positions = logits.flatten(0, 1)[positions.to(double.device)]
        parts.append(torch.log_softmax(of_positions.double(), dim=-1)[:, columns].cpu())
    matrix = torch.cat(parts)
    if not torch.isfinite(matrix).all():
        raise RunError("a log-probability is NaN or infinite: such a matrix has no singular values")
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    triangle = torch.linalg.qr(tall.to(double.device), mode="r").R  # with the singular values of Q R
    values = torch.linalg.svdvals(triangle).cpu().numpy()
    return LogProbRank(layer, values, count, matrix.shape[1], vocab_size, eps, repeats)


def describe_output(model: LoadedModel) -> OutputLayer:
    """Describe the output layer of a model of ours, or the output embedding of one of transformers."""
    if model.fullrank_model is None:
        head = model.module.get_output_embeddings()
        capped = getattr(model.module.config.get_text_config(), "final_logit_softcapping", None)
        exempt = f"a soft-cap of {capped:g} on the logits is not linear" if capped else None
        return OutputLayer("softmax", head.weight.shape[-1], getattr(head, "bias", None) is not None, exempt=exempt)
    config = model.fullrank_model.config
    out = config.output
    kind = out.kind
    clusters = 1
    exempt = None
    if isinstance(out, AdaptiveConfig):
        kind = "adaptive softmax"
        clusters += len(out.cutoffs or ())
    elif isinstance(out, MixtureConfig) and out.mixtures == 1:
        kind = "softmax of a latent state"
    elif isinstance(out, MixtureConfig):
        kind = f"mixture of {out.mixtures} softmaxes"
        exempt = "the logarithm of a sum of softmaxes is not linear in their logits"
    elif kind != "softmax":
        exempt = f"no bound is known for output layers of kind '{kind}'"
    if out.normalize == "sigsoftmax":
        kind = kind.replace("softmax", "sigsoftmax")
        exempt = exempt or "sigsoftmax adds log sigmoid(z) to every logit z, which is not linear"
    return OutputLayer(kind, config.hidden_size, bool(out.bias), clusters, exempt)


def _convert_to_double(model: Any) -> Any:
    """Copy a model in double precision and evaluation mode."""
    model = copy.deepcopy(model).double().eval()
    # Hugging Face's fast kernels lack double precision
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if "flash" in str(getattr(model.config, "_attn_implementation", None)):
        model.set_attn_implementation("eager")
    return model


def _choose_contexts(batches: Iterable[Tensor], wanted: int) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Choose the first `wanted` contexts that differ.

    Returns the batches with the positions (n,) of these contexts in them, rows end to end, and the number of repeats.
    """
    seen: set[bytes] = set()
    chosen = []
    repeats = 0
    for ids in batches:
        check_ids(ids)
        positions = []
        for place, (b, n) in enumerate(np.ndindex(*ids.shape)):
            if len(seen) == wanted:
                break
            context = ids[b, : n + 1].cpu().numpy().tobytes()
            if context in seen:
                repeats += 1
            else:
                seen.add(context)
                positions.append(place)
        if positions:
            chosen.append((ids, torch.tensor(positions)))
        if len(seen) == wanted:
            break
    return chosen, repeats


# -- the measurement ---------------------------------------------------------------------------------------------------


@measurement(
    "rank",
    needs={"logits", "hidden"},
    table=Table(
        rows="output",
        columns=(
            Column("hidden size", "d"),
            Column("bound"),
            Column("rank"),
            Column("effective rank", format=".2f"),
            Column("contexts"),
            Column("words"),
        ),
    ),
    plot=Lines(
        x="number",
        y="singular value",
        series=("model",),
        marks=(("x", "bound"), ("y", "tolerance")),
        y_scale="log",
        title="How many dimensions the log-probabilities have",
        subtitle="Singular values of the matrix of log p(word | context); below the tolerance they are rounding",
        x_title="number of the singular value",
    ),
)
def measure_rank(
    model: LoadedModel,
    text: Text,
    *,
    contexts: Annotated[int | None, "Contexts that are read; by default 2 (d + 2) + 32."] = None,
) -> Iterator[Record]:
    """Measure the softmax bottleneck: the rank of log p(word | context) over many contexts, and its bound.

    A softmax over d hidden dimensions has rank d + 1 at most, d + 2 with an output bias; a mixture of softmaxes, sigsoftmax and
    a soft-cap on the logits are exempt. In double precision; a singular value counts above s_max max(shape) eps.
    Effective rank: exp(entropy) of the singular values as shares of their sum.

    Args:
        model: gives log-probabilities and hidden states.
        text: its first contexts are read.
        contexts: rows of the matrix; None: 2 (d + 2) + 32.

    Returns:
        Records of the output layer, and one of each singular value.
    """
    measured = rank(model, text.segments(), contexts=contexts)
    layer = measured.layer
    labels = {"output": layer.kind}
    protocol = (
        f"{measured.contexts:,} contexts, {measured.columns:,} of {measured.vocab_size:,} words, double precision"
    )
    if layer.exempt is None:
        yield Record(labels, "bound", layer.bound, note=f"Bound: {layer.in_words}.")
    values = {
        "hidden size": layer.hidden_size, "rank": measured.rank, "effective rank": measured.effective_rank,
        "contexts": measured.contexts, "words": measured.columns, "vocabulary size": measured.vocab_size,
        "repeated contexts": measured.repeats, "tolerance": measured.tolerance, "rounding": measured.eps,
    }  # fmt: skip
    for measure, value in values.items():
        note = " ".join(explain_rank(measured)) if measure == "rank" else ""
        yield Record(labels, measure, value, protocol=protocol, note=note)
    for number, value in enumerate(measured.singular_values, start=1):
        yield Record({**labels, "number": number}, "singular value", value)


def explain_rank(measured: LogProbRank) -> list[str]:
    """Explain the rank beside its bound, a sentence each."""
    layer = measured.layer
    bound = f"{layer.in_words} = {layer.bound:,}"
    if layer.exempt is not None:
        remarks = [f"The bound of a single softmax, {bound}, does not hold here: {layer.exempt}."]
    elif measured.rank <= layer.bound:
        remarks = [f"The softmax bottleneck: the rank stays at or below {bound} however many contexts are read."]
    else:
        remarks = [f"The rank is above {bound}, which such an output layer exceeds by rounding only."]
    if not measured.conclusive:
        remarks.append(
            f"Too few contexts or words to show a rank above {bound}: read more (--contexts, a longer --text)."
        )
    return remarks


# -- the gradient ------------------------------------------------------------------------------------------------------


def gradient_share(model: nn.Module | LoadedModel, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Measure the share of the gradient that the output layer of a model lets through (Godey and Artzi 2026, arXiv 2603.10145).

        G = d nll / d s = p - 1[y]   (T, V)      s = h W' + b,  W (V, d)
        let through:  ||G U|| / ||G||,   U (V, d) an orthonormal basis of the columns of W

    Training moves the logits s by moving h, and so along columns of W only: what of G lies across them is lost.

    model: of ours or of Hugging Face, with one softmax over a single output matrix.
    batches: input_ids and targets (B, N) int64. Targets -100 do not count. Every row is read on its own, without
    memory.
    Raises InputError for another output layer, and where no target counts.
    """
    loaded = open_model(model)
    loaded.require({"logits", "output_matrix"}, "share of the gradient")
    exempt = describe_output(loaded).exempt
    if exempt is not None:
        raise InputError(f"share of the gradient: {loaded.name} has no logits of one softmax: {exempt}")
    basis = _find_basis(loaded.output_matrix())
    squares = let_through = 0.0
    for ids, targets in batches:
        counts = targets != IGNORED
        logits = loaded.logits(ids)[counts.to(loaded.device)]
        wanted = targets[counts].to(loaded.device)
        vocab_size = logits.shape[1]
        rows = max(1, _CHUNK // vocab_size)
        for scores, words in zip(logits.split(rows), wanted.split(rows), strict=True):
            gradient = scores.double().softmax(-1)
            gradient[torch.arange(len(words)), words] -= 1
            squares += float(gradient.square().sum())
            let_through += float((gradient @ basis[:vocab_size]).square().sum())
    if not squares:
        raise InputError("targets: none of them counts")
    return (let_through / squares) ** 0.5


def _find_basis(weight: Tensor) -> Tensor:
    """Find an orthonormal basis U (V, r) of the columns of `weight` (V, d), of rank r."""
    q, triangle = torch.linalg.qr(weight.double())
    u, s, _ = torch.linalg.svd(triangle)
    least = s[0] * max(weight.shape) * torch.finfo(s.dtype).eps
    return q @ u[:, : int((s > least).sum())]
