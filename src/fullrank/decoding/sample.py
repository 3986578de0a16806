"""Sampling, and its limit at temperature 0, greedy decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.decoding.reading import Decodable, Reading, decoding
from fullrank.errors import InputError


@dataclass(frozen=True)
class Sequences:
    """What was written after each prompt.

    ids (B, T): new tokens, <eos> included; after the end of a row, eos_id.
    log_probs (B, T): of each token under the model itself (nats, before temperature and truncation); 0 after the end.
    lengths (B,): new tokens of each row, <eos> included. T is the longest.
    """

    ids: Tensor
    log_probs: Tensor
    lengths: Tensor


def sample(
    model: Decodable,
    prompt_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    eos_id: int | None = None,
    seed: int | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
) -> Sequences:
    """Continue prompts (B, N), padded on the left, token by token; a row ends with `eos_id` or after `max_new_tokens`.

    Tokens come from p(v)^(1/temperature), cut to the `top_k` most probable and then to the smallest set of the most probable
    ones with `top_p` of what remains. `greedy`, and temperature 0, take the most probable token, the first of equal ones.
    Draws come from a generator of this call alone: the same `seed` gives the same text, and the global one is untouched.
    Raises InputError for values out of range and for sequences longer than the model can take.
    """
    _check(temperature, top_k, top_p)
    greedy = greedy or temperature == 0
    generator = torch.Generator(prompt_ids.device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    with decoding(model):
        log_probs, reading = Reading.of_prompts(
            model, prompt_ids, attention_mask, max_new_tokens=max_new_tokens, use_cache=use_cache
        )
        lengths = torch.zeros(prompt_ids.shape[0], dtype=torch.int64, device=prompt_ids.device)
        ended = torch.zeros_like(lengths, dtype=torch.bool)
        ids: list[Tensor] = []
        chosen: list[Tensor] = []
        while True:
            if greedy:
                token = log_probs.argmax(dim=-1)
            else:
                p = distribution(log_probs, temperature=temperature, top_k=top_k, top_p=top_p)
                token = torch.multinomial(p, 1, generator=generator).squeeze(1)
            if eos_id is not None:
                token = token.masked_fill(ended, eos_id)
            chosen.append(log_probs.gather(1, token[:, None]).squeeze(1).masked_fill(ended, 0.0))
            ids.append(token)
            lengths = lengths + ~ended
            if eos_id is not None:
                ended = ended | (token == eos_id)
            if len(ids) == max_new_tokens or (eos_id is not None and bool(ended.all())):
                return Sequences(torch.stack(ids, dim=1), torch.stack(chosen, dim=1), lengths)
            log_probs, reading = reading.then(token)


def distribution(
    log_probs: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The probabilities that tokens are drawn with: log_probs (..., V) -> (..., V), float64, sums of one.

    Temperature first, then `top_k`, then `top_p` of the renormalised rest; of equal tokens the first ones are kept.
    Raises InputError for values out of range; temperature must be above zero here.
    """
    _check(temperature, top_k, top_p)
    if temperature == 0:
        raise InputError("temperature: above 0 for a distribution; 0 is the most probable token")
    scores = log_probs.double()
    # the largest becomes 0 first, so that the division can only overflow towards -inf, probability 0
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperature
    if top_k is None and top_p is None:
        return torch.softmax(scores, dim=-1)
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[..., top_k:] = -math.inf
    probs = torch.softmax(ordered, dim=-1)
    if top_p is not None and top_p < 1:
        before = probs.cumsum(dim=-1) - probs
        before[..., 0] = 0.0
        probs = probs.masked_fill(before >= top_p, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, index, probs)


def _check(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise InputError(f"temperature: zero or more, given {temperature}")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k: one or more tokens, given {top_k}; leave it out to keep all")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p: a share above 0 and at most 1, given {top_p}")
