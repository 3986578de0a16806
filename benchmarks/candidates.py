"""The parts of a benchmark: passes over tensors, candidates that make them, comparisons of candidates, suites."""

import importlib.util
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fullrank.core.errors import pip_install

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORWARD, BOTH = "forward", "forward + backward"


@dataclass(frozen=True)
class Settings:
    """Sizes and device of one run. `batch` None: the suite's own. `compile`: also measure peers made by `torch.compile`."""

    heads: int = 8
    head_dim: int = 64
    batch: int | None = None
    dtype: str = "fp32"
    device: str = "cpu"
    compile: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def autocast(self) -> torch.autocast:
        """Products in `dtype` over fp32 parameters."""
        narrow = self.dtype != "fp32"
        return torch.autocast(self.torch_device.type, self.torch_dtype if narrow else torch.bfloat16, enabled=narrow)

    def randn(self, *dims: int, seed: int = 0, scale: float = 1.0) -> Tensor:
        """Normal random numbers, the same on every device, in the dtype of the run."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(*dims, generator=generator) * scale).to(self.torch_device, self.torch_dtype)


class Measured(Protocol):
    """A computation that can be timed (a call), cleared of its gradients, and compared with others (values)."""

    def __call__(self) -> object: ...

    def clear(self) -> None:
        """Free the gradients."""

    def values(self) -> dict[str, Tensor]:
        """Output and gradients of one call, by name."""


class Pass:
    """`forward()`, and with `backward` also the gradients of `leaves`.

    `cotangent` is the gradient of the output; None for a loss. Without `backward` nothing is kept for gradients.
    """

    def __init__(
        self, forward: Callable[[], Tensor], leaves: Mapping[str, Tensor], cotangent: Tensor | None, backward: bool
    ) -> None:
        self.forward, self.leaves, self.cotangent, self.backward = forward, leaves, cotangent, backward

    def __call__(self) -> Tensor:
        if not self.backward:
            with torch.no_grad():
                return self.forward()
        self.clear()
        out = self.forward()
        out.backward(None if self.cotangent is None else self.cotangent.to(out.dtype))
        return out

    def clear(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def values(self) -> dict[str, Tensor]:
        output = {"output": self().detach()}
        return output | {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}


@dataclass(frozen=True)
class Candidate:
    """One way to compute something.

    computes: candidates with the same word give the same values, and are compared before they are timed.
    against: the names of the peers it is measured against; empty for a peer.
    absent: why it cannot run here; empty if it can.
    takes: bytes that it needs at least, where that may be too many.
    compiled: its first call compiles it for its size.
    """

    name: str
    make: Callable[[], Measured]
    computes: str
    against: tuple[str, ...] = ()
    absent: str = ""
    takes: int = 0
    compiled: bool = False

    @property
    def ours(self) -> bool:
        return bool(self.against)


@dataclass(frozen=True)
class Comparison:
    """Candidates of one shape, timed in the same rounds. `length`: tokens of a text; `what`: which pass."""

    shape: str
    length: int
    what: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Suite:
    """A benchmark by name.

    lengths: measured when the benchmark is named.   quick: measured in the quick set of all benchmarks.
    tiny: a length for the first call, which allocates things once.   rounds: the default.
    takes: which of the options heads, head_dim and batch have an effect.
    each_length: show cost per n^2 and memory per n for every length.
    """

    name: str
    about: str
    lengths: tuple[int, ...]
    quick: tuple[int, ...]
    comparisons: Callable[[Settings, int], list[Comparison]]
    tiny: int = 16
    rounds: int = 9
    takes: frozenset[str] = frozenset({"heads", "head_dim", "batch"})
    each_length: bool = False


def missing(module: str) -> str:
    """Why a peer from another package cannot run: empty if the package is installed."""
    return "" if importlib.util.find_spec(module) else f"not installed; {pip_install('bench')}"


def uncompiled(settings: Settings) -> str:
    """Why `torch.compile` cannot run: empty if it can."""
    if not settings.compile:
        return "left out; --compile measures it too"
    if settings.torch_device.type == "cuda":
        return "" if importlib.util.find_spec("triton") else "torch.compile needs triton on a GPU"
    compilers = ("cl",) if sys.platform == "win32" else ("g++", "clang++", "c++")
    return "" if any(map(shutil.which, compilers)) else f"torch.compile needs a C++ compiler ({' or '.join(compilers)})"


def talking_heads() -> Any:
    """The attention class of x-transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it scripts functions when imported
        from x_transformers.attend import Attend
    return Attend


def eager_attention() -> Any:
    """The attention function of transformers made of products and a softmax, as in its Llama."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward
