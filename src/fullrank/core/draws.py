"""Dropout, and the random numbers of a training pass as a function of their place: the pass, the call that draws, and the row.

A row of the whole batch draws the same numbers whichever process reads it, so that one process and several drop the same
entries. The training loop sets `current` for each pass; where it is None, torch's generators draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class Draws:
    """The draws of one pass over the rows `first` .. `first + rows` - 1 of the whole batch.

    words(call, start, count): int64 (count,), random words `start` .. of the endless sequence of one call.
    call: the number of the next call that draws.
    selected: where a layer computes only some tokens of these rows, their positions (T,) among all, and the number of all.
    """

    words: Callable[[int, int, int], Tensor]
    first: int = 0
    rows: int = 1
    call: int = 0
    selected: tuple[Tensor, int] | None = None

    def uniform_and_bits(self, shape: torch.Size, shared: bool) -> tuple[float, Tensor]:
        """Draw a number in [0, 1) for the whole call, and 16 random bits for each entry, int16 `shape`.

        The rows of the batch come first in `shape`, or its tokens; shared: no rows, the same draws in every process.
        """
        call = self._take_call()
        count = math.prod(shape)
        positions, tokens = self.selected or (None, 0)
        if count == 0:  # no token was selected; torch views no empty words of another size
            bits = torch.empty(0, dtype=torch.int16)
        elif shared:
            bits = self._bits(call, 0, 1, count)
        elif positions is None:
            bits = self._bits(call, self.first, self.rows, count // self.rows)
        else:
            width = count // len(positions)
            row_bits = self._bits(call, self.first, self.rows, tokens // self.rows * width)
            bits = row_bits.reshape(tokens, width)[positions]
        return self._uniform(call), bits.reshape(shape)

    def seed(self) -> tuple[int, int]:
        """Draw a seed from 0 to 2^62 - 1 for a kernel that draws by itself; return it with the number of the first row."""
        return int(self.words(self._take_call(), 0, 1)) & (2**62 - 1), self.first

    def permutation(self, count: int, probability: float) -> Tensor | None:
        """Draw a permutation of `count` with `probability`, the same in every process; otherwise return None."""
        call = self._take_call()
        if self._uniform(call) >= probability:
            return None
        return self.words(call, 1, count).argsort()

    def _take_call(self) -> int:
        self.call += 1
        return self.call - 1

    def _uniform(self, call: int) -> float:
        return (int(self.words(call, 0, 1)) & (2**53 - 1)) / 2**53

    def _bits(self, call: int, first: int, rows: int, entries: int) -> Tensor:
        """Draw 16 bits for each entry of each row, int16 (rows, entries).

        Every row begins with a new word. The first word of a call is not used here.
        """
        words = -(-entries // 4)
        drawn = self.words(call, 1 + first * words, rows * words)
        return drawn.view(torch.int16).view(rows, 4 * words)[:, :entries]


current: Draws | None = None


def seed(device: torch.device | str = "cpu") -> Tensor:
    """Draw a seed for a kernel, and return it with the number of the first row of the batch: int64 (2,).

    Outside a training pass, and in compiled code, torch's generator draws, and the row is 0.
    """
    if torch.compiler.is_compiling() or current is None:
        drawn = torch.randint(2**62, (1,), device=device)
        return torch.cat((drawn, torch.zeros_like(drawn)))
    return torch.tensor(current.seed(), device=device)


def selecting() -> bool:
    """Return whether tensors hold selected tokens (`selected`), which belong to no row."""
    return not torch.compiler.is_compiling() and current is not None and current.selected is not None


def calls() -> int:
    """Return the number of the next call that draws, 0 outside a training pass."""
    return 0 if current is None else current.call


@contextmanager
def select_tokens(positions: Tensor, tokens: int, call: int | None = None) -> Iterator[None]:
    """Run the block with draws for tensors that hold selected tokens alone; each token draws what it would among all.

    Args:
        positions: (T,), those of the selected tokens among all, or among those that a block around this one selected.
        tokens: the number of all tokens.
        call: the number of the first call inside; None goes on counting. Where parts of the tokens are computed one after the
            other, each begins with what `calls` was before the first of them.
    """
    if torch.compiler.is_compiling() or current is None:
        yield
        return
    before = current.selected
    current.selected = (positions, tokens) if before is None else (before[0][positions], before[1])
    current.call = current.call if call is None else call
    try:
        yield
    finally:
        current.selected = before


def checkpoint_function(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function and keep only its inputs; the backward pass calls it again, with the same draws.

    Args:
        function: returns a tensor or several.
        arguments: its positional arguments.
        options: its keyword arguments.

    Returns:
        What the function returns.
    """
    if not torch.is_grad_enabled():
        return function(*arguments, **options)
    if torch.compiler.is_compiling():  # torch's generators draw there, and it knows of them
        return checkpoint(function, *arguments, use_reentrant=False, **options)
    again = _Again(copy(current))
    run = copy_context().run  # both passes have the context variables of now
    return checkpoint(
        run, function, *arguments, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **options
    )


@dataclass
class _Again(AbstractContextManager[None]):
    """A block with the draws of a first pass; entered once for every backward pass."""

    draws: Draws | None

    def __enter__(self) -> None:
        global current
        self.before = current
        current = copy(self.draws)

    def __exit__(self, *error: Any) -> None:
        global current
        current = self.before


@contextmanager
def draw_apart() -> Iterator[None]:
    """Run the block with random numbers of its own on the CPU; those that follow stay as they would be without it."""
    with torch.random.fork_rng(devices=[]):
        seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu").item()
        torch.default_generator.manual_seed(int(seed))
        yield


def dropout(x: Tensor, p: float, shared: bool = False) -> Tensor:
    """Zero each entry of x with probability p and scale the rest by 1/(1 - p).

    Args:
        x: any shape, the rows of the batch first.
        p: the probability that an entry is dropped.
        shared: x has no rows, and several processes that train together draw alike.
    """
    if p == 0:
        return x
    if x.device.type != "cpu" or p > 1 - 2**-16 or torch.compiler.is_compiling():
        return F.dropout(x, p)
    mask = draw_mask(x, p, shared)
    return x * mask.mul_(1 / (1 - p))


def draw_mask(x: Tensor, p: float, shared: bool) -> Tensor:
    """Draw the dropout mask of x on a CPU, 1 for kept and 0 for dropped entries, in its dtype.

    On a CPU `Tensor.bernoulli_` takes most of dropout's time (7.5 of 7.8 ns per entry); here one 64-bit draw makes four
    entries (1.3 ns). 16 bits are compared with 65,536 p, rounded up or down at random so that every entry is dropped
    with probability p exactly; the rounding is drawn once a mask. All numbers come from the draws of the training pass
    (`current`), or torch's default generator.

    Args:
        x: gives shape and dtype, the rows of the batch first.
        p: the probability that an entry is dropped.
        shared: as of `dropout`.
    """
    if current is not None:
        rounding, bits = current.uniform_and_bits(x.shape, shared)
    else:
        rounding = torch.rand((), device="cpu").item()
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device="cpu")
        words.random_(-(2**63), None)
        bits = words.view(torch.int16)[: x.numel()].view(x.shape)
    least = math.floor(65_536 * p + rounding) - 32_768  # of a kept entry, as a signed number
    return bits.ge_(least).to(x.dtype)  # in place: comparing to booleans takes ten times as long


class Dropout(nn.Module):
    """Zero entries with probability p and scale the rest by 1/(1 - p), in training only.

    x (B, N, E) -> (B, N, E), or one sequence (N, E).
    locked: one mask for all N positions (variational dropout, Gal & Ghahramani 2016). shared: as of `dropout`.
    """

    def __init__(self, p: float, locked: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.p = p
        self.locked = locked
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if not self.locked:
            return dropout(x, self.p, self.shared)
        one_position = torch.ones_like(x[..., :1, :])
        return x * dropout(one_position, self.p, self.shared or selecting())


def make_dropout(p: float, locked: bool = False, shared: bool = False) -> nn.Module:
    """Build a `Dropout`, or where nothing is dropped the identity.

    Args:
        p: the probability that an entry is dropped.
        locked: as of `Dropout`.
        shared: as of `dropout`.
    """
    return Dropout(p, locked, shared) if p else nn.Identity()


def draw_words(p: float, input_ids: Tensor, vocab_size: int) -> Tensor:
    """Draw the words that are dropped, each wherever it stands.

    Dropout of rows of the embedding (Gal & Ghahramani 2016; Merity et al. 2018, §4.3). Every process draws alike.

    Args:
        p: the probability that a word is dropped.
        input_ids: int64 (B, N).
        vocab_size: the number of words.

    Returns:
        The factor of each token (B, N, 1): 0 for a dropped word, else 1/(1 - p).
    """
    like = torch.ones(vocab_size, 1, device=input_ids.device)
    return F.embedding(input_ids, dropout(like, p, shared=True))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Run the block without gradients, the modules of the model in evaluation mode (no dropout).

    Afterwards every module is in the mode that it was in before.
    """
    training = [module for module in model.modules() if module.training] if hasattr(model, "modules") else []
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
