"""Beam search: the most probable continuations, several at a time."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fullrank.core.draws import evaluating
from fullrank.core.errors import InputError
from fullrank.decoding.sample import Constraints, Decodable, read_prompts


@dataclass(frozen=True)
class Hypotheses:
    """The best continuations of each prompt, best first.

    ids (B, n, T): new tokens, <eos> included; after the end of a hypothesis, eos_id (0 without one).
    log_probs (B, n): sum over the tokens, nats. scores (B, n): log_probs / length^length_penalty. lengths (B, n): new
    tokens, <eos> included. Where fewer than n continuations are possible at all, the rest have length 0 and score -inf.
    """

    ids: Tensor
    log_probs: Tensor
    scores: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class _Hypothesis:
    tokens: Tensor  # (length,)
    log_prob: float
    score: float


def beam_search(
    model: Decodable,
    prompt_ids: Tensor,
    *,
    max_new_tokens: int | Tensor,
    min_new_tokens: int = 0,
    no_repeat_ngram_size: int | None = None,
    beams: int = 4,
    n_best: int = 1,
    length_penalty: float = 1.0,
    eos_id: int | None = None,
    attention_mask: Tensor | None = None,
    window: int | None = None,
) -> Hypotheses:
    """Search for the most probable continuations of prompts by a beam of unfinished texts.

        score(y) = sum_t log p(y_t | prompt, y_1 .. y_{t-1}) / length(y)^length_penalty

    length(y) counts the new tokens with <eos>. This is fairseq's `lenpen`; the one of GNMT, ((5 + length) / 6)^alpha, is
    another: its exponents do not carry over.
    In every step the beam keeps the `beams` most probable unfinished texts. A text that ends with `eos_id` counts if it is
    among the `beams` most probable of its step; texts cut off at `max_new_tokens` count too, without an <eos> (fairseq
    forces one). As in fairseq, the search for a prompt is over when `beams` texts have ended; before that it stops only if
    no unfinished text could still come among the best, whatever followed. One beam is greedy decoding; a beam as wide as
    there are texts is exhaustive search.

    Args:
        model: a model that can be decoded.
        prompt_ids: prompts (B, N), padded on the left.
        max_new_tokens: the most new tokens of a text: a number, or (B,), one a prompt.
        min_new_tokens: tokens that <eos> must have before it.
        no_repeat_ngram_size: no text holds the same n-gram of new tokens twice; None or 0: it may.
        beams: unfinished texts that the beam keeps for a prompt.
        n_best: continuations that are returned for a prompt, at most `beams`.
        length_penalty: exponent of the length, from -10 to 10.
        eos_id: the token that ends a text; None where none does.
        attention_mask: (B, N), 1 for tokens and 0 for padding; None without padding.
        window: the most tokens that are read at once, see `Reading`; None: a text has to fit into `model.max_length`.

    Returns:
        The `n_best` continuations of each prompt, best first.

    Raises:
        InputError: a value is out of range, or a sequence is longer than the model can take.
        RunError: the model's logits are not finite.
    """
    if beams < 1:
        raise InputError(f"beams: one or more, given {beams}")
    if not 1 <= n_best <= beams:
        raise InputError(f"n_best: from 1 to the number of beams ({beams}), given {n_best}")
    if not -10 <= length_penalty <= 10:
        raise InputError(f"length_penalty: an exponent from -10 to 10 (usual are 0 to 2), given {length_penalty}")
    constraints = Constraints.build(prompt_ids, max_new_tokens, min_new_tokens, no_repeat_ngram_size, eos_id)
    with evaluating(model):
        reading = read_prompts(model, prompt_ids, attention_mask, constraints.longest, window)
        max_lengths = constraints.max_lengths.tolist()
        nothing = _Hypothesis(prompt_ids.new_empty(0), -math.inf, -math.inf)
        ended = [[nothing] * n_best for _ in max_lengths]  # of each prompt
        searching = list(range(len(ended)))  # the prompt of each row below
        totals = reading.log_probs.new_zeros(len(ended), 1)  # (R, W): log-probability of each unfinished text
        tokens = prompt_ids.new_empty(len(ended), 1, 0)  # (R, W, t)
        for length in itertools.count(1):
            weight = length**-length_penalty
            width = totals.shape[1]
            log_probs = constraints.apply(reading.log_probs, tokens.flatten(0, 1))
            totals, source, token = _candidates(totals, log_probs, beams, eos_id)
            before = tokens.gather(1, source[..., None].expand(-1, -1, length - 1))
            tokens = torch.cat((before, token[..., None]), dim=2)
            if eos_id is not None:
                ends = (token[:, :beams] == eos_id) & (totals[:, :beams] > -math.inf)
                for row, rank in ends.nonzero().tolist():
                    total = totals[row, rank].item()
                    ended[searching[row]].append(_Hypothesis(tokens[row, rank].clone(), total, total * weight))
                # the first candidates that have not ended, in their order
                has_ended = token == eos_id
                unfinished = has_ended.int().sort(dim=1, stable=True).indices[:, :beams]
                totals = totals.masked_fill(has_ended, -math.inf).gather(1, unfinished)
                source = source.gather(1, unfinished)
                tokens = tokens.gather(1, unfinished[..., None].expand(-1, -1, length))
            active = []
            sums = totals.tolist()
            for row, prompt in enumerate(searching):
                if length == max_lengths[prompt]:
                    ended[prompt] += [
                        _Hypothesis(text, total, total * weight)
                        for text, total in zip(tokens[row], sums[row], strict=True)
                        if total > -math.inf
                    ]
                    continue
                # sums only fall, and a given (negative) sum scores best at the next length or at the last
                reach = min(max_lengths[prompt] ** -length_penalty, (length + 1) ** -length_penalty)
                hope = sums[row][0] * reach
                scores = sorted((text.score for text in ended[prompt]), reverse=True)
                if len(scores) < n_best + beams and hope > -math.inf and hope >= scores[n_best - 1]:
                    active.append(row)
            if not active:
                break
            rows = torch.tensor(active, device=prompt_ids.device)
            searching = [searching[row] for row in active]
            totals = totals[rows]
            tokens = tokens[rows]
            reading = reading.rows((source[rows] + rows[:, None] * width).flatten())
            reading = reading.next(tokens[:, :, -1].flatten())
    return _collect_best(ended, n_best, eos_id, prompt_ids, totals)


def _candidates(totals: Tensor, log_probs: Tensor, beams: int, eos_id: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Find the most probable texts that are one token longer, from totals (R, W) and log_probs (R W, V).

    Returns their sums, the beams they go on from, and their last tokens, all (R, C), best first. Each beam can end only once,
    so that with an <eos> twice as many texts as there are beams hold enough unfinished ones.
    """
    vocabulary = log_probs.shape[-1]
    scores = (totals[:, :, None] + log_probs.view(*totals.shape, vocabulary)).flatten(1)
    count = beams if eos_id is None else 2 * beams
    best, index = scores.topk(min(count, scores.shape[1]))
    return best, index // vocabulary, index % vocabulary


def _collect_best(
    ended: list[list[_Hypothesis]], n_best: int, eos_id: int | None, prompt_ids: Tensor, totals: Tensor
) -> Hypotheses:
    texts = []
    for of_prompt in ended:
        texts += sorted(of_prompt, key=lambda text: -text.score)[:n_best]
    shape = (len(ended), n_best)
    filler = 0.0 if eos_id is None else float(eos_id)
    ids = pad_sequence([text.tokens for text in texts], batch_first=True, padding_value=filler)
    return Hypotheses(
        ids.unflatten(0, shape),
        totals.new_tensor([text.log_prob for text in texts]).view(shape),
        totals.new_tensor([text.score for text in texts]).view(shape),
        prompt_ids.new_tensor([len(text.tokens) for text in texts], dtype=torch.int64).view(shape),
    )
