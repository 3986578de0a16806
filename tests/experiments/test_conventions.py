"""A run on lines that begin with <sos>: both counts of tokens, the last checkpoint beside the best, and what is written."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fullrank as fr
from fullrank.data import load_corpus
from fullrank.experiments.generation import write
from fullrank.experiments.run import evaluate
from run_files import train_quietly


def run(folder, **options):
    """A training of a few steps on lines of made-up words."""
    drawn = np.random.default_rng(0)
    for split, lines in (("train", 80), ("valid", 12), ("test", 15)):
        text = "".join(" ".join(drawn.choice(list("abcdef"), drawn.integers(0, 6))) + "\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")
    files = {split: str(folder / f"{split}.txt") for split in ("train", "valid", "test")}
    raw = {
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "data": {"name": "text", "sos": True, "cache": str(folder / "cache"), **files},
        "train": {"batch_size": 4, "segment_length": 8, "device": "cpu", "optimizer": "sgd", **options},
        "eval": {"every_steps": 4},
    }
    return train_quietly(raw, folder / "run")


def by_hand(folder, checkpoint, split):
    """Nats of a split token by token, its tokens, and how many of them are <sos>."""
    corpus = load_corpus(Path(json.loads((folder / "run.json").read_text())["prepared"]))
    model = fr.LanguageModel.load(folder, checkpoint).eval()
    ids = corpus.ids(split).tolist()
    nats = 0.0
    for first in range(0, len(ids), 8):
        block = ids[first : first + 8]
        before = [ids[first - 1] if first else corpus.tokenizer.start_id, *block[:-1]]
        with torch.no_grad():
            logits = model(torch.tensor([before])).logits[0].double()
        nats -= sum(float(torch.log_softmax(row, -1)[i]) for row, i in zip(logits, block, strict=True))
    return nats, len(ids), ids.count(corpus.tokenizer.sos_id)


@pytest.fixture(scope="module")
def worse(tmp_path_factory):
    """A run whose last steps spoil it: the best checkpoint is not the last."""
    folder = tmp_path_factory.mktemp("worse")
    rate = {"schedule": "linear", "learning_rate": 0.1, "min_learning_rate": 9, "max_grad_norm": 1}
    return folder / "run", run(folder, steps=12, **rate)


def test_best_and_last_checkpoint_and_both_counts(worse):
    folder, result = worse
    assert result["best"]["step"] < result["steps"] == 12
    for kind, checkpoint in (("final", "best"), ("last", "last")):
        for split in ("valid", "test"):
            figures = result[kind][split]
            nats, tokens, lines = by_hand(folder, checkpoint, split)
            assert lines == {"valid": 12, "test": 15}[split]
            assert (figures["tokens"], figures["tokens_without_sos"]) == (tokens, tokens - lines)
            assert figures["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
            assert figures["perplexity_without_sos"] == pytest.approx(math.exp(nats / (tokens - lines)), rel=1e-4)
            assert figures["perplexity_per_word"] == figures["perplexity_without_sos"]
            again = evaluate(folder, split, checkpoint=checkpoint, device_name="cpu")
            assert {key: again[key] for key in figures} == figures
    assert result["last"]["valid"]["nll"] > result["final"]["valid"]["nll"]


@pytest.mark.parametrize(
    ("prompt", "read"), [("", ["<eos>", "<sos>"]), ("a\n", ["<eos>", "<sos>", "a", "<eos>", "<sos>"])]
)
def test_what_is_written_begins_a_line(worse, prompt, read, monkeypatch):
    folder, _ = worse
    entries = fr.data.load_tokenizer(folder).entries
    seen = []
    forward = fr.LanguageModel.forward

    def watched(model, input_ids, *args, **options):
        seen.append(input_ids[0].tolist())
        return forward(model, input_ids, *args, **options)

    monkeypatch.setattr(fr.LanguageModel, "forward", watched)
    written = write(folder, prompt, max_new_tokens=6, seed=3, device_name="cpu")
    assert [entries[i].replace("\n", "<eos>") for i in seen[0]] == read
    text = written["texts"][0]["text"]
    assert text.startswith(prompt)
    assert "<sos>" not in text
