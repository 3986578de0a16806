"""Run folders read: found, named, and every damage told in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from reporting_runs import CORPUS, comparison, make_run

from fullrank.core.errors import InputError
from fullrank.reporting import find_runs
from fullrank.reporting.runs import RunRecord, mechanism_words, read_run, read_runs
from fullrank.reporting.tables import comparison_table


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x")
    assert len(read_runs([run, run, tmp_path / "." / "x"])) == 1


def test_an_unfinished_run_is_called_as_it_was_when_it_began(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", finished=False)
    (run / "run.json").write_text(
        '{"name": "row-b", "row": "b", "recipe": "demo/demo", "scale": null}', encoding="utf-8"
    )
    assert [record.name for record in comparison([run]).unfinished] == ["row-b"]


def test_a_folder_that_is_no_run_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="not a run folder"):
        comparison([tmp_path / "empty"])
    with pytest.raises(InputError, match="no such folder"):
        comparison([tmp_path / "nowhere"])
    with pytest.raises(InputError, match="no run folders"):
        comparison([])


def test_a_folder_of_runs_says_which_and_finds_them(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "runs" / name) for name in ("x", "y")]
    with pytest.raises(InputError, match=r"it holds runs: .*x, .*y"):
        read_run(tmp_path / "runs")
    assert find_runs(tmp_path) == find_runs(tmp_path / "runs") == runs
    assert find_runs(runs[0]) == [runs[0]]
    assert find_runs(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("result.json", b'{"name": "x", "final"', "result.json: damaged (Expecting"),
        ("result.json", b"[1]", "result.json: damaged (a section of keys, given [1])"),
        ("result.json", b'{"final": {"test": {"perplexity": NaN}}}', "no finite perplexity"),
        ("result.json", b"[" * 100_000, "result.json: damaged (brackets inside brackets"),
        (
            "result.json",
            b'{"final": {"test": {"perplexity": "low"}}}',
            "(final.test.perplexity: a number, given 'low')",
        ),
        ("result.json", b'{"final": {"test": {"perplexity": true}}}', "(final.test.perplexity: a number, given True)"),
        ("result.json", b'{"final": [1]}', "(final: a mapping, given [1])"),
        ("result.json", b'{"final": {}, "name": "\\ud800"}', "surrogates"),
        (
            "result.json",
            b'{"final": {}, "tokens_seen": 1' + b"0" * 400 + b"}",
            "(tokens_seen: 0 or a positive whole number",
        ),
        ("analysis/spectrum.json", b'{"layers": 3}', "spectrum.json: damaged (layers: a list"),
        ("analysis/spectrum.json", b'{"layers": [{"after": 3}]}', "(layers.after: a section of keys, given 3)"),
        ("metrics.jsonl", b'{"step": 1}\n{"st', "line 2 cannot be read"),
        ("metrics.jsonl", b'{"step": 1}\n{"step": [2]}', "line 2 cannot be read and was left out: damaged (step: "),
        ("timing.jsonl", b'{"step": 1, "tokens_per_second": "fast"}', "timing.jsonl: line 1 cannot be read"),
        ("metrics.jsonl", b'\xff\xfe\n{"step": 1}\nnull\n', "2 lines, the first is line 1,"),
        ("config.yaml", b"model: [", "config.yaml: not valid YAML"),
        ("config.yaml", b"\xff", "not UTF-8"),
    ],
)
def test_damage_becomes_a_sentence(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    run = make_run(tmp_path / "x")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(content)
    record = read_run(run)
    assert any(said in problem for problem in record.problems), record.problems
    assert (record.result is None) == (name == "result.json")


def test_tasks_are_known_from_configurations_where_nothing_is_recorded(tmp_path: Path) -> None:
    def task(name: str) -> str:
        return RunRecord(tmp_path, "x", {"data": {"name": name}}).task

    for name in ("parallel", "iwslt14-de-en", "wmt16-en-de", "multi30k-de-en", "synthetic-translation"):
        assert task(name) == "translation"
    for name in ("ptb", "wikitext-103", "text", "builtin", "lm1b"):
        assert task(name) == "language_modeling"


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"attention": {"mix": "neighbours"}}, "mix: neighbours"),
        ({"attention": {"mix": {"name": "neighbours", "width": 2}}}, "mix: neighbours"),
        ({"layers": [{"at": [-1], "attention": {"score": "cosine"}}]}, "score: cosine"),
        ({"attention": {"normalize": "entmax"}}, "normalize: entmax"),
        ({"attention": {"kind": "retention"}}, "attention: retention"),
        ({"output": {"kind": "hierarchical"}}, "output: hierarchical"),
    ],
)
def test_a_stage_of_ones_own_is_not_called_plain(model: dict[str, object], named: str) -> None:
    words = mechanism_words({"model": model})
    assert words == f"{named} (a stage of your own)"


def test_a_plain_model_and_built_in_stages_are_called_by_their_names() -> None:
    plain = {"attention": {"kind": "weighted", "score": "dot_product", "mix": "none", "normalize": "softmax"}}
    assert mechanism_words({"model": plain}).startswith("plain multi-head attention")
    mixed = mechanism_words({"model": {"attention": {"mix": "position_wise"}, "output": {"normalize": "sigsoftmax"}}})
    assert "Mixhead B" in mixed
    assert "sigsoftmax" in mixed


def test_seeds_with_names_of_their_own_are_a_row_named_by_what_differs(tmp_path: Path) -> None:
    def runs_of(mix: str, letter: str) -> list[Path]:
        no_recipe = {"recipe": None, "row": None, "scale": None}
        return [
            make_run(tmp_path / f"{letter}{seed}", mix=mix, seed=seed, result={"name": f"{letter}{seed}", **no_recipe})
            for seed in (1, 2)
        ]

    rows = comparison([*runs_of("none", "n"), *runs_of("position_wise", "b")]).rows
    assert [row.name for row in rows] == ["none (2 seeds)", "position_wise (2 seeds)"]
    (alone,) = comparison([tmp_path / "n1", tmp_path / "n2"]).rows
    assert alone.name == "n1 (2 seeds)"


def test_one_text_in_different_tokens_is_compared_in_bits_per_character(tmp_path: Path) -> None:
    def run(name: str, kind: str, bits: float, sha256: str = "a" * 64) -> Path:
        sources = [
            {"split": split, "sha256": f"{split}{sha256}", "start": 0, "end": None} for split in ("valid", "test")
        ]
        details = {"settings": {"kind": kind}, "sources": sources}
        corpus = CORPUS | {"label": f"novel ({kind})", "fingerprint": kind, "vocabulary": len(kind), "details": details}
        corpus |= {"unigram_perplexity": {"valid": 90.0 * len(kind), "test": 100.0 * len(kind)}}
        final = {
            split: {
                "nll": bits,
                "perplexity": 2**bits,
                "tokens": 100,
                "bits_per_character": bits,
                "bits_per_byte": bits,
            }
            for split in ("valid", "test")
        }
        return make_run(tmp_path / name, row=name, corpus=corpus, result={"final": final})

    compared = comparison([run("pieces", "bpe", 2.487), run("letters", "character", 3.262)])
    assert compared.comparable
    assert compared.measure.key == "bits_per_character"
    assert compared.rows[1].difference["test"] == pytest.approx(3.262 / 2.487 - 1)
    foot = comparison_table(compared).foot
    assert len(foot) == 2  # each vocabulary has a unigram model of its own
    assert not comparison([tmp_path / "pieces", run("other", "character", 3.2, "b" * 64)]).comparable
