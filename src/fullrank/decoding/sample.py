"""Sampling and greedy decoding, and what beam search shares with them: reading token by token, constraints on texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core.cache import take_rows
from fullrank.core.draws import evaluating
from fullrank.core.errors import InputError, RunError
from fullrank.core.layout import read_mask
from fullrank.core.model import ModelOutput, longest


class Decodable(Protocol):
    """A model that can be decoded.

    Called as `model(input_ids, cache=..., attention_mask=...)`: input_ids (B, N) are new tokens, attention_mask (B, M)
    covers all tokens so far, 1 for tokens and 0 for padding. A cache is a value with `reorder(index)`, which selects and
    repeats rows; `new_cache()` is an empty one. The output has `logits` (B, N, V), or log-probabilities, and the `cache` of
    the next call. max_length: the longest sequence the model can take, None without limit.
    """

    @property
    def max_length(self) -> int | None: ...

    def new_cache(self) -> Any: ...

    def __call__(self, input_ids: Tensor, *, attention_mask: Tensor | None, cache: Any) -> Any: ...


@dataclass(frozen=True)
class Sequences:
    """New tokens after each prompt.

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
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    greedy: bool = False,
    eos_id: int | None = None,
    seed: int | None = None,
    attention_mask: Tensor | None = None,
    window: int | None = None,
) -> Sequences:
    """Continue prompts token by token; a row ends with `eos_id` or after `max_new_tokens`.

    Tokens come from p(v)^(1/temperature), cut to the `top_k` most probable, then to the smallest set of the most probable
    ones with `top_p` of what remains, then to those with `min_p` of the probability of the likeliest (Nguyen et al. 2024).
    Forbidden tokens are left out before the draw; a row ends where nothing may follow.

    Args:
        model: a model that can be decoded.
        prompt_ids: prompts (B, N), padded on the left.
        max_new_tokens: the most new tokens of a row: a number, or (B,), one a prompt.
        min_new_tokens: tokens that <eos> must have before it.
        no_repeat_ngram_size: no text holds the same n-gram of new tokens twice; None or 0: it may.
        temperature: zero or more; 0 as `greedy`.
        top_k: how many of the most probable tokens are drawn from; None: all.
        top_p: the share of probability that is kept, above 0 and at most 1; None: all.
        min_p: the least probability of a token, as a share of that of the likeliest; None: any.
        repetition_penalty: divides the logits above 0 of all tokens of prompt and text, and multiplies those below (Keskar et
            al. 2019), before all else; padding does not count.
        greedy: take the most probable token, the first of equal ones.
        eos_id: the token that ends a row; None where none does.
        seed: of a generator of this call alone: the same seed gives the same text, and the global generator is untouched;
            None: another text each time.
        attention_mask: (B, N), 1 for tokens and 0 for padding; None without padding.
        window: the most tokens that are read at once, see `Reading`; None: a text has to fit into `model.max_length`.

    Returns:
        The new tokens after each prompt, and their log-probabilities.

    Raises:
        InputError: a value is out of range, or a sequence is longer than the model can take.
        RunError: the model's logits are not finite.
    """
    _check_options(temperature, top_k, top_p, min_p, repetition_penalty)
    constraints = Constraints.build(prompt_ids, max_new_tokens, min_new_tokens, no_repeat_ngram_size, eos_id)
    greedy = greedy or temperature == 0
    generator = torch.Generator(prompt_ids.device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    with evaluating(model):
        reading = read_prompts(model, prompt_ids, attention_mask, constraints.longest, window)
        filler = 0 if eos_id is None else eos_id
        ids = prompt_ids.new_empty(prompt_ids.shape[0], 0)
        chosen = reading.log_probs.new_empty(ids.shape)
        lengths = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
        ended = torch.zeros_like(lengths, dtype=torch.bool)
        while True:
            log_probs = constraints.apply(reading.log_probs, ids)
            if log_probs is not reading.log_probs:
                ended = ended | (log_probs.amax(dim=-1) == -math.inf)
                if ended.all():
                    break
                log_probs = log_probs.masked_fill(ended[:, None], 0.0)  # any token will do there
            scores = log_probs
            if repetition_penalty != 1:
                written = torch.cat((prompt_ids, ids), dim=1)
                is_token = None
                if attention_mask is not None:
                    is_token = F.pad(attention_mask.bool(), (0, ids.shape[1]), value=True)
                penalized = log_normalized(penalize_repetition(reading.logits, written, repetition_penalty, is_token))
                scores = penalized.masked_fill(log_probs == -math.inf, -math.inf)
            if greedy:
                token = scores.argmax(dim=-1)
            else:
                p = distribution(scores, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
                token = torch.multinomial(p, 1, generator=generator).squeeze(1)
            token = token.masked_fill(ended, filler)
            here = log_probs.gather(1, token[:, None]).masked_fill(ended[:, None], 0.0)
            chosen = torch.cat((chosen, here), dim=1)
            ids = torch.cat((ids, token[:, None]), dim=1)
            lengths = lengths + ~ended
            ended = ended | (lengths == constraints.max_lengths)
            if eos_id is not None:
                ended = ended | (token == eos_id)
            if ended.all():
                break
            reading = reading.next(token)
    return Sequences(ids, chosen, lengths)


def penalize_repetition(logits: Tensor, ids: Tensor, penalty: float, is_token: Tensor | None = None) -> Tensor:
    """Penalize the logits z of tokens that occur: z / penalty above 0, z * penalty below; see `sample`.

    Args:
        logits: (B, V).
        ids: tokens that were read or written (B, N).
        penalty: above 0; 1 changes nothing.
        is_token: (B, N), False for padding, which does not count; None: all are tokens.

    Returns:
        Logits (B, V).
    """
    occurs = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    counts = torch.ones_like(ids) if is_token is None else is_token.long()
    occurs.scatter_add_(1, ids, counts)
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(occurs > 0, penalized, logits)


def distribution(
    log_probs: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Compute the probabilities that tokens are drawn with.

    Temperature comes first, then `top_k`, then `top_p` of the renormalised rest, then `min_p`. Of equal tokens the first are
    kept.

    Args:
        log_probs: (..., V).
        temperature: above zero.
        top_k: how many of the most probable tokens are kept; None: all.
        top_p: the share of probability that is kept; None: all.
        min_p: the least probability of a token, as a share of that of the likeliest; None: any.

    Returns:
        Probabilities (..., V) in fp64, which sum to one.
    """
    shape = log_probs.shape
    index = None
    if top_k is not None or top_p is not None:
        log_probs, index = _sort_largest(log_probs, top_k or shape[-1])
    scores = log_probs.double()
    # the largest becomes 0 first, so that the division can only overflow towards -inf, probability 0
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperature
    probs = torch.softmax(scores, dim=-1)
    if top_p is not None and top_p < 1:
        before = probs.cumsum(dim=-1) - probs
        before[..., 0] = 0.0
        probs = probs.masked_fill(before >= top_p, 0.0)
    if min_p is not None:
        probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    if (top_p or 1) < 1 or min_p is not None:
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs if index is None else probs.new_zeros(shape).scatter(-1, index, probs)


def _sort_largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the `count` largest of scores (..., V), largest first, and their places; of equal ones the first."""
    if count < scores.shape[-1]:
        largest, index = scores.topk(count, dim=-1)
        chosen = (scores >= largest[..., -1:]).sum(dim=-1)
        if bool((chosen == count).all()):  # no equal ones are parted
            index = index.sort(dim=-1).values
            ordered, order = scores.gather(-1, index).sort(dim=-1, descending=True, stable=True)
            return ordered, index.gather(-1, order)
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], index[..., :count]


def _check_options(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, repetition_penalty: float
) -> None:
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise InputError(f"temperature: zero or more, given {temperature}")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k: one or more tokens, given {top_k}; leave it out to keep all")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p: a share above 0 and at most 1, given {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise InputError(f"min_p: a share from 0 to 1 of the likeliest token's probability, given {min_p}")
    if not (repetition_penalty > 0 and math.isfinite(repetition_penalty)):
        raise InputError(f"repetition_penalty: above 0, where 1 changes nothing, given {repetition_penalty}")


@dataclass(frozen=True)
class Reading:
    """State of a model that reads token by token.

    ids (B, N); mask (B, N) with False for padding, None when there is none; the cache holds what was read.
    window: the most tokens W that are read at once; None without limit. A prompt is its last W tokens. A token that would be
    one too many begins the window anew: what is read is the last W / 2 tokens (rounded up), it among them, as a text of
    their own. So each token is read twice at most. Padding counts.
    """

    model: Any
    ids: Tensor
    mask: Tensor | None
    cache: Any
    window: int | None = None
    logits: Any = None  # (B, V), of the next token, as the model gives them

    @cached_property
    def log_probs(self) -> Tensor:
        """Log p(next token), (B, V)."""
        return log_normalized(self.logits)

    def next(self, tokens: Tensor) -> Reading:
        """Read one more token in every row, (B,)."""
        ids = torch.cat((self.ids, tokens[:, None]), dim=1)
        mask = None if self.mask is None else F.pad(self.mask, (0, 1), value=True)
        if self.window is None or ids.shape[1] <= self.window:
            return self.read(ids, mask, self.cache, 1)
        count = (self.window + 1) // 2
        mask = None if mask is None else mask[:, -count:]
        return self.read(ids[:, -count:], mask, self.model.new_cache(), count)

    def rows(self, index: Tensor) -> Reading:
        """Select the rows `index` (K,) of this reading, in that order; rows may repeat."""
        if torch.equal(index, torch.arange(len(self.ids), device=index.device)):
            return self  # greedy search copies no cache
        return replace(
            self,
            ids=self.ids.index_select(0, index),
            mask=take_rows(self.mask, index),
            cache=self.cache.reorder(index),
            logits=None,
        )

    def read(self, ids: Tensor, mask: Tensor | None, cache: Any, count: int) -> Reading:
        """Read the last tokens of a text.

        Args:
            ids: tokens (B, N).
            mask: (B, N), False for padding; None without padding.
            cache: what was read of the tokens before the last ones.
            count: how many tokens are read.

        Returns:
            The new reading.
        """
        out = self.model(ids[:, -count:], cache=cache, attention_mask=mask)
        return replace(self, ids=ids, mask=mask, cache=out.cache, logits=out.logits[:, -1])


def read_prompts(
    model: Decodable, prompt_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int, window: int | None
) -> Reading:
    """Read prompts.

    Args:
        model: a model that can be decoded.
        prompt_ids: prompts (B, N), padded on the left.
        attention_mask: (B, N), 1 for tokens and 0 for padding; None without padding.
        max_new_tokens: tokens of the longest text that may follow.
        window: the most tokens that are read at once, see `Reading`; None: a text has to fit into `model.max_length`.

    Returns:
        The reading.

    Raises:
        InputError: the mask has another shape or padding that is not on the left, or without `window` the text may grow longer
            than the model can take. The model is not called then.
    """
    mask = _check_mask(prompt_ids, attention_mask)
    wanted = prompt_ids.shape[1] + max_new_tokens
    if window is not None:
        prompt_ids = prompt_ids[:, -window:]
        mask = None if mask is None else mask[:, -window:]
    elif model.max_length is not None and wanted > model.max_length:
        raise InputError(
            f"a prompt of {prompt_ids.shape[1]} tokens and max_new_tokens {max_new_tokens} make {wanted}, but the model "
            f"takes at most {model.max_length}; shorten the prompt or lower max_new_tokens"
        )
    reading = Reading(model, prompt_ids, mask, model.new_cache(), window)
    return reading.read(prompt_ids, mask, reading.cache, prompt_ids.shape[1])


def _check_mask(prompt_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Read the mask as booleans; None when nothing is padded. Raises InputError for padding on the right or inside."""
    mask = read_mask(attention_mask, prompt_ids)
    if mask is None:
        return None
    ends = mask[:, :-1] & ~mask[:, 1:]  # of tokens, before padding
    if not mask[:, -1].all() or ends.any():
        raise InputError("attention_mask: prompts are padded on the left, so a row is 0 ... 0 1 ... 1 and ends with 1")
    return None if mask.all() else mask


def log_normalized(logits: Tensor) -> Tensor:
    """Normalise logits over the last axis to log-probabilities, in fp32 at least; log-probabilities stay what they are.

    Raises RunError if they are not numbers: a token chosen from them would be meaningless.
    """
    log_probs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    if log_probs[..., 0].isnan().any():  # one that is not a number, or +inf, makes all of its row NaN
        raise RunError("the model's logits are not finite; it diverged in training, or its precision is too low")
    return log_probs


@dataclass(frozen=True)
class Constraints:
    """Limits on every new text, whatever the model thinks of it: its length, and n-grams that must not come twice.

    max_lengths (B,): new tokens of each row at most, <eos> included. min_length: tokens that <eos> must have before it.
    ngram: no text holds the same n-gram of new tokens twice; 0: it may. N-grams of the prompt do not count.
    A forbidden token gets log-probability -inf, and the rest stays as it is: scores are sums under the model itself.
    """

    max_lengths: Tensor
    min_length: int
    ngram: int
    eos_id: int | None

    @classmethod
    def build(
        cls, prompt_ids: Tensor, max_new_tokens: int | Tensor, min_new_tokens: int, no_repeat_ngram_size: int | None,
        eos_id: int | None,
    ) -> Constraints:  # fmt: skip
        """Build the constraints of texts that follow prompts.

        Args:
            prompt_ids: prompts (B, N).
            max_new_tokens: the most new tokens of a row: a number, or (B,), one a prompt.
            min_new_tokens: tokens that <eos> must have before it.
            no_repeat_ngram_size: size of n-grams of new tokens that no text holds twice; None or 0: it may.
            eos_id: the token that ends a row; None where none does.

        Raises:
            InputError: prompts have another form, or no text meets the limits.
        """
        if prompt_ids.dim() != 2 or prompt_ids.is_floating_point() or not prompt_ids.numel():
            raise InputError(
                f"prompt_ids: whole numbers of shape (B, N), at least one row with one token, given {prompt_ids.dtype} of "
                f"shape {tuple(prompt_ids.shape)}; an empty text starts with the tokenizer's start_id"
            )
        max_lengths = torch.as_tensor(max_new_tokens, device=prompt_ids.device).expand(prompt_ids.shape[0])
        shortest = int(max_lengths.min())
        ngram = no_repeat_ngram_size or 0
        if shortest < 1 or max_lengths.is_floating_point():  # no length would be equal to a fraction
            raise InputError(f"max_new_tokens: a whole number, one or more, given {max_new_tokens}")
        if not 0 <= min_new_tokens <= shortest:
            raise InputError(f"min_new_tokens: from 0 to max_new_tokens ({shortest}), given {min_new_tokens}")
        if ngram < 0:
            raise InputError(f"no_repeat_ngram_size: a number of tokens, or 0 for no rule, given {ngram}")
        min_length = 0 if eos_id is None else min_new_tokens
        return cls(max_lengths, min_length, ngram, eos_id)

    @property
    def longest(self) -> int:
        """Largest of all max_lengths."""
        return int(self.max_lengths.max())

    def apply(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """Set log p(next token) (K, V) after new tokens (K, t) to -inf for tokens that may not come next.

        Returns `log_probs` itself where no token can be forbidden after so many.
        """
        length = tokens.shape[1]
        forbids_repeats = 0 < self.ngram <= length
        if length >= self.min_length and not forbids_repeats:
            return log_probs
        log_probs = log_probs.clone()
        if length < self.min_length:
            log_probs[:, self.eos_id] = -math.inf
        if forbids_repeats:
            ngrams = tokens.unfold(1, self.ngram, 1)  # (K, t - n + 1, n)
            # those whose first n - 1 tokens are the last ones of the text
            repeated = (ngrams[..., :-1] == tokens[:, None, length - self.ngram + 1 :]).all(dim=-1)
            # several n-grams may end with the same token, and one that does not match must not free it again
            limits = torch.where(repeated, -math.inf, math.inf).to(log_probs.dtype)
            log_probs.scatter_reduce_(1, ngrams[..., -1], limits, reduce="amin")
        return log_probs


class EnsembleCache(NamedTuple):
    """The caches of all models of an ensemble."""

    caches: Sequence[Any]

    def reorder(self, index: Tensor) -> EnsembleCache:
        return EnsembleCache([cache.reorder(index) for cache in self.caches])


@dataclass(frozen=True)
class Ensemble:
    """Models of one vocabulary, decoded as one, by the mean of their probabilities (fairseq).

    p(v) = 1/K sum_k p_k(v)
    """

    models: Sequence[Any]

    @property
    def max_length(self) -> int | None:
        return longest(*(model.max_length for model in self.models))

    def modules(self) -> Iterator[Any]:
        for model in self.models:
            yield from model.modules()

    def new_cache(self) -> EnsembleCache:
        return EnsembleCache([model.new_cache() for model in self.models])

    def __call__(self, input_ids: Tensor, *, attention_mask: Tensor | None, cache: EnsembleCache) -> ModelOutput:
        pairs = zip(self.models, cache.caches, strict=True)
        outs = [model(input_ids, attention_mask=attention_mask, cache=model_cache) for model, model_cache in pairs]
        log_probs = torch.stack([log_normalized(out.logits) for out in outs])
        mean = log_probs.logsumexp(0) - math.log(len(outs))
        return ModelOutput(mean, cache=EnsembleCache([out.cache for out in outs]))
