"""What a text may look like, whatever the model thinks of it: its length, and n-grams that must not come twice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.core.errors import InputError


@dataclass(frozen=True)
class Rules:
    """What search and sampling hold every new text to.

    longest (B,): new tokens of each row at most, <eos> included. shortest: tokens that <eos> must have before it.
    ngram: no text holds the same n-gram of new tokens twice; 0: it may. What the prompt holds does not count.
    What is forbidden gets log-probability -inf, and the rest stays as it is: scores are sums under the model itself.
    """

    longest: Tensor
    shortest: int
    ngram: int
    eos_id: int | None

    @classmethod
    def of(
        cls,
        prompt_ids: Tensor,
        max_new_tokens: int | Tensor,
        min_new_tokens: int,
        no_repeat_ngram_size: int | None,
        eos_id: int | None,
    ) -> Rules:
        """Those for prompts (B, N). Raises InputError for values that no text can satisfy."""
        rows = prompt_ids.shape[:1]
        if isinstance(max_new_tokens, Tensor):
            if max_new_tokens.is_floating_point() or max_new_tokens.shape != rows:
                raise InputError(
                    f"max_new_tokens: a number, or whole numbers of shape {tuple(rows)}, one a prompt; given "
                    f"{max_new_tokens.dtype} of shape {tuple(max_new_tokens.shape)}"
                )
            longest = max_new_tokens.to(prompt_ids.device)
        else:
            longest = torch.full(rows, max_new_tokens, device=prompt_ids.device)
        least = int(longest.min()) if longest.numel() else 1
        if least < 1:
            raise InputError(f"max_new_tokens: one or more, given {least}")
        if not 0 <= min_new_tokens <= least:
            raise InputError(
                f"min_new_tokens: from 0 to max_new_tokens ({least}{' in the shortest row' * (rows.numel() > 1)}), given "
                f"{min_new_tokens}"
            )
        if no_repeat_ngram_size is not None and no_repeat_ngram_size < 0:
            raise InputError(
                f"no_repeat_ngram_size: a number of tokens, or 0 for no rule, given {no_repeat_ngram_size}"
            )
        return cls(longest, min_new_tokens, no_repeat_ngram_size or 0, eos_id)

    @property
    def most(self) -> int:
        """The longest of all rows."""
        return int(self.longest.max()) if self.longest.numel() else 1

    def forbids(self, length: int) -> bool:
        """Whether anything can be forbidden as the next token of texts of `length` new tokens."""
        early = self.eos_id is not None and length < self.shortest
        return early or 0 < self.ngram <= length

    def allowed(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """log p(next token) (K, V) after new tokens (K, t), with -inf for tokens that may not come next."""
        length = tokens.shape[1]
        if not self.forbids(length):
            return log_probs
        log_probs = log_probs.clone()
        if self.eos_id is not None and length < self.shortest:
            log_probs[:, self.eos_id] = -math.inf
        if 0 < self.ngram <= length:
            repeated, follows = _repeats(tokens, self.ngram)
            # several windows may be followed by the same token, and one that does not match must not free it again
            log_probs.scatter_reduce_(
                1, follows, torch.where(repeated, -math.inf, math.inf).to(log_probs.dtype), reduce="amin"
            )
        return log_probs


def _repeats(tokens: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Where texts (K, t) have come to the same n - 1 tokens before, and the token that followed there: both (K, t - n + 1)."""
    length = tokens.shape[1]
    follows = tokens[:, n - 1 :]
    if n == 1:
        return torch.ones_like(follows, dtype=torch.bool), follows
    windows = tokens[:, :-1].unfold(1, n - 1, 1)  # (K, t - n + 1, n - 1)
    return (windows == tokens[:, None, length - n + 1 :]).all(dim=-1), follows
