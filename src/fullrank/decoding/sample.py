"""Sampling, and its limit at temperature 0, greedy decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.core.errors import InputError
from fullrank.decoding.reading import Decodable, Reading, decoding
from fullrank.decoding.rules import Rules


@dataclass(frozen=True)
class Sequences:
    """What was written after each prompt.

    ids (B, T): new tokens, <eos> included; after the end of a row, eos_id (0 without one).
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
    max_new_tokens: int | Tensor,
    min_new_tokens: int = 0,
    no_repeat_ngram_size: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    eos_id: int | None = None,
    seed: int | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
    stop: Callable[[Tensor], Tensor] | None = None,
) -> Sequences:
    """Continue prompts (B, N), padded on the left, token by token; a row ends with `eos_id` or after `max_new_tokens`.

    Tokens come from p(v)^(1/temperature), cut to the `top_k` most probable and then to the smallest set of the most probable
    ones with `top_p` of what remains. `greedy`, and temperature 0, take the most probable token, the first of equal ones.
    Draws come from a generator of this call alone: the same `seed` gives the same text, and the global one is untouched.
    With a sequence of seeds, one a row, a row's text does not depend on the rows beside it.
    max_new_tokens: a number, or (B,), one a prompt. min_new_tokens: tokens that <eos> must have before it.
    no_repeat_ngram_size: no text holds the same n-gram of new tokens twice; None or 0: it may. What is forbidden is left out
    before the draw; a row ends where nothing may follow.
    stop: asked after every token with all new tokens (B, T): which rows end here too, (B,) bool.
    Raises InputError for values out of range and for sequences longer than the model can take.
    """
    _check(temperature, top_k, top_p)
    rules = Rules.of(prompt_ids, max_new_tokens, min_new_tokens, no_repeat_ngram_size, eos_id)
    greedy = greedy or temperature == 0
    generators = _generators(seed, prompt_ids)
    with decoding(model):
        log_probs, reading = Reading.of_prompts(
            model, prompt_ids, attention_mask, max_new_tokens=rules.most, use_cache=use_cache
        )
        filler = 0 if eos_id is None else eos_id
        ids = prompt_ids.new_empty(prompt_ids.shape[0], 0)
        chosen = log_probs.new_empty(ids.shape)
        lengths = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
        ended = torch.zeros_like(lengths, dtype=torch.bool)
        while True:
            length = ids.shape[1]
            if rules.forbids(length):
                log_probs = rules.allowed(log_probs, ids)
                ended = ended | (log_probs.amax(dim=-1) == -math.inf)
                log_probs = log_probs.masked_fill(ended[:, None], 0.0)  # any token will do there
                if ended.all():
                    break
            if greedy:
                token = log_probs.argmax(dim=-1)
            else:
                p = distribution(log_probs, temperature=temperature, top_k=top_k, top_p=top_p)
                token = _drawn(p, generators)
            token = token.masked_fill(ended, filler)
            chosen = torch.cat((chosen, log_probs.gather(1, token[:, None]).masked_fill(ended[:, None], 0.0)), dim=1)
            ids = torch.cat((ids, token[:, None]), dim=1)
            lengths = lengths + ~ended
            ended = ended | (lengths == rules.longest)
            if eos_id is not None:
                ended = ended | (token == eos_id)
            if stop is not None:
                ended = ended | stop(ids)
            if length + 1 == rules.most or bool(ended.all()):
                break
            log_probs, reading = reading.then(token)
    return Sequences(ids, chosen, lengths)


def _generators(seed: int | Sequence[int] | None, prompt_ids: Tensor) -> list[torch.Generator]:
    """One for all rows, or one for each."""
    if seed is None:
        generator = torch.Generator(prompt_ids.device)
        generator.seed()
        return [generator]
    seeds = [seed] if isinstance(seed, int) else list(seed)
    if not isinstance(seed, int) and len(seeds) != prompt_ids.shape[0]:
        raise InputError(f"seed: a number, or one for each of {prompt_ids.shape[0]} prompts, given {len(seeds)}")
    return [torch.Generator(prompt_ids.device).manual_seed(one) for one in seeds]


def _drawn(probs: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """A token of each row of probs (B, V), (B,)."""
    if len(generators) == 1:
        return torch.multinomial(probs, 1, generator=generators[0]).squeeze(1)
    draws = [torch.multinomial(row, 1, generator=own) for row, own in zip(probs, generators, strict=True)]
    return torch.cat(draws)


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
