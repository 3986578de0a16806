"""Reading with a model, one token at a time: what sampling and beam search share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fullrank.core.errors import InputError, RunError


class Output(Protocol):
    """What a model returns: logits (B, N, V), or log-probabilities, and the cache of the next call."""

    @property
    def logits(self) -> Tensor: ...

    @property
    def cache(self) -> Any: ...


class Decodable(Protocol):
    """A model that can be decoded: any callable; with `new_cache()` it need not read the text again for every token.

    input_ids (B, N) are new tokens, attention_mask (B, M) covers all tokens so far, 1 for tokens and 0 for padding.
    A cache is a value with `reorder(index)`, which selects and repeats rows. An optional attribute `max_length` (int or
    None) is the longest sequence the model can take.
    """

    def __call__(self, input_ids: Tensor, *, attention_mask: Tensor | None) -> Output: ...


@dataclass(frozen=True)
class Reading:
    """What a model has read, as a value.

    ids (B, N); mask (B, N) with False for padding, None when there is none; cache None: every step reads all ids again.
    """

    model: Any
    ids: Tensor
    mask: Tensor | None
    cache: Any

    @classmethod
    def of_prompts(
        cls,
        model: Decodable,
        prompt_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        max_new_tokens: int,
        use_cache: bool,
    ) -> tuple[Tensor, Reading]:
        """Read prompts (B, N), padded on the left: log p(next token), (B, V), and the reading.

        Raises InputError for prompts, masks or lengths that cannot be decoded, before the model is called.
        max_new_tokens: of the longest text that may follow.
        """
        mask = _checked(prompt_ids, attention_mask)
        longest = getattr(model, "max_length", None)
        wanted = prompt_ids.shape[1] + max_new_tokens
        if longest is not None and wanted > longest:
            raise InputError(
                f"a prompt of {prompt_ids.shape[1]} tokens and max_new_tokens {max_new_tokens} make {wanted}, but the model "
                f"takes at most {longest}; shorten the prompt or lower max_new_tokens"
            )
        if use_cache and not hasattr(model, "new_cache"):
            raise InputError(f"{type(model).__name__} has no new_cache(); give use_cache=False")
        start = cls(model, prompt_ids[:, :0], None if mask is None else mask[:, :0], None)
        if use_cache:
            start = replace(start, cache=model.new_cache())  # type: ignore[attr-defined]
        return start._then(prompt_ids, mask)

    def then(self, tokens: Tensor) -> tuple[Tensor, Reading]:
        """Read one more token in every row, (B,): log p(next token), (B, V), and the new reading."""
        new = tokens[:, None]
        return self._then(new, None if self.mask is None else torch.ones_like(new, dtype=torch.bool))

    def rows(self, index: Tensor) -> Reading:
        """The reading of rows `index` (K,) of this one, in that order; rows may repeat."""
        rows = self.ids.shape[0]
        if index.shape[0] == rows and torch.equal(index, torch.arange(rows, device=index.device)):
            return self  # greedy search copies no cache
        return replace(
            self,
            ids=self.ids.index_select(0, index),
            mask=None if self.mask is None else self.mask.index_select(0, index),
            cache=None if self.cache is None else self.cache.reorder(index),
        )

    def _then(self, new: Tensor, new_mask: Tensor | None) -> tuple[Tensor, Reading]:
        ids = torch.cat((self.ids, new), dim=1)
        mask = None if self.mask is None or new_mask is None else torch.cat((self.mask, new_mask), dim=1)
        if self.cache is None:
            out = self.model(ids, attention_mask=mask)
            after = None
        else:
            out = self.model(new, cache=self.cache, attention_mask=mask)
            after = out.cache
        return log_normalized(out.logits[:, -1]), Reading(self.model, ids, mask, after)


def log_normalized(logits: Tensor) -> Tensor:
    """Log-probabilities over the last axis, in fp32 at least; log-probabilities stay what they are.

    Raises RunError if they are not numbers: a token chosen from them would be meaningless.
    """
    log_probs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    if log_probs[..., 0].isnan().any():  # one that is not a number, or +inf, makes all of its row NaN
        raise RunError("the model's logits are not finite; it diverged in training, or its precision is too low")
    return log_probs


def _checked(prompt_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """The mask as booleans, None when nothing is padded."""
    if prompt_ids.dim() != 2 or prompt_ids.is_floating_point():
        raise InputError(
            f"prompt_ids: whole numbers of shape (B, N), given {prompt_ids.dtype} of shape {tuple(prompt_ids.shape)}"
        )
    if 0 in prompt_ids.shape:
        raise InputError(
            "prompt_ids: at least one row with one token; an empty text starts with the tokenizer's start_id"
        )
    if attention_mask is None:
        return None
    mask = attention_mask.bool()
    if mask.shape != prompt_ids.shape:
        raise InputError(f"attention_mask: shape {tuple(prompt_ids.shape)} like prompt_ids, given {tuple(mask.shape)}")
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise InputError("attention_mask: prompts are padded on the left, so a row is 0 ... 0 1 ... 1 and ends with 1")
    return None if mask.all() else mask


@contextlib.contextmanager
def decoding(model: Any) -> Iterator[None]:
    """No gradients, and the modules of the model in evaluation mode (no dropout); leaves every one as it was."""
    modules = list(model.modules()) if hasattr(model, "modules") else []
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
