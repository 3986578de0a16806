"""Check of a scoring loop: whether its perplexity is that of one normalised distribution over texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fullrank.checking.compare import largest
from fullrank.checking.report import Finding, Report, inapplicable, judge
from fullrank.checking.scorer import ROUNDING, Scorer, count_faults
from fullrank.checking.sums import LATER, ONCE, SUM, sum_over_vocabulary
from fullrank.core.errors import InputError

SAME, ADD, RANKS = "the same text gets the same score", "texts in one call add up", "ranks add up"
COUNTS = "counts and means are what they say"
_SECONDS = 20.0  # of calls of a score with a large vocabulary
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
    windows = [window] if isinstance(window, int) else list(window)
    size = len(vocabulary) if vocabulary else vocab_size
    is_text = texts is not None and isinstance(next(iter(texts), None), str)
    if is_text and vocabulary:
        raise InputError("texts: strings, and vocabulary is given too, of which texts are made; leave out one of them")
    if size is None and not is_text:
        raise InputError(
            "vocab_size: needed to check a function of token ids, as in vocab_size=50; vocabulary= if it takes a str"
        )
    if (size is not None and size < 2) or length < 4 or min(windows, default=1) < 1:
        raise InputError(f"vocab_size, length, window: at least 2, 4 and 1; given {size}, {length} and {window}")
    samples = list(texts or draw_texts(max([length, *(2 * one + 3 for one in windows)]), size or 2))
    form: Callable[[Any], Any] = str if is_text else list if isinstance(samples[0], list) else torch.tensor
    if vocabulary:
        form = lambda ids: "".join(vocabulary[one] for one in ids)  # noqa: E731
    chosen: list[Text] = [text if is_text else torch.as_tensor(text).tolist() for text in samples]
    base = max(chosen, key=len)
    if len(base) < 4:
        raise InputError(f"texts: the longest has {len(base)} tokens; give one of 4 or more")
    used = set() if is_text else {int(token) for text in chosen for token in text}
    if size is not None and used and not 0 <= min(used) <= max(used) < size:
        raise InputError(f"texts: token ids from 0 to {size - 1} (vocab_size={size}), given {min(used)} to {max(used)}")
    scorer = Scorer(score, form, many)
    chosen = chosen if len(chosen) > 1 else [base, base[: len(base) // 2]]
    findings = {SAME: score_twice(scorer, chosen)}
    if findings[SAME].verdict == "fails":
        mend = inapplicable("not tested: the score of a text changes from call to call; mend that first")
        findings |= dict.fromkeys((SUM, ONCE, LATER, ADD, RANKS, COUNTS), mend)
    else:
        if calls is None:
            calls = max(10_000, min(3 * (size or 0), int(_SECONDS * scorer.calls / max(scorer.seconds, 1e-9))))
        findings |= sum_over_vocabulary(scorer, base, size, windows, end_mark, calls)
        findings[ADD], findings[RANKS] = add_texts(scorer, chosen), add_ranks(scorer, chosen)
        findings[COUNTS] = compare_counts(scorer, chosen, end_mark)
    about = {"model": getattr(score, "__name__", type(score).__name__), "source": "a scoring function"}
    about |= {"vocab_size": size, "length": len(base), "calls": scorer.calls, "first_token_scored": scorer.skipped == 0}
    order = (SUM, ONCE, LATER, SAME, ADD, RANKS, COUNTS)
    return Report(
        tuple(replace(findings[name], check=name) for name in order), {**about, **(description or {})}, needed=SUM
    )


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
    elif bool((second <= first + allowed).all()):
        remark = "a text costs less the second time: something is kept between calls, such as a cache that has seen it"
    else:
        remark, after = "random numbers (windows drawn at random, dropout), or a state kept between calls", []
        for text in (ordered[-1], ordered[-1], ordered[0]):
            scorer.total(text)
            after.append(scorer.total(ordered[0]))
        if abs(after[0] - after[1]) <= allowed < abs(after[0] - after[2]):
            remark = "a memory of the text before is kept between calls: begin each text without it"
    looked_at = f"{len(texts)} texts, each scored again after the others, in nats"
    return judge(looked_at, difference, allowed, ROUNDING, remark=remark)


def add_texts(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    if not scorer.many:
        return inapplicable("score takes one text; many=True is for a function of a list of texts")
    alone = scorer.totals(texts)
    together = torch.tensor([scorer.read(*some).total for some in (texts, texts[::-1])], dtype=torch.float64)
    expected, allowed = alone.sum(), 10 * scorer.allowed(alone, together)
    difference, remark = largest(together, expected.expand(2)), ""
    if not difference <= allowed:
        more, less = (
            "more than the texts is counted, such as padding",
            "something is left out, or a mean is one of means",
        )
        remark = more if together[0] > expected else less
        remark = f"together {float(together[0]):.6g} nats, one by one {float(expected):.6g}: {remark}, or texts see each other"
    lengths = ", ".join(str(len(text)) for text in texts)
    looked_at = f"{len(texts)} texts of {lengths} in one call, against one by one, in nats"
    return judge(looked_at, difference, allowed, ROUNDING, remark=remark)


def add_ranks(scorer: Scorer, texts: Sequence[Text]) -> Finding:
    if not scorer.ranked:
        return inapplicable("score has no arguments rank and world_size")
    samples = texts if scorer.many else [max(texts, key=len)]
    whole, faults, worst = scorer.read(*samples), [], 0.0
    expected = {"nats": whole.total, **whole.counts}
    for world in (2, 3):
        parts = [scorer.read(*samples, rank=rank, world_size=world) for rank in range(world)]
        for key, one in expected.items():
            total = sum(part.total if key == "nats" else part.counts.get(key, 0.0) for part in parts)
            worst = max(worst, abs(total - one))
            if not abs(total - one) <= (10 * scorer.allowed(torch.tensor([one])) if key == "nats" else 0.0):
                faults.append(f"{world} ranks add up to {total:.6g} {key}, one to {one:.6g}")
    allowed = 10 * scorer.allowed(torch.tensor([whole.total]))
    return judge("sums over 2 and 3 ranks, against one", worst, allowed, ROUNDING, remark="; ".join(faults))


def compare_counts(scorer: Scorer, texts: Sequence[Text], end_mark: bool) -> Finding:
    samples = [[text] for text in texts] + ([list(texts)] if scorer.many else [])
    faults, tested, untested = list[str](), set[str](), set[str]()
    for some in samples:
        reading, true = scorer.read(*some), count_truly(scorer, some, end_mark)
        if "tokens" not in true and reading.each is not None:
            true["tokens"] = len(reading.each)
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
        why = 'score returns no count that is known here; return {"nll": ..., "tokens": ...}'
        return inapplicable("; ".join(filter(None, (rest, why))))
    return count_faults(list(dict.fromkeys(faults))[:3], f"{', '.join(sorted(tested))} of {len(samples)} calls", rest)


def count_truly(scorer: Scorer, texts: Sequence[Text], end_mark: bool) -> dict[str, int]:
    """What is known of the tokens, words and bytes of some texts."""
    counts, forms = dict[str, int](), [scorer.form(text) for text in texts]
    if scorer.skipped is not None and not isinstance(texts[0], str):
        counts["tokens"] = sum(len(text) + end_mark - scorer.skipped for text in texts)
    if isinstance(forms[0], str):
        counts |= {"words": sum(len(one.split()) for one in forms), "bytes": sum(len(one.encode()) for one in forms)}
    return counts
