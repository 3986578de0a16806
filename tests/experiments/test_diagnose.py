"""Findings of `fullrank diagnose` on models whose bottleneck is known."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fullrank.comparison.runs import read_run
from fullrank.experiments.diagnose import CHECKS, Subject, unigram_perplexity
from fullrank.models import open_model
from fullrank.text import Text

PERIOD = 16
VOCABULARY = 20
BY_NAME = {check.name: check for check in CHECKS}


class LooksBack(nn.Module):
    """Predicts with certainty that the next token is the one `distance` positions before it, where it can see that."""

    def __init__(self, distance):
        super().__init__()
        self.distance = distance
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.otherwise = nn.Embedding(VOCABULARY, VOCABULARY)  # logits where it cannot

    def forward(self, ids):
        logits = self.otherwise(ids).detach()
        back = self.distance - 1
        if back < ids.shape[1]:
            logits[:, back:].scatter_(2, ids[:, : ids.shape[1] - back, None], 90.0)
        return SimpleNamespace(logits=logits)


def diagnosed(distance, length):
    text = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:PERIOD].repeat(length * 5).tolist()
    finding = BY_NAME["context"].examine(Subject(open_model(LooksBack(distance)), Text.from_ids(text, length)))
    return finding.verdict, dict(finding.figures["perplexity"]), finding.figures["reach"]


def test_more_context_would_help():
    """The text repeats after 32 tokens, too, and only the longest context of 40 tokens reaches as far."""
    verdict, perplexity, reach = diagnosed(2 * PERIOD, 45)
    assert (verdict, reach) == ("bottleneck", 40)
    assert min(perplexity["8"], perplexity["16"]) > 5
    assert perplexity["40"] == pytest.approx(1)


def test_context_enough():
    verdict, perplexity, reach = diagnosed(PERIOD, 63)
    assert (verdict, reach) == ("no bottleneck", 16)
    assert perplexity["8"] > 5  # the last of 7 tokens has 14 before it
    assert [perplexity[n] for n in ("16", "32", "56")] == pytest.approx([1, 1, 1])


def test_the_unigram_model_counts_all_tokens_but_the_one_that_it_predicts():
    tokens = [3, 1, 3, 3, 2, 1, 3]
    nll = 0.0
    for position, token in enumerate(tokens):
        counted = tokens[:position] + tokens[position + 1 :]
        nll -= math.log((counted.count(token) + 1) / (len(counted) + len(set(tokens))))
    assert unigram_perplexity(tokens) == pytest.approx(math.exp(nll / len(tokens)))


def examined(name, folder, train, valid, fourgrams=200.0):
    """The finding on a run with these perplexities every 10 steps; its test perplexity is 100."""
    lines = []
    for split, curve in (("train", train), ("valid", valid)):
        for index, perplexity in enumerate(curve, start=1):
            lines.append({"step": 10 * index, "split": split, "nll": math.log(perplexity), "ppl": perplexity})
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("{data: {name: builtin}, train: {optimizer: muon}}")
    (folder / "run.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"steps": 100, "parameters": {"total": 7}, "final": {"test": {"perplexity": 100.0}}}
    result["corpus"] = {"fourgram_perplexity": {"test": fourgrams}}
    (folder / "result.json").write_text(json.dumps(result))
    return BY_NAME[name].examine(Subject(open_model(LooksBack(1)), Text.from_ids([1, 2], 2), read_run(folder)))


@pytest.mark.parametrize(
    ("last", "valid", "verdict"),
    [(40.0, 100.0, "bottleneck"), (60.0, 100.0, "perhaps"), (80.0, 100.0, "no bottleneck")],
)
def test_a_run_that_learned_its_text_by_heart(tmp_path, last, valid, verdict):
    """Only the last tenth of the training counts, and the last validation."""
    finding = examined("overfits", tmp_path, [300.0] * 18 + [last, last], [500.0, valid])
    assert finding.verdict == verdict
    assert finding.figures["ratio"] == pytest.approx(valid / last)
    if verdict != "no bottleneck":
        assert finding.advice[0].endswith(f"yaml train.weight_decay=1.0 --out {tmp_path}-weight_decay-1.0")


def test_parameters_are_those_of_the_run(tmp_path):
    """The model under test of a translation run is its encoder alone, which has fewer parameters than the run."""
    examined("reading", tmp_path, [], [100.0])
    assert Subject(open_model(LooksBack(1)), Text.from_ids([1, 2], 2), read_run(tmp_path)).num_parameters == 7


@pytest.mark.parametrize(
    ("valid", "fourgrams", "says"),
    [
        ([200.0] * 9 + [100.0], 200.0, "falls by 50.0% in the last tenth"),
        ([100.0] * 10, 99.0, "On its test text it has 100.0, counting 4-grams has 99.0"),
    ],
)
def test_a_run_that_reads_too_little(tmp_path, valid, fourgrams, says):
    finding = examined("reading", tmp_path, [], valid, fourgrams)
    assert finding.verdict == "bottleneck"
    assert says in " ".join(finding.words)
    assert [line for line in finding.advice if " train.steps=200 " in line] == finding.advice != []
