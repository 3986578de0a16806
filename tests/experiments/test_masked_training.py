"""Masked language modelling from a configuration to figures: what is learnt, and how it is measured."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_memory_training import configuration, trained
from test_memory_training import text as text

import fullrank as fr
from fullrank.config.load import build
from fullrank.config.run import TrainConfig
from fullrank.data import build_bytes, load_corpus
from fullrank.data.batches import MaskedBatch, Masking, iterate_masked_blocks
from fullrank.experiments.language_model import MaskedModelTask
from fullrank.experiments.run import evaluate
from fullrank.training.values import TrainingPosition

MODEL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "position": "relative",
    "attention": {"score": "relative", "mix": "position_wise", "cross_head": 0.1}, "output": {"tied": True},
    "dropout": {"residual": 0.05},
}  # fmt: skip


def masked(text, **options):
    sizes = {"batch_size": 16, "segment_length": 24, "learning_rate": 0.005}
    raw = configuration(text, MODEL, objective="masked", **sizes | options)
    return raw | {"eval": {"every_steps": 50, "batch_size": 7}}


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "masked"
    penalties = {"orthogonality": 1e-3, "overlap": 1e-4, "label_smoothing": 0.01}
    return folder, trained(folder, masked(text, steps=120, **penalties))[0]


def test_it_learns_from_both_sides(run):
    """Eight pairs of letters: a guess has a perplexity of 16; after earlier tokens alone every second is known: sqrt(8)."""
    _, result = run
    for split in ("valid", "test"):
        assert result["corpus"]["unigram_perplexity"][split] == pytest.approx(16, rel=0.05)
        assert result["final"][split]["perplexity"] < 2.3 < math.sqrt(8)
        assert result["final"][split]["accuracy_percent"] > 75
    assert result["mask"] == {"token": "<mask>", "id": 256}
    epochs, batches = divmod(result["steps"], 32)  # 500 blocks in batches of 16
    assert result["tokens_seen"] == epochs * 12_000 + batches * 16 * 24, "all tokens that are read count as seen"


def by_hand(folder, split, seed=0):
    """Nats, tokens and hits of a run, one block at a time, from logits."""
    corpus = load_corpus(Path(json.loads((folder / "run.json").read_text())["prepared"]))
    model = fr.MaskedLanguageModel.load(folder)
    masking = Masking(build_bytes(), model.mask_id, TrainConfig())
    nats = 0.0
    tokens = hits = 0
    for batch in iterate_masked_blocks(corpus.ids(split), masking, batch_size=1, segment_length=24, seed=seed):
        read = batch.inputs[:, : batch.read]  # without padding
        with torch.no_grad():
            logs = torch.log_softmax(model(read).logits[0].double(), -1)
        for position, target in zip(batch.at.tolist(), batch.targets.tolist(), strict=True):
            nats -= float(logs[position, target])
            hits += int(logs[position].argmax()) == target
            tokens += 1
    return nats, tokens, hits


@pytest.mark.full
def test_figures(run):
    folder, result = run
    for split in ("valid", "test"):
        nats, tokens, hits = by_hand(folder, split)
        assert result["final"][split] == {
            "nll": pytest.approx(nats / tokens, rel=1e-5),
            "perplexity": pytest.approx(math.exp(nats / tokens), rel=1e-5),
            "accuracy_percent": pytest.approx(100 * hits / tokens),
            "tokens": tokens,
        }
        again = evaluate(folder, split, device_name="cpu")
        assert {key: again[key] for key in result["final"][split]} == result["final"][split]
        unbatched = evaluate(folder, split, device_name="cpu", batch_size=1)
        assert unbatched["tokens"] == tokens
        assert unbatched["nll"] == pytest.approx(again["nll"], rel=1e-5), "figures do not depend on the batches"
    corpus = load_corpus(Path(json.loads((folder / "run.json").read_text())["prepared"]))
    counts = np.bincount(corpus.ids("train"), minlength=256)
    masking = Masking(build_bytes(), 256, TrainConfig())
    blocks = iterate_masked_blocks(corpus.ids("test"), masking, batch_size=3, segment_length=11, seed=0)
    targets = [i for batch in blocks for i in batch.targets.tolist()]
    nats = sum(-math.log((counts[i] + 1) / (counts.sum() + 256)) for i in targets) / len(targets)
    assert result["corpus"]["unigram_perplexity"]["test"] == pytest.approx(math.exp(nats))


def test_masks_are_new_in_every_epoch_and_depend_on_the_seed(text, tmp_path):
    """Both epochs and both seeds read the blocks in the same order."""
    masks = {}
    original = MaskedModelTask.objective

    def watched(self, batch, carry, position):
        masks.setdefault(self.options.seed, []).append(batch.at.tolist())
        return original(self, batch, carry, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MaskedModelTask, "objective", watched)
        for seed in (1, 2):
            raw = masked(text, order="contiguous", epochs=2, batch_size=100, seed=seed)
            trained(tmp_path / str(seed), raw)
    batches = len(masks[1]) // 2
    first, second = masks[1][:batches], masks[1][batches:]
    assert len(first) == len(second) > 1
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert all(a != b for a, b in zip(masks[1], masks[2], strict=True))


def test_the_objective():
    """Its parts against the model; penalties are those of the trace; a batch without a mask has no loss."""
    torch.manual_seed(0)
    options = TrainConfig(objective="masked", orthogonality=0.5, overlap=0.25, label_smoothing=0.1)
    config = build({"model": {**MODEL, "vocab_size": 30, "dropout": {}}}).model
    model = fr.MaskedLanguageModel(config).train()
    model.encoder.blocks[0].attention.attend.mix.mixing.data += 0.1
    inputs = torch.randint(29, (2, 6))
    batch = MaskedBatch(inputs, torch.tensor([1, 9]), torch.tensor([3, 4]), None)
    task = MaskedModelTask(None)
    task.model, task.options = model, options
    torch.manual_seed(1)  # of the cross-head permutation
    loss = task.objective(batch, {}, TrainingPosition(1))
    torch.manual_seed(1)
    trace = fr.Trace()
    parts = model.loss_parts(inputs, batch.targets, at=batch.at, label_smoothing=0.1, trace=trace)
    expected = parts.loss + 0.5 * fr.orthogonality(trace) + 0.25 * fr.overlap(trace)
    torch.testing.assert_close(loss.value, expected)
    torch.testing.assert_close(loss.nll, 2 * parts.nll)
    assert (loss.tokens, loss.read, loss.seen) == (2, 12, 12)
    assert float(fr.orthogonality(trace).detach()) > 0
    nothing = MaskedBatch(inputs, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), None)
    empty = task.objective(nothing, {}, TrainingPosition(1))
    assert (float(empty.value), empty.tokens, empty.seen) == (0.0, 0, 12)


def test_defaults_are_those_of_bert():
    train = build({"train": {"objective": "masked"}}).train
    assert (train.mlm_probability, train.mask_replace_prob, train.random_replace_prob) == (0.15, 0.8, 0.1)
    assert (train.order, build({}).train.order, build({}).train.objective) == ("shuffled", "contiguous", "causal")
