"""Sums over the vocabulary: is each token scored once, by probabilities that add up to one and see nothing later?

For a total T in nats and any beginning x of a text,

    sum over v of exp(T(x) - T(x v)) = 1

if the token v is scored exactly once, by probabilities that add up to one and see nothing later. The sum is the size of the
vocabulary where v is not scored, and below one where v, or anything before it, is scored again. Scores per token are tested
directly: sum over v of exp(-nll_k(x with x_k = v)) = 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.compare import largest
from fullrank.checking.report import Finding, inapplicable, judge
from fullrank.checking.scorer import ROUNDING, Scorer, count_faults

SUM, ONCE, LATER = "probabilities sum to one", "every token is scored once", "later tokens change no earlier score"
_SAMPLES = 32  # texts drawn from the scorer itself, at least
_SURE = 0.1  # largest error of a sum that is estimated with them
_COARSE = 0.3  # nats; where rounding alone may be as large, nothing is decided


def sum_over_vocabulary(
    scorer: Scorer, base: Any, size: int | None, windows: list[int], end_mark: bool, calls: int
) -> dict[str, Finding]:
    """The findings of sums over the vocabulary, position by position."""
    names = (SUM, ONCE, LATER)
    if size is None:
        give = "vocabulary=[...], pieces of text that are one token each"
        return dict.fromkeys(names, inapplicable(f"not tested: texts are strings of unknown tokens; give {give}"))
    if size > calls:
        many = f"a sum takes {size:,} calls of score, and calls={calls:,} are allowed; raise calls"
        return dict.fromkeys(names, inapplicable(f"not tested: {many}"))
    near = [m * w + i for w in windows for m in (1, 2) for i in (-1, 0, 1)]
    powers = [2**i + j for i in range(2, 20) for j in (0, -1)]
    wanted = dict.fromkeys([1, len(base) - 1, 0, 2, *near, 3, *powers, *range(len(base))])
    positions = sorted([n for n in wanted if 0 <= n < len(base)][: calls // size])
    shown = f"{len(positions)} of {len(base)} positions of a text"
    values = range(size)
    whole = scorer.read(base)
    if scorer.allowed(torch.tensor([whole.total]) if whole.each is None else whole.each) > _COARSE:
        return dict.fromkeys(
            names, inapplicable("not tested: the scores are rounded too coarsely; return them in fp32")
        )
    if whole.each is not None:
        return judge_scores(scorer, base, positions, values, shown, size, end_mark)
    if end_mark:
        why = "not tested: a total does not tell the end mark from the tokens; return nll per token, or leave the mark off"
        return dict.fromkeys(names, inapplicable(why))
    return judge_totals(scorer, base, positions, values, shown, size, calls)


def name_positions(positions: Sequence[int]) -> str:
    shown = ", ".join(map(str, positions[:6])) + (", ..." if len(positions) > 6 else "")
    return f"{'tokens' if len(positions) > 1 else 'token'} {shown} (counted from 0)"


def is_unscored(own: Tensor, size: int, allowed: float) -> bool:
    """Every token costs the same, and not as in a uniform distribution; of some tokens only: they cost nothing."""
    if len(own) < size:
        return float(own.abs().max()) <= allowed
    return float(own.max() - own.min()) <= allowed < abs(float(own[0]) - math.log(size))


def judge_start(scorer: Scorer, own: Tensor, allowed: float) -> list[str]:
    """The first token has no effect: it is not scored, which is allowed, unless something else is in its place."""
    scorer.skipped = 1
    if float(own.abs().max()) <= allowed:
        return []
    return [f"{float(own[0]):.3g} nats that depend on no token are added: a start mark (<sos>) or padding is counted"]


_UNSCORED = "the first token is not scored, and not counted"


def judge_scores(
    scorer: Scorer, base: Any, positions: list[int], values: Sequence[int], shown: str, size: int, end_mark: bool
) -> dict[str, Finding]:
    whole, faults = scorer.each(base), []
    lengths = sorted({*range(2, min(len(base), 24)), *(n for n in positions if n > 1), len(base)})
    surplus = {n: len(scorer.each(base[:n])) - n - end_mark for n in lengths}
    scorer.skipped = -surplus[len(base)]
    if wrong := [n for n in lengths if surplus[n] not in (0, -1) or surplus[n] != surplus[lengths[0]]]:
        more = "a start mark, an end mark (say end_mark=True), padding, or overlapping windows scored again"
        least = "a last short window or batch is dropped, or an overlap is skipped"
        n = max(wrong, key=lambda n: abs(surplus[n]))
        hint = more if surplus[n] > 0 else least
        faults.append(
            f"a text of {n} tokens has {n + surplus[n] + end_mark} scores{' with its end mark' * end_mark}: {hint}"
        )
        if scorer.skipped not in (0, 1):
            scorer.skipped = None
            unmatched = inapplicable("not tested: there is not one score for each token; mend that first")
            return {
                SUM: unmatched,
                ONCE: count_faults(faults, f"texts of {lengths[0]} to {len(base)} tokens"),
                LATER: unmatched,
            }
    sums, moved, silent, allowed, skipped = {}, {}, [], scorer.allowed(whole), scorer.skipped
    for k in (k for k in positions if k >= skipped):
        rows = torch.stack([scorer.each([*base[:k], v, *base[k + 1 :]]) for v in values])
        own, sums[k] = rows[:, k - skipped], float(torch.logsumexp(-rows[:, k - skipped], 0))
        moved[k] = largest(rows[:, : k - skipped], whole[: k - skipped].expand(len(rows), -1))
        if is_unscored(own, size, allowed):
            del sums[k]
            if k == 0:
                faults += judge_start(scorer, own, allowed)
            else:
                silent.append(k)
        elif abs(sums[k]) > allowed and abs(float(torch.logsumexp(-own / 2, 0))) <= allowed:
            faults.append(f"token {k} is scored twice (the square roots of its probabilities add up to one)")
            del sums[k]
    if silent:
        faults.append(f"{name_positions(silent)}: never scored, whatever stands there costs the same")
    worst = max(moved, key=lambda k: moved[k], default=0)
    leak = f"another token {worst} changes the scores of tokens before it" if moved and moved[worst] > allowed else ""
    off = max((abs(math.expm1(one)) for one in sums.values()), default=0.0)
    k = max(sums, key=lambda k: abs(sums[k]), default=0)
    remark = describe_sum(k, sums.get(k, 0.0)) if off > allowed else ""
    looked_at = f"{shown}, each with {len(values):,} tokens in it"
    once = f"{looked_at}, and texts of {lengths[0]} to {len(base)} tokens"
    return {
        SUM: judge(f"sum over v of exp(-nll), {looked_at}", off, allowed, ROUNDING, remark=remark),
        ONCE: count_faults(faults, once, _UNSCORED if scorer.skipped else ""),
        LATER: judge(f"scores before a token that is changed, {looked_at}", max(moved.values(), default=0.0), allowed,
                       ROUNDING, remark=leak),
    }  # fmt: skip


def describe_sum(k: int, log_sum: float) -> str:
    why = "the score knows the token that it scores, a softmax runs over another axis, or probability is lost"
    return f"at token {k} the probabilities of all tokens add up to {math.exp(log_sum):.4g}: {why}"


_TOTALS = inapplicable(
    "not seen in totals; where it happens the probabilities do not add up; return nll per token to see it"
)
_REREAD = "scores change with the number (not the identity) of later tokens, as where a last window reads further back"


def judge_totals(
    scorer: Scorer, base: Any, positions: list[int], values: Sequence[int], shown: str, size: int, calls: int
) -> dict[str, Finding]:
    faults, silent, sums, twice = [], [], {}, []
    allowed = scorer.allowed(scorer.totals([base]))

    def halved(text: Any) -> bool:
        """The square roots of the probabilities of the token after `text` add up to one."""
        after = scorer.totals([[*text, v] for v in values])
        return abs(float(torch.logsumexp((scorer.total(text) - after) / 2, 0))) <= allowed

    for n in positions:
        before, after = scorer.total(base[:n]), scorer.totals([[*base[:n], v] for v in values])
        if is_unscored(after - before, size, allowed):
            if n == 0:
                faults += judge_start(scorer, after, allowed)
            else:
                silent.append(n)
            continue
        sums[n] = float(torch.logsumexp(before - after, 0))
        if abs(sums[n]) > allowed and halved(base[:n]) and halved(base[n - 1 :: -1] if n else base[:n]):
            twice.append(n)  # of two texts: of one it may be chance
    scorer.skipped = scorer.skipped or 0
    off = {n: one for n, one in sums.items() if abs(one) > allowed}
    if silent:
        faults.append(f"{name_positions(silent)}: never scored when last, whatever stands there costs the same")
    remark, blamed = "", {}
    if list(off) == [0]:
        faults.append(
            f"every text costs {-off[0]:.3g} nats more than its tokens: a start mark (<sos>) or padding is counted"
        )
    elif twice:
        faults.append(f"{name_positions(twice)}: scored twice (the square roots of their probabilities add up to one)")
    elif off and not silent:
        first = next(n for n in off if n)
        early = first > 2 or abs(off[first]) < 0.1  # rounding is smaller
        mean, error, drawn = estimate_texts(scorer, size, first, len(base), calls)
        sure, clear = error <= _SURE, max(map(abs, off.values())) >= math.log(size) / 2 or not early
        agrees = bool(((mean - 1).abs() <= 4 * error + allowed)[sure].all())
        if agrees and bool(sure.any()):
            estimate = f"{mean[sure][-1]:.2f} ± {error[sure][-1]:.2f}"
            remark = f"{_REREAD}; over {drawn} texts drawn from the scores the sum over all texts is {estimate}"
        elif agrees and not clear and not faults:
            why = f"not decided: from token {first} on {_REREAD}, or the sum is not one; raise calls, or return nll per token"
            return {**dict.fromkeys((SUM, ONCE), inapplicable(why)), LATER: _TOTALS}
        elif min((n for n in sums if n), default=0) < first:
            over = "again (windows that overlap count twice)" if off[first] < 0 else "with less weight, or dropped"
            faults.append(
                f"where a text ends with token {first}, tokens before it are scored {over}, or a mean is taken of "
                "means; if the text is cut at places that depend on its length, return nll per token"
            )
        else:
            blamed, remark = off, describe_sum(first, off[first]) + ", or earlier scores change with later tokens"
    worst = max((abs(math.expm1(one)) for n, one in sums.items() if n in blamed or n not in off), default=0.0)
    sampled = bool(remark) and not blamed
    looked_at = f"sum over v of exp(T(x) - T(x v)), {shown}, each with {len(values):,} tokens in it"
    return {
        SUM: judge(looked_at, worst, allowed, ROUNDING, remark=remark),
        ONCE: count_faults(faults, looked_at, "" if not scorer.skipped or sampled else _UNSCORED),
        LATER: _TOTALS,
    }


def estimate_texts(scorer: Scorer, size: int, first: int, longest: int, calls: int) -> tuple[Tensor, Tensor, int]:
    """Sums of exp(-T) over all texts of some tokens that follow a random first one, estimated: means, errors, texts drawn.

    Texts of `first` + 1 to + 3 tokens are drawn token by token from the scores. A text weighs the product of its sums over
    the vocabulary, and the mean weight is the sum over all texts.
    """
    if size**first <= calls:  # few enough to read them all
        texts = [[0, *rest] for rest in itertools.product(range(size), repeat=first)]
        whole = torch.logsumexp(scorer.total([0]) - scorer.totals(texts), 0).exp()
        return whole[None], torch.zeros(1, dtype=torch.float64), len(texts)
    if first <= 2:  # no window ends as early
        return torch.tensor([]), torch.tensor([]), 0
    length = min(longest, first + 3)
    drawn = min(calls // (size * (length - 1)), 8 * _SAMPLES)
    if drawn < _SAMPLES:
        return torch.tensor([]), torch.tensor([]), 0
    generator, sums = torch.Generator().manual_seed(2), torch.zeros(drawn, length, dtype=torch.float64)
    for i in range(drawn):
        text = torch.randint(size, (1,), generator=generator).tolist()
        before = scorer.total(text)
        for n in range(1, length):
            after = scorer.totals([[*text, v] for v in range(size)])
            sums[i, n] = torch.logsumexp(before - after, 0)
            text.append(int(torch.multinomial(torch.softmax(-after, 0), 1, generator=generator)))
            before = float(after[text[-1]])
        if i + 1 in (_SAMPLES, drawn):
            weights = sums[: i + 1].cumsum(1)[:, first:].exp()
            mean, error = weights.mean(0), weights.std(0) / math.sqrt(i + 1)
            if bool(((mean - 1).abs() > 8 * error)[error <= _SURE].any()):
                break  # far from one already
    return mean, error, i + 1
