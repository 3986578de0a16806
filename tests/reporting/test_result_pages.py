"""Verdicts on claims, and the pages made from the ledger: for made-up rows, and for the ledger of this repository."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from fullrank.config.claims import Claim, ClaimsFile
from fullrank.config.load import read_yaml
from fullrank.core.errors import ConfigError, InputError
from fullrank.reporting.ledger import sealed
from fullrank.reporting.result_pages import make_pages, write_pages
from fullrank.reporting.verdicts import Verdict, judge

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
RECIPE = "mixhead/table1-vanilla"
T_2 = 4.302652729911275  # the 97.5 % point of Student's t with two degrees of freedom, from a table


def row(name: str, seed: int, figure: float, **changes: Any) -> dict[str, Any]:
    settings: Mapping[str, Any] = {
        "result": f"{name}{seed}{figure}{changes}", "recipe": RECIPE, "row": name, "scale": "small", "seed": seed, "set": {},
        "corpus": {"label": "a corpus (slice)", "fingerprint": "ff"}, "sha256": {"test": "aa"}, "training": None,
        "protocols": {"test": {"words": "blocks of 7", "settings": None}}, "final": {"test": {"perplexity": figure}},
        "parameters": {"total": 1000}, "tokens_seen": 600_000, "wall_seconds": 60.0, "environment": {"commit": "abc"},
    }  # fmt: skip
    return sealed({**settings, **changes})


def arms(plain: Sequence[float], b: Sequence[float], **changes: Any) -> list[dict[str, Any]]:
    return [
        *(row("plain", seed, figure) for seed, figure in enumerate(plain, 1)),
        *(row("b", seed, figure, **changes) for seed, figure in enumerate(b, 1)),
    ]


def judged(rows: Sequence[Mapping[str, Any]], **claim: Any) -> Verdict:
    stated = {"table": "Table 1", "claim": "b is better", "recipe": RECIPE, "better": {"row": "b"}, **claim}
    return judge(Claim.from_dict(stated), rows)


def test_a_difference_and_its_interval_are_paired_by_seed() -> None:
    verdict = judged(arms([100, 110, 120], [90, 99, 111]))
    assert verdict.word == "confirmed"
    assert verdict.difference == pytest.approx(-10)
    assert verdict.interval == pytest.approx((-10 - T_2 / 3**0.5, -10 + T_2 / 3**0.5))  # of -10, -11, -9
    assert verdict.seeds == (1, 2, 3)


@pytest.mark.parametrize(
    ("plain", "b", "claim", "word"),
    [
        ([100, 110, 120], [111, 120, 129], {}, "not confirmed"),
        ([100, 110, 120], [111, 120, 129], {"direction": "higher"}, "confirmed"),
        ([100, 110, 120], [90, 115, 119], {}, "not decided"),
        ([100, 110, 120], [100, 110, 120], {}, "not decided"),
        ([100, 110], [90, 99, 111], {}, "not measured"),
        ([100, 110, 120], [90, 99, 111], {"set": {"train.steps": 5}}, "not measured"),
        ([100, 110, 120], [90, 99, 111], {"than": {"recipe": "mixhead/table2-vanilla"}}, "not measured"),
        ([100, 110, 120], [90, 99, 111], {"scale": "tiny"}, "not measured"),
        ([100, 110, 120], [90, 99, 111], {"figure": "final.test.bleu"}, "not measured"),
        ([100, 110, 120], [90, 99, 111], {"set": {"train": {"learning_rate": 1e-3}}}, "confirmed"),  # the recipe's own
    ],
)
def test_verdicts(plain: list[float], b: list[float], claim: dict[str, Any], word: str) -> None:
    assert judged(arms(plain, b), **claim).word == word


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": {"test": "bb"}},
        {"corpus": {"label": "a corpus", "fingerprint": "gg"}},
        {"protocols": {"valid": {"words": "blocks of 7"}, "test": {"words": "windows"}}},
    ],
)
def test_figures_of_another_text_vocabulary_or_protocol_are_not_compared(changes: dict[str, Any]) -> None:
    assert judged(arms([100, 110, 120], [90, 99, 111], **changes)).word == "not measured"


def test_figures_of_another_signature_are_not_compared(folder: Path) -> None:
    def final(figure: float, tokens: str) -> dict[str, Any]:
        return {"test": {"bleu": figure, "bleu_signature": f"nrefs:1|tok:{tokens}|version:2.{len(tokens)}"}}

    claim = {"figure": "final.test.bleu", "direction": "higher"}
    plain = [row("plain", seed, 0.0, final=final(20 + seed, "zh")) for seed in (1, 2, 3)]
    same, other = (
        [row("b", seed, 0.0, final=final(30 + seed + seed % 2, tokens)) for seed in (1, 2, 3)]
        for tokens in ("zh", "13a")
    )
    assert [judged([*plain, *rows], **claim).word for rows in (same, other)] == ["confirmed", "not measured"]
    write_ledger(folder, [*plain, *same, *other])
    board = make_pages(folder)["leaderboard.md"]
    assert "tok:zh" in board
    assert "tok:13a" not in board  # one row alone is no board


def test_settings_of_one_side_choose_its_runs() -> None:
    rows = [*arms([100, 110, 120], [300, 300, 300]), *arms([], [90, 99, 111], set={"train.learning_rate": 0.5})]
    assert judged(rows).word == "not confirmed"
    verdict = judged(rows, better={"row": "b", "set": {"train.learning_rate": 0.5}})
    assert (verdict.word, verdict.sides[1].figures) == ("confirmed", {1: 90, 2: 99, 3: 111})
    assert verdict.sides[1].command.endswith("--rows b --scale small --seeds 1,2,3 train.learning_rate=0.5")


def test_figures_of_the_last_checkpoint_are_compared_where_a_claim_says_so() -> None:
    rows = arms([100, 110, 120], [90, 99, 111], last={"test": {"perplexity": 300.0}})
    rows = [sealed({**one, "last": one.get("last", one["final"])}) for one in rows]
    assert judged(rows).word == "confirmed"
    assert judged(rows, figure="last.test.perplexity").word == "not confirmed"


def test_a_deviation_is_compared_in_percent() -> None:
    rows = arms([1, 2, 3, 4, 5, 6, 7, 8], [4.4, 4.5, 4.6, 4.4, 4.5, 4.6, 4.4, 4.6])
    verdict = judged(rows, statistic="deviation")
    assert verdict.word == "confirmed"
    assert verdict.difference is not None
    assert -97 < verdict.difference < -95  # from 2.449 to 0.0926


def test_a_claim_that_is_not_testable_is_not_judged() -> None:
    assert judge(Claim(table="Table 2", claim="large", why="no machine"), []).word == "not testable here"


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("{table: 1, claim: a, beter: b}", "unknown key 'claims.beter'; did you mean 'claims.better'?"),
        ("{table: 1, claim: a, better: {row: b}}", "claims.recipe: a claim names its recipe and the row `better`"),
        ("{table: 1, claim: a, recipe: x}", "claims.recipe: a claim names its recipe and the row `better`"),
        ("{table: 1, claim: a, figure: bleu}", "claims.figure: a checkpoint, a split and a measure"),
        ("{better: {row: b}, recipe: x}", "claims.table: every claim has one"),
    ],
)
def test_faults_of_claims_are_named_with_their_file(tmp_path: Path, claim: str, message: str) -> None:
    path = tmp_path / "paper.yaml"
    path.write_text(f"claims: [{claim}]")
    with pytest.raises(ConfigError) as error:
        ClaimsFile.of_file(read_yaml(path), path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "mixhead.yaml").write_text(
        f"paper: Mixhead\nclaims:\n  - {{table: Table 1, claim: b is better, better: {{row: b}}, recipe: {RECIPE}, "
        "remark: the released code decodes without mixing}\n  - {table: Table 2, claim: large, why: no machine}\n"
    )
    write_ledger(tmp_path, arms([100, 110, 120], [90, 99, 111]))
    write_pages(tmp_path)
    return tmp_path


def write_ledger(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    (folder / "ledger.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def test_a_page_says_what_the_ledger_says(folder: Path) -> None:
    page = (folder / "mixhead.md").read_text()
    assert f"| 1. Table 1 | b is better | `{RECIPE}` | **confirmed** | −10.00 [−12.48 to −7.52] |" in page
    assert "- the released code decodes without mixing" in page
    assert "- `plain`: 110 ± 10 (100, 110, 120), 600,000 tokens; seeds 1–3" in page
    assert "- a corpus (slice); blocks of 7" in page
    assert f"- `fullrank reproduce {RECIPE} --rows b --scale small --seeds 1,2,3`" in page
    assert "- **not testable here**: no machine" in page
    assert "| [Mixhead](mixhead.md) | 1 | 0 | 0 | 0 | 1 | 6 |" in (folder / "README.md").read_text()


def test_deleting_a_row_of_the_ledger_changes_the_pages(folder: Path) -> None:
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(InputError, match=r"README.md, leaderboard.md, mixhead.md: not what the ledger"):
        write_pages(folder, check=True)
    assert write_pages(folder) == ["README.md", "leaderboard.md", "mixhead.md"]
    assert "**not measured**" in (folder / "mixhead.md").read_text()
    write_pages(folder, check=True)


def test_a_page_that_was_edited_by_hand_is_found(folder: Path) -> None:
    write_pages(folder, check=True)
    page, gone = folder / "mixhead.md", folder / "old_paper.md"
    gone.write_text(page.read_text())
    page.write_text(page.read_text().replace("−10.00", "−11.00"))
    with pytest.raises(InputError, match=r"mixhead.md, old_paper.md: not what the ledger"):
        write_pages(folder, check=True)
    assert write_pages(folder) == ["mixhead.md", "old_paper.md"]
    assert not gone.exists()
    write_pages(folder, check=True)


def test_files_of_others_are_neither_deleted_nor_replaced(folder: Path) -> None:
    """Only what begins with our mark is a page of ours, in whatever encoding, kind or folder the others are."""
    (folder / "curves").mkdir(exist_ok=True)
    others = {
        folder / "thesis.md": b"# My thesis\n",
        folder / "latin1.md": b"caf\xe9\n",
        folder / "quoting.md": b"It says <!-- Made by `fullrank ledger pages`; -->\n",
        folder / "curves" / "own.svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>\n',
    }
    for path, content in others.items():
        path.write_bytes(content)
    (folder / "folder.md").mkdir()
    write_pages(folder, check=True)
    assert write_pages(folder) == []
    for name in ("README.md", "leaderboard.md"):
        (folder / name).write_text("Mine.\n")
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for check in (True, False):
            with pytest.raises(InputError, match=rf"{name}: exists and is not a page of fullrank, so it is left alone"):
                write_pages(folder, check=check)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        (folder / name).unlink()
    write_pages(folder)
    assert {path: path.read_bytes() for path in others} == others


EVIL = "<img src=x onerror=alert(1)> [click](javascript:alert(1)) ` | ![i](http://x/i.png)\n# <script>x</script>"


@pytest.mark.parametrize(
    "place",
    [
        "row",
        "recipe",
        "scale",
        "label",
        "commit",
        "words",
        "key",
        "value",
        "split",
        "teacher",
        "claim",
        "census",
        "figure",
    ],
)
def test_a_value_of_a_record_is_text_wherever_it_stands(folder: Path, place: str) -> None:
    changes: dict[str, Any] = {
        "recipe": {"recipe": f"mixhead/{EVIL}"},
        "scale": {"scale": EVIL},
        "label": {"corpus": {"label": EVIL, "fingerprint": "ff"}},
        "commit": {"environment": {"commit": EVIL}},
        "words": {"protocols": {"test": {"words": EVIL, "settings": None}}},
        "key": {"set": {EVIL: 1}},
        "value": {"set": {"train.steps": EVIL}},
        "split": {"final": {EVIL: {"perplexity": 1.0}}, "protocols": {EVIL: {"words": "blocks"}}},
        "teacher": {"teacher": {"name": EVIL}, "training": {"recipe": EVIL, "row": EVIL}},
    }
    name = EVIL if place == "row" else "b"
    rows = [row(name, seed, 9.0, curve=[[1, 3.0], [2, 2.0]], **changes.get(place, {})) for seed in (1, 2, 3)]
    write_ledger(folder, [*arms([100, 110, 120], [90, 99, 111]), *rows])
    if place == "claim":
        claim = {"table": EVIL, "claim": EVIL, "recipe": RECIPE, "better": {"row": "b"}, "remark": EVIL}
        (folder / "claims" / "mixhead.yaml").write_text(json.dumps({"paper": EVIL, "claims": [claim]}))
    if place == "census":
        failure = {"check": EVIL, "layers": [EVIL], "path": EVIL, "reproduction": f"```\n{EVIL}"}
        one = {"type": EVIL, "class": EVIL, "verdict": "leaks", "reason": EVIL, "parameters": 1, "seconds": 1.0,
               "failures": [failure], "transformers": EVIL, "torch": "2"}  # fmt: skip
        (folder / "census.json").write_text(json.dumps({"classes": [one]}))
    if place == "figure":
        (folder / "speed.json").write_text(json.dumps({"rows": [{"peer": EVIL}], "protocol": EVIL}))
        (folder / "benchmarks.yaml").write_text("speed.json: {title: a, about: b, tables: {rows/*: [peer]}}")
    for page in (content for file, content in make_pages(folder).items() if file.endswith(".md")):
        for tag, attributes in tags(page):
            assert tag != "script"
            assert "onerror" not in attributes
            assert attributes.get("src") != "http://x/i.png" or place == "claim"  # claims are an author's Markdown


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """The tags of a page as a browser has it, with their attributes."""
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(page)
    found = list[tuple[str, dict[str, str | None]]]()

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attributes)))

    Tags().feed(html)
    return found


def test_a_leaderboard_has_the_best_first_with_what_makes_it_again(folder: Path) -> None:
    rows = arms([100, 110, 120], [90, 99, 111], curve=[[10, 400.0], [20, 100.0]], set={"train.learning_rate": 0.5})
    hidden = {"test": {"words": "blocks of 7", "settings": {"next_token": False}}}
    taught = row("plain", 1, 200.0, teacher={"name": "b", "sha256": "cc"}, set={"train.distill.weight": 0.5})
    elsewhere = row("elsewhere", 1, 3.0, sha256={"test": "bb"})
    write_ledger(folder, [*rows, taught, row("leaks", 1, 2.0, protocols=hidden), elsewhere])
    pages = make_pages(folder)
    page = pages["leaderboard.md"]
    assert page.count("\n## ") == 1
    assert "## a corpus (slice): perplexity\n\nBlocks of 7." in page
    recipe = f"[{RECIPE}](../../src/fullrank/recipes/{RECIPE}.yaml)"
    name = f"curves/{rows[3]['id']}.svg"
    command = f"fullrank reproduce {RECIPE} --rows b --scale small --seeds 1,2,3 train.learning_rate=0.5"
    line = f"100.0 ± 10.5 | {recipe} b | 1–3 | 1,000 | 600,000 | abc | ![validation curves]({name}) | `{command}` |"
    assert line in page
    assert page.index(line) < page.index(f"110.0 ± 10.0 | {recipe} plain")
    assert f"{recipe} plain, taught by b |" in page
    assert "--seeds 1 train.distill.weight=0.5 train.distill.run=TEACHER`" in page
    assert "leaks" not in page
    assert pages[name].count('points="60.0,3.0 117.0,29.0"') == 3  # steps to the right, perplexity upwards


def test_runs_of_other_recipes_have_a_page_of_their_own(folder: Path) -> None:
    write_ledger(folder, [row("plain", seed, 50.0, recipe="my.yaml", set=None) for seed in range(1, 7)])
    page = make_pages(folder)["other_runs.md"]
    assert "| `my.yaml` small | plain | not recorded | a corpus (slice) | 1–6 | test perplexity 50 ± 0 [1] |" in page


def test_tables_of_benchmarks_follow_their_paths(folder: Path) -> None:
    rows = [{"shape": s, "against": [{"peer": p, "time": {"middle": t}} for p, t in peers]} for s, peers in (
        ("short", [("x", 0.51234), ("y", 1500.2)]), ("long", [("y", None)]),
    )]  # fmt: skip
    (folder / "speed.json").write_text(json.dumps({"rows": rows, "same": {"a.bin": True}, "protocol": "in turns"}))
    (folder / "benchmarks.yaml").write_text(
        "speed.json:\n  title: Speed\n  about: Ours.\n  tables:\n"
        "    rows/*/against/*: [shape, peer, time.middle]\n    same/<file>: [file, value]\n"
    )
    page = make_pages(folder)["benchmarks.md"]
    assert "| --- | --- | --- |\n| short | x | 0.5123 |\n| short | y | 1,500 |\n| long | y |  |\n" in page
    assert "| file | value |\n| --- | --- |\n| a.bin | yes |\n\nprotocol in turns" in page
    (folder / "benchmarks.yaml").write_text("speed.json: {title: a, about: b, tables: {rows/*/agianst/*: [peer]}}")
    with pytest.raises(InputError, match=r"benchmarks.yaml: speed.json: no row at rows/\*/agianst"):
        make_pages(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ledger.jsonl", b"\xff\n", "ledger.jsonl: line 1: damaged .*utf-8"),
        ("ledger.jsonl", b"[" * 100_000, "ledger.jsonl: line 1: damaged .brackets"),
        ("ledger.jsonl", b'{"id": "0"}\n', "ledger.jsonl: line 1 does not match its checksum"),
        ("speed.json", b"7", r"speed.json: damaged \(a mapping, given 7\)"),
        ("speed.json", b'{"rows": 7}', r"no row at rows/\*/peer"),
        ("speed.json", None, "speed.json: cannot be read .*No such file"),
    ],
)
def test_damaged_files_are_named(folder: Path, name: str, content: bytes | None, message: str) -> None:
    (folder / "benchmarks.yaml").write_text("speed.json: {title: a, about: b, tables: {rows/*/peer: [value]}}")
    (folder / "speed.json").write_text('{"rows": [{"peer": 1}]}')
    assert "| 1 |" in make_pages(folder)["benchmarks.md"]
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        make_pages(folder)


def test_the_pages_of_this_repository_are_what_its_ledger_says() -> None:
    write_pages(RESULTS, check=True)


def test_every_claim_of_this_repository_names_rows_that_exist(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "claims", tmp_path / "claims")
    for path in (tmp_path / "claims").glob("*.yaml"):
        for claim in ClaimsFile.of_file(read_yaml(path), path).claims:
            judge(claim, [])
