"""The training objective: nll, label smoothing and penalties, against what they are made of."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import fullrank as fr
from fullrank.config.training import TrainConfig
from fullrank.data.batches import Batch, Blocks
from fullrank.evaluation.perplexity import EvaluationProtocol
from fullrank.experiments.language_model import CausalObjective
from fullrank.experiments.measure import measure
from fullrank.training import TrainingPosition


@pytest.fixture
def model() -> fr.LanguageModel:
    attention = fr.AttentionConfig(mix="position_wise")
    sizes = {"vocab_size": 13, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
    found = fr.LanguageModel(fr.ModelConfig(**sizes, attention=attention)).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return found


@pytest.fixture
def batch() -> Batch:
    weights = torch.ones(3, 7)
    weights[2, 4:] = 0
    return Batch(torch.randint(13, (3, 7)), torch.randint(13, (3, 7)), weights)


def test_value_nll_and_tokens(model: fr.LanguageModel, batch: Batch) -> None:
    logits, kept = model(batch.inputs).logits, batch.weights.bool()  # type: ignore[union-attr]
    smoothed = F.cross_entropy(logits[kept], batch.targets[kept], label_smoothing=0.1)
    plain = F.cross_entropy(logits[kept], batch.targets[kept], reduction="sum")
    loss = CausalObjective(model, TrainConfig(label_smoothing=0.1))(batch, {}, TrainingPosition(step=1))
    torch.testing.assert_close(loss.value, smoothed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.as_tensor(loss.nll), plain, rtol=1e-12, atol=1e-12)
    assert loss.tokens == int(kept.sum())


def test_penalties_are_added_with_their_coefficients(model: fr.LanguageModel, batch: Batch) -> None:
    trace = fr.Trace()
    model(batch.inputs, trace=trace)
    plain = CausalObjective(model, TrainConfig())(batch, {}, TrainingPosition(step=1)).value
    both = CausalObjective(model, TrainConfig(orthogonality=0.3, overlap=0.02))(
        batch, {}, TrainingPosition(step=1)
    ).value
    expected = 0.3 * fr.orthogonality(trace) + 0.02 * fr.overlap(trace)
    assert expected > 1e-3
    torch.testing.assert_close(both - plain, expected, rtol=1e-9, atol=1e-12)


def test_orthogonality_in_training_pulls_mixing_to_orthogonal_matrices(model: fr.LanguageModel, batch: Batch) -> None:
    objective = CausalObjective(model, TrainConfig(orthogonality=1.0))
    before = fr.orthogonality(model).item()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        objective(batch, {}, TrainingPosition(step=1)).value.backward()
        optimizer.step()
    assert fr.orthogonality(model).item() < 0.2 * before


def test_evaluation_is_in_evaluation_mode_and_leaves_the_model_as_it_was(model: fr.LanguageModel) -> None:
    model.embedding_dropout.p = 0.5
    model.train()
    ids = torch.randint(13, (18,)).numpy()
    protocol = EvaluationProtocol(kind="blocks", segment_length=7)
    found = [measure(model, ids, protocol, batch_size=3, start_id=0) for _ in range(2)]
    assert found[0].nll == found[1].nll
    assert model.training
    batch = Blocks(ids, batch_size=3, segment_length=7, start_id=0).batch(0, 0)
    kept = batch.weights.bool()  # type: ignore[union-attr]
    expected = F.cross_entropy(model.eval()(batch.inputs).logits[kept], batch.targets[kept], reduction="sum")
    assert found[0].nll == pytest.approx(expected.item(), rel=1e-12)
    assert found[0].tokens == int(kept.sum()) == 18
