"""A diagnosis: findings with their figures, records and plots, as a page and as JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fullrank.core.errors import InputError
from fullrank.records import Plot, Record, Table
from fullrank.render.blocks import Block, Code, Facts, Page, Paragraph, Section
from fullrank.render.page import build_blocks
from fullrank.render.tables import join_words

Verdict = Literal["bottleneck", "perhaps", "no bottleneck", "not measured"]
_BADGES = {"bottleneck": "bad", "perhaps": "open", "no bottleneck": "good", "not measured": "quiet"}


@dataclass(frozen=True)
class Finding:
    """One possible bottleneck.

    words: sentences with the figures. figures: for JSON. advice: what to try, as commands or lines of Python.
    records, tables, plots: what the page shows. short: a noun phrase for the headline. name: the key in JSON.
    title: on the page. rule: when the verdict is which.
    """

    verdict: Verdict
    words: Sequence[str]
    figures: Mapping[str, Any] = field(default_factory=dict)
    advice: Sequence[str] = ()
    records: Sequence[Record] = ()
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    short: str = ""
    name: str = ""
    title: str = ""
    rule: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The JSON of a finding."""
        return {key: getattr(self, key) for key in ("verdict", "words", "rule", "figures", "advice")}

    def build_section(self) -> Section:
        """The section of a page."""
        blocks: list[Block] = [Paragraph(sentence) for sentence in self.words]
        blocks.append(Paragraph(self.rule, "note"))
        blocks += build_blocks(self.tables, self.plots, list(self.records))
        blocks += [Code(line, "" if index else "What to try") for index, line in enumerate(self.advice)]
        return Section(self.title, blocks, self.name, self.verdict, _BADGES[self.verdict])


Examine = Callable[[Any], Finding]


def examines(name: str, title: str, short: str, rule: str) -> Callable[[Examine], Examine]:
    """Make a function the examination of one bottleneck: where it raises InputError, nothing was measured."""

    def decorate(function: Examine) -> Examine:
        @functools.wraps(function)
        def examine(subject: Any) -> Finding:
            try:
                finding = function(subject)
            except InputError as error:
                finding = Finding("not measured", [f"{error}."])
            return replace(finding, name=name, title=title, short=finding.short or short, rule=rule)

        return examine

    return decorate


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of one model. source: run, saved model or Hugging Face. text: the name of the text that was read.

    undertrained: its perplexity is above that of a unigram model, so that nothing else can be told.
    """

    model: str
    source: str
    text: str
    parameters: int
    segment_length: int
    findings: Sequence[Finding]
    perplexity: float | None = None
    unigram_perplexity: float | None = None
    undertrained: bool = False

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if self.undertrained:
            return (
                f"{self.model} is worse than a unigram model (perplexity {self.perplexity:,.1f}, counts of words "
                f"{self.unigram_perplexity:,.1f}): train it first, nothing below tells of a bottleneck yet"
            )
        bound, perhaps = self._list("bottleneck"), self._list("perhaps")
        if bound:
            return f"{self.model} is bound by {bound}"
        return f"{self.model} may be bound by {perhaps}" if perhaps else f"No bottleneck was found in {self.model}"

    def _list(self, verdict: Verdict) -> str:
        return join_words(finding.short for finding in self.findings if finding.verdict == verdict)

    def to_dict(self) -> dict[str, Any]:
        """One JSON document."""
        facts = {key: value for key, value in vars(self).items() if key != "findings"}
        findings = {finding.name: finding.to_dict() for finding in self.findings}
        return {**facts, "headline": self.headline, "findings": findings}

    def build_page(self) -> Page:
        """The page; equal diagnoses give equal pages."""
        source = self.source[0].upper() + self.source[1:]
        facts = f"{source}, {self.parameters:,} parameters, read on {self.text} in segments of {self.segment_length:,} tokens."
        return Page(
            f"Which bottleneck is {self.model} in?",
            "fullrank diagnose",
            self.headline,
            [Paragraph(facts), Facts([(finding.title, finding.verdict) for finding in self.findings], "tiles")],
            [finding.build_section() for finding in self.findings],
        )


def record_curve(measure: str, x: str, points: Iterable[tuple[float, float]], **labels: int) -> list[Record]:
    """A curve as records, over the label `x`."""
    return [Record({**labels, x: place}, measure, value) for place, value in points]
