"""Many prompts completed side by side, each up to its first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.data import Tokenizer
from fullrank.decoding import sample
from fullrank.experiments.generation import Remembering

_SEEN = 8  # tokens of the prompt that tell how the first new one is joined to it


@dataclass(frozen=True)
class Completion:
    """How prompts are completed. stop: a text ends before the first of these. temperature 0: the most probable tokens."""

    stop: tuple[str, ...] = ()
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    how: Completion,
    *,
    segment_length: int,
    batch_size: int,
    seeds: Sequence[int],
    report: Callable[[int], None] | None = None,
) -> list[str]:
    """What follows each prompt, without it, in the order given; `seeds`: of each prompt's draws.

    A model with memory reads a prompt in segments. One without reads its last `segment_length` tokens; where positions end,
    as many as leave room for `max_new_tokens`. report: told how many prompts each batch has finished.
    Raises InputError where new tokens alone are more than the model has positions for.
    """
    room = None if model.max_length is None else model.max_length - how.max_new_tokens
    if room is not None and room < 1:
        raise InputError(
            f"max_gen_toks: {how.max_new_tokens} new tokens and a prompt are more than the {model.max_length} positions of "
            "this model; lower it"
        )
    reader = Remembering(model, segment_length) if model.memory_length else model
    whole = [_encoded(tokenizer, prompt) for prompt in prompts]
    kept = [_last(ids, segment_length if not model.memory_length else None, room) for ids in whole]
    found: dict[int, str] = {}
    for batch in _batches([len(ids) for ids in kept], batch_size, alike=bool(model.memory_length)):
        given = [kept[i] for i in batch]
        longest = max(map(len, given))
        ids = torch.tensor([[tokenizer.start_id] * (longest - len(row)) + row for row in given])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in given])
        device = next(model.parameters()).device
        drawn = sample(
            reader,
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=how.max_new_tokens,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            seed=[seeds[i] for i in batch],
            stop=_Stop(tokenizer, given, how.stop) if how.stop else None,
        )
        for i, row, new, length in zip(batch, given, drawn.ids.tolist(), drawn.lengths.tolist(), strict=True):
            found[i] = _before(_written(tokenizer, row, new[:length]), how.stop)
        if report is not None:
            report(len(batch))
    return [found[i] for i in range(len(prompts))]


@dataclass(frozen=True)
class _Stop:
    """Which rows of new tokens hold a stop string."""

    tokenizer: Tokenizer
    given: Sequence[Sequence[int]]
    stop: tuple[str, ...]

    def __call__(self, ids: Tensor) -> Tensor:
        texts = [_written(self.tokenizer, row, new) for row, new in zip(self.given, ids.tolist(), strict=True)]
        return torch.tensor([any(word in text for word in self.stop) for text in texts], device=ids.device)


def _encoded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """As `fullrank generate` reads it: from the start mark on, and from that of a line where one begins."""
    ids = tokenizer.encode(prompt)
    if tokenizer.sos_id is not None and (not ids or ids[-1] == tokenizer.eos_id):
        ids.append(tokenizer.sos_id)
    return [tokenizer.start_id, *ids]


def _last(ids: list[int], *limits: int | None) -> list[int]:
    return ids[-min([len(ids), *(limit for limit in limits if limit is not None)]) :]


def _batches(lengths: Sequence[int], size: int, *, alike: bool) -> list[list[int]]:
    """Texts of like length together, the longest first; `alike`: of the same length, so that there is no padding."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found: list[list[int]] = []
    for i in order:
        if found and len(found[-1]) < size and (not alike or lengths[found[-1][0]] == lengths[i]):
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _written(tokenizer: Tokenizer, given: Sequence[int], new: Sequence[int]) -> str:
    """The text of new tokens, joined as it is to what was given (words are, with a space)."""
    seen = list(given[-_SEEN:])
    before, whole = tokenizer.decode(seen), tokenizer.decode([*seen, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)


def _before(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    ends = [text.find(word) for word in stop if word in text]
    return text[: min(ends)] if ends else text
