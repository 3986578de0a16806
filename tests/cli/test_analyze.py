"""`fullrank analyze context`: what it reads, what it says, what it writes, and what it refuses."""

import html
import itertools
import json
import math
import random

import pytest
import torch

import fullrank as fr
import hugging_face_models as tiny
from cli_runs import SMALL, called, succeeds, write_config


def measured(*words):
    code, out, err = called("analyze", *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def values(content, measure, **labels):
    """Values of the records of a measure that have these labels."""
    return [
        record["value"]
        for record in content["records"]
        if record["measure"] == measure and record["labels"].items() >= labels.items()
    ]


WIDTH = 8
WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A plain run, a mixture and two Hugging Face models, with the text that they read."""
    folder = tmp_path_factory.mktemp("rank")
    rng = random.Random(0)
    for split, lines in (("train", 60), ("valid", 130), ("test", 5)):
        text = "\n".join(" ".join(rng.choices(WORDS, k=9)) for _ in range(lines))
        (folder / f"{split}.txt").write_text(text + "\n", encoding="utf-8")
    config = write_config(folder / "c.yaml", folder, folder / "cache", steps=3)
    settings = [*SMALL, f"model.hidden_size={WIDTH}", "model.final_norm=false", "model.dropout.output=0.3"]
    for name, output in (("plain", []), ("mixture", ["kind=mixture_of_softmaxes", "mixtures=3"])):
        overrides = [*settings, *(f"model.output.{setting}" for setting in output)]
        assert called("train", config, *overrides, "--out", folder / name)[0] == 0
    torch.manual_seed(0)
    tiny.save(tiny.gpt2(), folder / "gpt2")
    tiny.save(tiny.gemma2(), folder / "gemma2")
    tiny.write_text(folder / "words.txt", lines=150)
    return folder


def value(content, measure, **labels):
    (only,) = values(content, measure, **labels)
    return only


def test_context_of_models_and_of_a_memory(files, tmp_path):
    """Perplexities are those of the last eighth of each text, read alone; a run with memory has it as further context."""
    text = files / "words.txt"
    content = measured("context", files / "gpt2", files / "plain", "--text", text, "--segment-length", 32, "--texts", 5)
    assert [entry["model"] for entry in content["models"]] == ["gpt2", "plain"]
    model = fr.open_model(str(files / "gpt2"))
    rows = torch.cat(list(fr.text.read_file(model, text, 32))[:5])[:5]
    for length in (8, 16, 28):
        ids = rows[:, -length - 4 :].clone()
        ids[:, 0] = rows[:, 0]  # <bos>
        logits = model.module(ids[:, :-1]).logits[:, -4:]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -4:].flatten())
        expected = pytest.approx(math.exp(nll.item()), rel=1e-5)
        assert value(content, "perplexity", model="gpt2", **{"tokens of context": length}) == expected
    gains = values(content, "gain", model="plain")
    nats = [math.log(perplexity) for perplexity in values(content, "perplexity", model="plain")]
    assert gains == pytest.approx([before - after for before, after in itertools.pairwise(nats)])

    config = write_config(tmp_path / "c.yaml", files, files / "cache", steps=2)
    run = tmp_path / "memory"
    assert called("train", config, *SMALL, "model.memory_length=8", "--out", run)[0] == 0
    content = measured("context", run)
    assert values(content, "perplexity", **{"tokens of context": 14})  # 16 tokens: a segment and its memory
    assert json.loads((run / "analysis" / "context.json").read_text(encoding="utf-8"))["measurement"] == "context"


def diagnosed(files, *words):
    """The JSON of `fullrank diagnose`, and the page that it wrote."""
    page = files / "page.html"
    out = succeeds("diagnose", *words, "--out", page, "--json")
    return json.loads(out), html.unescape(page.read_text(encoding="utf-8")).replace("\N{NO-BREAK SPACE}", " ")


def test_diagnose_says_of_an_untrained_model_that_it_is_one_and_nothing_else(files):
    gpt2, page = diagnosed(files, files / "gpt2", "--text", files / "words.txt", "--segment-length", 12)
    assert gpt2["undertrained"]
    assert gpt2["perplexity"] > gpt2["unigram_perplexity"]
    assert f"{gpt2['unigram_perplexity']:,.1f}" in gpt2["headline"]
    assert gpt2["headline"] in page
    assert gpt2["findings"].pop("reading")["verdict"] == "bottleneck"
    assert {finding["verdict"] for finding in gpt2["findings"].values()} == {"not measured"}
    assert not any(finding["advice"] for finding in gpt2["findings"].values())


@pytest.fixture
def as_if_trained(monkeypatch):
    """A unigram model that is worse than any model of these tests."""
    monkeypatch.setattr("fullrank.experiments.diagnose.unigram_perplexity", lambda tokens: float("inf"))


@pytest.mark.usefixtures("as_if_trained")
@pytest.mark.full
def test_diagnose(files):
    """The rank is that of `analyze rank`."""
    plain, _ = diagnosed(files, files / "plain")
    findings = plain["findings"]
    ranked = measured("rank", files / "plain")
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
    mixture, _ = diagnosed(files, files / "mixture")
    assert mixture["findings"]["output"]["verdict"] == "no bottleneck"
    assert mixture["findings"]["output"]["advice"] == []
