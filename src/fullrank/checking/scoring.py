"""Check of a scoring loop: whether its perplexity is that of one normalised distribution over texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from fullrank.checking.compare import largest
from fullrank.checking.report import Finding, Report, bounded, inapplicable
from fullrank.checking.scorer import ROUNDING, Scorer, counted, totals
from fullrank.checking.sums import LATER, ONCE, SUM, over_vocabulary
from fullrank.core.errors import InputError

SAME, ADD, RANKS = "the same text gets the same score", "texts in one call add up", "ranks add up"
COUNTS = "counts and means are what they say"
_SECONDS = 20.0  # of calls of a score with a large vocabulary
_PRECISION = 1e-4  # nats for each token that the rounding of a total may cost
_TRUE = {"tokens": "{:g} are scored", "words": "text.split() has {:g}", "bytes": "the text has {:g} in UTF-8"}
Text = list[int] | str


def check_scoring(
    score: Callable[..., Any], texts: Sequence[Any] | None = None, *, vocab_size: int | None = None,
    vocabulary: Sequence[str] | None = None, length: int = 67, window: int | Sequence[int] = (), many: bool = False,
    end_mark: bool = False, calls: int | None = None, description: Mapping[str, Any] | None = None,
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
    vocabulary, by default 10,000, or as many as three sums take where that is less than 20 s; what they do not reach is said.
    Raises InputError where score fails or returns something else, and where texts or vocab_size are missing.
    """
    texts, windows = list(texts or ()), [window] if isinstance(window, int) else list(window)
    size, strings = len(vocabulary) if vocabulary else vocab_size, bool(texts) and isinstance(texts[0], str)
    if strings and vocabulary:
        raise InputError("texts: strings, and vocabulary is given too, of which texts are made; leave out one of them")
    if size is None and not strings:
        raise InputError(
            "vocab_size: needed to check a function of token ids, as in vocab_size=50; vocabulary= if it takes a str"
        )
    if (size is not None and size < 2) or length < 4 or min(windows, default=1) < 1:
        raise InputError(
            f"vocab_size, length, window: at least 2, 4 and 1; given {size}, {length} and {window}; raise the one below"
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
    used = {int(token) for one in chosen for token in one if not strings}
    if size is not None and used and not 0 <= min(used) <= max(used) < size:
        raise InputError(f"texts: token ids from 0 to {size - 1} (vocab_size={size}), given {min(used)} to {max(used)}")
    scorer = Scorer(score, str if strings else form, many)
    chosen = chosen if len(chosen) > 1 else [base, base[: len(base) // 2]]
    found = {SAME: _repeated(scorer, chosen)}
    if found[SAME].verdict == "fails":
        mend = inapplicable("not tested: the score of a text changes from call to call; mend that first")
        found |= dict.fromkeys((SUM, ONCE, LATER, ADD, RANKS, COUNTS), mend)
    else:
        _understood(scorer, sorted(chosen, key=len), size)
        if calls is None:
            calls = max(10_000, min(3 * (size or 0), int(_SECONDS * scorer.calls / max(scorer.seconds, 1e-9))))
        found |= _rounded(scorer, base, size) or over_vocabulary(scorer, base, size, windows, end_mark, calls)
        found |= {ADD: _added(scorer, chosen), RANKS: _ranks(scorer, chosen), COUNTS: _counts(scorer, chosen, end_mark)}
    about = {"model": getattr(score, "__name__", type(score).__name__), "source": "a scoring function"}
    about |= {"vocab_size": size, "length": len(base), "calls": scorer.calls, "first_token_scored": scorer.skipped == 0}
    order = (SUM, ONCE, LATER, SAME, ADD, RANKS, COUNTS)
    findings = tuple(replace(found[name], check=name) for name in order)
    return Report(findings, {**about, **(description or {})}, needed=SUM)


def _repeated(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    """Each text twice, with the others between: a cache that has seen a text shows, and so does chance."""
    ordered = sorted(texts, key=len, reverse=True)
    first, second = (totals(scorer, ordered) for _ in range(2))
    difference, allowed = largest(second, first), 10 * scorer.allowed(first)
    if difference <= allowed:
        scorer.noise = difference
    learns = bool((second <= first + allowed).all())
    why = "a text costs less the second time: something is kept between calls, such as a cache that has seen it"
    remark = why if learns else "random numbers (windows drawn at random, dropout), or a state kept between calls"
    if not difference <= allowed and not learns:
        after = [[scorer.total(text), scorer.total(ordered[0])][1] for text in (ordered[-1], ordered[-1], ordered[0])]
        if abs(after[0] - after[1]) <= allowed < abs(after[0] - after[2]):
            remark = "a memory of the text before is kept between calls: begin each text without it"
    looked_at = f"{len(texts)} texts, each scored again after the others, in nats"
    return bounded(looked_at, difference, allowed, ROUNDING, remark=remark if difference > allowed else "")


_READINGS: dict[
    str, tuple[str, Callable[[float, int], float]]
] = {  # what a bare number may be, and the total that it means
    "a perplexity": ('return {"perplexity": x, "tokens": n}', lambda value, tokens: tokens * math.log(value)),
    "a mean for each token": ('return {"loss": x, "tokens": n}', lambda value, tokens: tokens * value),
    "a mean in bits": ('return {"loss": x * log(2), "tokens": n}', lambda value, tokens: tokens * value * math.log(2)),
    "a total in bits": ("return x * log(2)", lambda value, tokens: value * math.log(2)),
}


def _understood(scorer: Scorer, texts: Sequence[Text], size: int | None) -> None:
    """Raise InputError for a bare number that is no total in nats: one that adds up as another figure, or does not grow."""
    base = texts[-1]
    if size is not None and scorer.bare:
        texts = [base[:n] for n in range(4, min(len(base), 40) + 1)]
    values = [scorer.total(text) for text in texts if scorer.bare]
    if not values or min(values) <= 0:
        return

    def adds_up(meant: Callable[[float, int], float]) -> bool:
        """Sums over the vocabulary are one after two and after three tokens, if the first token is scored, or if not."""
        for skipped in (0, 1):
            sums = [
                torch.logsumexp(
                    meant(before, n - skipped) - torch.tensor([meant(v, n + 1 - skipped) for v in after]), 0
                )
                for n, before, after in cut
            ]
            if all(abs(float(one)) <= 1e-3 for one in sums):
                return True
        return False

    looks = ""
    if size is not None and size <= 2000 and len(base) > 3:
        cut = [(n, scorer.total(base[:n]), [scorer.total([*base[:n], v]) for v in range(size)]) for n in (2, 3)]
        if any(value <= 0 for _, before, after in cut for value in (before, *after)) or adds_up(lambda x, n: x):
            return
        looks = next((name for name, (_, meant) in _READINGS.items() if adds_up(meant)), "")
    falls = sum(later < earlier for earlier, later in pairwise(values)) / len(values)
    flat = len(base) >= 5 * len(texts[0]) and max(values) < 2 * min(values)
    if not looks and (flat or (len(values) >= 16 and size and falls > 0.3)):  # a total grows, token by token
        looks = "a perplexity" if values[-1] > 2 * math.log(size or 2) else "a mean for each token"
    if looks:
        raise InputError(
            f"score: a bare number is read as a total in nats; this looks like {looks}: {_READINGS[looks][0]}"
        )


def _rounded(scorer: Scorer, base: Text, size: int | None) -> dict[str, Finding]:
    """The findings of totals in half precision; none where they are not."""
    for n in range(2, 1 + min(len(base), 12)) if size is not None else ():
        scorer.read(base[:n])
    whole = scorer.read(base)
    if scorer.half is None:
        return {}
    kind, error = str(scorer.half).removeprefix("torch."), torch.finfo(scorer.half).eps / 2
    error *= max(1.0, abs(whole.total)) / len(base)
    looked_at = f"the rounding of a total of {whole.total:.6g} nats, for each of {len(base)} tokens"
    remark = f"totals are sums or means in {kind}, a precision of {error * len(base):.2g} nats: add in float32"
    coarse = inapplicable(f"not tested: scores are rounded to {kind}; return them in float32")
    reason = "a perplexity is right to one in ten thousand"
    return {SUM: bounded(looked_at, error, _PRECISION, reason, remark=remark), ONCE: coarse, LATER: coarse}


def _added(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    if not scorer.many:
        return inapplicable("score takes one text; many=True is for a function of a list of texts")
    alone = totals(scorer, texts)
    together = torch.tensor([scorer.read(*some).total for some in (texts, texts[::-1])], dtype=torch.float64)
    expected, allowed = alone.sum(), 10 * scorer.allowed(alone, together)
    difference, remark = largest(together, expected.expand(2)), ""
    if not difference <= allowed:
        sizes = torch.tensor([len(text) - (scorer.skipped or 0) for text in texts]).double()
        mean_of_means = (alone / sizes).mean() * sizes.sum()
        more = "more than the texts is counted, such as padding" if together[0] > expected else "something is left out"
        remark = (
            "a mean of the texts' means, whatever their lengths"
            if abs(together[0] - mean_of_means) <= allowed
            else more
        )
        remark = f"together {float(together[0]):.6g} nats, one by one {float(expected):.6g}: {remark}, or texts see each other"
    looked_at = (
        f"{len(texts)} texts of {', '.join(str(len(text)) for text in texts)} in one call, against one by one, in nats"
    )
    return bounded(looked_at, difference, allowed, ROUNDING, remark=remark)


def _ranks(scorer: Scorer, texts: Sequence[Text]) -> Finding:
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
    return bounded("sums over 2 and 3 ranks, against one", worst, allowed, ROUNDING, remark="; ".join(faults))


def _counts(scorer: Scorer, texts: Sequence[Text], end_mark: bool) -> Finding:
    samples = [[text] for text in texts] + ([list(texts)] if scorer.many else [])
    faults: list[str] = []
    tested: set[str] = set()
    untested: set[str] = set()
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
                faults.append(f'"{key}" is {count:g}, and {_TRUE[key].format(true[key])}')
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
    return counted(list(dict.fromkeys(faults))[:3], f"{', '.join(sorted(tested))} of {len(samples)} calls", rest)
