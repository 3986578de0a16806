"""A mixture of softmaxes as its equation reads, in probabilities, and what it is compared with a layer by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fullrank as fr

DOUBLE = torch.float64


@dataclass(frozen=True)
class Case:
    """A layer, and the shape (B, N) of the tokens it is given."""

    tokens: tuple[int, int] = (2, 5)
    vocabulary: int = 11
    width: int = 5
    mixtures: int = 3
    bias: bool = True
    tied: bool = False
    normalize: str = "softmax"
    epsilon: float = 0.0

    def __str__(self) -> str:
        flags = [name for name in ("bias", "tied") if getattr(self, name)]
        flags += [self.normalize] if self.normalize != "softmax" else []
        flags += [str(self.epsilon)] if self.epsilon else []
        return f"{self.tokens[0]}x{self.tokens[1]}-K{self.mixtures}-V{self.vocabulary}-E{self.width}-{'-'.join(flags)}"

    @property
    def small(self) -> bool:
        """Whether everything about it may be tried."""
        return self.tokens[0] * self.tokens[1] * self.vocabulary * self.mixtures < 100_000

    def config(self, **changes: Any) -> fr.ModelConfig:
        output: dict[str, Any] = {
            "kind": "mixture_of_softmaxes", "mixtures": self.mixtures, "bias": self.bias, "tied": self.tied,
            "normalize": self.normalize, "epsilon": self.epsilon,
        }  # fmt: skip
        return fr.ModelConfig(
            vocab_size=self.vocabulary, hidden_size=self.width, num_attention_heads=1,
            output=fr.OutputConfig(**output | changes),
        )  # fmt: skip

    def layer(self, dtype: torch.dtype = DOUBLE, **changes: Any) -> Layer:
        """Every parameter N(0, 1), biases and priors too."""
        from fullrank.core.embedding import TokenEmbedding

        config = self.config(**changes)
        embedding = TokenEmbedding(config)
        made = Layer(fr.MixtureOfSoftmaxes(config, embedding), embedding if self.tied else None)
        torch.manual_seed(self.tokens[1] + 7 * self.vocabulary + 31 * self.mixtures)
        for tensor in made.tensors().values():
            tensor.data.copy_(torch.randn(tensor.shape, dtype=DOUBLE))
        made.output.to(dtype)
        embedding.to(dtype)
        return made

    def batch(self, dtype: torch.dtype = DOUBLE) -> tuple[Tensor, Tensor]:
        """Hidden states that require a gradient, and targets, of which the first and the last word are two."""
        hidden = torch.randn(*self.tokens, self.width, dtype=DOUBLE).to(dtype).requires_grad_()
        targets = torch.randint(self.vocabulary, self.tokens)
        targets[0, 0], targets[-1, -1] = 0, self.vocabulary - 1
        return hidden, targets


@dataclass(frozen=True)
class Layer:
    output: nn.Module
    embedding: nn.Module | None

    def tensors(self) -> dict[str, Tensor]:
        """Parameters by name; a tied matrix is called `weight`, too."""
        own = dict(self.output.named_parameters())
        return own if self.embedding is None else own | {"weight": self.embedding.weight}  # type: ignore[dict-item]

    def copy(self) -> dict[str, Tensor]:
        """What the equation reads: the saved numbers, in double precision, as leaves of their own."""
        saved = self.output.state_dict()
        if self.embedding is not None:
            assert "weight" not in saved
            saved["weight"] = self.embedding.state_dict()["weight"]
        return {name: tensor.detach().double().clone().requires_grad_() for name, tensor in saved.items()}


def components(read: dict[str, Tensor], hidden: Tensor, mixtures: int) -> list[tuple[Tensor, Tensor]]:
    """pi_k (T, 1) and h_k (T, E) of hidden states g (T, E): h_k = tanh(W_k g + b_k), pi = softmax(P g)."""
    width = hidden.shape[1]
    prior = (hidden @ read["mixture.prior.weight"].T).exp()
    prior = prior / prior.sum(1, keepdim=True)
    squares = read["mixture.latent.weight"].split(width)
    shifts = read["mixture.latent.bias"].split(width)
    assert prior.shape[1] == len(squares) == len(shifts) == mixtures
    return [
        (prior[:, k, None], torch.tanh(torch.einsum("ij,tj->ti", squares[k], hidden) + shifts[k]))
        for k in range(mixtures)
    ]


def one_softmax(scores: Tensor, normalize: str) -> Tensor:
    """softmax: e^z / sum e^z.  sigsoftmax (Kanai et al. 2018): e^z sigmoid(z) / sum e^z sigmoid(z)."""
    raised = (scores - scores.amax(1, keepdim=True)).exp()
    raised = raised * torch.sigmoid(scores) if normalize == "sigsoftmax" else raised
    return raised / raised.sum(1, keepdim=True)


def probabilities(read: dict[str, Tensor], hidden: Tensor, mixtures: int, normalize: str = "softmax") -> Tensor:
    """p(v) = sum_k pi_k softmax(W h_k + b)_v, (T, V)."""
    total: Any = 0
    for share, latent in components(read, hidden, mixtures):
        scores = latent @ read["weight"].T
        scores = scores + read["bias"] if "bias" in read else scores
        total = total + share * one_softmax(scores, normalize)
    return total


def log_prob(case: Case, read: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """log(p + epsilon), (B, N, V)."""
    found = probabilities(read, hidden.flatten(0, 1), case.mixtures, case.normalize) + case.epsilon
    return found.log().view(*hidden.shape[:2], -1)


def mean_loss(logs: Tensor, targets: Tensor, weights: Tensor | None, smoothing: float) -> Tensor:
    """Cross entropy with (1 - e) [v = x] + e / V, sum(w loss) / sum(w)."""
    wanted = torch.nn.functional.one_hot(targets, logs.shape[-1]).double() * (1 - smoothing)
    each = -((wanted + smoothing / logs.shape[-1]) * logs).sum(-1)
    share = torch.ones_like(each) if weights is None else weights.double()
    return (each * share).sum() / share.sum()


def compared(
    found: Tensor, expected: Tensor, leaves: dict[str, Tensor], copies: dict[str, Tensor], cotangent: Tensor
) -> None:
    """A value and its gradients with respect to `leaves` against those of the equation with respect to `copies`.

    In double precision to 1e-9 of the largest number, in fp32 to 1e-5 of it, or of 1 if that is more.
    """
    assert leaves.keys() == copies.keys()
    dtype = next(iter(leaves.values())).dtype
    assert found.dtype == dtype
    tolerance, least = (1e-9, 1e-4) if dtype == DOUBLE else (1e-5, 1.0)
    close("value", found.detach(), expected.detach(), tolerance, least)
    asked = [name for name, leaf in leaves.items() if leaf.requires_grad]
    given = torch.autograd.grad(found, [leaves[name] for name in asked], cotangent.to(dtype), retain_graph=True)
    right = torch.autograd.grad(expected, [copies[name] for name in asked], cotangent.double(), retain_graph=True)
    for name, one, other in zip(asked, given, right, strict=True):
        assert one.dtype == dtype, f"gradient of {name} is {one.dtype}"
        close(f"gradient of {name}", one, other, tolerance, least)


def close(name: str, found: Tensor, expected: Tensor, tolerance: float, least: float = 1.0) -> None:
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)}, not {tuple(expected.shape)}"
    off, size = float((found.double() - expected).abs().max()), float(expected.abs().max())
    assert off <= tolerance * max(least, size), f"{name} is off by {off:.1e}, its largest number is {size:.1e}"


class Watch(TorchDispatchMode):
    """Notes how much memory is held at most, the largest tensor, and the shape of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0  # bytes, numbers
        self.products: list[tuple[int, ...]] = []
        self._held: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        from torch.multiprocessing.reductions import StorageWeakRef

        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors(args)}
        for tensor in _tensors(out):
            self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.held())
        if "mm" in str(func):
            self.products.append(tuple(out.shape))
        return out

    def held(self) -> int:
        """Bytes that are held now."""
        self._held = {key: (ref, size) for key, (ref, size) in self._held.items() if not ref.expired()}
        return sum(size for _, size in self._held.values())


def _tensors(nested: Any) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested]
    return [t for item in nested for t in _tensors(item)] if isinstance(nested, tuple | list) else []


def watched(run: Callable[[], object]) -> Watch:
    with Watch() as watch:
        run()
    return watch
