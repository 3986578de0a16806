"""Check of a scoring loop: whether its perplexity is that of one normalised distribution over texts.

For a total T in nats and any beginning x of a text,

    sum over v of exp(T(x) - T(x v)) = 1

if the token v is scored exactly once, by probabilities that add up to one and see nothing later. The sum is the size of the
vocabulary where v is not scored, and below one where v, or anything before it, is scored again. Scores per token are tested
directly: sum over v of exp(-nll_k(x with x_k = v)) = 1.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.report import Finding, Report, allow, inapplicable, judge, largest
from fullrank.core.errors import InputError, one_line

SUM = "probabilities sum to one"
ONCE = "every token is scored once"
LATER = "later tokens change no earlier score"
_SAMPLES = 32  # texts drawn from the scorer itself, at least
_SURE = 0.1  # largest error of a sum that is estimated with them
_COARSE = 0.3  # nats; where rounding alone may be as large, nothing is decided
_TOTALS = "not seen in totals; where it happens the probabilities do not add up; return nll per token to see it"
_REREAD = "scores change with the number (not the identity) of later tokens, as where a last window reads further back"
ROUNDING = "rounding in the precision of the scores, and what a second call changes"
_RETURNS = (
    'nll per token or its total, or a mapping with "nll", or with "loss" or "perplexity" and what is counted: "tokens"'
)
SAME = "the same text gets the same score"
ADD = "texts in one call add up"
RANKS = "ranks add up"
COUNTS = "counts and means are what they say"
_TRUE = {"tokens": "{:g} are scored", "words": "text.split() has {:g}", "bytes": "the text has {:g} in UTF-8"}
Text = list[int] | str


class NotTested(Exception):
    """Sums over the vocabulary say nothing; the words say why."""


def check_scoring(
    score: Callable[..., Any],
    texts: Sequence[Any] | Tensor | None = None,
    *,
    vocab_size: int | None = None,
    vocabulary: Sequence[str] | None = None,
    length: int = 67,
    window: int = 0,
    many: bool = False,
    calls: int = 10_000,
    description: Mapping[str, Any] | None = None,
) -> Report:
    """Check that a scoring function, from a text to its nll in nats, counts every token once and nothing else.

        report = fr.check_scoring(score, vocab_size=50);  report.passes, print(report)

    `score(text)` returns the nll per token, or its total, or a mapping. A mapping holds "nll" (either of the two), or a mean
    as "loss" or "perplexity", and what was counted as "tokens", "words" or "bytes". A mean is multiplied by "tokens", else by
    "words", else by "bytes". Where the signature of `score` has `rank` and `world_size`, it returns the part of that rank.

    Args:
        score: the function. It takes a tensor (N,) of token ids; a list of ids, or a str, where `texts` hold such.
        texts: texts to score, a tensor (B, N) or a list of texts; None: random token ids.
        vocab_size: how many token ids there are; needed for a function of token ids.
        vocabulary: pieces of text, one token each, for a function of a str: texts are made by joining them.
        length: tokens of the longest random text.
        window: tokens that the scorer reads at a time; random texts are long enough to pass it twice. 0: there is no window.
        many: `score` takes a list of texts.
        calls: most calls of `score` for sums over the vocabulary; the report says what they do not reach.
        description: further facts for the report, by name.

    Returns:
        The report; `print(report)` shows a line for each check.

    Raises:
        InputError: `score` fails or returns something else, or texts or vocab_size are missing or do not fit.
    """
    if not callable(score):
        raise InputError(f"score: a function from a text to its nll, given {type(score).__name__}")
    size = len(vocabulary) if vocabulary else vocab_size
    is_text = texts is not None and isinstance(next(iter(texts), None), str)
    if is_text and vocabulary:
        raise InputError("texts: strings, and vocabulary is given too, of which texts are made; leave out one of them")
    if size is None and not is_text:
        raise InputError(
            "vocab_size: needed to check a function of token ids, as in vocab_size=50; vocabulary= if it takes a str"
        )
    if (size is not None and size < 2) or length < 4 or window < 0:
        raise InputError(f"vocab_size, length, window: at least 2, 4 and 0; given {size}, {length} and {window}")
    samples: list[Any] = list(() if texts is None else texts)
    if not samples:
        longest = max(length, 2 * window + 3)
        generator = torch.Generator().manual_seed(0)
        lengths = (longest, longest // 3 + 1, 5, longest // 2, 3)
        samples += [torch.randint(size or 2, (length,), generator=generator) for length in lengths]
    form: Callable[[Any], Any] = str if is_text else list if isinstance(samples[0], list) else torch.tensor
    if vocabulary:
        form = lambda ids: "".join(vocabulary[token] for token in ids)  # noqa: E731
    chosen: list[Text] = [text if is_text else torch.as_tensor(text).tolist() for text in samples]
    base = max(chosen, key=len)
    if len(base) < 4:
        raise InputError(f"texts: the longest has {len(base)} tokens; give one of 4 or more")
    if size is not None and not is_text:
        used = {int(token) for text in chosen for token in text}
        if not 0 <= min(used) <= max(used) < size:
            id_range = f"given {min(used)} to {max(used)}"
            raise InputError(f"texts: token ids from 0 to {size - 1} (vocab_size={size}), {id_range}")
    scorer = Scorer(score, form, many, size or 0, calls)
    chosen = chosen if len(chosen) > 1 else [base, base[: len(base) // 2]]
    same = score_twice(scorer, chosen)
    order = (SUM, ONCE, LATER, SAME, ADD, RANKS, COUNTS)
    not_tested = inapplicable("not tested: the score of a text changes from call to call; mend that first")
    findings = dict.fromkeys(order, not_tested) | {SAME: same}
    if same.verdict == "passes":
        try:
            findings |= _sum_over_vocabulary(scorer, base, window)
        except NotTested as why:
            findings |= dict.fromkeys((SUM, ONCE, LATER), inapplicable(str(why)))
        findings |= {ADD: add_texts(scorer, chosen), RANKS: add_ranks(scorer, chosen)}
        findings[COUNTS] = compare_counts(scorer, chosen)
    facts = {"model": getattr(score, "__name__", type(score).__name__), "source": "a scoring function"}
    facts |= {"vocab_size": size, "length": len(base), "calls": scorer.calls, "first_token_scored": scorer.skipped == 0}
    named = tuple(replace(findings[name], check=name) for name in order)
    return Report(named, {**facts, **(description or {})}, needed=SUM)


def score_twice(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    """Score each text twice, with the others between: a cache that has seen a text shows, and so does chance.

    What the second call changes becomes `scorer.noise`, where the check passes.
    """
    ordered = sorted(texts, key=len, reverse=True)
    first = scorer.totals(ordered)
    second = scorer.totals(ordered)
    difference = largest(second, first)
    allowed = 10 * scorer.allowed(first)
    if difference <= allowed:
        scorer.noise = difference
    looked_at = f"{len(texts)} texts, each scored again after the others, in nats"
    fault = "random numbers (windows drawn at random, dropout), or a state kept between calls"
    return judge(looked_at, difference, allowed, ROUNDING, fault)


def add_texts(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    """Compare texts scored in one call with the same texts one by one."""
    if not scorer.many:
        return inapplicable("score takes one text; many=True is for a function of a list of texts")
    alone = scorer.totals(texts).sum()
    together = scorer.read(*texts).total
    why = "padding is counted, something is left out, a mean is one of means, or texts see each other"
    fault = f"together {together:.6g} nats, one by one {float(alone):.6g}: {why}"
    looked_at = f"texts of {', '.join(str(len(text)) for text in texts)} in one call, against one by one, in nats"
    return judge(looked_at, abs(together - float(alone)), 10 * scorer.allowed(alone), ROUNDING, fault)


def add_ranks(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    """Compare sums over 2 and 3 ranks, of nats and of counts, with those of one."""
    if not scorer.ranked:
        return inapplicable("score has no arguments rank and world_size")
    samples = texts if scorer.many else [max(texts, key=len)]
    one_rank = scorer.read(*samples)
    allowed = 10 * scorer.allowed(torch.tensor([one_rank.total]))
    faults = []
    for world in (2, 3):
        parts = [scorer.read(*samples, rank=rank, world_size=world) for rank in range(world)]
        total = sum(part.total for part in parts)
        if not abs(total - one_rank.total) <= allowed:
            faults.append(f"{world} ranks add up to {total:.6g} nats, one to {one_rank.total:.6g}")
        for key, count in one_rank.counts.items():
            counted = sum(part.counts.get(key, 0.0) for part in parts)
            if counted != count:
                faults.append(f"{world} ranks add up to {counted:.6g} {key}, one to {count:.6g}")
    return _count_faults(faults, "sums over 2 and 3 ranks, against one")


def compare_counts(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    """Compare returned counts with those of the texts, and returned means with total over count."""
    samples = [[text] for text in texts] + ([list(texts)] if scorer.many else [])
    faults = []
    tested = set[str]()
    untested = set[str]()
    for batch in samples:
        reading = scorer.read(*batch)
        forms = [scorer.form(text) for text in batch]
        true_counts = {}
        if scorer.skipped is not None and not isinstance(batch[0], str):
            true_counts["tokens"] = sum(len(text) - scorer.skipped for text in batch)
        elif reading.each is not None:
            true_counts["tokens"] = len(reading.each)
        if isinstance(forms[0], str):
            true_counts |= {
                "words": sum(len(form.split()) for form in forms),
                "bytes": sum(len(form.encode()) for form in forms),
            }
        for key, count in reading.counts.items():
            (tested if key in true_counts else untested).add(key)
            if count != true_counts.get(key, count):
                faults.append(f'"{key}" is {count:g}, and {_TRUE[key].format(true_counts[key])}')
        counts = reading.counts or {"tokens": true_counts.get("tokens", math.nan)}
        for key, mean in reading.means.items():
            tested.add(key)
            nats = mean if key == "loss" else math.log(mean)
            if not any(abs(nats - reading.total / count) <= 1e-3 + scorer.unit for count in counts.values() if count):
                faults.append(f'"{key}" is {mean:.6g}, which is not the total over any count ({", ".join(counts)})')
    not_tested = f"not tested: {', '.join(sorted(untested))}" if untested else ""
    if not tested:
        return inapplicable(
            f'{not_tested or "score returns no count that is known here"}; return {{"nll": ..., "tokens": ...}}'
        )
    return _count_faults(
        list(dict.fromkeys(faults))[:3], f"{', '.join(sorted(tested))} of {len(samples)} calls", not_tested
    )


@dataclass(frozen=True)
class Score:
    """Result of a call.

    Attributes:
        total: nll in nats.
        each: nll of each score of a single text; None where they are not told apart.
        counts: returned counts by name.
        means: returned means by name.
    """

    total: float
    each: Tensor | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Scorer:
    """The user's function, with what is known of it.

    Attributes:
        score: the function.
        form: makes the text that it takes of token ids.
        many: it takes a list of texts.
        size: of the vocabulary; 0: not known.
        most_calls: of the function for sums over the vocabulary.
        unit: the rounding of its scores.
        noise: what a second call changes.
        calls: how often it was called.
        skipped: how many tokens at the start it does not score; None: not known.
    """

    score: Callable[..., Any]
    form: Callable[[Any], Any]
    many: bool
    size: int
    most_calls: int
    unit: float = allow(torch.float32)[0]
    noise: float = 0.0
    calls: int = 0
    skipped: int | None = None

    @functools.cached_property
    def ranked(self) -> bool:
        """True where it returns the part of a rank."""
        try:
            arguments = inspect.signature(self.score).parameters
        except (TypeError, ValueError):  # of some builtins Python cannot tell
            return False
        return {"rank", "world_size"} <= set(arguments)

    def read(self, *texts: Any, rank: int = 0, world_size: int = 1) -> Score:
        """Call the function.

        Args:
            *texts: token ids or strings; more than one for a function of a list of texts.
            rank: given to a function that takes it.
            world_size: given to a function that takes it.

        Raises:
            InputError: the function fails, or returns something else.
        """
        ranks = {"rank": rank, "world_size": world_size} if self.ranked else {}
        inputs = [self.form(text) for text in texts]
        doing = "failed"
        try:
            value = self.score(inputs if self.many else inputs[0], **ranks)
            doing = f"returned {type(value).__name__} {str(value)[:80]!r}"
            score = self.convert(value)
        except Exception as error:
            what = f"a {type(inputs[0]).__name__} of {len(texts[0])} tokens"
            raise InputError(
                f"score: {doing} on {what} ({type(error).__name__}: {one_line(error)}); it has to return {_RETURNS}; "
                "texts= changes the kind of text, many=True gives lists of texts, length= shorter ones"
            ) from error
        self.calls += 1
        return score

    def convert(self, value: Any) -> Score:
        """Convert what the scorer returned to one form; ValueError for nan, and for a mapping without a score."""
        returned = value if isinstance(value, Mapping) else {"nll": value}
        counts = {key: float(returned[key]) for key in ("tokens", "words", "bytes") if key in returned}
        means = {key: float(returned[key]) for key in ("loss", "perplexity") if key in returned}
        if "nll" not in returned:
            if not means or not counts:
                raise ValueError(f"a mapping with {', '.join(map(str, value)) or 'nothing'}")
            mean = means["loss"] if "loss" in means else math.log(means["perplexity"])
            count = next(iter(counts.values()))
            return Score(mean * count if count else 0.0, None, counts, means)
        value = returned["nll"]
        is_list = isinstance(value, list | tuple) and any(torch.as_tensor(row).dim() for row in value)
        rows = [self.read_numbers(row) for row in (value if is_list else [value])]
        if rows[0].dim() == 2:
            rows = list(rows[0])
        total = float(sum(float(row.sum()) for row in rows))
        if math.isnan(total):
            raise ValueError("nan; a text that it cannot score has a total of 0 and 0 tokens")
        has_each = len(rows) == 1 and rows[0].dim() == 1 and (is_list or not self.many)
        return Score(total, rows[0] if has_each else None, counts, means)

    def read_numbers(self, value: Any) -> Tensor:
        if isinstance(value, Tensor) and value.is_floating_point():
            self.unit = max(self.unit, allow(value.dtype)[0])
        return torch.as_tensor(value).detach().cpu().double()

    def total(self, text: Any) -> float:
        """Score a text; 0 for no tokens, and for a single token that cannot be scored: a first token has no score then."""
        if len(text) > 1:
            return self.read(text).total
        try:
            return self.read(text).total if len(text) else 0.0
        except InputError:
            return 0.0

    def totals(self, texts: Iterable[Any]) -> Tensor:
        return torch.tensor([self.total(text) for text in texts], dtype=torch.float64)

    def score_next(self, text: Any) -> Tensor:
        """Score the text with each token of the vocabulary after it: totals (V,)."""
        return self.totals([[*text, token] for token in range(self.size)])

    def each(self, text: Any) -> Tensor:
        """Return the scores per token (T,); an empty tensor where there is only a total."""
        each = self.read(text).each
        return torch.zeros(0) if each is None else each

    def allowed(self, figures: Tensor) -> float:
        """Estimate the error that rounding may cause in sums of these figures."""
        sizes = figures[figures.isfinite()].abs().tolist()
        return self.unit * (1 + max(sizes, default=0.0)) + 8 * self.noise


def _count_faults(faults: list[str], looked_at: str, remark: str = "") -> Finding:
    """Make a finding that passes where there are no faults."""
    return judge(looked_at, float(len(faults)), 0.0, "a count", "; ".join(faults), remark=remark)


@dataclass
class VocabularySums:
    """Sums over the vocabulary at some positions of a text, in which every token stood there in turn.

    Attributes:
        logs: log of the sum of the probabilities of all tokens, by position.
        silent: positions where all tokens cost the same.
        moved: largest change of an earlier score by another token, by position.
        faults: what is counted and should not be, in words.
        remark: why sums that are not one are no fault.
    """

    logs: dict[int, float] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    moved: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    faults: list[str] = field(default_factory=list)
    remark: str = ""


def _sum_over_vocabulary(scorer: Scorer, base: Any, window: int) -> dict[str, Finding]:
    """Sum probabilities over the vocabulary, position by position; `scorer.skipped` is found and set on the way."""
    size = scorer.size
    reading = scorer.read(base)
    each = reading.each
    total = torch.tensor([reading.total])
    allowed = scorer.allowed(total if each is None else each)
    if not size:
        raise NotTested(
            "not tested: texts are strings of unknown tokens; give vocabulary=[...], pieces of text that are one token each"
        )
    if size > scorer.most_calls:
        calls = f"{size:,} calls of score, and calls={scorer.most_calls:,} are allowed"
        raise NotTested(f"not tested: a sum takes {calls}; raise calls")
    if allowed > _COARSE:
        raise NotTested("not tested: the scores are rounded too coarsely; return them in fp32")
    if each is not None:  # texts have one score for each token, or for each but the first
        surplus = {len(scorer.each(base[:n])) - n for n in range(2, len(base) + 1)}
        scorer.skipped = -surplus.pop() if surplus in ({0}, {-1}) else None
    if scorer.skipped is None:
        each = None
        allowed = scorer.allowed(total)
    positions = _choose_positions(len(base), window, scorer.most_calls // size)
    sums = _read_sums(scorer, base, each, positions, allowed)
    if each is None:
        _explain_totals(scorer, sums, len(base), allowed)
    looked_at = f"{len(positions)} of {len(base)} positions of a text, each with {size:,} tokens in it"
    errors = {n: abs(math.expm1(log)) for n, log in sums.logs.items()} or {0: 0.0}
    worst = max(errors, key=errors.__getitem__)
    total_probability = math.exp(sums.logs.get(worst, 0.0))
    fault = f"at token {worst} the probabilities of all tokens add up to {total_probability:.4g}: the score knows the token "
    fault += "that it scores, a softmax runs over another axis, or probability is lost"
    fault += ", or earlier scores change with later tokens" * (each is None)
    later = inapplicable(_TOTALS)
    if each is not None:
        n = max(sums.moved, key=sums.moved.__getitem__)
        leak = f"another token {n} changes the scores of tokens before it"
        later = judge(f"scores before a token that is changed, {looked_at}", sums.moved[n], allowed, ROUNDING, leak)
    unscored = "the first token is not scored, and not counted" if scorer.skipped else ""
    return {
        SUM: judge(f"sums of probabilities, {looked_at}", errors[worst], allowed, ROUNDING, fault, remark=sums.remark),
        ONCE: _count_faults(sums.faults, looked_at, unscored),
        LATER: later,
    }


def _choose_positions(length: int, window: int, count: int) -> list[int]:
    """Choose positions of a text: its ends, those around borders of windows and powers of two, then the rest."""
    borders = [times * window + i for times in (1, 2) for i in (-1, 0, 1)]
    powers = [2**i + j for i in range(2, 20) for j in (0, -1)]
    wanted = dict.fromkeys([1, length - 1, 0, 2, *borders, 3, *powers, *range(length)])
    return sorted([n for n in wanted if 0 <= n < length][:count])


def _read_sums(
    scorer: Scorer, base: Any, each: Tensor | None, positions: Sequence[int], allowed: float
) -> VocabularySums:
    """Score a text with every token in turn at each of some positions; `scorer.skipped` is set if it was not known."""
    sums = VocabularySums()
    size = scorer.size
    skipped = scorer.skipped or 0
    for n in [position for position in positions if position >= skipped]:
        if each is None:
            costs = scorer.score_next(base[:n]) - scorer.total(base[:n])
        else:
            rows = torch.stack([scorer.each([*base[:n], v, *base[n + 1 :]]) for v in range(size)])
            place = n - skipped
            costs = rows[:, place]
            sums.moved[n] = largest(rows[:, :place], each[:place].expand(size, -1))
        # every token costs the same, and not as in a uniform distribution
        if not float(costs.max() - costs.min()) <= allowed < abs(float(costs[0]) - math.log(size)):
            sums.logs[n] = float(torch.logsumexp(-costs, 0))
        elif n:
            sums.silent.append(n)
        else:
            scorer.skipped = 1  # the first token is not scored, which is allowed, unless something else is in its place
            if float(costs.abs().max()) > allowed:
                cost = f"{float(costs[0]):.3g} nats that depend on no token are added"
                sums.faults.append(f"{cost}: a start mark (<sos>) or padding is counted")
    scorer.skipped = scorer.skipped or 0
    if sums.silent:
        shown = ", ".join(map(str, sums.silent[:6])) + ", ..." * (len(sums.silent) > 6)
        sums.faults.append(f"tokens {shown} (counted from 0): never scored, whatever stands there costs the same")
    return sums


def _explain_totals(scorer: Scorer, sums: VocabularySums, length: int, allowed: float) -> None:
    """Explain why sums of totals are not one, and take out of `sums.logs` what is explained.

    There may be a constant, windows that read further back, tokens scored twice, or no distribution.
    """
    off = {n: log for n, log in sums.logs.items() if abs(log) > allowed}
    if list(off) == [0]:
        sums.faults.append(
            f"every text costs {-off[0]:.3g} nats more than its tokens: a start mark or padding is counted"
        )
    elif off and not sums.silent:
        first = next(n for n in off if n)
        estimates = _estimate_texts(scorer, first, min(length, first + 3))
        agrees = all(abs(mean - 1) <= 4 * error + allowed for mean, error in estimates)
        is_clear = max(map(abs, off.values())) >= math.log(scorer.size) / 2
        if agrees and estimates:
            mean, error = estimates[-1]
            whole = f"over texts drawn from the scores the sum over all texts is {mean:.2f} ± {error:.2f}"
            sums.remark = f"{_REREAD}; {whole}"
        elif agrees and not is_clear and not sums.faults:
            why = f"from token {first} on {_REREAD}, or the sum is not one"
            raise NotTested(f"not decided: {why}; raise calls, or return nll per token")
        elif any(0 < n < first for n in sums.logs):
            over = "again (windows that overlap count twice)" if off[first] < 0 else "with less weight, or dropped"
            sums.faults.append(
                f"where a text ends with token {first}, tokens before it are scored {over}, or a mean is taken of means; "
                "if the text is cut at places that depend on its length, return nll per token"
            )
        else:
            return
    for n in off:
        del sums.logs[n]


def _estimate_texts(scorer: Scorer, first: int, length: int) -> list[tuple[float, float]]:
    """Estimate the sums of exp(-T) over all texts of `first` + 1 to `length` tokens.

    Texts are drawn token by token from the scores. A text weighs the product of its sums over the vocabulary, and the mean
    weight is the sum over all texts. Where the shortest are few enough, all of these are read instead.
    """
    if scorer.size**first <= scorer.most_calls:
        begin = [scorer.size // 2]
        texts = itertools.product(begin, *[range(scorer.size)] * first)
        exact = torch.logsumexp(scorer.total(begin) - scorer.totals(texts), 0).exp()
        return [(float(exact), 0.0)]
    drawn = min(scorer.most_calls // (scorer.size * (length - 1)), 8 * _SAMPLES)
    if drawn < _SAMPLES:
        return []
    generator = torch.Generator().manual_seed(2)
    sums = torch.zeros(drawn, length, dtype=torch.float64)
    for i in range(drawn):
        text = torch.randint(scorer.size, (1,), generator=generator).tolist()
        before = scorer.total(text)
        for n in range(1, length):
            after = scorer.score_next(text)
            sums[i, n] = torch.logsumexp(before - after, 0)
            text.append(int(torch.multinomial(torch.softmax(-after, 0), 1, generator=generator)))
            before = float(after[text[-1]])
    weights = sums.cumsum(1)[:, first:].exp()
    errors = weights.std(0) / math.sqrt(drawn)
    return [
        (mean, error) for mean, error in zip(weights.mean(0).tolist(), errors.tolist(), strict=True) if error <= _SURE
    ]
