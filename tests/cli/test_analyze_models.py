"""`fullrank analyze` and `diagnose` on runs, saved models and Hugging Face models: figures, and what is refused."""

from __future__ import annotations

import base64
import html
import json
import random
import re
import shutil
import statistics
import sys
import xml.etree.ElementTree as ET
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


def found(called: Called, *words: object) -> dict[str, Any]:
    code, out, said = called(*words, "--json")
    assert (code, said) == (0, "")
    content: dict[str, Any] = json.loads(out)
    return content


def test_a_run_and_a_mixture(called: Called, place: Path) -> None:
    """The mixture's rank is that of its contexts, or of its vocabulary of 60 words, <eos> and <unk>."""
    content = found(called, "@plain", "@mixture")
    plain, mixture = content["models"]
    assert [plain["model"], mixture["model"]] == ["plain", "mixture"]
    assert (plain["rank"], plain["bound"], plain["bound_in_words"]) == (WIDTH + 2, WIDTH + 2, "d + 2")
    assert (plain["bound_applies"], plain["exempt"]) == (True, None)
    assert (plain["source"], plain["output"], plain["d"], plain["bias"]) == ("run", "softmax", WIDTH, True)
    assert plain["contexts"] == mixture["contexts"] == 2 * (WIDTH + 2) + 32
    assert plain["columns"] == plain["vocab_size"] == 62
    assert plain["segment_length"] == 8  # as it was evaluated
    assert plain["text"].endswith(", valid")
    assert (mixture["rank"], mixture["full"], mixture["bound_applies"]) == (52, True, False)
    assert mixture["output"] == "mixture of 3 softmaxes"
    assert (plain["precision"], plain["rounding"]) == ("float64", 2.0**-52)
    assert len(plain["singular_values"]) == 52
    assert sum(value > plain["tolerance"] for value in plain["singular_values"]) == plain["rank"]
    assert content["remarks"] == content["files"] == []
    model = fr.LanguageModel.load(place / "plain")
    assert plain["rank"] == fr.analysis.rank(model, torch.randint(62, (9, 8))).rank


def test_the_text_is_the_runs_own(called: Called, place: Path) -> None:
    """The valid split after its start mark, segment after segment; a file of the same text gives the same matrix."""
    by_file = found(called, "@plain", "--text", "@valid.txt")["models"][0]
    own = found(called, "@plain")["models"][0]
    assert own["singular_values"] == by_file["singular_values"]
    assert by_file["text"].endswith("valid.txt")
    other = found(called, "@plain", "--text", "@test.txt", "--segment-length", "5")["models"][0]
    assert other["singular_values"] != own["singular_values"]
    assert other["segment_length"] == 5
    entries = [line.split("\t")[0] for line in (place / "plain" / "vocabulary.txt").read_text().splitlines()]
    text = (place / "valid.txt").read_text().replace("\n", " <eos> ").split()
    stream = torch.tensor([entries.index(word) for word in ["<eos>", *text]])
    assert len(stream) == 1301  # more than is read at once
    model = fr.LanguageModel.load(place / "plain")
    whole = found(called, "@plain", "--contexts", "2000")["models"][0]
    expected = fr.analysis.rank(model, [stream[:1296].view(-1, 8), stream[None, 1296:]], contexts=2000)
    assert whole["contexts"] == expected.contexts > 1000
    assert whole["singular_values"] == pytest.approx(expected.singular_values.tolist(), abs=1e-9)
    first = fr.analysis.rank(model, stream[:80].view(-1, 8))
    assert own["singular_values"] == pytest.approx(first.singular_values.tolist(), abs=1e-9)


def test_hugging_face_models(called: Called, place: Path) -> None:
    content = found(called, "@gpt2", "@gemma2", "--text", "@words.txt", "--segment-length", "12")
    gpt2, gemma2 = content["models"]
    assert (gpt2["rank"], gpt2["bound"], gpt2["bound_applies"]) == (9, 9, True)
    assert (gemma2["rank"], gemma2["bound"], gemma2["bound_applies"]) == (47, 9, False)
    assert gemma2["output"] == "softmax, soft-cap 30"
    assert "soft-cap" in gemma2["exempt"]
    assert {gpt2["source"], gemma2["source"]} == {"Hugging Face"}
    assert (gpt2["contexts"], gpt2["repeated_contexts"]) == (52, 4)  # <bos> begins every segment
    words = (place / "words.txt").read_text().split()
    ids = torch.tensor([tiny.WORDS.index(word) for word in words])
    assert len(ids) == 1350
    rows = torch.cat([torch.ones(122, 1, dtype=torch.long), ids[:1342].view(-1, 11)], dim=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "gpt2")
    rest = torch.tensor([[1, *ids[1342:].tolist()]])
    expected = fr.analysis.rank(model, [rows, rest], contexts=2000)
    whole = found(called, "@gpt2", "--text", "@words.txt", "--segment-length", "12", "--contexts", "2000")["models"][0]
    assert whole["contexts"] == expected.contexts > 1000
    assert whole["singular_values"] == pytest.approx(expected.singular_values.tolist(), abs=1e-9)
    longest = found(called, "@gpt2", "--text", "@words.txt")["models"][0]
    assert longest["segment_length"] == 32  # its positions


def test_an_injected_model_and_an_export(
    called: Callable[..., tuple[object, str, str]], place: Path, tmp_path: Path
) -> None:
    """The export has the bound of its own output layer, which is that of the run."""
    tiny.save(fr.inject(tiny.gpt2(), mix="position_wise"), tmp_path / "injected")
    with pytest.raises(SystemExit):
        main(["export", str(place / "mixture"), str(tmp_path / "export")])
    text = tiny.write_text(tmp_path / "words.txt")
    code, out, said = called(tmp_path / "injected", tmp_path / "export", "--text", text, "--contexts", 40, "--json")
    assert (code, said) == (0, "")
    injected, export = json.loads(out)["models"]
    assert (injected["d"], injected["exempt"]) == (WIDTH, None)
    assert export["exempt"].startswith("the logarithm of a sum")


def test_a_saved_model_with_a_vocabulary(called: Called, place: Path, tmp_path: Path) -> None:
    fr.LanguageModel.load(place / "plain").save(tmp_path / "saved")
    code, out, said = called(tmp_path / "saved", "--text", "@valid.txt")
    assert (code, out) == (2, "")
    assert "no vocabulary.json there" in said
    for name in ("vocabulary.json", "vocabulary.txt"):
        shutil.copy(place / "plain" / name, tmp_path / "saved")
    content = found(called, tmp_path / "saved", "--text", "@valid.txt")["models"][0]
    assert (content["source"], content["rank"], content["segment_length"]) == ("saved model", WIDTH + 2, 128)
    last = found(called, "@plain", "--checkpoint", "last", "--text", "@valid.txt", "--segment-length", "128")
    assert last["models"][0]["rank"] == content["rank"]


def test_the_table_and_what_it_means(called: Called) -> None:
    code, out, said = called("@plain", "@mixture")
    assert (code, said) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    plain = next(row for row in rows if row[:1] == ["plain"])
    assert plain[:5] == ["plain", "softmax", str(WIDTH), str(WIDTH + 2), str(WIDTH + 2)]
    assert plain[6:] == ["52", "62"]
    mixture = next(row for row in rows if row[:1] == ["mixture"])
    assert mixture[1:8] == ["mixture", "of", "3", "softmaxes", str(WIDTH), "exempt", f"({WIDTH + 2})"]
    assert "the rank stays at or below d + 2 = 10, as log p is linear in the 8 hidden dimensions" in out
    assert "The bound of a single softmax, d + 2 = 10, does not hold here: the logarithm of a sum of softmaxes" in out
    assert "The rank is the highest that 52 contexts and 62 words can show." in out


def test_what_is_too_little_is_said(called: Called) -> None:
    few = found(called, "@plain", "@mixture", "--contexts", "9")["models"]
    assert [one["conclusive"] for one in few] == [False, False]
    for one in few:
        assert "9 contexts and 62 words are too few to show a rank above d + 2 = 10" in " ".join(one["remarks"])
    short = found(called, "@plain", "--text", "@test.txt", "--contexts", "500")["models"][0]
    assert any("different contexts of the 500 that were asked for" in remark for remark in short["remarks"])
    together = found(called, "@plain", "@gpt2", "--text", "@words.txt", "--segment-length", "12", "--contexts", "50")
    assert together["remarks"] == []


def test_the_figure(called: Called, tmp_path: Path) -> None:
    """Two readable files; the drawing names models, ranks and bounds, and is the same to the byte the next time."""
    out = tmp_path / "new" / "figures"
    content = found(called, "@plain", "@mixture", "--out", out)
    assert content["files"] == [str(out / "rank.png"), str(out / "rank.svg")]
    assert (out / "rank.png").read_bytes().startswith(b"\x89PNG\r\n")
    root = ET.fromstring((out / "rank.svg").read_text(encoding="utf-8"))
    words = [text.strip() for text in root.itertext() if text.strip()]
    assert "plain: softmax, d = 8, rank 10" in words
    assert "mixture: mixture of 3 softmaxes, d = 8, rank 52" in words
    assert words.count("d + 2 = 10: a softmax ends here") == 1
    assert {"singular value", "number of the singular value", "1"} <= set(words)
    assert any("52 contexts by 62 words" in text for text in words)
    before = [(out / f"rank.{kind}").read_bytes() for kind in ("png", "svg")]
    code, shown, _ = called("@plain", "@mixture", "--out", out)
    assert code == 0
    assert str(out / "rank.svg") in shown.splitlines()
    assert [(out / f"rank.{kind}").read_bytes() for kind in ("png", "svg")] == before


WRONG: dict[str, tuple[list[str], str]] = {
    "no such folder": (["/no/such/folder"], "/no/such/folder: no such folder"),
    "a path beside the runs": (["@gpt2/none"], "no such folder"),
    "a file": (["@c.yaml"], "a configuration, which has no weights; give a run folder"),
    "an empty folder": (["@cache"], "no model there; give a recipe, a YAML file, a run folder"),
    "no text": (["@gpt2"], "not a run of fullrank, so no text of its own; give one with --text FILE"),
    "no such text": (["@gpt2", "--text", "@none.txt"], "--text: no such file"),
    "too long": (["@gpt2", "--text", "@words.txt", "--segment-length", "33"], "--segment-length: 33, but"),
    "one context": (["@plain", "--contexts", "1"], "--contexts"),
    "no checkpoint": (["@plain", "--checkpoint", "first"], "checkpoints/first"),
    "a device": (["@plain", "--device", "abacus"], "--device: 'abacus' is not a device"),
    "a file for a folder": (["@plain", "--out", "@c.yaml"], "a file of that name exists"),
    "the second of two": (["@plain", "@gpt2"], "give one with --text FILE"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str, called: Called) -> None:
    words, part = WRONG[case]
    code, out, said = called(*words)
    assert (code, out) == (2, "")
    assert part in " ".join(said.replace("│", " ").split())
    assert "Traceback" not in said


def test_hugging_face_folders_that_cannot_be_used(called: Called, tmp_path: Path) -> None:
    """Without tokenizer, without some weights, and what is no causal model."""
    torch.manual_seed(0)
    bare = tiny.save(tiny.llama(), tmp_path / "bare", tokenizer=False)
    cut = tiny.save(tiny.llama(), tmp_path / "cut")
    from safetensors.torch import load_file, save_file

    tensors = load_file(cut / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, cut / "model.safetensors", metadata={"format": "pt"})
    other = tiny.save(tiny.llama(), tmp_path / "other")
    (other / "config.json").write_text('{"model_type": "t5"}')
    for folder, part in (
        (bare, "bare has no tokenizer"),
        (cut, "lacks weights of LlamaForCausalLM: lm_head.weight"),
        (other, "no causal model that transformers can load"),
    ):
        code, out, said = called(folder, "--text", "@words.txt")
        assert (code, out) == (2, "")
        assert part in said
        assert len(said.splitlines()) == 1


def test_without_transformers(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs need it not, models of Hugging Face say how to install it."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, said = called("@gpt2", "--text", "@words.txt")
    assert (code, out) == (2, "")
    command = "pip install 'fullrank[hf]' (in a clone: pip install -e '.[hf]')"
    assert f"a Hugging Face model needs transformers; install it: {command}" in said
    code, _, said = called("no-such-run", "--text", "@words.txt")
    assert code == 2
    assert "no such folder, and a model of the Hugging Face hub needs transformers" in said.splitlines()[-1]
    assert found(called, "@plain")["models"][0]["rank"] == WIDTH + 2


def test_help_shows_examples(called: Called) -> None:
    code, out, _ = called("--help")
    assert code == 0
    assert "Examples" in out
    assert "softmax bottleneck" in out


def test_spectra_of_a_run_and_of_a_hugging_face_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [place / "plain", place / "gpt2", "--text", place / "words.txt", "--texts", 3, "--segment-length", 8]
    for more in (["--json", "--out", place / "spectra"], []):
        with pytest.raises(SystemExit) as stopped:
            main(["analyze", "spectrum", *map(str, [*words, *more])])
        assert not stopped.value.code
        if more:
            content = json.loads(capsys.readouterr().out)
    run, foreign = content["models"]
    assert (run["model"], run["weights"]) == ("plain", "by the definition")
    assert (foreign["model"], foreign["weights"]) == ("gpt2", "explicitly, by the model's own attention")
    assert [(one["texts"], one["segment_length"]) for one in (run, foreign)] == [(3, 8)] * 2
    for layer in (*run["layers"], *foreign["layers"]):
        assert layer["mixed"] == (layer in run["layers"])
        assert (layer["before"] == layer["after"]) == (layer in foreign["layers"])
        assert all(len(curve) == 8 and abs(curve[-1] - 1) < 1e-9 for curve in layer["after"]["curves"])
        assert all(1 <= rank <= 8 for rank in layer["after"]["effective_rank"])
    png, svg, *kept = (Path(file) for file in content["files"])
    assert kept == [place / "plain" / "analysis" / f"spectrum.{kind}" for kind in ("png", "svg")]
    assert json.loads((place / "plain" / "analysis" / "spectrum.json").read_text()) == run
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert "plain: effective rank" in "".join(ET.parse(svg).getroot().itertext())
    shown = " ".join(capsys.readouterr().out.split())
    means = [statistics.fmean(run["layers"][0][when]["effective_rank"]) for when in ("before", "after")]
    assert f"plain 0 {means[0]:.1f} {means[1]:.1f}" in shown
    assert f"plain ({place / 'words.txt'}): 3 segments of 8 tokens, weights by the definition" in shown


def test_spectra_need_a_whole_segment(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = place / "short.txt"
    short.write_text("w1 w2 w3\n", encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main(["analyze", "spectrum", str(place / "plain"), "--text", str(short), "--segment-length", "12"])
    assert stopped.value.code == 2
    assert "no text to read" in capsys.readouterr().err


def analyzed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["analyze", *map(str, words)])
    said = capsys.readouterr()
    return stopped.value.code or 0, said.out, said.err


def test_heads_of_a_run_against_another(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["heads", place / "plain", "--text", place / "words.txt", "--against", place / "mixture", "--texts", 4]
    code, out, said = analyzed(capsys, *words, "--out", tmp_path, "--json")
    assert (code, said) == (0, "")
    content = json.loads(out)
    run, other = content["models"]
    assert (run["model"], run["texts"], run["objective"]) == ("plain", 4, "next tokens")
    for a, b in zip(run["layers"], other["layers"], strict=True):
        deviations = [statistics.stdev(layer["change"]) for layer in (a, b)]
        assert a["deviation"] == pytest.approx(deviations[0])
        assert a["deviation_change_percent"] is None
        assert b["deviation_change_percent"] == pytest.approx(100 * (deviations[1] / deviations[0] - 1))
        assert all(
            ends["low"] <= change <= ends["high"] for ends, change in zip(b["intervals"], b["change"], strict=True)
        )
    assert [Path(file).name for file in content["files"][:4]] == [
        "heads.png",
        "heads.svg",
        "similarity.png",
        "similarity.svg",
    ]
    names = "".join(ET.parse(tmp_path / "heads.svg").getroot().itertext())
    assert "plain" in names
    assert "mixture" in names
    _, shown, _ = analyzed(capsys, *words)
    row = next(line.split() for line in shown.splitlines() if line.split()[:2] == ["mixture", "0"])
    assert row[2:-3] == [f"{change:+.3f}" for change in other["layers"][0]["change"]]
    assert f"plain ({place / 'words.txt'}): 4 segments of 8 tokens, weights by the definition; perplexity" in shown
    code, _, said = analyzed(capsys, *words[:4], "--against", place / "gpt2")
    assert (code, "--against: has 1 layers of attention" in said) == (2, True)


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
    (one,) = json.loads(out)["models"]
    assert one["objective"] == "2 masked tokens a text"
    tiny.save(tiny.gpt2(), tmp_path / "bert", tokenizer=False)  # a causal model with that tokenizer
    code, out, said = analyzed(capsys, "heads", *words)
    assert (code, said, json.loads(out)["models"][0]["objective"]) == (0, "", "next tokens")
    tiny.save(transformers.BertModel(bert.config), tmp_path / "bert", tokenizer=False)
    code, _, said = analyzed(capsys, "heads", *words)
    assert (code, "BertModel: has no vocabulary layer" in said) == (2, True)
    code, out, _ = analyzed(capsys, "spectrum", *words)
    assert (code, len(json.loads(out)["models"][0]["layers"])) == (0, 1)


def test_pruned_heads_are_saved(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["heads", place / "mixture", "--texts", 3]
    code, _, said = analyzed(capsys, *words, "--prune", 2)
    assert (code, "--prune: give --out DIR" in said) == (2, True)
    code, _, said = analyzed(capsys, *words, "--prune", 1.5, "--out", tmp_path)
    assert (code, "a whole number of heads, or a share of the 8 that there are; given 1.5" in said) == (2, True)
    code, _, said = analyzed(capsys, *words, "--prune", 2, "--out", tmp_path)
    assert (code, "position_wise - the heads that stay read the weights" in said) == (2, True)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    saved = tmp_path / "saved"
    fr.LanguageModel(fr.ModelConfig(vocab_size=62, **sizes)).save(saved)
    for name in ("vocabulary.json", "vocabulary.txt"):
        shutil.copy(place / "plain" / name, saved)
    words = ["heads", saved, "--text", place / "words.txt", "--texts", 3, "--out", tmp_path, "--prune", 0.25, "--json"]
    code, out, said = analyzed(capsys, *words)
    assert (code, said) == (0, "")
    content = json.loads(out)
    ((layer, (head,)),) = content["pruned"]["heads"].items()
    changes = [layer["change"] for layer in content["models"][0]["layers"]]
    assert changes[int(layer)][head] == min(map(min, changes))
    figures = content["pruned"]["perplexity"]
    assert figures["after"] - figures["before"] == pytest.approx(min(map(min, changes)), abs=1e-4)
    smaller = fr.LanguageModel.load(content["pruned"]["folder"])
    assert content["pruned"]["parameters"]["after"] == smaller.num_parameters()
    code, out, _ = analyzed(capsys, "spectrum", tmp_path / "pruned", "--text", place / "words.txt", "--json")
    heads = [len(layer["after"]["effective_rank"]) for layer in json.loads(out)["models"][0]["layers"]]
    assert (code, heads) == (0, smaller.config.heads_by_layer)
    words = ["--text", place / "words.txt", "--texts", 3, "--out", tmp_path / "hf", "--json"]
    _, out, _ = analyzed(capsys, "heads", place / "gpt2", "--prune", 1, *words)
    expected = json.loads(out)["pruned"]["perplexity"]["after"]
    _, out, _ = analyzed(capsys, "heads", tmp_path / "hf" / "pruned", *words)
    assert json.loads(out)["models"][0]["perplexity"] == pytest.approx(expected)


def test_mixing_over_training(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Best and last of a run are read once where they are of one step; the figures are those of the loaded models."""
    code, out, said = analyzed(capsys, "mixing", place / "plain", place / "mixture", "--texts", 3, "--json")
    assert (code, said) == (0, "")
    entries = [line.split("\t")[0] for line in (place / "plain" / "vocabulary.txt").read_text().splitlines()]
    text = ["<eos>", *(place / "valid.txt").read_text().replace("\n", " <eos> ").split()]
    rows = torch.tensor([entries.index(word) for word in text[:24]]).view(3, 8)
    for one in json.loads(out)["models"]:
        steps = [checkpoint["step"] for checkpoint in one["checkpoints"]]
        assert steps == sorted(set(steps))
        last = one["checkpoints"][-1]
        assert (last["checkpoint"], last["step"]) == ("last", 3)
        expected = fr.analysis.mixing(fr.LanguageModel.load(place / one["model"], "last"), rows)
        for layer, own in zip(last["layers"], expected, strict=True):
            assert (layer["distance"], layer["orthogonality"]) == pytest.approx(
                (own.distance, own.orthogonality), abs=1e-6
            )
            assert layer["variation"] == pytest.approx(own.variation, abs=1e-6)
            assert own.variation is not None
            assert own.variation > 0
    code, shown, _ = analyzed(capsys, "mixing", place / "plain", "--texts", 3, "--out", tmp_path)
    assert code == 0
    assert str(tmp_path / "mixing.svg") in shown.splitlines()
    assert any(line.split()[:4] == ["plain", "last", "3", "0"] for line in shown.splitlines())
    assert "plain, layer 1" in "".join(ET.parse(tmp_path / "mixing.svg").getroot().itertext())
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
    (ranked,) = found(called, "@plain")["models"]
    figures = findings["output"]["figures"]
    assert (figures["rank"], figures["bound"], figures["contexts"]) == (WIDTH + 2, WIDTH + 2, ranked["contexts"])
    assert figures["effective_rank"] == pytest.approx(ranked["effective_rank"], abs=1e-9)
    shares = torch.tensor(ranked["singular_values"][1:], dtype=torch.float64)
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


def test_the_report_of_a_run_shows_its_analyses(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for analysis in ("spectrum", "mixing"):
        code, shown, _ = analyzed(capsys, analysis, place / "mixture", "--texts", 2)
        assert code == 0
        assert str(place / "mixture" / "analysis" / f"{analysis}.svg") in shown.splitlines()
    with pytest.raises(SystemExit):
        main(["report", str(place / "mixture"), "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<section id="analyses"' in page
    for analysis in ("spectrum", "mixing"):
        (data,) = re.findall(rf'src="data:image/svg\+xml;base64,([^"]+)" alt="{analysis}"', page)
        assert base64.b64decode(data) == (place / "mixture" / "analysis" / f"{analysis}.svg").read_bytes()


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
    for layer, own in zip(json.loads(out)["models"][0]["layers"], expected.layers, strict=True):
        assert layer["after"]["effective_rank"] == pytest.approx(own.after.effective_rank.tolist(), abs=1e-6)
    code, _, said = analyzed(capsys, "heads", *words)
    assert (code, "Encoder: has no vocabulary layer" in said) == (2, True)
    sizes = {"d_model": 8, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    config = transformers.BartConfig(vocab_size=len(tiny.WORDS), **sizes)
    tiny.save(transformers.BartForConditionalGeneration(config), tmp_path / "bart")
    words = [tmp_path / "bart", "--text", place / "words.txt", "--texts", 2, "--segment-length", 5, "--json"]
    code, out, said = analyzed(capsys, "spectrum", *words)
    assert (code, said) == (0, "")
    assert len(json.loads(out)["models"][0]["layers"]) == 2
