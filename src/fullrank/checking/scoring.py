"""Check of a scoring loop: whether its perplexity is that of one normalised distribution over texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fullrank.checking.report import Finding, Report, inapplicable, judge, largest
from fullrank.checking.sums import LATER, ONCE, ROUNDING, SUM, Scorer, count_faults, sum_over_vocabulary
from fullrank.core.errors import InputError

SAME, ADD, RANKS = "the same text gets the same score", "texts in one call add up", "ranks add up"
COUNTS = "counts and means are what they say"
_TRUE = {"tokens": "{:g} are scored", "words": "text.split() has {:g}", "bytes": "the text has {:g} in UTF-8"}
Text = list[int] | str


def check_scoring(
    score: Callable[..., Any], texts: Sequence[Any] | None = None, *, vocab_size: int | None = None,
    vocabulary: Sequence[str] | None = None, length: int = 67, window: int = 0, many: bool = False,
    calls: int = 10_000, description: Mapping[str, Any] | None = None,
) -> Report:  # fmt: skip
    """Check that `score`, a function from a text to its nll in nats, counts every token once and nothing else.

        report = fr.check_scoring(score, vocab_size=50);  report.passes, print(report)

    score(text): a tensor (N,) of token ids; a list of them or a str where `texts` are such; with many=True a list of texts.
    It returns nll per token, or a total, or a mapping: "nll" (either), or the means "loss" or "perplexity"; and what was
    counted as "tokens", "words", "bytes". A mean is taken times "tokens", else words, else bytes. Where its signature has
    `rank` and `world_size`, it returns the part of that rank.
    texts: random tokens if not given. vocabulary: pieces of text, one token each, that are joined to texts, for functions of
    a str. window: tokens that the scorer reads at a time; texts are made long enough to pass it twice. calls: most calls of
    `score` for sums over the vocabulary; what they do not reach is said.
    Raises InputError where score fails or returns something else, and where texts or vocab_size are missing.
    """
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
    samples = list(texts or draw_texts(max(length, 2 * window + 3), size or 2))
    form: Callable[[Any], Any] = str if is_text else list if isinstance(samples[0], list) else torch.tensor
    if vocabulary:
        form = lambda ids: "".join(vocabulary[one] for one in ids)  # noqa: E731
    chosen: list[Text] = [text if is_text else torch.as_tensor(text).tolist() for text in samples]
    base = max(chosen, key=len)
    if len(base) < 4:
        raise InputError(f"texts: the longest has {len(base)} tokens; give one of 4 or more")
    if size is not None and not is_text:
        used = {int(token) for text in chosen for token in text}
        if not 0 <= min(used) <= max(used) < size:
            given = f"given {min(used)} to {max(used)}"
            raise InputError(f"texts: token ids from 0 to {size - 1} (vocab_size={size}), {given}")
    scorer = Scorer(score, form, many)
    chosen = chosen if len(chosen) > 1 else [base, base[: len(base) // 2]]
    same = score_twice(scorer, chosen)
    order = (SUM, ONCE, LATER, SAME, ADD, RANKS, COUNTS)
    mend = inapplicable("not tested: the score of a text changes from call to call; mend that first")
    findings = dict.fromkeys(order, mend) | {SAME: same}
    if same.verdict == "passes":
        findings |= sum_over_vocabulary(scorer, base, size, window, calls)
        findings |= {ADD: add_texts(scorer, chosen), RANKS: add_ranks(scorer, chosen)}
        findings[COUNTS] = compare_counts(scorer, chosen)
    about = {"model": getattr(score, "__name__", type(score).__name__), "source": "a scoring function"}
    about |= {"vocab_size": size, "length": len(base), "calls": scorer.calls, "first_token_scored": scorer.skipped == 0}
    named = tuple(replace(findings[name], check=name) for name in order)
    return Report(named, {**about, **(description or {})}, needed=SUM)


def draw_texts(longest: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (longest, longest // 3 + 1, 5, longest // 2, 3)
    return [torch.randint(size, (length,), generator=generator) for length in lengths]


def score_twice(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    """Each text twice, with the others between: a cache that has seen a text shows, and so does chance."""
    ordered = sorted(texts, key=len, reverse=True)
    first, second = scorer.totals(ordered), scorer.totals(ordered)
    difference, allowed, remark = largest(second, first), 10 * scorer.allowed(first), ""
    if difference <= allowed:
        scorer.noise = difference
    else:
        remark = (
            "random numbers (windows drawn at random, dropout), or something is kept between calls, such as a cache"
        )
    looked_at = f"{len(texts)} texts, each scored again after the others, in nats"
    return judge(looked_at, difference, allowed, ROUNDING, remark=remark)


def add_texts(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    if not scorer.many:
        return inapplicable("score takes one text; many=True is for a function of a list of texts")
    alone, together = scorer.totals(texts), scorer.read(*texts).total
    difference, allowed, remark = abs(together - float(alone.sum())), 10 * scorer.allowed(alone, alone.sum()), ""
    if difference > allowed:
        why = "padding is counted, something is left out, a mean is one of means, or texts see each other"
        remark = f"together {together:.6g} nats, one by one {float(alone.sum()):.6g}: {why}"
    looked_at = f"texts of {', '.join(str(len(text)) for text in texts)} in one call, against one by one, in nats"
    return judge(looked_at, difference, allowed, ROUNDING, remark=remark)


def add_ranks(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    if not scorer.ranked:
        return inapplicable("score has no arguments rank and world_size")
    samples = texts if scorer.many else [max(texts, key=len)]
    whole, faults = scorer.read(*samples), list[str]()
    for world in (2, 3):
        parts = [scorer.read(*samples, rank=rank, world_size=world) for rank in range(world)]
        total, allowed = sum(part.total for part in parts), 10 * scorer.allowed(torch.tensor([whole.total]))
        if not abs(total - whole.total) <= allowed:
            faults.append(f"{world} ranks add up to {total:.6g} nats, one to {whole.total:.6g}")
        for key, count in whole.counts.items():
            counted = sum(part.counts.get(key, 0.0) for part in parts)
            if counted != count:
                faults.append(f"{world} ranks add up to {counted:.6g} {key}, one to {count:.6g}")
    return count_faults(faults, "sums over 2 and 3 ranks, against one")


def compare_counts(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    samples = [[text] for text in texts] + ([list(texts)] if scorer.many else [])
    faults, tested, untested = list[str](), set[str](), set[str]()
    for some in samples:
        reading, forms, true = scorer.read(*some), [scorer.form(text) for text in some], dict[str, int]()
        if scorer.skipped is not None and not isinstance(some[0], str):
            true["tokens"] = sum(len(text) - scorer.skipped for text in some)
        elif reading.each is not None:
            true["tokens"] = len(reading.each)
        if isinstance(forms[0], str):
            true |= {"words": sum(len(one.split()) for one in forms), "bytes": sum(len(one.encode()) for one in forms)}
        for key, count in reading.counts.items():
            (tested if key in true else untested).add(key)
            if count != true.get(key, count):
                faults.append(f'"{key}" is {count:g}, and {_TRUE[key].format(true[key])}')
        per = reading.counts or {"tokens": true.get("tokens", math.nan)}
        for key, mean in reading.means.items():
            tested.add(key)
            nats = mean if key == "loss" else math.log(mean)
            if not any(abs(nats - reading.total / count) <= 1e-3 + scorer.unit for count in per.values() if count):
                faults.append(f'"{key}" is {mean:.6g}, which is not the total over any count ({", ".join(per)})')
    rest = f"not tested: {', '.join(sorted(untested))}" if untested else ""
    if not tested:
        return inapplicable(
            f'{rest or "score returns no count that is known here"}; return {{"nll": ..., "tokens": ...}}'
        )
    return count_faults(list(dict.fromkeys(faults))[:3], f"{', '.join(sorted(tested))} of {len(samples)} calls", rest)
