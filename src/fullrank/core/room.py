"""Room for keys and values that are still to come, so that a new token does not copy all earlier ones."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 64  # tokens


class Room:
    """Storage (B, H, C, D) of which the first `used` tokens are taken; C doubles when it is full.

    Several caches may look at one storage. Each sees only its own first tokens, and who looks at all that is taken may
    write behind it; anybody else copies first. So a cache stays a value, also where two texts go on from one.
    """

    def __init__(self, storage: Tensor, used: int) -> None:
        self.storage, self.used = storage, used

    @classmethod
    def beside(cls, tokens: Tensor | None) -> Room | None:
        """What lets the next call make room for `tokens`, which are not to be written behind."""
        return None if tokens is None else cls(tokens, -1)

    def append(self, length: int, new: Tensor) -> tuple[Tensor, Room]:
        """The first `length` tokens, then new ones (B, H, N, D), as a view (B, H, length + N, D); and where they lie."""
        room, end = self, length + new.shape[2]
        if self.used != length or end > self.storage.shape[2] or self._closed():
            batch, heads, _, width = self.storage.shape
            storage = new.new_empty(batch, heads, max(2 * length, end, _LEAST), width)
            storage[:, :, :length] = self.storage[:, :, :length]
            room = Room(storage, length)
        room.storage[:, :, length:end] = new
        room.used = end
        return room.storage[:, :, :end], room

    def _closed(self) -> bool:
        """Made in inference mode: not to be written to outside of it."""
        return self.storage.is_inference() and not torch.is_inference_mode_enabled()


def append(past: Tensor, room: Room | None, new: Tensor) -> tuple[Tensor, Room | None]:
    """Earlier tokens (B, H, M, D), then new ones (B, H, N, D): (B, H, M + N, D), without a copy where there is room.

    Where gradients are kept, in compiled code and in another dtype they are joined, and no room is left.
    """
    if room is None or torch.is_grad_enabled() or torch.compiler.is_compiling() or past.dtype != new.dtype:
        return torch.cat((past.to(new.dtype), new), dim=2), None
    return room.append(past.shape[2], new)
