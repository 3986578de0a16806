"""Verdicts on claims, for rows that nobody trained."""

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from made_rows import RECIPE, make_row
from scipy import stats

from research import LEDGER, RESEARCH
from research.claims import (
    FEWEST_SEEDS,
    Claim,
    compare_deviations,
    correct,
    find_side,
    judge,
    pool_deviation,
    read_claims,
    select_alike,
)
from research.ledger import read_ledger
from research.train import plan_trainings, read_plan

T_2 = 4.302652729911275  # the 97.5 % point of Student's t with two degrees of freedom, from a table
PLAIN, BETTER = [100, 110, 120], [90, 99, 111]
OTHER_RATES = [
    make_row(name, 1, 500.0, settings={"train.learning_rate": rate}, **{"final.valid.perplexity": 500.0})
    for name in ("plain", "b")
    for rate in (1e-4, 1e-2)
]
SEARCHED = {"final.valid.perplexity": 100.0}


def make_searched(plain, b, **columns):
    """Rows, and beside them worse ones with a lower and with a higher learning rate."""
    rows = [make_row("plain", seed, figure, **SEARCHED) for seed, figure in enumerate(plain, 1)]
    rows += [make_row("b", seed, figure, **{**SEARCHED, **columns}) for seed, figure in enumerate(b, 1)]
    return [*rows, *OTHER_RATES]


def judge_rows(rows, lines=None, **claim):
    entry = {"table": "Table 1", "claim": "b is better", "recipe": RECIPE, "better": {"row": "b"}, **claim}
    (verdict,) = judge([Claim(**entry)], rows, lines)
    return verdict


def test_of_two_rows_the_difference_is_the_paired_one():
    verdict = judge_rows(make_searched(PLAIN, BETTER))
    assert (verdict.word, verdict.comparison.seeds) == ("supported here", (1, 2, 3))
    assert verdict.estimate.difference == pytest.approx(-10)
    assert verdict.estimate.interval == pytest.approx((-10 - T_2 / 3**0.5, -10 + T_2 / 3**0.5))  # of -10, -11, -9
    assert verdict.estimate.p_value == pytest.approx(stats.ttest_rel(PLAIN, BETTER).pvalue)


def test_the_deviation_of_all_rows_of_a_recipe_is_pooled():
    """By least squares for rows and seeds; of two rows, half the variance of their differences."""
    two = [dict(enumerate(figures)) for figures in (PLAIN, BETTER)]
    assert pool_deviation(two) == (pytest.approx((1 / 2) ** 0.5), 2)
    third = dict(enumerate([80, 90, 100]))  # its figures follow from the seed alone
    deviation, freedom = pool_deviation([*two, third])
    table = np.array([PLAIN, BETTER, [80, 90, 100]])
    residuals = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    assert (deviation, freedom) == (pytest.approx(((residuals**2).sum() / 4) ** 0.5), 4)


def test_a_row_that_deviates_more_is_judged_by_itself():
    """Cochran's C, one variance over the sum of all, of three rows with three seeds: 0.8709 at 5 %, from a table."""
    for width, is_alike in ((3.65, True), (3.70, False)):  # 0.869 and 0.873
        arms = {"x": {1: 0, 2: 0.5, 3: 1}, "y": {1: 5, 2: 5.5, 3: 6}, "wide": {1: 0, 2: width / 2, 3: width}}
        assert ("wide" in select_alike(arms)) == is_alike
    rows = make_searched(PLAIN, BETTER)
    unstable = [100, 300, 700]
    rows += [make_row("a", seed, figure, **SEARCHED) for seed, figure in enumerate(unstable, 1)]
    claims = [Claim(table="1", claim=name, recipe=RECIPE, better={"row": name}) for name in ("b", "a")]
    of_b, of_a = (verdict.estimate for verdict in judge(claims, rows))
    assert of_b == judge_rows(rows).estimate
    assert of_a.p_value == pytest.approx(stats.ttest_rel(PLAIN, unstable).pvalue)


def test_p_values_of_a_page_are_corrected_by_holm():
    assert correct([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert correct([0.9, 0.6]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("b", "claim", "word"),
    [
        ([111, 120, 129], {}, "contradicted here"),
        ([111, 120, 129], {"direction": "higher"}, "supported here"),
        ([90, 115, 119], {}, "open"),
        (PLAIN, {}, "no difference that matters"),
        (PLAIN, {"direction": "equal"}, "supported here"),
        ([111, 121, 131.1], {"direction": "equal"}, "contradicted here"),
        ([90, 115, 119], {"direction": "equal"}, "open"),
        ([90, 99], {}, "open"),
        (BETTER, {"set": {"train.steps": 5}}, "open"),
        (BETTER, {"than": {"recipe": "mixhead/table2-vanilla"}}, "open"),
        (BETTER, {"scale": "tiny"}, "open"),
        (BETTER, {"figure": "final.test.bleu"}, "open"),
        (BETTER, {"set": {"train": {"learning_rate": 1e-3}}}, "supported here"),  # the recipe's own
        (BETTER, {"why": "no machine"}, "not testable here"),
    ],
)
def test_verdicts(b, claim, word):
    assert judge_rows(make_searched(PLAIN, b), **claim).word == word


@pytest.mark.parametrize(("cost", "word"), [(90.5, "supported here"), (89.5, "open")])
def test_learning_rates_are_compared_on_the_seeds_that_they_share(cost, word):
    """Seed 1 is easy: at the usual rate it costs 90 where others cost 105."""
    rows = [make_row("plain", seed, figure, **SEARCHED) for seed, figure in enumerate(PLAIN, 1)]
    for seed, figure in enumerate(BETTER, 1):
        rows.append(make_row("b", seed, figure, **{"final.valid.perplexity": 90.0 if seed == 1 else 105.0}))
    lower = {"settings": {"train.learning_rate": 5e-4}, "final.valid.perplexity": cost}
    assert judge_rows([*rows, *OTHER_RATES, make_row("b", 1, 90.0, **lower)]).word == word


@pytest.mark.parametrize("column", ["text.test", "vocabulary", "protocol.test", "signature"])
def test_figures_of_another_text_vocabulary_or_protocol_are_not_compared(column):
    assert judge_rows(make_searched(PLAIN, BETTER, **{column: "another"})).reason == "fewer than 3 seeds in common"


def test_every_claim_is_decided_by_runs_of_the_ledger_or_of_the_plan():
    """A claim without a reason names rows with three seeds that are recorded, or that the plan trains alike."""
    rows = read_ledger(LEDGER)
    planned = {}
    for training in plan_trainings(read_plan(RESEARCH / "plan.yaml"), None, Path("runs"), rows):
        planned.setdefault(training.setting, set()).add(training.seed)
    for path in sorted((RESEARCH / "claims").glob("*.yaml")):
        for claim in read_claims(path)[1]:
            for arm in () if claim.why else (claim.than, claim.better):
                side = find_side(claim, arm, rows)
                seeds = side.runs.keys() | planned.get(side.setting, set())
                assert len(seeds) >= FEWEST_SEEDS, f"{path.name}: {claim.table}, {claim.claim}: {side.command}"


SCORES, OTHERS = [41.2, 43.0, 40.1, 42.4, 41.9], [42.5, 42.9, 42.2, 43.1, 42.0]


def test_change_of_deviation_is_the_papers():
    """Skip Cross-head, Table 4, MRPC: 1.281 and 1.4 are +9.3 %, 0.988 and 0.91 are -7.9 %; CoLA 1.23 and 1.1 are -10.6 %."""

    def spread(deviation):
        return [80 - deviation, 80.0, 80 + deviation]  # its sample deviation is `deviation`

    for base, other, change in ((1.281, 1.4, 9.3), (0.988, 0.91, -7.9), (1.23, 1.1, -10.6)):
        assert compare_deviations(spread(base), spread(other)).difference == pytest.approx(change, abs=0.05)


def test_interval_of_the_deviation_by_hand():
    """r = s_b^2 / s_a^2; with 4 and 4 degrees of freedom F(0.975) = 9.60453 (tables), and F(0.025) is its inverse."""
    ratio = statistics.variance(OTHERS) / statistics.variance(SCORES)
    low, high = compare_deviations(SCORES, OTHERS).interval
    assert low == pytest.approx(100 * (math.sqrt(ratio / 9.60453) - 1), abs=1e-3)
    assert high == pytest.approx(100 * (math.sqrt(ratio * 9.60453) - 1), abs=1e-3)
    # where the numbers differ, the degrees of freedom of the other arm come first
    low, _ = compare_deviations(SCORES, OTHERS[:3]).interval
    ratio = statistics.variance(OTHERS[:3]) / statistics.variance(SCORES)
    assert low == pytest.approx(100 * (math.sqrt(ratio / stats.f.ppf(0.975, 2, 4)) - 1))
