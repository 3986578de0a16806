"""`fullrank analyze` and `diagnose` on runs, saved models and Hugging Face models: figures, and what is refused."""

from __future__ import annotations

import html
import json
import random
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_runs import SMALL, write_config

import fullrank as fr
import hugging_face_models as tiny
from fullrank.cli import main
from translation_runs import languages, write_run

WIDTH = 8
WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain run, a mixture and two Hugging Face models, with the text that they read."""
    folder = tmp_path_factory.mktemp("rank")
    rng = random.Random(0)
    for split, lines in (("train", 60), ("valid", 130), ("test", 5)):
        text = "\n".join(" ".join(rng.choice(WORDS) for _ in range(9)) for _ in range(lines))
        (folder / f"{split}.txt").write_text(text + "\n", encoding="utf-8")
    config = write_config(folder / "c.yaml", folder, folder / "cache", steps=3)
    settings = [*SMALL, f"model.hidden_size={WIDTH}", "model.final_norm=false", "model.dropout.output=0.3"]
    for name, more in (("plain", []), ("mixture", ["kind=mixture_of_softmaxes", "mixtures=3"])):
        words = [*settings, *(f"model.output.{one}" for one in more)]
        with pytest.raises(SystemExit) as stopped:
            main(["train", str(config), *words, "--out", str(folder / name)])
        assert stopped.value.code in (0, None)
    torch.manual_seed(0)
    tiny.save(tiny.gpt2(), folder / "gpt2")
    tiny.save(tiny.gemma2(), folder / "gemma2")
    tiny.write_text(folder / "words.txt", lines=150)
    return folder


@pytest.fixture
def called(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str, str]]:
    """Exit status, stdout and stderr of `fullrank analyze rank` in this process; `@x` is a file of the place."""

    def run(*words: object) -> tuple[object, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(["analyze", "rank", *(str(word).replace("@", f"{place}/") for word in words)])
        said = capsys.readouterr()
        return stopped.value.code or 0, said.out, said.err

    return run


Called = Callable[..., tuple[object, str, str]]


def measured(called: Called, *words: object) -> dict[str, Any]:
    code, out, said = called(*words, "--json")
    assert (code, said) == (0, "")
    content: dict[str, Any] = json.loads(out)
    return content


def values(content: dict[str, Any], measure: str, **labels: object) -> list[float]:
    """Values of the records of a measure that have these labels."""
    return [
        record["value"]
        for record in content["records"]
        if record["measure"] == measure and record["labels"].items() >= labels.items()
    ]


def value(content: dict[str, Any], measure: str, **labels: object) -> float:
    (only,) = values(content, measure, **labels)
    return only


def notes(content: dict[str, Any]) -> str:
    return " ".join(record["note"] for record in content["records"])


def test_a_run_and_a_mixture(called: Called, place: Path) -> None:
    """The mixture's rank is that of its contexts, or of its vocabulary of 60 words, <eos> and <unk>."""
    content = measured(called, "@plain", "@mixture")
    assert [about["model"] for about in content["models"]] == ["plain", "mixture"]
    assert {about["segment_length"] for about in content["models"]} == {8}  # as it was evaluated
    assert all(about["source"] == "run" and about["text"].endswith(", valid") for about in content["models"])
    plain, mixture = {"model": "plain"}, {"model": "mixture"}
    assert value(content, "rank", **plain) == value(content, "bound", **plain) == WIDTH + 2
    assert value(content, "hidden size", **plain) == WIDTH
    assert value(content, "contexts", **plain) == value(content, "contexts", **mixture) == 2 * (WIDTH + 2) + 32
    assert value(content, "words", **plain) == value(content, "vocabulary size", **plain) == 62
    assert value(content, "rank", output="mixture of 3 softmaxes") == 52
    assert values(content, "bound", **mixture) == []
    assert value(content, "rounding", **plain) == 2.0**-52
    singular = values(content, "singular value", **plain)
    assert len(singular) == 52
    assert sum(one > value(content, "tolerance", **plain) for one in singular) == WIDTH + 2
    model = fr.LanguageModel.load(place / "plain")
    assert value(content, "rank", **plain) == fr.analysis.rank(model, torch.randint(62, (9, 8))).rank


def test_the_text_is_the_runs_own(called: Called, place: Path) -> None:
    """The valid split after its start mark, segment after segment; a file of the same text gives the same matrix."""
    by_file = measured(called, "@plain", "--text", "@valid.txt")
    own = measured(called, "@plain")
    assert values(own, "singular value") == values(by_file, "singular value")
    other = measured(called, "@plain", "--text", "@test.txt", "--segment-length", "5")
    assert other["models"][0]["segment_length"] == 5
    entries = fr.data.load_tokenizer(place / "plain").entries
    text = (place / "valid.txt").read_text().replace("\n", " <eos> ").split()
    stream = torch.tensor([entries.index(word) for word in ["<eos>", *text]])
    model = fr.LanguageModel.load(place / "plain")
    read = measured(called, "@plain", "--contexts", "2000")
    expected = fr.analysis.rank(model, [stream[:1296].view(-1, 8), stream[None, 1296:]], contexts=2000)
    assert value(read, "contexts") == expected.contexts > 1000
    assert values(read, "singular value") == pytest.approx(expected.singular_values.tolist(), abs=1e-9)


def test_hugging_face_models(called: Called, place: Path) -> None:
    content = measured(called, "@gpt2", "@gemma2", "--text", "@words.txt", "--segment-length", "12")
    assert value(content, "rank", model="gpt2") == value(content, "bound", model="gpt2") == 9
    assert value(content, "rank", model="gemma2") == 47
    assert values(content, "bound", model="gemma2") == []
    assert "more follows after it" in notes(content)
    assert value(content, "contexts", model="gpt2") == 52
    assert value(content, "repeated contexts", model="gpt2") == 4  # <bos> begins every segment
    words = (place / "words.txt").read_text().split()
    ids = torch.tensor([tiny.WORDS.index(word) for word in words])
    rows = torch.cat([torch.ones(122, 1, dtype=torch.long), ids[:1342].view(-1, 11)], dim=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "gpt2")
    rest = torch.tensor([[1, *ids[1342:].tolist()]])
    expected = fr.analysis.rank(model, [rows, rest], contexts=2000)
    read = measured(called, "@gpt2", "--text", "@words.txt", "--segment-length", "12", "--contexts", "2000")
    assert value(read, "contexts") == expected.contexts > 1000
    assert values(read, "singular value") == pytest.approx(expected.singular_values.tolist(), abs=1e-9)
    assert measured(called, "@gpt2", "--text", "@words.txt")["models"][0]["segment_length"] == 32  # its positions


def test_an_injected_model_and_an_export(called: Called, place: Path, tmp_path: Path) -> None:
    """The export has the bound of its own output layer, which is that of the run."""
    tiny.save(fr.inject(tiny.gpt2(), mix="position_wise"), tmp_path / "injected")
    with pytest.raises(SystemExit):
        main(["export", str(place / "mixture"), str(tmp_path / "export")])
    text = tiny.write_text(tmp_path / "words.txt")
    content = measured(called, tmp_path / "injected", tmp_path / "export", "--text", text, "--contexts", 40)
    assert value(content, "bound", model="injected") == WIDTH + 1
    assert values(content, "bound", model="export") == []


def test_a_saved_model_with_a_vocabulary(called: Called, place: Path, tmp_path: Path) -> None:
    fr.LanguageModel.load(place / "plain").save(tmp_path / "saved")
    code, out, said = called(tmp_path / "saved", "--text", "@valid.txt")
    assert (code, out) == (2, "")
    assert "vocabulary.json" in said
    for name in ("vocabulary.json", "tokenizer.json"):
        shutil.copy(place / "plain" / name, tmp_path / "saved")
    content = measured(called, tmp_path / "saved", "--text", "@valid.txt")
    about = content["models"][0]
    assert (about["source"], about["segment_length"]) == ("saved model", 128)
    last = measured(called, "@plain", "--checkpoint", "last", "--text", "@valid.txt", "--segment-length", "128")
    assert value(last, "rank") == value(content, "rank") == WIDTH + 2


def test_too_few_contexts_are_noted(called: Called) -> None:
    few = measured(called, "@plain", "@mixture", "--contexts", "9")
    assert [record["note"].count("Too few contexts") for record in few["records"] if record["measure"] == "rank"] == [
        1,
        1,
    ]
    short = measured(called, "@plain", "--text", "@test.txt", "--contexts", "500")
    assert "than the 500 that were asked for" in notes(short)


def test_spectra_of_a_run_and_of_a_hugging_face_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [place / "plain", place / "gpt2", "--text", place / "words.txt", "--texts", 3, "--segment-length", 8]
    code, out, _ = analyzed(capsys, "spectrum", *words, "--json", "--out", place / "spectra")
    assert code == 0
    content = json.loads(out)
    assert [(about["texts"], about["segment_length"]) for about in content["models"]] == [(3, 8)] * 2
    for model in ("plain", "gpt2"):
        before, after = (
            [
                value(content, "cumulative share", model=model, layer=0, weights=weights, share=k / 8)
                for k in range(1, 9)
            ]
            for weights in ("before", "after")
        )
        assert after[-1] == pytest.approx(1)
        assert (before == after) == (model == "gpt2")  # nothing mixes its heads
        ranks = values(content, "effective rank", model=model, layer=0, weights="after")
        assert ranks[0] == pytest.approx(statistics.fmean(ranks[1:]))  # the mean, then each head
        assert all(1 <= rank <= 8 for rank in ranks)
    kept = json.loads((place / "plain" / "analysis" / "spectrum.json").read_text())
    assert kept["records"][0]["labels"] == {"layer": 0, "weights": "before"}
    assert kept["plots"][0]["kind"] == "Lines"


def analyzed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["analyze", *map(str, words)])
    said = capsys.readouterr()
    return stopped.value.code or 0, said.out, said.err


def test_heads_of_two_runs(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["heads", place / "plain", place / "mixture", "--text", place / "words.txt", "--texts", 4]
    code, out, said = analyzed(capsys, *words, "--out", tmp_path, "--json")
    assert (code, said) == (0, "")
    content = json.loads(out)
    for layer in (0, 1):
        deviations = []
        for model in ("plain", "mixture"):
            labels = {"model": model, "layer": layer}
            deviations.append(statistics.stdev(values(content, "change", **labels)))
            assert value(content, "deviation", **labels) == pytest.approx(deviations[-1])
        change = value(content, "deviation change", model="mixture", layer=layer)
        assert change == pytest.approx(100 * (deviations[1] / deviations[0] - 1))
    for record in content["records"]:
        if record["measure"] == "change":
            low, high = record["interval"]
            assert low <= record["value"] <= high
    assert [Path(file).name for file in content["files"]][::2] == ["heads.png", "heads_2.png"]
    _, shown, _ = analyzed(capsys, *words)
    row = next(line.split() for line in shown.splitlines() if line.split()[:2] == ["mixture", "0"])
    assert row[2:] == [
        f"{one:+.3f}".replace("-", "\N{MINUS SIGN}") for one in values(content, "change", model="mixture", layer=0)
    ]


def test_an_encoder_predicts_masked_tokens(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(tiny.WORDS), **sizes))
    tiny.save(bert, tmp_path / "bert")
    file = tmp_path / "bert" / "tokenizer_config.json"
    marks = {"cls_token": "<bos>", "sep_token": "<unk>", "mask_token": tiny.WORDS[-1]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **marks}))
    words = [tmp_path / "bert", "--text", place / "words.txt", "--texts", 3, "--segment-length", 12, "--json"]
    code, out, said = analyzed(capsys, "heads", *words)
    assert (code, said) == (0, "")
    assert json.loads(out)["records"][0]["protocol"].startswith("2 masked tokens a text")
    tiny.save(tiny.gpt2(), tmp_path / "bert", tokenizer=False)  # a causal model with that tokenizer
    code, out, said = analyzed(capsys, "heads", *words)
    assert (code, said) == (0, "")
    assert json.loads(out)["records"][0]["protocol"].startswith("next tokens")
    tiny.save(transformers.BertModel(bert.config), tmp_path / "bert", tokenizer=False)
    code, _, said = analyzed(capsys, "heads", *words)
    assert code == 2
    assert "bert has no logits" in said
    code, out, _ = analyzed(capsys, "spectrum", *words)
    assert (code, {record["labels"]["layer"] for record in json.loads(out)["records"]}) == (0, {0})


def test_mixing_over_training(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Best and last of a run are read once where they are of one step; the figures are those of the loaded models."""
    code, out, said = analyzed(capsys, "mixing", place / "plain", place / "mixture", "--texts", 3, "--json")
    assert (code, said) == (0, "")
    entries = fr.data.load_tokenizer(place / "plain").entries
    text = ["<eos>", *(place / "valid.txt").read_text().replace("\n", " <eos> ").split()]
    rows = torch.tensor([entries.index(word) for word in text[:24]]).view(3, 8)
    content = json.loads(out)
    for model in ("plain", "mixture"):
        steps = [record["labels"]["step"] for record in content["records"] if record["labels"]["model"] == model]
        assert steps == sorted(steps)
        assert steps[-1] == 3
        expected = fr.analysis.mixing(fr.LanguageModel.load(place / model, "last"), rows)
        for layer in expected:
            labels = {"model": model, "step": 3, "layer": layer.layer}
            for measure in ("distance", "orthogonality", "variation"):
                assert value(content, measure, **labels) == pytest.approx(getattr(layer, measure), abs=1e-6)
            assert values(content, "mixing", **labels) == pytest.approx(layer.matrix.flatten().tolist(), abs=1e-6)
    code, _, said = analyzed(capsys, "mixing", place / "gpt2", "--text", place / "words.txt")
    assert (code, "no layer of it mixes heads" in said) == (2, True)


def diagnosed(place: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The JSON of `fullrank diagnose`, and the page that it wrote."""
    capsys.readouterr()
    page = place / "page.html"
    with pytest.raises(SystemExit) as stopped:
        main(["diagnose", *(word.replace("@", f"{place}/") for word in words), "--out", str(page), "--json"])
    assert stopped.value.code in (0, None)
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content, html.unescape(page.read_text(encoding="utf-8")).replace("\N{NO-BREAK SPACE}", " ")


def test_diagnose_says_of_an_untrained_model_that_it_is_one_and_nothing_else(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2, page = diagnosed(place, capsys, "@gpt2", "--text", "@words.txt", "--segment-length", "12")
    assert gpt2["undertrained"]
    assert gpt2["perplexity"] > gpt2["unigram_perplexity"]
    assert f"{gpt2['unigram_perplexity']:,.1f}" in gpt2["headline"]
    assert gpt2["headline"] in page
    assert gpt2["findings"].pop("reading")["verdict"] == "bottleneck"
    assert {finding["verdict"] for finding in gpt2["findings"].values()} == {"not measured"}
    assert not any(finding["advice"] for finding in gpt2["findings"].values())


@pytest.fixture
def as_if_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unigram model that is worse than any model of these tests."""
    monkeypatch.setattr("fullrank.experiments.diagnose.unigram_perplexity", lambda tokens: float("inf"))


@pytest.mark.usefixtures("as_if_trained")
def test_diagnose(called: Called, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rank is that of `analyze rank`, the commands it advises fit the run, and the page says what the JSON says."""
    plain, page = diagnosed(place, capsys, "@plain")
    findings = plain["findings"]
    ranked = measured(called, "@plain")
    figures = findings["output"]["figures"]
    assert (figures["rank"], figures["bound"]) == (WIDTH + 2, WIDTH + 2)
    assert figures["contexts"] == value(ranked, "contexts")
    assert figures["effective_rank"] == pytest.approx(value(ranked, "effective rank"), abs=1e-9)
    shares = torch.tensor(values(ranked, "singular value")[1:], dtype=torch.float64)
    used = float(torch.distributions.Categorical(probs=shares / shares.sum()).entropy().exp())
    assert figures["effective_rank_beside_mean"] == pytest.approx(used, abs=1e-9)
    assert findings["output"]["verdict"] == "perhaps"
    assert used >= WIDTH / 2
    assert figures["gradient_suppressed"] + figures["gradient_let_through"] == pytest.approx(1)
    assert findings["output"]["advice"]
    advised = [line for finding in findings.values() for line in finding["advice"] if line.startswith("fullrank train")]
    assert len({line.partition(" --out ")[2] for line in advised} - {""}) == len(advised) > 1
    for finding in findings.values():
        assert all(line.startswith(("fullrank train", "fullrank analyze heads")) for line in finding["advice"])
        assert all(
            text in page for text in (*finding["words"], finding["rule"], finding["verdict"], *finding["advice"])
        )
    mixture, _ = diagnosed(place, capsys, "@mixture")
    assert mixture["findings"]["output"]["verdict"] == "no bottleneck"
    assert mixture["findings"]["output"]["advice"] == []


@pytest.mark.full
@pytest.mark.usefixtures("as_if_trained")
def test_diagnose_a_hugging_face_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2, _ = diagnosed(place, capsys, "@gpt2", "--text", "@words.txt", "--segment-length", "12")
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "gpt2")
    assert gpt2["parameters"] == model.num_parameters()
    parts = gpt2["findings"]["parameters"]["figures"]["parts"]
    assert parts["vocabulary"] == model.transformer.wte.weight.numel()  # tied
    assert parts["attention"] == sum(p.numel() for p in model.transformer.h[0].attn.parameters())
    assert sum(parts.values()) == gpt2["parameters"]
    assert gpt2["findings"]["output"]["figures"]["rank"] == 9
    assert gpt2["findings"]["context"]["verdict"] != "not measured"


@pytest.mark.full
def test_diagnose_a_masked_run(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", place, tmp_path / "cache", steps=3)
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(config), *SMALL, "train.objective=masked", "--out", str(tmp_path / "masked")])
    assert stopped.value.code in (0, None)
    masked, _ = diagnosed(place, capsys, str(tmp_path / "masked"))
    findings = masked["findings"]
    assert findings["context"]["verdict"] == "not measured"  # read from both sides
    assert "gradient_suppressed" in findings["output"]["figures"]  # its rank is that of causal models
    assert sum(findings["parameters"]["figures"]["parts"].values()) == masked["parameters"]
    model = fr.MaskedLanguageModel.load(tmp_path / "masked")
    assert findings["attention"]["figures"]["head_dim"] == model.config.head_dim
    assert not any("fr.inject" in line for finding in findings.values() for line in finding["advice"])


def test_encoders_of_models_that_read_two_sequences(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of our translation runs and of Hugging Face models; what has no vocabulary layer has no perplexity."""
    made = write_run(tmp_path / "run")
    text = tmp_path / "german.txt"
    text.write_text("ein hund schläft .\nein mann rennt .\n" * 4, encoding="utf-8")
    words = [tmp_path / "run", "--text", text, "--texts", 2, "--segment-length", 5, "--json"]
    code, out, said = analyzed(capsys, "spectrum", *words)
    assert (code, said) == (0, "")
    source, _ = languages()
    ids = [token for line in text.read_text().splitlines() for token in (*source.encode(line), source.eos_id)]
    expected = fr.analysis.spectrum(made.encoder, torch.tensor(ids[:10]).view(2, 5))
    for number, own in enumerate(expected.layers):
        ranks = values(json.loads(out), "effective rank", layer=number, weights="after")[1:]
        assert ranks == pytest.approx(own.after.effective_rank.tolist(), abs=1e-6)
    code, _, said = analyzed(capsys, "heads", *words)
    assert (code, "vocabulary layer" in said) == (2, True)
    sizes = {"d_model": 8, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    config = transformers.BartConfig(vocab_size=len(tiny.WORDS), **sizes)
    tiny.save(transformers.BartForConditionalGeneration(config), tmp_path / "bart")
    words = [tmp_path / "bart", "--text", place / "words.txt", "--texts", 2, "--segment-length", 5, "--json"]
    code, out, said = analyzed(capsys, "spectrum", *words)
    assert (code, said) == (0, "")
    assert {record["labels"]["layer"] for record in json.loads(out)["records"]} == {0, 1}
