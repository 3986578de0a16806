"""The contract of a score."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fullrank.core.engine import Terms
from fullrank.core.layout import Layout
from fullrank.core.registry import contract


@contract("score")
class Score(nn.Module):
    """What a score declares. It is built from `(config, size)`, and called with what it `needs` and with the layout.

    It returns (B, H, N, M) before the mask, or (1, H, N, M) if all sequences have the same scores.
    needs: the fields of `Heads` that it reads, in the order of its arguments; nothing else is projected.
    idle: what is allocated all the same, and never trained.
    max_length: the greatest M; None if there is no limit.
    clamp_length: keys that are farther count as that far, for scores that read distances.
    """

    Config: ClassVar[Any] = None
    needs: ClassVar[tuple[str, ...]] = ("scored", "keys")
    idle: tuple[str, ...] = ()
    max_length: int | None = None
    clamp_length: int | None = None

    def terms(self, *needed: Tensor | Layout) -> Terms | str:
        """The score as engines compute it, from the same arguments; a string is the reason for which no engine does."""
        return f"no engine knows the score {type(self).__name__}"
