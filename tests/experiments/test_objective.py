"""The training objective: nll, label smoothing and penalties, against what they are made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fullrank as fr
from fullrank.config.training import TrainConfig
from fullrank.data.batches import Batch, Blocks, Part
from fullrank.evaluation.perplexity import EvaluationProtocol
from fullrank.experiments.measure import measure
from fullrank.experiments.objective import CausalObjective
from fullrank.experiments.task import place_draws
from fullrank.training import TrainingPosition
from fullrank.training.randomness import begin_draws, end_draws


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


# -- parts that only training has ---------------------------------------------------------------------------------------


def tied(kind: str, **options: Any) -> fr.LanguageModel:
    sizes = {"vocab_size": 13, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
    output = fr.OutputConfig(kind=kind, tied=True, **options)
    found = fr.LanguageModel(fr.ModelConfig(**sizes, output=output)).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return found


@pytest.mark.parametrize(("kind", "options"), [("softmax", {}), ("mixture_of_softmaxes", {"mixtures": 3})])
def test_past_decode_is_its_equation(kind: str, options: dict[str, Any], batch: Batch) -> None:
    """A loop over tokens after two of context; gradients of all parameters, those that only training has included."""
    model = tied(kind, **options)
    batch = dataclasses.replace(batch, inputs=torch.cat((torch.randint(13, (3, 2)), batch.inputs), 1))
    plain = CausalObjective(model, TrainConfig())(batch, {}, TrainingPosition(step=1)).value
    objective = CausalObjective(model, TrainConfig(past_decode=0.7))
    with torch.no_grad():
        for parameter in model.past_decode.parameters():  # type: ignore[union-attr]
            parameter.copy_(torch.randn_like(parameter))
    found = objective(batch, {}, TrainingPosition(step=1)).value - plain
    table, extra = model.get_parameter("embedding.weight"), dict(model.past_decode.named_parameters())  # type: ignore[union-attr]
    p = model(batch.inputs).logits.softmax(-1)
    each = []
    for row, column in (batch.weights == 1).nonzero().tolist():  # type: ignore[union-attr]
        expected = sum(p[row, 2 + column, v] * table[v] for v in range(13))
        scores = table @ torch.tanh(extra["weight"] @ expected + extra["shift"]) + extra["bias"]
        each.append(scores.logsumexp(0) - scores[batch.inputs[row, 2 + column]])
    right = 0.7 * torch.stack(each).mean()
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
    leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
    both = [torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True) for loss in (found, right)]
    for (name, _), one, other in zip(model.named_parameters(), *both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11, msg=name)
    assert all(gradient.abs().max() > 1e-4 for gradient in both[0][-3:])


def masked_inputs(model: fr.LanguageModel, batch: Batch, number: int = 1, part: Part | None = None) -> torch.Tensor:
    """Which inputs (B, N) of a pass were replaced by the learned vector, all others being as they were."""
    seen: list[torch.Tensor] = []
    handle = model.embedding.register_forward_hook(lambda _, __, vectors: seen.append(vectors))
    begin_draws(3, number)
    place_draws(part, len(batch.inputs))
    model.hidden(batch.inputs)
    end_draws()
    handle.remove()
    table = model.get_parameter("embedding.weight")[batch.inputs] * model.embedding.scale
    masked = (seen[0] != table).any(-1)
    assert (seen[0][masked] == model.input_mask.vector).all()  # type: ignore[union-attr]
    return masked


def test_masked_inputs_are_a_learned_vector_and_targets_stay(batch: Batch) -> None:
    model = tied("softmax")
    objective = CausalObjective(model, TrainConfig(input_mask=0.4, seed=3))
    masked = masked_inputs(model, batch)
    assert 0 < masked.sum() < masked.numel()
    begin_draws(3, 1)
    loss = objective(batch, {}, TrainingPosition(step=1))
    end_draws()
    # the same model, with m as a further entry of its table
    config = dataclasses.replace(model.config, vocab_size=14)
    longer = fr.LanguageModel(config).double()
    state = dict(model.state_dict())
    state["embedding.weight"] = torch.cat((state["embedding.weight"], model.input_mask.vector[None].detach()))  # type: ignore
    longer.load_state_dict(state)
    logits = longer(batch.inputs.masked_fill(masked, 13)).logits[..., :13]
    kept = batch.weights.bool()  # type: ignore[union-attr]
    right = F.cross_entropy(logits[kept], batch.targets[kept])
    torch.testing.assert_close(loss.value, right, rtol=1e-12, atol=1e-12)
    loss.value.backward()
    assert model.input_mask.vector.grad.abs().max() > 1e-6  # type: ignore[union-attr]
    model.eval()
    assert not masked_inputs(model, batch).any()
