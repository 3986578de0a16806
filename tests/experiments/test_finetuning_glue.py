"""Fine-tuning on GLUE: the same updates as a loop written here, the same figures as the equations, nothing lost."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_encoder import tiny_encoder, write_cola, write_stsb
from torch.nn import functional as F

import fullrank as fr
from fullrank.config.finetune import GLUE
from fullrank.config.load import build_any
from fullrank.core.errors import InputError
from fullrank.data.padded_batches import ExampleBatches
from fullrank.experiments.finetuning import GlueFinetuning, encode, find_mixing
from fullrank.experiments.pretrained import load_pretrained
from fullrank.training.values import TrainingPosition
from run_files import read_metrics, train_quietly

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with an encoder without dropout, one with, and task files."""
    folder = tmp_path_factory.mktemp("finetuning")
    tiny_encoder(folder / "still", dropout=0.0)
    tiny_encoder(folder / "encoder")
    write_cola(folder / "glue")
    write_stsb(folder / "glue")
    return folder


@pytest.fixture(scope="module")
def finished(files):
    """The folder of a run, and its result."""
    return files / "run", train_quietly(settings(files), files / "run")


def settings(files, name="glue/cola", encoder="encoder", **train):
    return {
        "model": {"pretrained": str(files / encoder), "attention": {"mix": "position_wise"}},
        "data": {"name": name, "dir": str(files / "glue"), "max_length": 32},
        "train": {"batch_size": 8, "epochs": 2, "learning_rate": 1e-3, "mixing_learning_rate": 1e-2, **train},
    }


def test_too_few_tokens_for_a_text(files):
    model = load_pretrained(build_any(settings(files)).model, "classification", num_labels=2)
    with pytest.raises(InputError, match=r"^data\.max_length: at least 3, of which 2 are special .* given 2$"):
        encode(model, [("one sentence",)], 2)


def test_a_run_makes_the_updates_of_a_loop_written_here(files, tmp_path):
    """AdamW with decoupled decay, linear warm-up and decay, clipping, and two rates, from their equations."""
    raw = settings(files, encoder="still", max_grad_norm=0.5, weight_decay=0.1)
    config = build_any(raw)
    train_quietly(raw, tmp_path / "run")
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")

    torch.manual_seed(config.train.seed)
    model = load_pretrained(config.model, "classification", num_labels=2)
    texts, labels = columns_of(config)
    batches = ExampleBatches(encode(model, texts, 32), replace(config.train, batch_size=8))
    parameters = dict(model.model.named_parameters())
    assert {name.rpartition(".")[2] for name in find_mixing(model.model)} == {"from_query", "mixing"}
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}
    per_epoch = batches.batches_per_epoch
    total = 2 * per_epoch
    warm = round(0.1 * total)
    model.model.train()
    for step in range(1, total + 1):
        batch = batches.batch(*divmod(step - 1, per_epoch))
        loss = F.cross_entropy(model.model(**batch.inputs).logits, labels[batch.indices])
        gradients_or_none = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(parameters, gradients_or_none, strict=True) if g is not None}
        norm = torch.sqrt(sum((g**2).sum() for g in gradients.values()))
        scale = min(1.0, 0.5 / (float(norm) + 1e-6))
        share = step / warm if step <= warm else 1 - (step - warm) / (total - warm)
        with torch.no_grad():
            for name, gradient in gradients.items():
                p = parameters[name]
                g = gradient * scale
                rate = share * (1e-2 if ".fullrank." in name else 1e-3)
                decay = 0.0 if p.ndim < 2 or ".fullrank." in name else 0.1
                first[name].lerp_(g, 0.1)
                second[name].lerp_(g * g, 0.001)
                p *= 1 - rate * decay
                p -= rate * (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.999**step)).sqrt() + 1e-8)
    for name, p in parameters.items():
        torch.testing.assert_close(saved[name], p.detach(), rtol=1e-3, atol=2e-5)
    moved = [saved[name] - torch.eye(4) for name in find_mixing(model.model) if "mixing" in name]
    assert torch.stack(moved).abs().max() > 0.01


def columns_of(config):
    train = GlueFinetuning(config).prepare().corpus["train"]
    texts, labels = zip(*train.rows, strict=True)
    return list(texts), torch.tensor(labels)


def test_penalties_reach_the_injected_attention(files):
    task = GlueFinetuning(build_any(settings(files, encoder="still", orthogonality=0.3, overlap=0.02))).prepare()
    task.build(files, torch.device("cpu"))
    for parameter in find_mixing(task.model).values():
        torch.nn.init.normal_(parameter)
    batch = task.batches.batch(0, 0)
    loss = task.objective(batch, {}, TrainingPosition(step=1))
    trace = fr.Trace()
    with fr.traced(trace):
        logits = task.model(**batch.inputs).logits
    plain = F.cross_entropy(logits, task.splits["train"].targets[batch.indices])
    expected = 0.3 * fr.orthogonality(trace) + 0.02 * fr.overlap(trace)
    assert expected > 1
    torch.testing.assert_close(loss.value - plain, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.as_tensor(loss.nll), 8 * plain.detach())  # the figures are without penalties


def test_figures_are_those_of_the_predictions(finished):
    folder, result = finished
    table = np.loadtxt(folder / "predictions-dev.tsv", skiprows=1)
    labels = table[:, 1]
    predictions = table[:, 2]
    assert len(table) == result["final"]["dev"]["examples"] == 24
    assert set(result["final"]) == {"dev"}
    correlation = 0.0 if predictions.std() == 0 else float(np.corrcoef(labels, predictions)[0, 1])
    assert result["final"]["dev"]["matthews_correlation"] == pytest.approx(correlation, abs=1e-12)
    assert result["metrics"] == ["matthews_correlation"]
    assert result["slice"] == {"train": True, "dev": True}
    assert result["steps"] == 2 * 8
    assert result["parameters"]["mixing"] == 2 * (4 * 4 + 4 * 4)  # L (D H + H^2)
    assert result["parameters"]["fresh"] > 0
    assert "matthews_correlation" in read_metrics(folder)[-1]
    assert not (folder / "checkpoints").exists()


def test_a_task_of_numbers_is_regression(files, tmp_path):
    result = train_quietly(settings(files, "glue/stsb", epochs=6, learning_rate=1e-2), tmp_path / "run")
    figures = result["final"]["dev"]
    labels, predictions = np.loadtxt(tmp_path / "run" / "predictions-dev.tsv", skiprows=1, usecols=(1, 2), unpack=True)
    assert figures["loss"] == pytest.approx(float(((labels - predictions) ** 2).mean()), rel=1e-4)
    assert figures["pearson"] == pytest.approx(float(np.corrcoef(labels, predictions)[0, 1]), abs=0.01)
    assert set(figures) == {"pearson", "spearman", "loss", "examples"}


@pytest.mark.parametrize("name", ["mnli", "stsb"])
def test_a_pipeline_names_the_labels_of_the_saved_model(name, tmp_path):
    """The pipeline gives the prediction that the run wrote: a label by its name in the task, for STS-B a number."""
    task = GLUE[name]
    raw = {
        "model": {"pretrained": "random", "attention": {"mix": "position_independent"}},
        "data": {"name": f"glue/{name}", "invented": True, "max_train": 16, "max_eval": 6},
        "train": {"steps": 2, "batch_size": 8, "learning_rate": 1e-2},
    }
    train_quietly(raw, tmp_path / "run")
    rows = [line.split("\t") for line in (tmp_path / "run" / "predictions-dev.tsv").read_text().splitlines()[1:]]
    dev = GlueFinetuning(build_any(raw)).prepare().corpus["dev"]
    texts = [dict(zip(("text", "text_pair"), sentences, strict=False)) for sentences, _ in dev.rows]
    model = fr.load_injected(tmp_path / "run" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    classify = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    for text, row in zip(texts, rows, strict=True):
        answer = classify(text)
        if task.labels is None:
            assert answer["score"] == pytest.approx(float(row[2]), rel=1e-4)
        else:
            assert answer["label"] == task.labels[int(row[2])]
