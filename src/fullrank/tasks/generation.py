"""A run writes text: prompt in, samples or beams out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullrank.attention.kernels import kernel
from fullrank.data import load_tokenizer
from fullrank.decoding import beam_search, sample
from fullrank.errors import InputError
from fullrank.model.language_model import LanguageModel
from fullrank.tasks.run_folder import open_run
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


def generate(
    folder: Path,
    prompt: str,
    how: Decoding,
    *,
    checkpoint: str = "best",
    device_name: str = "auto",
    kernel_name: str = "auto",
) -> dict[str, Any]:
    """`how.number` continuations of `prompt` by the run in `folder`, each with its log-probability in nats."""
    open_run(folder)
    if how.beam is not None and how.number > how.beam:
        raise InputError(f"--number: {how.number} texts from a beam of {how.beam}; make --beam at least {how.number}")
    tokenizer = load_tokenizer(folder)
    device = choose_device(device_name, "--device")
    model = LanguageModel.load(folder, checkpoint).to(device)
    # the model was trained to read a text from its start mark on
    ids = torch.tensor([[tokenizer.start_id, *tokenizer.encode(prompt)]], device=device)
    eos = tokenizer.eos_id if how.stop else None
    with kernel(kernel_name), torch.no_grad():
        if how.beam is not None:
            beams = beam_search(
                model,
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
                model,
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
    read = ids[0, 1:].tolist()
    texts = [
        {"text": tokenizer.decode(read + row[:length]), "tokens": length, "log_prob": score}
        for row, length, score in zip(new.tolist(), lengths.tolist(), scores.tolist(), strict=True)
    ]
    return {"run": str(folder), "prompt": prompt, "texts": texts}
