"""Text from a model, one token at a time with a cache: `sample` (sampling, greedy), `beam_search`, and `generate` over both.

`generate` continues a text by one of our language models, in a window that slides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.memory import Memory
from fullrank.core.model import ModelOutput, longest
from fullrank.decoding.beam import Hypotheses as Hypotheses
from fullrank.decoding.beam import beam_search as beam_search
from fullrank.decoding.sample import Ensemble as Ensemble
from fullrank.decoding.sample import Sequences as Sequences
from fullrank.decoding.sample import sample as sample


class MemoryReader:
    """A model with memory, decoded token by token: its memory takes the place of a growing cache.

    The prompt is one segment; after it every token sees the `memory_length` tokens before it.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.max_length = model.max_length

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()

    def new_cache(self) -> Memory:
        """Make an empty memory."""
        return self.model.new_memory()

    def __call__(self, input_ids: Tensor, *, attention_mask: Tensor | None, cache: Memory) -> ModelOutput:
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        hidden, memory, _ = self.model.hidden(input_ids, cache, attention_mask=mask)
        return ModelOutput(self.model.output(hidden), cache=memory)


def reader_of(model: LanguageModel) -> LanguageModel | MemoryReader:
    """Return the model as it is decoded: with its cache, or with its memory if it has one."""
    return MemoryReader(model) if model.memory_length else model


def window_of(model: LanguageModel, window: int | None = None) -> int | None:
    """Choose the most tokens that generation reads at once.

    It is `window`, or else the length of the segments that the model was trained on, or else `max_position_embeddings`, and
    never more than `model.max_length`. A model with memory, which slides by itself, has no limit but the first and the last of
    these. None: no limit. Raises InputError for a window of no token.
    """
    if window is not None and window < 1:
        raise InputError(f"window: one token or more, given {window}")
    if window is None and not model.memory_length:
        window = model.trained_length or model.config.max_position_embeddings
    return longest(window, model.max_length)


_DRAWING = {  # and their defaults
    "temperature": 1.0, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": 1.0, "greedy": False,
    "seed": None,
}  # fmt: skip


def generate(
    model: LanguageModel,
    input_ids: Tensor,
    *,
    beams: int | None = None,
    length_penalty: float = 1.0,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """Continue prompts as `LanguageModel.generate` does.

    Args:
        model: with a cache or a memory.
        input_ids: prompts (B, N), padded on the left.
        beams: unfinished texts of a beam search; None to sample.
        length_penalty: exponent of the length in a beam search.
        window: the most tokens that are read at once; None as in `window_of`.
        options: those of `sample`; a beam search takes all but those of drawing.

    Returns:
        Prompts and new tokens (B, N + T).

    Raises:
        InputError: a value is out of range, or a beam search is given options of drawing.
        RunError: the model's logits are not finite.
    """
    reader = reader_of(model)
    window = window_of(model, window)
    if beams is None:
        new = sample(reader, input_ids, window=window, **options).ids
    else:
        if {name: options.pop(name, usual) for name, usual in _DRAWING.items()} != _DRAWING:
            raise InputError(f"beams: a search draws nothing; leave out beams, or {', '.join(_DRAWING)}")
        hypotheses = beam_search(
            reader, input_ids, window=window, beams=beams, length_penalty=length_penalty, **options
        )
        new = hypotheses.ids[:, 0]
    return torch.cat((input_ids, new), dim=1)
