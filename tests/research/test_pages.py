"""Pages made from a ledger: those of this repository are up to date, and those of a made-up ledger say what it holds."""

import shlex
from types import SimpleNamespace

import pytest
from made_rows import RECIPE, make_rows

from fullrank.config.load import read_yaml, resolve_any
from fullrank.core.errors import InputError
from research import RESEARCH, RESULTS
from research.claims import FEWEST_SEEDS
from research.ledger import write_ledger
from research.pages import find_claim_rows, renew_claim_rows, write_pages
from research.which import describe_runs


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "mixhead.yaml").write_text(
        "paper: Mixhead\nclaims:\n"
        f"  - {{table: Table 1, claim: b is better, recipe: {RECIPE}, rates: stated, better: {{row: b}}}}\n"
        "  - {table: Table 2, claim: large, why: no machine}\n"
    )
    write_ledger(tmp_path / "ledger.csv", make_rows([100, 110, 120], [90, 99, 111]))
    write_pages(tmp_path, tmp_path)
    return tmp_path


def test_the_pages_of_this_repository_are_what_its_ledger_says():
    write_pages(RESULTS, check=True)


def test_a_page_says_what_the_ledger_says(folder):
    page = (folder / "mixhead.md").read_text()
    assert "**supported here** | −10.00 [−12.48 to −7.52] |" in page
    assert "`plain`: 110 ± 10 (100, 110, 120), 600,000 tokens; seeds 1–3" in page
    assert "test perplexity 100 ± 10.54 [1] | 1,000 | 600,000 | 60 | abc |" in page
    assert "**not testable here**: no machine" in page
    assert "| [Mixhead](mixhead.md) | 1 | 0 | 0 | 0 | 0 | 1 | 6 |" in (folder / "README.md").read_text()


def test_a_changed_ledger_changes_the_pages(folder):
    write_ledger(folder / "ledger.csv", make_rows([100, 110, 120], [90, 99]))
    with pytest.raises(InputError, match=r"mixhead\.md, leaderboard\.md, README\.md: not what the ledger"):
        write_pages(folder, folder, check=True)
    assert write_pages(folder, folder) == ["mixhead.md", "leaderboard.md", "README.md"]
    assert "**open**: fewer than 3 seeds" in (folder / "mixhead.md").read_text()


def test_a_comparison_without_a_shared_seed_is_said_so():
    run = {"parameters": 10, "corpus": "ptb", "tokens_seen": 0}
    side = SimpleNamespace(row="plain", runs={1: run}, figures={1: 157.5})
    comparison = SimpleNamespace(than=side, seeds=())
    verdict = SimpleNamespace(claim=SimpleNamespace(recipe="best/mixers"), comparison=comparison)
    assert describe_runs(verdict, {}) == "`best/mixers`: 10 parameters, ptb, plain 157.5, no shared seed yet"


def test_what_would_decide_can_be_trained():
    situations = read_yaml(RESEARCH / "which.yaml")["situations"]
    commands = [shlex.split(command) for situation in situations for command in situation.get("deciding", [])]
    assert commands
    for fullrank, verb, recipe, *words in commands:
        options, settings = words[:6], words[6:]
        assert [fullrank, verb, *options[::2]] == ["fullrank", "reproduce", "--rows", "--scale", "--seeds"]
        assert len(options[5].split(",")) >= FEWEST_SEEDS
        for row in options[1].split(","):
            resolve_any(recipe, row, options[3], settings)


def test_a_page_of_docs_quotes_claims_as_they_are_now():
    row = "| 3. Table 1 | b is better | `mixhead/table1` | **open** | – |"
    verdicts = find_claim_rows(f"## Claims\n\n{row}\n")
    before = "Text.\n\n| 2. Table 1 | b is better | `mixhead/table1` | **too early** | +1 |\n"
    assert renew_claim_rows(before, verdicts, "mixhead.md") == f"Text.\n\n{row}\n"
    with pytest.raises(
        InputError, match=r"mixhead\.md: quotes a claim that research/claims has not: Table 2, a is better"
    ):
        renew_claim_rows("| 1. Table 2 | a is better | | **open** | – |", verdicts, "mixhead.md")
