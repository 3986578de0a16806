"""Claims of a paper and tables of benchmarks: the sources of result pages beside the ledger.

`claims/<paper>.yaml`; the keys are those of `Claim`:

    paper: "Zhang et al. 2022, Mixhead"
    claims:
      - {table: Table 1, claim: "mixing lowers perplexity", better: b, than: plain, recipes: [mixhead/table1-vanilla]}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fullrank.config.load import read_yaml
from fullrank.config.recipe import Scale, Settings
from fullrank.core.errors import ConfigError
from fullrank.core.section import Section, key


@dataclass(frozen=True, kw_only=True)
class Claim(Section):
    """One claim: the row `better` has a lower (or higher) figure than the row `than`, compared seed by seed.

    Settings (`set`) name what differs from the recipe; only runs with exactly these count.
    """

    KEY = "claims"
    table: str = key("", "the table or figure, as in Table 1")
    claim: str = key("", "what the paper says, in a short sentence")
    testable: bool = key(True, "false: it cannot be decided here, and `why` says for what reason")
    why: str | None = key(None, "the reason why it is not testable here")
    released: str | None = key(None, "what the released code does otherwise than the paper says")
    remark: str | None = key(None, "what else a reader has to know")
    recipes: list[str] = key([], "the recipes, each compared by itself")
    than_recipe: str | None = key(None, "the recipe of the row `than`; null: the same")
    better: str = key("", "the row that should be better")
    than: str = key("plain", "the row that it is compared with")
    scale: Scale = key("small", "paper, small or tiny")
    set: Settings | None = key(None, "settings of both rows")
    better_set: Settings | None = key(None, "further settings of the row `better`")
    than_set: Settings | None = key(None, "further settings of the row `than`")
    split: str = key("test", "the split of the figure; of fine-tuning dev")
    measure: str = key("perplexity", "the figure: perplexity, bits_per_byte, bleu, accuracy ...")
    direction: Literal["lower", "higher"] = key("lower", "the direction that is better")
    statistic: Literal["mean", "deviation"] = key("mean", "what is compared: the mean over seeds, or its deviation")
    checkpoint: Literal["final", "last"] = key(
        "final", "final: the checkpoint that the run reports; last: its last one"
    )

    def _faults(self) -> Iterator[str]:
        for name in ("table", "claim"):
            if not getattr(self, name):
                yield f"claims.{name}: every claim has one"
        if not self.testable and not self.why:
            yield "claims.why: a claim that is not testable here says why"
        if self.testable and not (self.recipes and self.better):
            yield "claims.recipes: a claim names its recipes and the row `better`, or says testable: false"


@dataclass(frozen=True, kw_only=True)
class ClaimsFile(Section):
    """The YAML of a paper's claims."""

    paper: str = key("", "authors, year and title")
    about: str | None = key(None, "what stands above the claims")
    claims: list[Claim] = key([], "the claims, in the order of the paper")

    def _faults(self) -> Iterator[str]:
        if not self.paper:
            yield "paper: a file of claims names its paper (authors, year and title)"


@dataclass(frozen=True, kw_only=True)
class BenchmarkTable(Section):
    """A table of a JSON file, `results/*/candidates/*` for example; a star is every key, or every item of a list.

    Columns are paths inside a row: `time/middle`; `.` is the row itself, `$1` the key at the first star, and `../shape` the
    nearest `shape` around the row.
    """

    KEY = "tables"
    title: str | None = key(None, "what stands above the table")
    rows: str = key("", "the path of its rows")
    columns: dict[str, str] | None = key(None, "the path of each column, by its heading")
    across: str | None = key(
        None, "the path of a heading: rows that agree in their columns become one, with a cell for each"
    )
    cell: str | None = key(None, "with across: the path of the cell")


@dataclass(frozen=True, kw_only=True)
class BenchmarkFile(Section):
    """The tables of one JSON file; benchmarks.yaml holds them by the file's name."""

    title: str = key("", "the heading")
    about: str = key("", "what was measured, in words")
    tables: list[BenchmarkTable] = key([], "its tables")


def read_claims(path: Path) -> ClaimsFile:
    """The claims in a YAML file; ConfigError names the file and the key."""
    try:
        return ClaimsFile.from_dict(read_yaml(path))
    except ConfigError as error:
        raise ConfigError(*(f"{path}: {line}" for line in error.problems)) from error
