"""Check of a scoring loop: whether its perplexity is that of one normalised distribution over texts.

For a total T in nats and any beginning x of a text,

    sum over v of exp(T(x) - T(x v)) = 1

if the token v is scored exactly once, by probabilities that add up to one and see nothing later. The sum is the size of the
vocabulary where v is not scored, and below one where v, or anything before it, is scored again. Scores per token are tested
directly: sum over v of exp(-nll_k(x with x_k = v)) = 1.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.report import Finding, Report, bounded, inapplicable, largest, tolerance
from fullrank.core.errors import InputError

SUM, ONCE, LATER = "probabilities sum to one", "every token is scored once", "later tokens change no earlier score"
SAME, ADD, RANKS = "the same text gets the same score", "texts in one call add up", "ranks add up"
COUNTS = "counts and means are what they say"
_COUNTS = ("tokens", "words", "bytes")
_RETURNS = 'nll per token or its total, or a mapping with "nll", or with "loss" or "perplexity" and what is counted: "tokens"'
_SAMPLES = 32  # texts drawn from the scorer itself, at least
_COARSE = 0.3  # nats; where rounding alone may be as large, nothing is decided
_ROUNDING = "rounding in the precision of the scores, and what a second call changes"
Text = list[int] | str


def check_scoring(
    score: Callable[..., Any], texts: Sequence[Any] | None = None, *, vocab_size: int | None = None,
    vocabulary: Sequence[str] | None = None, length: int = 67, window: int | Sequence[int] = (), many: bool = False,
    end_mark: bool = False, calls: int = 10_000, description: Mapping[str, Any] | None = None,
) -> Report:  # fmt: skip
    """Check that `score`, a function from a text to its nll in nats, counts every token once and nothing else.

        report = fr.check_scoring(score, vocab_size=50);  report.passes, print(report)

    score(text): a tensor (N,) of token ids; a list of them or a str where `texts` are such; with many=True a list of texts.
    It returns nll per token, or a total, or a mapping: "nll" (either), or the means "loss" or "perplexity"; and what was
    counted as "tokens", "words", "bytes". A mean is taken times "tokens", else words, else bytes. Where its signature has
    `rank` and `world_size`, it returns the part of that rank.
    texts: random tokens if not given. vocabulary: pieces of text, one token each, that are joined to texts, for functions of
    a str. window: tokens that the scorer reads at a time, one number or several; texts are made long enough to pass it
    twice. end_mark: the scorer appends an end mark to each text and scores it. calls: most calls of `score` for sums over the
    vocabulary; what they do not reach is said.
    Raises InputError where score fails or returns something else, and where texts or vocab_size are missing.
    """
    texts, windows = list(texts or ()), [window] if isinstance(window, int) else list(window)
    size, strings = len(vocabulary) if vocabulary else vocab_size, bool(texts) and isinstance(texts[0], str)
    if strings and vocabulary:
        raise InputError("texts: strings, and vocabulary is given too, of which texts are made; leave out one of them")
    if size is None and not strings:
        raise InputError("vocab_size: needed to check a function of token ids, as in vocab_size=50; vocabulary= if it takes a str")
    if (size is not None and size < 2) or length < 4 or min(windows, default=1) < 1:
        raise InputError(
            f"vocab_size, length, window: at least 2, 4 and 1; given {size}, {length} and {window}; change the one below"
        )
    longest, generator = max([length, *(2 * one + 3 for one in windows)]), torch.Generator().manual_seed(0)
    if not texts:
        lengths = (longest, longest // 3 + 1, 5, longest // 2, 3)
        texts = [torch.randint(size or 2, (n,), generator=generator) for n in lengths]
    form: Callable[[Any], Any] = list if isinstance(texts[0], list) else torch.tensor
    if vocabulary:
        form = lambda ids: "".join(vocabulary[one] for one in ids)  # noqa: E731
    chosen: list[Text] = [one if strings else torch.as_tensor(one).tolist() for one in texts]
    base = max(chosen, key=len)
    if len(base) < 4:
        raise InputError(f"texts: the longest has {len(base)} tokens; give one of 4 or more")
    if size is not None and not all(0 <= token < size for one in chosen for token in one):  # type: ignore[operator]
        raise InputError(f"texts: token ids from 0 to {size - 1} (vocab_size={size}), given {min(map(min, chosen))} to {max(map(max, chosen))}")
    scorer = _Scorer(score, str if strings else form, many)
    chosen = chosen if len(chosen) > 1 else [base, base[: len(base) // 2]]
    found = {SAME: _repeated(scorer, chosen)}
    if found[SAME].verdict == "fails":
        mend = inapplicable("not tested: the score of a text changes from call to call; mend that first")
        found |= dict.fromkeys((SUM, ONCE, LATER, ADD, RANKS, COUNTS), mend)
    else:
        found |= _over_vocabulary(scorer, base, size, windows, end_mark, calls)
        found |= {ADD: _added(scorer, chosen), RANKS: _ranks(scorer, chosen), COUNTS: _counts(scorer, chosen, end_mark)}
    about = {"model": getattr(score, "__name__", type(score).__name__), "source": "a scoring function"}
    about |= {"vocab_size": size, "length": len(base), "calls": scorer.calls, "first_token_scored": scorer.skipped == 0}
    order = (SUM, ONCE, LATER, SAME, ADD, RANKS, COUNTS)
    return Report(tuple(replace(found[name], check=name) for name in order), {**about, **(description or {})})


@dataclass(frozen=True)
class _Reading:
    """What a call returned; each: nll of each score of a single text, where they are told apart."""

    total: float
    each: Tensor | None
    counts: dict[str, float]
    means: dict[str, float]


class _Scorer:
    """The user's function. skipped: how many tokens at the start it does not score (None: not known)."""

    def __init__(self, score: Callable[..., Any], form: Callable[[Any], Any], many: bool) -> None:
        try:
            names = set(inspect.signature(score).parameters)
        except (TypeError, ValueError):
            names = set()
        self.score, self.form, self.many, self.ranked = score, form, many, {"rank", "world_size"} <= names
        self.unit, self.noise, self.calls = tolerance(torch.float32), 0.0, 0
        self.skipped: int | None = None

    def read(self, *texts: Any, rank: int = 0, world_size: int = 1) -> _Reading:
        given: list[Any] = [self.form(text) for text in texts]
        self.calls += 1
        what = f"a {type(given[0]).__name__} of {len(texts[0])} {'characters' if isinstance(texts[0], str) else 'tokens'}"
        try:
            parts = {"rank": rank, "world_size": world_size} if self.ranked else {}
            value = self.score(given if self.many else given[0], **parts)
        except Exception as error:
            words = " ".join(str(error).split())[:200]
            raise InputError(
                f"score: failed on {'a list with ' if self.many else ''}{what} ({type(error).__name__}: {words}); texts= changes "
                "the kind of text, many=True gives lists of texts, length= shorter ones"
            ) from error
        try:
            reading = self._reading(value, len(texts) == 1)
        except (TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"score: returned {type(value).__name__} {str(value)[:80]!r}; it has to return {_RETURNS}") from error
        if math.isnan(reading.total) or (reading.each is not None and bool(reading.each.isnan().any())):
            raise InputError(f"score: returned nan for {what}; a text that it cannot score has a total of 0 and 0 tokens")
        return reading

    def _reading(self, value: Any, single: bool) -> _Reading:
        counts: dict[str, float] = {}
        means: dict[str, float] = {}
        if isinstance(value, Mapping):
            counts = {key: float(value[key]) for key in _COUNTS if key in value}
            means = {key: float(value[key]) for key in ("loss", "perplexity") if key in value}
            if "nll" not in value:
                if not means or not counts:
                    given = ", ".join(map(str, value)) or "nothing"
                    raise InputError(f"score: returned a mapping with {given}; it has to return {_RETURNS}")
                mean, count = means.get("loss", math.log(means.get("perplexity", 1.0))), next(iter(counts.values()))
                return _Reading(0.0 if count == 0 else mean * count, None, counts, means)
            value = value["nll"]
        if isinstance(value, list | tuple) and any(isinstance(row, list | tuple) or getattr(row, "ndim", 0) for row in value):
            rows = [self._numbers(row) for row in value]
        elif (numbers := self._numbers(value)).dim() == 2:
            rows = list(numbers)
        else:
            total = float(numbers.sum())
            return _Reading(total, None if numbers.dim() == 0 or self.many else numbers, counts, means)
        total = float(sum(float(row.sum()) for row in rows))
        return _Reading(total, rows[0] if len(rows) == 1 and single else None, counts, means)

    def _numbers(self, value: Any) -> Tensor:
        if isinstance(value, bool | str | bytes | None):
            raise TypeError("no numbers")
        if not isinstance(value, Tensor):
            return torch.as_tensor(value, dtype=torch.float64)
        if value.is_floating_point():
            self.unit = max(self.unit, tolerance(value.dtype))
        return value.detach().double().cpu()

    def total(self, text: Any) -> float:
        """0 of no text, and of one token where that cannot be scored: the first token has no score then."""
        if len(text) > 1:
            return self.read(text).total
        try:
            return self.read(text).total if len(text) else 0.0
        except InputError:
            return 0.0

    def each(self, text: Any) -> Tensor:
        each = self.read(text).each
        if each is None:
            raise InputError(f"score: returned nll per token, and a total for a text of {len(text)} tokens; return one of them always")
        return each

    def allowed(self, *figures: Tensor) -> float:
        """The error that rounding may cause in sums of these."""
        sizes = [float(one[one.isfinite()].abs().max()) for one in figures if one.isfinite().any()]
        return self.unit * (1 + max(sizes, default=0.0)) + 8 * self.noise


def _totals(scorer: _Scorer, texts: Sequence[Any]) -> Tensor:
    return torch.tensor([scorer.total(text) for text in texts], dtype=torch.float64)


def _repeated(scorer: _Scorer, texts: Sequence[Text]) -> Finding:
    """Each text twice, with the others between: a cache that has seen a text shows, and so does chance."""
    ordered = sorted(texts, key=len, reverse=True)
    first, second = (_totals(scorer, ordered) for _ in range(2))
    difference, allowed = largest(second, first), 10 * scorer.allowed(first)
    if difference <= allowed:
        scorer.noise = difference
    learns = bool((second <= first + allowed).all())
    why = "a text costs less the second time: something is kept between calls, such as a cache that has seen it"
    remark = why if learns else "random numbers (windows drawn at random, dropout), or a state kept between calls"
    looked_at = f"{len(texts)} texts, each scored again after the others, in nats"
    return bounded(looked_at, difference, allowed, _ROUNDING, remark=remark if difference > allowed else "")


def _over_vocabulary(
    scorer: _Scorer, base: Any, size: int | None, windows: list[int], end_mark: bool, calls: int
) -> dict[str, Finding]:
    """What sums over the vocabulary show, position by position."""
    names = (SUM, ONCE, LATER)
    if size is None:
        give = "vocabulary=[...], pieces of text that are one token each"
        return dict.fromkeys(names, inapplicable(f"not tested: texts are strings of unknown tokens; give {give}"))
    exact = size <= calls
    near = [m * w + i for w in windows for m in (1, 2) for i in (-1, 0, 1)]
    powers = [2**i + j for i in range(2, 20) for j in (0, -1)]
    wanted = dict.fromkeys([0, 1, 2, *near, len(base) - 1, 3, *powers, *range(len(base))])
    most = calls // size if exact else max(calls // 4, 16)
    positions = sorted([n for n in wanted if 0 <= n < len(base)][: max(most, 1)])
    shown = f"{len(positions)} of {len(base)} positions of a text" if len(positions) < len(base) else f"{len(base)} positions"
    values = range(size) if exact else torch.randint(size, (4,), generator=torch.Generator().manual_seed(1)).tolist()
    look = _by_token if scorer.read(base).each is not None else _by_total
    if end_mark and look is _by_total:
        why = "not tested: a total does not tell the end mark from the tokens; return nll per token, or leave the mark off"
        return dict.fromkeys(names, inapplicable(why))
    if look is _by_token:
        found = _by_token(scorer, base, positions, values, shown, size, end_mark)
    else:
        found = _by_total(scorer, base, positions, values, shown, size, calls)
    if not exact:
        many = f"not tested: a sum takes {size:,} calls of score, and calls={calls:,} are allowed; raise calls"
        found[SUM] = inapplicable(many)
    return found


def _where(positions: Sequence[int]) -> str:
    shown = ", ".join(map(str, positions[:6])) + (", ..." if len(positions) > 6 else "")
    return f"{'tokens' if len(positions) > 1 else 'token'} {shown} (counted from 0)"


def _verdict(faults: list[str], looked_at: str, remark: str = "") -> Finding:
    return bounded(looked_at, float(len(faults)), 0.0, "a count", remark="; ".join(faults) or remark)


def _unscored(own: Tensor, size: int, allowed: float) -> bool:
    """Every token costs the same, and not as in a uniform distribution; of some tokens only: they cost nothing."""
    if len(own) < size:
        return float(own.abs().max()) <= allowed
    return float(own.max() - own.min()) <= allowed < abs(float(own[0]) - math.log(size))


def _start(scorer: _Scorer, own: Tensor, allowed: float) -> list[str]:
    """The first token has no effect: it is not scored, which is allowed, unless something else is in its place."""
    scorer.skipped = 1
    if float(own.abs().max()) <= allowed:
        return []
    return [f"{float(own[0]):.3g} nats that depend on no token are added: a start mark (<sos>) or padding is counted"]


_UNSCORED = "the first token is not scored, and not counted"


def _by_token(
    scorer: _Scorer, base: Any, positions: list[int], values: Sequence[int], shown: str, size: int, end_mark: bool
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
        faults.append(f"a text of {n} tokens has {n + surplus[n] + end_mark} scores{' with its end mark' * end_mark}: {hint}")
        if scorer.skipped not in (0, 1):
            scorer.skipped = None
            unmatched = inapplicable("not tested: there is not one score for each token; mend that first")
            return {SUM: unmatched, ONCE: _verdict(faults, f"texts of {lengths[0]} to {len(base)} tokens"), LATER: unmatched}
    sums, moved, silent, allowed, skipped = {}, {}, [], scorer.allowed(whole), scorer.skipped
    for k in (k for k in positions if k >= skipped):
        rows = torch.stack([scorer.each([*base[:k], v, *base[k + 1 :]]) for v in values])
        own, sums[k] = rows[:, k - skipped], float(torch.logsumexp(-rows[:, k - skipped], 0))
        moved[k] = largest(rows[:, : k - skipped], whole[: k - skipped].expand(len(rows), -1))
        if _unscored(own, size, allowed):
            del sums[k]
            if k == 0:
                faults += _start(scorer, own, allowed)
            else:
                silent.append(k)
        elif abs(sums[k]) > allowed and abs(float(torch.logsumexp(-own / 2, 0))) <= allowed:
            faults.append(f"token {k} is scored twice (the square roots of its probabilities add up to one)")
            del sums[k]
    if silent:
        faults.append(f"{_where(silent)}: never scored, whatever stands there costs the same")
    ends = {n: [scorer.each([*base[: n - 1], v])[-1 - end_mark] for v in values[:3]] for n in lengths if n > 2}
    short = [n for n, own in ends.items() if _unscored(torch.stack(own), size, allowed)]
    if short and not silent:
        faults.append(f"the last token is never scored in texts of {', '.join(map(str, short[:6]))} tokens")
    worst = max(moved, key=lambda k: moved[k], default=0)
    leak = f"another token {worst} changes the scores of tokens before it" if moved and moved[worst] > allowed else ""
    off = max((abs(math.expm1(one)) for one in sums.values()), default=0.0)
    k = max(sums, key=lambda k: abs(sums[k]), default=0)
    remark = _sum_remark(k, sums.get(k, 0.0)) if off > allowed else ""
    looked_at = f"{shown}, each with {len(values):,} tokens in it"
    once = f"{looked_at}, and texts of {lengths[0]} to {len(base)} tokens"
    return {
        SUM: bounded(f"sum over v of exp(-nll), {looked_at}", off, allowed, _ROUNDING, remark=remark),
        ONCE: _verdict(faults, once, _UNSCORED if scorer.skipped else ""),
        LATER: bounded(f"scores before a token that is changed, {looked_at}", max(moved.values(), default=0.0), allowed,
                       _ROUNDING, remark=leak),
    }  # fmt: skip


def _sum_remark(k: int, log_sum: float) -> str:
    why = "the score knows the token that it scores, a softmax runs over another axis, or probability is lost"
    return f"at token {k} the probabilities of all tokens add up to {math.exp(log_sum):.4g}: {why}"


def _by_total(
    scorer: _Scorer, base: Any, positions: list[int], values: Sequence[int], shown: str, size: int, calls: int
) -> dict[str, Finding]:
    faults, silent, sums, twice, exact = [], [], {}, [], len(values) == size
    allowed = scorer.allowed(_totals(scorer, [base]))
    for n in positions:
        before, after = scorer.total(base[:n]), _totals(scorer, [[*base[:n], v] for v in values])
        if _unscored(after - before, size, allowed):
            if n == 0:
                faults += _start(scorer, after, allowed)
            else:
                silent.append(n)
            continue
        sums[n] = float(torch.logsumexp(before - after, 0))
        if abs(sums[n]) > allowed and exact and abs(float(torch.logsumexp((before - after) / 2, 0))) <= allowed:
            twice.append(n)
    scorer.skipped = scorer.skipped or 0
    off = {n: one for n, one in sums.items() if abs(one) > allowed} if exact else {}
    if silent:
        faults.append(f"{_where(silent)}: never scored when last, whatever stands there costs the same")
    remark, blamed = "", {}
    if list(off) == [0]:
        faults.append(f"every text costs {-off[0]:.3g} nats more than its tokens: a start mark (<sos>) or padding is counted")
    elif twice:
        faults.append(f"{_where(twice)}: scored twice (the square roots of their probabilities add up to one)")
    elif off and not silent:
        first = next(n for n in off if n)
        mean, error, drawn = _sampled(scorer, size, first, len(base), calls)
        if drawn and bool(((error <= 0.1) & ((mean - 1).abs() <= 4 * error + allowed)).all()):
            remark = (
                "the scores of earlier tokens change with the number (not the identity) of later ones, as where a last window "
                f"reads further back; over {drawn} texts drawn from the scores the sum over all texts is {mean[-1]:.3f} ± {error[-1]:.3f}"
            )
        elif min((n for n in sums if n), default=0) < first:
            over = "again: windows overlap and count twice" if off[first] < 0 else "with less than their weight, or dropped"
            faults.append(f"from token {first} on, where it is the last, tokens before it are scored {over}, or a mean is taken of means")
        else:
            blamed, remark = off, _sum_remark(first, off[first]) + ", or earlier scores change with later tokens"
    worst = max((abs(math.expm1(one)) for n, one in sums.items() if n in blamed or n not in off), default=0.0)
    sampled = bool(remark) and not blamed
    looked_at = f"sum over v of exp(T(x) - T(x v)), {shown}, each with {len(values):,} tokens in it"
    return {
        SUM: bounded(looked_at, worst, allowed, _ROUNDING, remark=remark),
        ONCE: _verdict(faults, looked_at, "" if not scorer.skipped or sampled else _UNSCORED),
        LATER: inapplicable("not seen in totals; where it happens the probabilities do not add up; return nll per token to see it"),
    }


def _sampled(scorer: _Scorer, size: int, first: int, longest: int, calls: int) -> tuple[Tensor, Tensor, int]:
    """Sums of exp(-T) over all texts of some tokens that follow a random first one, estimated: means, errors, texts drawn.

    Texts of `first` + 1 to + 3 tokens are drawn token by token from the scores. A text weighs the product of its sums over
    the vocabulary, and the mean weight is the sum over all texts.
    """
    length = min(longest, first + 3)
    drawn = min(calls // (size * (length - 1)), 8 * _SAMPLES)
    if drawn < _SAMPLES:
        return torch.tensor([]), torch.tensor([]), 0
    generator, sums = torch.Generator().manual_seed(2), torch.zeros(drawn, length, dtype=torch.float64)
    for i in range(drawn):
        text = torch.randint(size, (1,), generator=generator).tolist()
        before = scorer.total(text)
        for n in range(1, length):
            after = _totals(scorer, [[*text, v] for v in range(size)])
            sums[i, n] = torch.logsumexp(before - after, 0)
            text.append(int(torch.multinomial(torch.softmax(-after, 0), 1, generator=generator)))
            before = float(after[text[-1]])
    weights = sums.cumsum(1)[:, first:].exp()
    return weights.mean(0), weights.std(0) / math.sqrt(drawn), drawn


def _added(scorer: _Scorer, texts: Sequence[Text]) -> Finding:
    if not scorer.many:
        return inapplicable("score takes one text; many=True is for a function of a list of texts")
    alone = _totals(scorer, texts)
    together = torch.tensor([scorer.read(*some).total for some in (texts, texts[::-1])], dtype=torch.float64)
    expected, allowed = alone.sum(), 10 * scorer.allowed(alone, together)
    difference, remark = largest(together, expected.expand(2)), ""
    if not difference <= allowed:
        sizes = torch.tensor([len(text) - (scorer.skipped or 0) for text in texts]).double()
        mean_of_means = (alone / sizes).mean() * sizes.sum()
        more = "more than the texts is counted, such as padding" if together[0] > expected else "something is left out"
        remark = "a mean of the texts' means, whatever their lengths" if abs(together[0] - mean_of_means) <= allowed else more
        remark = f"together {float(together[0]):.6g} nats, one by one {float(expected):.6g}: {remark}, or texts see each other"
    looked_at = f"{len(texts)} texts of {', '.join(str(len(text)) for text in texts)} in one call, against one by one, in nats"
    return bounded(looked_at, difference, allowed, _ROUNDING, remark=remark)


def _ranks(scorer: _Scorer, texts: Sequence[Text]) -> Finding:
    if not scorer.ranked:
        return inapplicable("score has no arguments rank and world_size")
    given = texts if scorer.many else [max(texts, key=len)]
    whole, faults, worst = scorer.read(*given), [], 0.0
    allowed = 10 * scorer.allowed(torch.tensor([whole.total]))
    for world in (2, 3):
        parts = [scorer.read(*given, rank=rank, world_size=world) for rank in range(world)]
        total = sum(part.total for part in parts)
        worst = max(worst, abs(total - whole.total))
        if not abs(total - whole.total) <= allowed:
            faults.append(f"{world} ranks add up to {total:.6g} nats, one to {whole.total:.6g}")
        for key in whole.counts:
            if (count := sum(part.counts.get(key, 0.0) for part in parts)) != whole.counts[key]:
                worst = max(worst, abs(count - whole.counts[key]))
                faults.append(f"{world} ranks count {count:g} {key}, one {whole.counts[key]:g}")
    return bounded("sums over 2 and 3 ranks, against one", worst, allowed, _ROUNDING, remark="; ".join(faults))


def _counts(scorer: _Scorer, texts: Sequence[Text], end_mark: bool) -> Finding:
    samples = [[text] for text in texts] + ([list(texts)] if scorer.many else [])
    faults, tested, untested = [], set(), set()
    for some in samples:
        reading = scorer.read(*some)
        counts, means = reading.counts, dict(reading.means)
        true: dict[str, float | None] = {"tokens": None, "words": None, "bytes": None}
        forms = [scorer.form(text) for text in some]
        if scorer.skipped is not None and not isinstance(some[0], str):
            true["tokens"] = sum(len(text) + end_mark - scorer.skipped for text in some)
        elif reading.each is not None:
            true["tokens"] = len(reading.each)
        if isinstance(forms[0], str):
            true |= {"words": sum(len(one.split()) for one in forms), "bytes": sum(len(one.encode()) for one in forms)}
        for key, count in counts.items():
            (untested if true[key] is None else tested).add(key)
            if true[key] is not None and count != true[key]:
                faults.append(f'"{key}" is {count:g}, and {true[key]:g} are scored')
        per = counts or {"tokens": true["tokens"] or math.nan}
        for key, mean in means.items():
            tested.add(key)
            nats = mean if key == "loss" else math.log(mean)
            if not any(abs(nats - reading.total / count) <= 1e-3 + scorer.unit for count in per.values() if count):
                faults.append(f'"{key}" is {mean:.6g}, which is not the total over any count ({", ".join(per)})')
    if not tested:
        rest = f"not tested: {', '.join(sorted(untested))}; " if untested else ""
        return inapplicable(f'{rest}score returns no count that is known here; return {{"nll": ..., "tokens": ...}}')
    rest = f"not tested: {', '.join(sorted(untested))}" if untested else ""
    return _verdict(list(dict.fromkeys(faults))[:3], f"{', '.join(sorted(tested))} of {len(samples)} calls", rest)
