"""The page of `fullrank diagnose`: a finding for each bottleneck, with its figures and what to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fullrank.reporting.drawing import Drawing
from fullrank.reporting.figures import count, listed
from fullrank.reporting.summary import Summary
from fullrank.reporting.tables import Table

Verdict = Literal["bottleneck", "perhaps", "no bottleneck", "not measured"]
BADGES: Mapping[Verdict, str] = {
    "bottleneck": "bad", "perhaps": "open", "no bottleneck": "good", "not measured": "quiet",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One possible bottleneck.

    name: the key in JSON. title: on the page. short: a noun phrase for the summary. words: sentences with the
    figures. figures: for JSON. rule: when the verdict is which. advice: what to try, as commands or lines of Python.
    """

    name: str
    title: str
    short: str
    verdict: Verdict
    words: Sequence[str]
    figures: Mapping[str, Any] = field(default_factory=dict)
    rule: str = ""
    advice: Sequence[str] = ()
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON of a finding."""
        return {
            "verdict": self.verdict,
            "words": [*self.words],
            "rule": self.rule,
            "figures": {**self.figures},
            "advice": [*self.advice],
        }


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

    def of(self, verdict: Verdict) -> list[Finding]:
        """The findings with this verdict."""
        return [finding for finding in self.findings if finding.verdict == verdict]

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if self.undertrained:
            return (
                f"{self.model} is worse than a unigram model (perplexity {self.perplexity:,.1f}, counts of words "
                f"{self.unigram_perplexity:,.1f}): train it first, nothing below tells of a bottleneck yet"
            )
        bound, perhaps = (listed(one.short for one in self.of(verdict)) for verdict in ("bottleneck", "perhaps"))
        if bound:
            return f"{self.model} is bound by {bound}"
        return f"{self.model} may be bound by {perhaps}" if perhaps else f"No bottleneck was found in {self.model}"

    def as_dict(self) -> dict[str, Any]:
        """One JSON document."""
        return {
            "model": self.model,
            "source": self.source,
            "text": self.text,
            "parameters": self.parameters,
            "segment_length": self.segment_length,
            "perplexity": self.perplexity,
            "unigram_perplexity": self.unigram_perplexity,
            "undertrained": self.undertrained,
            "headline": self.headline,
            "findings": {finding.name: finding.as_dict() for finding in self.findings},
        }

    def page(self) -> str:
        """One self-contained HTML page; equal diagnoses give equal bytes."""
        from fullrank.reporting.page import fill

        source = self.source[0].upper() + self.source[1:]
        facts = f"{source}, {count(self.parameters)} parameters, read on {self.text} in segments of"
        also = [f"Perhaps: {listed(one.short for one in found)}."] if (found := self.of("perhaps")) else []
        none = [f"No bottleneck: {listed(one.short for one in found)}."] if (found := self.of("no bottleneck")) else []
        return fill(
            "diagnosis.html",
            title=f"Which bottleneck is {self.model} in?",
            subtitle="fullrank diagnose",
            summary=Summary(self.headline, (f"{facts} {self.segment_length:,} tokens.", *also, *none)),
            tiles=[(one.title, one.verdict, _first(one)) for one in self.findings],
            findings=self.findings,
            badges=BADGES,
            notes={},
            cards=[],
            commands=[],
            troubles=[],
        )


def _first(finding: Finding) -> str:
    return finding.words[0] if finding.words else ""
