"""Claims of a paper and tables of benchmarks: the sources of result pages beside the ledger.

`claims/<paper>.yaml`; the keys are those of `Claim`:

    paper: "Zhang et al. 2022, Mixhead"
    claims:
      - {table: Table 1, claim: "mixing lowers perplexity", recipe: mixhead/table1-vanilla, better: {row: b}}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fullrank.config.recipe import Scale, Settings
from fullrank.core.section import Section, key


@dataclass(frozen=True, kw_only=True)
class Arm(Section):
    """One side of a comparison. Only runs with exactly the settings of the claim and of this side count."""

    row: str = key("plain", "the row of the recipe")
    recipe: str | None = key(None, "its recipe, where it is not that of the claim")
    set: Settings | None = key(None, "settings that differ from the recipe, beside those of the claim")


@dataclass(frozen=True, kw_only=True)
class Claim(Section):
    """One claim: the row `better` has a lower (or higher) figure than the row `than`, compared seed by seed."""

    KEY = "claims"
    table: str = key("", "the table or figure, as in Table 1")
    claim: str = key("", "what the paper says, in a short sentence")
    why: str | None = key(None, "of a claim that is not testable here: the reason")
    remark: str | None = key(None, "what else a reader has to know, as what the released code does otherwise")
    recipe: str = key("", "the recipe of both rows")
    scale: Scale = key("small", "paper, small or tiny")
    set: Settings | None = key(None, "settings of both rows that differ from the recipe")
    better: Arm = key(Arm(), "the row that should be better")
    than: Arm = key(Arm(), "the row that it is compared with")
    figure: str = key("final.test.perplexity", "the place of the figure in result.json; last.*: of the last checkpoint")
    direction: Literal["lower", "higher"] = key("lower", "the direction that is better")
    statistic: Literal["mean", "deviation"] = key("mean", "what is compared: the mean over seeds, or its deviation")

    def _faults(self) -> Iterator[str]:
        for name in ("table", "claim"):
            if not getattr(self, name):
                yield f"claims.{name}: every claim has one"
        if not self.why and (not self.recipe or self.better == self.than):
            yield "claims.recipe: a claim names its recipe and the row `better`, or `why` it is not testable here"
        if self.figure.count(".") < 2:
            yield f"claims.figure: a checkpoint, a split and a measure, as in final.test.perplexity, given {self.figure}"


@dataclass(frozen=True, kw_only=True)
class ClaimsFile(Section):
    """The YAML of a paper's claims."""

    paper: str = key("", "authors, year and title")
    claims: list[Claim] = key([], "the claims, in the order of the paper")

    def _faults(self) -> Iterator[str]:
        if not self.paper:
            yield "paper: a file of claims names its paper (authors, year and title)"


@dataclass(frozen=True, kw_only=True)
class BenchmarkFile(Section):
    """The tables of one JSON file; benchmarks.yaml holds them by the file's name.

    The rows of a table stand at a path such as `results/<setting>/candidates/*`: a star is every item of a list, `<setting>`
    every key, which the rows then have as `setting`. A column is a key of the row (`time.middle` of a nested one, `value` of a
    row that is no object), or of anything around it.
    """

    title: str = key("", "the heading")
    about: str = key("", "what was measured, in words")
    tables: dict[str, list[str]] = key({}, "columns of each table, by the path of its rows")
