"""The parts of a benchmark: passes and training steps, candidates that make them, comparisons of candidates, suites."""

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.errors import pip_install

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORWARD = "forward"
BOTH = "forward + backward"
STEP = "training step"


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
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def autocast(self) -> torch.autocast:
        """Make a context in which products of fp32 parameters have the dtype of the settings."""
        return torch.autocast(self.torch_device.type, self.torch_dtype, enabled=self.dtype != "fp32")

    def randn(self, *dims: int, seed: int = 0) -> Tensor:
        """Draw normal random numbers in fp32, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*dims, generator=generator).to(self.torch_device)


@dataclass(frozen=True)
class Shape:
    """Sizes of heads of attention."""

    batch: int
    heads: int
    tokens: int
    size: int

    def __str__(self) -> str:
        return f"B {self.batch}, H {self.heads}, N {self.tokens:,}, D {self.size}"


@dataclass
class Pass:
    """`forward()`, and with `backward` also the gradients of `leaves`.

    `cotangent` is the gradient of the output; None for a loss. Without `backward` nothing is kept for gradients.
    `settings`: products are in their dtype.
    """

    forward: Callable[[], Tensor]
    leaves: Mapping[str, Tensor]
    cotangent: Tensor | None
    backward: bool
    settings: Settings = Settings()

    def __call__(self) -> Tensor:
        self.clear()
        with torch.set_grad_enabled(self.backward), self.settings.autocast():
            out = self.forward()
        if not self.backward:
            return out
        out.backward(None if self.cotangent is None else self.cotangent.to(out.dtype))
        return out

    def clear(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def values(self) -> dict[str, Tensor]:
        values = {"output": self().detach()}
        for name, leaf in self.leaves.items():
            if leaf.grad is not None:
                values[name] = leaf.grad
        return values


@dataclass
class TrainingStep:
    """One update: the loss, its gradients, clipped to a norm, and the optimizer."""

    model: nn.Module
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    max_norm: float

    def __call__(self) -> None:
        self._compute_gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()

    def _compute_gradients(self) -> Tensor:
        self.clear()
        loss = self.loss()
        loss.backward()
        return loss

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def values(self) -> dict[str, Tensor]:
        """Compute the loss, and the norm of the gradients of all parameters but those of mixing; nothing is updated.

        Gradients are not compared one by one: where rounding moves a unit across the kink of ReLU, those of its weights jump.
        """
        loss = self._compute_gradients().detach()
        norms = []
        for name, parameter in self.model.named_parameters():
            if ".mix." not in name and parameter.grad is not None:
                norms.append(parameter.grad.norm())
        return {"output": loss, "gradients": torch.stack(norms).norm()}


@dataclass(frozen=True)
class Candidate:
    """One way to compute something.

    make: makes it of the settings, with or without a backward pass, and a size. What it makes is timed (a call), freed of its
    gradients (`clear`), and compared with others (`values`: output and gradients of one call, by name). It is given to other
    processes, so it is a function of a module, or a partial of one.
    computes: candidates with the same word give the same values, and are compared before they are timed.
    against: the names of the peers it is measured against; empty for a peer.
    absent: why it cannot run here; empty if it can.
    takes: bytes that it needs at least, where that may be too many.
    compiled: its first call compiles it for its size.
    gflop: matrix products of a call, 10^9 multiplications and additions.
    settings: those of the run, in its own dtype.
    """

    name: str
    make: Callable[[Settings, bool, Any], Any]
    computes: str
    against: tuple[str, ...] = ()
    absent: str = ""
    takes: float = 0
    compiled: bool = False
    gflop: float | None = None
    settings: Settings = Settings()

    @property
    def ours(self) -> bool:
        return bool(self.against)

    def make_pass(self, what: str, size: Any) -> Any:
        return self.make(self.settings, what == BOTH, size)


@dataclass(frozen=True)
class Comparison:
    """Candidates of one size.

    tiny: the size of a first call, which allocates what is allocated once and for all.
    length: what growth is measured over. passes: what is measured, one after another.
    tokens: those of a call, where tokens per second say something.
    """

    size: Any
    tiny: Any
    length: int
    candidates: Sequence[Candidate]
    passes: tuple[str, ...] = (FORWARD, BOTH)
    tokens: int | None = None


@dataclass(frozen=True)
class Suite:
    """A benchmark by name.

    comparisons: of the settings and a length; of the settings alone where the benchmark has sizes of its own.
    lengths: measured when the benchmark is named.   quick: measured in the quick set of all benchmarks.
    rounds: the default.   shortest: seconds; a shorter candidate runs several times in a row.
    takes: which of the options heads, head_dim and batch have an effect.
    """

    name: str
    about: str
    comparisons: Callable[..., list[Comparison]]
    lengths: tuple[int, ...] = ()
    quick: tuple[int, ...] = ()
    rounds: int = 9
    shortest: float = 0.01
    takes: frozenset[str] = frozenset({"heads", "head_dim", "batch"})


def explain_missing(module: str) -> str:
    """Explain why a peer from another package cannot run; empty if the package is installed."""
    if importlib.util.find_spec(module):
        return ""
    return f"not installed; {pip_install('bench')}"


def import_talking_heads() -> Any:
    """Import the attention class of x-transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it scripts functions when imported
        from x_transformers.attend import Attend
    return Attend
