"""A plan of trainings as one YAML file, for `fullrank queue`.

    set: {train.precision: bf16}                      # laid on every training
    ledger: docs/results/ledger.jsonl                 # beside the plan; ledger.jsonl if not given
    trainings:
      - {table: mixhead/table1-vanilla, rows: [plain, b], seeds: [1, 2, 3], scale: small,
         set: {train.learning_rate: 2.0e-3}, decides: "Mixhead Table 1: mixing lowers perplexity at equal size"}

A plan says what is trained and why, never where its texts lie: `fullrank queue --from` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullrank.config.recipe import Scale, Settings
from fullrank.core.section import CountOrZero, Section, key


@dataclass(frozen=True, kw_only=True)
class PlanEntry(Section):
    """Rows of a table, each trained with every seed."""

    KEY = "trainings"
    table: str = key("", "a recipe, a table of several recipes (mixhead/table1), or a YAML file")
    rows: list[str] | None = key(None, "its rows; null: all of them")
    seeds: list[CountOrZero] = key([1], "the seeds of every row")
    scale: Scale | None = key(None, "paper, small or tiny; null: the recipe's largest")
    set: Settings | None = key(None, "settings laid on every row; they become a part of the folder's name")
    decides: str | None = key(None, "the claim that these trainings decide")

    def _faults(self) -> Iterator[str]:
        if not self.table:
            yield "trainings.table: every entry names a table, as in table: mixhead/table1-vanilla"
        if not self.seeds:
            yield "trainings.seeds: at least one seed, given []"


@dataclass(frozen=True, kw_only=True)
class PlanFile(Section):
    """The YAML of a plan."""

    set: Settings | None = key(None, "settings laid on every training, below those of its entry")
    ledger: str = key("ledger.jsonl", "the ledger of finished runs, relative to the plan")
    trainings: list[PlanEntry] = key([], "what is trained, in this order")

    def _faults(self) -> Iterator[str]:
        if not self.trainings:
            yield "trainings: at least one entry, as in trainings: [{table: mixhead/table1-vanilla, rows: [plain, b]}]"
