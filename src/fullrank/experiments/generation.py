"""A run writes text: prompt in, samples or beams out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.memory import Memory
from fullrank.data import load_tokenizer
from fullrank.decoding import beam_search, sample
from fullrank.experiments.run_folder import open_run
from fullrank.kernels import kernel
from fullrank.training.device import choose_device


@dataclass(frozen=True)
class Decoding:
    """How to choose tokens. `beam` switches to beam search; without it tokens are sampled (or `greedy`)."""

    max_new_tokens: int = 100
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    greedy: bool = False
    beam: int | None = None
    length_penalty: float = 1.0
    seed: int | None = None
    number: int = 1
    stop: bool = False


@dataclass(frozen=True)
class _Read:
    logits: Tensor
    cache: Memory | None


class Remembering:
    """A model with memory as one that is decoded token by token: what it remembers takes the place of a growing cache.

    The prompt is one segment, or several of `segment_length`; after it every token sees the `memory_length` tokens before it.
    """

    def __init__(self, model: LanguageModel, segment_length: int | None = None) -> None:
        self.model, self.max_length, self.segment_length = model, model.max_length, segment_length

    def new_cache(self) -> Memory:
        """Nothing was read yet."""
        return self.model.new_memory()

    def __call__(self, input_ids: Tensor, *, attention_mask: Tensor | None, cache: Memory | None = None) -> _Read:
        tokens = input_ids.shape[1]
        mask = None if attention_mask is None else attention_mask[:, -tokens:]
        step = self.segment_length or tokens
        for start in range(0, tokens, step):
            here = slice(start, start + step)
            part = None if mask is None else mask[:, here]
            hidden, cache, _ = self.model.hidden(input_ids[:, here], cache, attention_mask=part)
        return _Read(self.model.output(hidden), cache)


def generate(
    folder: Path,
    prompt: str,
    how: Decoding,
    *,
    memory_length: int | None = None,
    checkpoint: str = "best",
    device_name: str = "auto",
    kernel_name: str = "auto",
) -> dict[str, Any]:
    """`how.number` continuations of `prompt` by the run in `folder`, each with its log-probability in nats.

    A model with memory remembers the last `memory_length` tokens (null: as many as it was trained with).
    """
    config = open_run(folder)[0]
    if config.data.has_pairs:
        raise InputError(f"{folder}: a translation run; it translates with `fullrank translate`")
    if config.masks:
        raise InputError(
            f"{folder}: names masked tokens from the text on both sides of them (train.objective: masked), so it cannot write "
            "a text token by token; train with train.objective: causal to generate"
        )
    if config.model.sees_future:
        raise InputError(
            f"{folder}: its tokens see later ones (model.attention.causal: as_published), so it cannot write a text token by "
            "token; train with model.attention.causal: masked to generate"
        )
    if how.beam is not None and how.number > how.beam:
        raise InputError(f"--number: {how.number} texts from a beam of {how.beam}; make --beam at least {how.number}")
    tokenizer = load_tokenizer(folder)
    device = choose_device(device_name, "--device")
    model = LanguageModel.load(folder, checkpoint, memory_length=memory_length).to(device)
    reader = Remembering(model) if model.memory_length else model
    given = tokenizer.encode(prompt)
    if tokenizer.sos_id is not None and (not given or given[-1] == tokenizer.eos_id):
        given.append(tokenizer.sos_id)  # what is written begins a line
    # the model was trained to read a text from its start mark on
    ids = torch.tensor([[tokenizer.start_id, *given]], device=device)
    eos = tokenizer.eos_id if how.stop else None
    with kernel(kernel_name), torch.no_grad():
        if how.beam is not None:
            beams = beam_search(
                reader,
                ids,
                max_new_tokens=how.max_new_tokens,
                beams=how.beam,
                n_best=how.number,
                length_penalty=how.length_penalty,
                eos_id=eos,
            )
            new, lengths, scores = beams.ids[0], beams.lengths[0], beams.log_probs[0]
        else:
            drawn = sample(
                reader,
                ids.expand(how.number, -1),
                max_new_tokens=how.max_new_tokens,
                temperature=how.temperature,
                top_k=how.top_k,
                top_p=how.top_p,
                greedy=how.greedy,
                eos_id=eos,
                seed=how.seed,
            )
            new, lengths, scores = drawn.ids, drawn.lengths, drawn.log_probs.sum(1)
    texts = [
        {"text": tokenizer.decode(given + row[:length]), "tokens": length, "log_prob": score}
        for row, length, score in zip(new.tolist(), lengths.tolist(), scores.tolist(), strict=True)
    ]
    return {"run": str(folder), "prompt": prompt, "texts": texts}
