"""The vocabulary layer's training loss, forward and backward, against what PyTorch offers.

One softmax (K = 1):

    cross_entropy         F.cross_entropy(F.linear(h, W, b), targets)
    linear_cross_entropy  F.linear_cross_entropy(h, W, targets, linear_bias=b), in chunks as torch chooses, or of 256 rows
    softmax loss          ours, with all weights 1/T

A mixture of K softmaxes, from hidden states (T, K, d) and the logarithm of the prior (T, K):

    probabilities         log(sum_k pi_k softmax(W h_k + b) + 1e-8), as the papers' codes have it
    logarithms            logsumexp_k(log pi_k + log_softmax(W h_k + b))
    linear_cross_entropy  logsumexp_k(log pi_k - nll_k), the nll_k of T K rows by F.linear_cross_entropy
    mixture of K          ours
    the whole layer       ours from one hidden state a token: latents, prior and their gradients, too

`mos` has ten softmaxes, 10,000 words and width 200; `mos-sizes` other sizes, too. Memory has the gradients in it (that of W
alone takes 4 V d bytes).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fullrank as fr
from candidates import BOTH, Candidate, Comparison, Pass, Settings
from fullrank.core.engine import Cluster, Components
from fullrank.kernels.vocabulary import vocabulary_loss

STOCK = "cross_entropy"


@dataclass(frozen=True)
class Size:
    """Tokens, softmaxes, words and width."""

    tokens: int
    mixtures: int
    vocabulary: int
    width: int

    def __str__(self) -> str:
        return f"T {self.tokens:,}, K {self.mixtures}, V {self.vocabulary:,}, d {self.width}"

    @property
    def logits(self) -> int:
        return self.tokens * self.mixtures * self.vocabulary


# hidden (T, K, d), log_prior (T, K), weight (V, d), bias (V,), targets (T,)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def stock(hidden: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross entropy of the first component, whatever K is."""
    return F.cross_entropy(F.linear(hidden[:, 0], weight, bias), targets)


def probabilities(hidden: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss of a mixture from its probabilities, as the papers' codes have it."""
    each = F.linear(hidden, weight, bias).softmax(-1)
    mixed = (each * log_prior.exp()[:, :, None]).sum(1)
    return F.nll_loss((mixed + 1e-8).log(), targets)


def logarithms(hidden: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss of a mixture from the logarithms of its probabilities."""
    each = F.linear(hidden, weight, bias).log_softmax(-1)
    return F.nll_loss(torch.logsumexp(each + log_prior[:, :, None], 1), targets)


def chunked(
    rows: int | None, hidden: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
) -> Tensor:
    """Compute the loss by F.linear_cross_entropy with `rows` a chunk; None: as torch chooses."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
    tokens, mixtures = log_prior.shape
    flat = hidden.flatten(0, 1)
    repeated = targets.repeat_interleave(mixtures)
    compute = partial(F.linear_cross_entropy, flat, weight, repeated, linear_bias=bias, options=options)
    if mixtures == 1:
        return compute()
    each = compute(reduction="none")
    return -torch.logsumexp(log_prior - each.view(tokens, mixtures), 1).mean()


def ours(hidden: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss by this package, with all weights 1/T."""
    tokens, mixtures = log_prior.shape
    scale = torch.full((tokens,), 1 / tokens, device=hidden.device)
    components = Components(hidden, None if mixtures == 1 else log_prior, (Cluster(weight, bias),))
    return vocabulary_loss(components, targets, scale, 0.0)[0]


def make_pass(loss: Loss, settings: Settings, backward: bool, size: Size) -> Pass:
    """Make a pass of a loss on random operands, under autocast where the dtype is narrow."""
    if loss is stock:  # its operands hold one component, so that its backward pass fills no zeros for others
        size = dataclasses.replace(size, mixtures=1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.mixtures, size.width, generator=generator)
    leaves = {
        "hidden": hidden if size.mixtures == 1 else hidden.tanh_(),
        "log_prior": torch.randn(size.tokens, size.mixtures, generator=generator).log_softmax(1),
        "weight": torch.randn(size.vocabulary, size.width, generator=generator).mul_(0.05),
        "bias": torch.zeros(size.vocabulary),
    }
    leaves = {name: leaf.to(settings.torch_device).requires_grad_() for name, leaf in leaves.items()}
    targets = torch.randint(size.vocabulary, (size.tokens,), generator=generator).to(settings.torch_device)
    return Pass(partial(loss, *leaves.values(), targets), leaves, None, backward, settings)


def make_layer(settings: Settings, backward: bool, size: Size) -> Pass:
    """Make a pass of `fr.MixtureOfSoftmaxes`: its loss, and the gradients of everything."""
    torch.manual_seed(0)
    config = fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=size.mixtures)
    module = fr.MixtureOfSoftmaxes(config, vocab_size=size.vocabulary, hidden_size=size.width)
    module.to(settings.torch_device)
    hidden = settings.randn(1, size.tokens, size.width).requires_grad_()
    targets = torch.randint(size.vocabulary, (1, size.tokens)).to(settings.torch_device)
    leaves = {"hidden": hidden, **dict(module.named_parameters())}
    return Pass(lambda: module.loss(hidden, targets)[0], leaves, None, backward, settings)


def compare(settings: Settings, length: int) -> list[Comparison]:
    """Compare losses of `length` tokens, V = 10,000, d = 200: of one softmax, and of ten."""
    return [_compare(Size(length, mixtures, 10_000, 200)) for mixtures in (1, 10)]


SIZES = (
    Size(700, 1, 10_000, 200),
    Size(1024, 1, 10_000, 512),
    Size(700, 1, 33_000, 200),
    *(Size(700, mixtures, 10_000, 200) for mixtures in (2, 5, 10, 15)),
    Size(700, 5, 33_000, 200),
)


def compare_sizes(settings: Settings) -> list[Comparison]:
    """Compare losses in all `SIZES`."""
    return [_compare(size) for size in SIZES]


def _compare(size: Size) -> Comparison:
    gflop = 6 * size.logits * size.width / 1e9

    def candidate(name: str, loss: Loss, kept: int = 0, **options: Any) -> Candidate:
        """Make a candidate that holds `kept` tensors of all logits at once."""
        single = loss is stock or size.mixtures == 1
        computes = "one softmax" if single else "mixture"
        work = gflop / size.mixtures if loss is stock else gflop
        return Candidate(name, partial(make_pass, loss), computes, takes=4 * kept * size.logits, gflop=work, **options)

    absent = "" if hasattr(F, "linear_cross_entropy") else f"not in torch {torch.__version__}"
    linear = "linear_cross_entropy"
    if size.mixtures > 1:
        linear += f", {size.mixtures} rows a token"
    stocks = [
        candidate(STOCK, stock, kept=2 if size.mixtures == 1 else 0),
        candidate(linear, partial(chunked, None), absent=absent),
        candidate(f"{linear}, 256 rows a chunk", partial(chunked, 256), absent=absent),
    ]
    names = tuple(peer.name for peer in stocks)
    if size.mixtures == 1:
        candidates = [candidate("softmax loss", ours, against=names), *stocks]
    else:
        peers = (names[1], names[2], "probabilities", "logarithms", STOCK)
        candidates = [
            candidate(f"mixture of {size.mixtures} softmaxes", ours, against=peers),
            Candidate("the whole layer", make_layer, "layer", (STOCK,)),
            candidate("probabilities", probabilities, kept=2),
            candidate("logarithms", logarithms, kept=3),
            *stocks,
        ]
    tiny = dataclasses.replace(size, tokens=8, vocabulary=1000)  # whose products go to the same libraries
    return Comparison(size, tiny, size.tokens, candidates, (BOTH,))
