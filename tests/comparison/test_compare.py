"""Seeds gathered into rows, rows compared: every number is that of its equation."""

import json
import math
from pathlib import Path

import pytest
from made_runs import CORPUS, SLICE, edit_config, find, make_pairs_of_seeds, make_run, print_report

from fullrank.comparison.compare import build_report
from fullrank.comparison.page import find_warnings, report_to_dict, summarize
from fullrank.comparison.runs import BITS_PER_BYTE, BITS_PER_CHARACTER, PERPLEXITY, Run, choose_measure, integer, number
from fullrank.core.config import NOT_NEXT_TOKEN

ON_TEST = {"split": "test", "checkpoint": "final"}


def test_seeds_are_gathered_into_mean_deviation_and_paired_difference(tmp_path):
    content = build_report(make_pairs_of_seeds(tmp_path))
    records = content.records
    assert [row.name for row in content.rows] == ["plain", "b"]
    assert find(records, "perplexity_mean", row="plain", **ON_TEST).value == pytest.approx(121)
    assert find(records, "perplexity_deviation", row="plain", **ON_TEST).value == pytest.approx(math.sqrt(2))
    # of perplexities, not exp of a mean loss
    assert find(records, "perplexity_mean", row="b", split="valid", checkpoint="final").value == pytest.approx(115.5)
    difference = find(records, "perplexity_difference", row="b", split="test")
    assert difference.value == pytest.approx(111.5 / 121 - 1)
    reach = 12.706204736 * 0.5 / 121  # of differences -10 and -9: their deviation is sqrt(1/2), n = 2
    assert difference.interval == pytest.approx((111.5 / 121 - 1 - reach, 111.5 / 121 - 1 + reach))
    assert (difference.labels["baseline"], difference.protocol) == ("plain", "paired over seeds")
    assert find(records, "perplexity_unigram", row="b", split="test").value == 655.25
    assert find(records, "parameters_added", row="b").value == 3456
    assert find(records, "perplexity_paper", row="b", split="test").value == 28.67
    assert find(records, "perplexity", row="b", seed=2, **ON_TEST).value == 113
    assert [row.name for row in content.groups[0].ranking] == ["b", "plain"]
    assert [run.name for run in content.unfinished_runs] == ["a"]


def test_rows_are_runs_that_differ_in_their_seed_alone(tmp_path):
    first, second, third = (make_run(tmp_path / f"s{seed}", seed=seed) for seed in (1, 2, 3))
    edit_config(second, "train.threads", 7)  # no setting of a row
    edit_config(third, "model.hidden_size", 256)
    repeated = make_run(tmp_path / "again", seed=1)  # the same seed twice is no independent sample
    rows = build_report([first, second, third, repeated]).rows
    assert [len(row.runs) for row in rows] == [2, 1, 1]
    assert len({row.name for row in rows}) == 3


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        (SLICE, "corpus, label, vocabulary"),
        (CORPUS | {"tokens": {"train": 700_000, "valid": 40_000, "test": 40_999}}, "test tokens"),
        (None, "corpus (not recorded in every run)"),
        (CORPUS | {"tokens": {**CORPUS["tokens"], "train": 5}, "sha256": {"train": "9"}}, None),
    ],
)
def test_other_texts_are_not_compared(tmp_path, other, fields):
    first = make_run(tmp_path / "x", corpus=CORPUS | {"sha256": {"train": "1", "test": "3"}})
    content = build_report([first, make_run(tmp_path / "y", row="b", test=90.0, corpus=other)])
    assert len(content.groups) == (1 if fields is None else 2)
    assert any("difference" in record.measure for record in content.records) == (fields is None)
    assert fields is None or f"differ in {fields}." in next(find_warnings(content))


def test_a_row_is_compared_with_the_plain_one_of_its_kind(tmp_path):
    rows = ("h4-plain", "h4-b", "h64-plain", "h64-a-cross", "a")
    content = build_report([make_run(tmp_path / row, row=row) for row in rows])
    baselines = [run["baseline"] for run in report_to_dict(content)["runs"]]
    assert baselines == [None, "h4-plain", None, "h64-plain", "h4-plain"]


@pytest.mark.parametrize(
    ("plain", "b", "beginning"),
    [
        ([100.0], [90.0], "b is lowest: test perplexity 90.00, 10.00% below plain (one seed, no interval)"),
        ([100.0, 110.0], [99.0, 104.0], "b is lowest, but other seeds might turn it round: "),
        ([100.0, 102.0, 101.0], [90.0, 91.0, 92.0], "b is best: test perplexity 91.00 ± 1.00, 9.90% below plain"),
        ([700.0], [90.0], "plain: undertrained, perplexity above that of a unigram model"),
    ],
)
def test_a_headline_is_as_strong_as_its_interval(tmp_path, plain, b, beginning):
    runs = [make_run(tmp_path / f"p{i}", seed=i, test=test) for i, test in enumerate(plain)]
    runs += [make_run(tmp_path / f"b{i}", row="b", seed=i, test=test, mix="average") for i, test in enumerate(b)]
    assert summarize(build_report(runs))[0].startswith(beginning)


BITS = {"valid_bits_per_character": 1.060, "test_bits_per_character": 1.037, "context": 1600}


def describe_run(kind, paper=None):
    final = {split: {"perplexity": 4.0} for split in ("valid", "test")}
    for figures in final.values():
        if kind != "word":
            figures |= {"bits_per_byte": 2.0, "bits_per_character": 2.5}
    result = {"final": final, "paper": paper, "corpus": {"details": {"settings": {"kind": kind}}}}
    return Run(Path(kind), kind, {"data": {"tokens": kind}}, result=result)


@pytest.mark.parametrize(
    ("runs", "measure"),
    [
        ([], PERPLEXITY),
        ([describe_run("byte")], BITS_PER_BYTE),
        ([describe_run("character", BITS)], BITS_PER_CHARACTER),
        ([describe_run("byte"), describe_run("character")], BITS_PER_BYTE),
        ([describe_run("byte"), describe_run("word")], PERPLEXITY),
        ([describe_run("word", BITS)], PERPLEXITY),  # a model of words has no bits
    ],
)
def test_the_measure_follows_the_tokens_and_the_paper(runs, measure):
    assert choose_measure(runs) is measure


def make_protocols(next_token):
    return {split: {"settings": {"next_token": next_token}} for split in ("valid", "test")}


def make_published(folder, test, next_token):
    """A run that sees the future; ten times worse at last positions. `next_token`: its figures were measured by stride 1."""
    final = {split: {"perplexity": test, "last_position": {"perplexity": 10 * test}} for split in ("valid", "test")}
    make_run(folder, row=folder.name, test=test, final=final, protocols=make_protocols(next_token))
    return edit_config(folder, "model.attention", {"kind": "multilinear", "causal": "as_published"})


def test_rows_that_see_the_future_compare_with_nothing(tmp_path):
    plain = make_run(tmp_path / "plain", test=100.0, protocols=make_protocols(True))
    ours = make_run(tmp_path / "ours", row="ours", test=90.0, mix="average", protocols=make_protocols(True))
    slid = make_published(tmp_path / "slid", 95.0, True)
    content = build_report([make_published(tmp_path / "core", 12.0, False), plain, ours, slid])
    changes = {record.labels["row"] for record in content.records if "difference" in record.measure}
    assert changes == {"ours", "slid"}
    (group,) = content.groups
    assert [row.name for row in group.ranking] == ["ours", "slid", "plain"]
    assert f"core: {NOT_NEXT_TOKEN}" in next(find_warnings(content))
    assert find(content.records, "last_position.perplexity_mean", row="core", **ON_TEST).value == 120
    facts = {run["row"]: (run["next_token"], run["remark"]) for run in report_to_dict(content)["runs"]}
    assert facts == dict.fromkeys(("plain", "ours", "slid"), (True, None)) | {"core": (False, NOT_NEXT_TOKEN)}
    assert "core (not next-token)" in print_report([tmp_path / "core", plain])
    assert "not next-token" not in print_report([plain, ours])


def test_damaged_and_unfinished_runs_are_listed(tmp_path):
    damages = {
        "half": ('{"final": {"va', "result.json: damaged"),
        "diverged": (json.dumps({"final": {"test": {"perplexity": None}}}), "no finite figure"),
        "wrong-type": (json.dumps({"final": 5, "seed": "x"}), "no finite figure"),
    }
    broken = {"train": "x", "valid": 5.0}
    runs = {name: make_run(tmp_path / name, row=name, ms_per_step=broken) for name in ("no-result", *damages, "lines")}
    (runs["no-result"] / "result.json").unlink()
    for name, (text, _) in damages.items():
        (runs[name] / "result.json").write_text(text)
    (runs["lines"] / "metrics.jsonl").write_bytes(b'{"step": 1, "split": "train", "nll": 9}\n{"step"\n\xff\n')
    content = build_report(list(runs.values()))
    assert [row.name for row in content.rows] == ["lines"]
    problems = {run.name: " ".join(run.problems) for run in content.unfinished_runs}
    assert "has not finished" in problems["no-result"]
    assert all(words in problems[name] for name, (_, words) in damages.items())
    assert "2 unreadable lines were left out" in content.runs[0].problems[0]
    assert len(content.runs[0].metrics) == 1
    assert content.runs[0].ms_per_step == {"valid": 5.0}
    assert summarize(build_report([runs["half"]]))[0] == "No run has finished yet"


@pytest.mark.parametrize("value", [True, "7", None, math.nan, math.inf, 10**400])
def test_what_is_no_finite_number_is_none(value):
    """A damaged file may hold a whole number that no float is as large as."""
    assert number(value) is None
    assert integer(value) is None
