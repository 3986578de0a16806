"""Verdicts on claims, for rows that nobody trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_runs import RECIPE, make_row, make_rows

from fullrank.core.errors import InputError
from research import RESEARCH
from research.claims import Claim, Verdict, judge, read_claims

T_2 = 4.302652729911275  # the 97.5 % point of Student's t with two degrees of freedom, from a table
PLAIN, BETTER = [100, 110, 120], [90, 99, 111]


def judge_rows(rows: Sequence[dict[str, Any]], **claim: Any) -> Verdict:
    stated = {"table": "Table 1", "claim": "b is better", "recipe": RECIPE, "better": {"row": "b"}, **claim}
    return judge(Claim(**stated), rows)


def test_a_difference_and_its_interval_are_paired_by_seed() -> None:
    verdict = judge_rows(make_rows(PLAIN, BETTER))
    assert (verdict.word, verdict.seeds) == ("confirmed", (1, 2, 3))
    assert verdict.difference == pytest.approx(-10)
    assert verdict.interval == pytest.approx((-10 - T_2 / 3**0.5, -10 + T_2 / 3**0.5))  # of -10, -11, -9


@pytest.mark.parametrize(
    ("b", "claim", "word"),
    [
        ([111, 120, 129], {}, "not confirmed"),
        ([111, 120, 129], {"direction": "higher"}, "confirmed"),
        ([90, 115, 119], {}, "not decided"),
        (PLAIN, {}, "not decided"),
        ([90, 99], {}, "not measured"),
        (BETTER, {"set": {"train.steps": 5}}, "not measured"),
        (BETTER, {"than": {"recipe": "mixhead/table2-vanilla"}}, "not measured"),
        (BETTER, {"scale": "tiny"}, "not measured"),
        (BETTER, {"figure": "final.test.bleu"}, "not measured"),
        (BETTER, {"set": {"train": {"learning_rate": 1e-3}}}, "confirmed"),  # the recipe's own
        (BETTER, {"why": "no machine"}, "not testable here"),
    ],
)
def test_verdicts(b: list[float], claim: dict[str, Any], word: str) -> None:
    assert judge_rows(make_rows(PLAIN, b), **claim).word == word


@pytest.mark.parametrize("column", ["text.test", "vocabulary", "protocol.test", "signature"])
def test_figures_of_another_text_vocabulary_or_protocol_are_not_compared(column: str) -> None:
    assert judge_rows(make_rows(PLAIN, BETTER, **{column: "another"})).word == "not measured"


def test_settings_of_one_side_choose_its_runs() -> None:
    rate = {"settings": {"train.learning_rate": 0.5}}
    rows = [*make_rows(PLAIN, [300, 300, 300]), *make_rows([], BETTER, **rate)]
    assert judge_rows(rows).word == "not confirmed"
    verdict = judge_rows(rows, better={"row": "b", "set": {"train.learning_rate": 0.5}})
    assert (verdict.word, verdict.sides[1].figures) == ("confirmed", {1: 90, 2: 99, 3: 111})
    assert verdict.sides[1].command.endswith("--rows b --scale small --seeds 1,2,3 train.learning_rate=0.5")


def test_figures_of_the_last_checkpoint_are_compared_where_a_claim_says_so() -> None:
    plain = [
        make_row("plain", seed, figure, **{"last.test.perplexity": figure}) for seed, figure in enumerate(PLAIN, 1)
    ]
    rows = plain + make_rows([], BETTER, **{"last.test.perplexity": 300})
    assert judge_rows(rows).word == "confirmed"
    assert judge_rows(rows, figure="last.test.perplexity").word == "not confirmed"


def test_a_deviation_is_compared_in_percent() -> None:
    rows = make_rows([1, 2, 3, 4, 5, 6, 7, 8], [4.4, 4.5, 4.6, 4.4, 4.5, 4.6, 4.4, 4.6])
    verdict = judge_rows(rows, statistic="deviation")
    assert verdict.word == "confirmed"
    assert verdict.difference == pytest.approx(-96.2, abs=0.1)  # from 2.449 to 0.0926


@pytest.mark.parametrize(
    "claim", ["beter: b", "better: {row: b}", "recipe: x", "recipe: x, better: {rwo: b}", "recipe: x, direction: down"]
)
def test_faults_of_claims_are_named_with_their_file(tmp_path: Path, claim: str) -> None:
    path = tmp_path / "paper.yaml"
    path.write_text(f"paper: A\nclaims: [{{table: Table 1, claim: a, {claim}}}]")
    with pytest.raises(InputError, match=r"paper\.yaml: .*keys are table, claim"):
        read_claims(path)


def test_every_claim_of_this_repository_names_rows_that_exist() -> None:
    for path in (RESEARCH / "claims").glob("*.yaml"):
        for claim in read_claims(path)[1]:
            assert judge(claim, []).word in ("not measured", "not testable here")
