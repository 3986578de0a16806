"""docs/which.md: which mechanism to use in which situation, by the verdicts on claims. `fullrank diagnose` quotes them.

which.yaml has the situations and names the claims behind each. Answers and figures are made from the verdicts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fullrank.config.load import read_yaml
from fullrank.core.errors import InputError
from research import build, ngrams
from research import markdown as md
from research.claims import VERDICTS, Claim, Verdict
from research.ledger import identify_text

# beside docs/results
PAGE = "../which.md"
QUOTES = "../../src/fullrank/experiments/which.json"
QUOTED = ("mechanism", "measured", "verdict", "runs")
YES, NO, SAME = DECIDED = VERDICTS[:3]
UNMEASURED = "fewer than three seeds"
Option = Mapping[str, str]  # a mechanism and what was measured of it, all in words


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A section of the page; the keys are explained at the head of which.yaml."""

    have: str
    options: Mapping[str, str]
    finding: str = ""
    deciding: Sequence[str] = ()


def make_pages(research: Path, cited: Mapping[str, tuple[str, Verdict]]) -> dict[str, str]:
    """Make the page without its head, and what `fullrank diagnose` quotes. cited: link and verdict by the key of a claim."""
    path = research / "which.yaml"
    texts = ngrams.read_values(research / "ngrams.csv")
    summary: list[dict[str, str]] = []
    sections: list[str] = []
    every: dict[str, Option] = {}
    quotes: dict[str, list[Option]] = {}
    for content in read_yaml(path)["situations"]:
        situation = build(Situation, content, str(path))
        if unknown := situation.options.keys() - cited.keys():
            raise InputError(f"{path}: no claim has the key {', '.join(sorted(unknown))}")
        options = [describe_option(words, *cited[key], texts) for key, words in situation.options.items()]
        options.sort(key=lambda option: VERDICTS.index(option["verdict"]))
        summary.append(summarize(situation, options))
        sections += describe_situation(situation, options)
        every |= {option["link"]: option for option in options}
        measured = [option for option in options if option["measured"] != UNMEASURED]
        quotes.setdefault(situation.finding, []).extend(map(quote, measured))
    quotes.pop("", None)
    page = ["# Which mechanism should I use?", *introduce(list(every.values())), md.make_table(summary), *sections]
    return {PAGE: "\n\n".join(page), QUOTES: json.dumps(quotes, indent=1, ensure_ascii=False) + "\n"}


def introduce(options: Sequence[Option]) -> Iterator[str]:
    """Yield the introduction of the page: the decided comparisons, and what they hold for."""
    counts = Counter(option["verdict"] for option in options)
    decided = sum(counts[word] for word in DECIDED)
    yield (
        "Begin with a plain model and tune it: its learning rate, its weight decay, how often it reads the text. Add a "
        f"mechanism only where this page says so. Of its {len(options)} comparisons {decided} are decided, "
        f"{counts['too early']} are *too early* and {counts['open']} *open*; a command beside them trains what decides."
    )
    words = {YES: "Use", NO: "Do not use"}
    answers = [option for option in options if option["verdict"] in words]
    yield "\n".join(
        f"- **{words[option['verdict']]}** {option['mechanism']}: {option['measured']}, {option['linked']}. {option['runs']}."
        for option in answers
    )
    yield (
        "An answer holds for the model, the text and the tokens that stand beside it, all of them small. For yours it is a "
        "guess: train both sides, with three seeds and three learning rates. Differences are to the row whose figure ends "
        "the line of its runs, with 95 % intervals; a lower perplexity is better. [The results](results/README.md) explain the "
        "verdicts, and "
        "[`fullrank diagnose`](bottleneck.md) quotes these figures."
    )


def summarize(situation: Situation, options: Sequence[Option]) -> dict[str, str]:
    """Summarize a situation as a line of the table at the head of the page."""
    undecided = dict.fromkeys(option["unsure"] for option in options if option["verdict"] not in DECIDED)
    if undecided and not situation.deciding:
        raise InputError(f"which.yaml: {situation.have}: not all is decided; name trainings that would, `deciding`")
    have = md.prose(situation.have)
    return {
        "you have": f"[{have}](#{md.make_anchor(have)})",
        "use": name_options(options, YES) or "nothing yet",
        "do not use": name_options(options, NO) or md.MISSING,
        "undecided because": "; ".join(undecided) or md.MISSING,
    }


def describe_situation(situation: Situation, options: Sequence[Option]) -> Iterator[str]:
    """Yield the section of a situation: its comparisons, the runs behind them, and the commands that would decide the rest."""
    have = md.prose(situation.have)
    yield f"## {have[0].upper()}{have[1:]}"
    yield md.make_table(
        [
            {"mechanism": option["mechanism"], "effect": option["measured"], "verdict": option["linked"]}
            for option in options
        ]
    )
    yield f"Measured on {'; '.join(dict.fromkeys(option['runs'] for option in options))}."
    if situation.deciding:
        yield "Trainings that decide the rest:\n\n" + "\n".join(f"    {command}" for command in situation.deciding)


def name_options(options: Sequence[Option], verdict: str) -> str:
    """Name the mechanisms whose comparison has this verdict, one a line of a cell."""
    return "<br>".join(option["mechanism"] for option in options if option["verdict"] == verdict)


def describe_option(words: str, link: str, verdict: Verdict, texts: Mapping[Any, Mapping[str, str]]) -> Option:
    """Describe a mechanism and what was measured of it.

    Args:
        words: the mechanism.
        link: link to the verdict.
        verdict: that of the claim about it.
        texts: rows of ngrams.csv by checksums of test text and vocabulary.

    Returns:
        Mechanism, figure, verdict, runs, link and reason for doubt, in words, by name.
    """
    mechanism = md.prose(words)
    measured = UNMEASURED
    unsure = UNMEASURED
    if verdict.estimate is not None:
        measured = f"{name_figure(verdict.claim)} {describe_difference(verdict)}"
        unsure = "may be seeds or learning rates"
    if verdict.word == "too early":
        is_above = "4-grams" in verdict.reason
        unsure = "worse than counting 4-grams" if is_above else "still learning"
    return {
        "mechanism": mechanism,
        "measured": measured,
        "verdict": verdict.word,
        "runs": describe_runs(verdict, texts),
        "link": link,
        "linked": f"[{verdict.word}]({link})",
        "unsure": unsure,
    }


def quote(option: Option) -> Option:
    """Return what `fullrank diagnose` quotes, as plain text."""
    return {key: option[key].replace("`", "") for key in QUOTED}


def describe_runs(verdict: Verdict, texts: Mapping[Any, Mapping[str, str]]) -> str:
    """Describe the runs that a claim compares with: recipe, size, text, 4-gram line, figure and seeds."""
    recipe = md.code(verdict.claim.recipe)
    comparison = verdict.comparison
    if comparison is None or not comparison.than.runs:
        return f"{recipe}: not trained yet"
    side = comparison.than
    first = next(iter(side.runs.values()))
    words = [f"{recipe}: {first['parameters']:,} parameters", md.prose(first["corpus"])]
    if first["tokens_seen"]:
        words.insert(1, f"{first['tokens_seen']:,} tokens read")
    counted = texts.get(identify_text(first))
    if counted is not None:
        words[-1] += f" of {int(counted['tokens']):,} tokens"
        words.append(f"4-grams {float(counted[ngrams.LINE]):.1f}")
    words.append(f"{side.row} {md.show(fmean(side.figures.values()))}")
    if comparison.seeds:
        words.append(f"seeds {md.show_seeds(comparison.seeds)}")
    else:
        words.append("no shared seed yet")
    return ", ".join(words)


def name_figure(claim: Claim) -> str:
    """Name the figure of a claim in words."""
    figure = md.readable(claim.figure.removeprefix("final.").replace(".", " "))
    return f"deviation over seeds of {figure}" if claim.statistic == "deviation" else figure


def describe_difference(verdict: Verdict) -> str:
    """Show the difference of a verdict with its interval; a dash without one."""
    if verdict.estimate is None:
        return md.MISSING
    unit = " %" if verdict.claim.statistic == "deviation" else ""
    return md.show_difference(verdict.estimate.difference, verdict.estimate.interval, unit)
