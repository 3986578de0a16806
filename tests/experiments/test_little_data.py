"""The policies for little data of `examples/little_data.py`, each against its equation."""

import dataclasses
import shutil
from copy import deepcopy

import pytest
import torch
from examples.little_data import Distillation, measure_dynamic, score_segments
from test_memory_training import MODEL, PLAIN, configuration, trained
from test_memory_training import text as text
from test_objective import batch as batch
from torch.nn import functional as F

import fullrank as fr
from fullrank.analysis.size import parameters_by_part
from fullrank.config.load import build
from fullrank.config.run import TrainConfig
from fullrank.core.errors import ConfigError, InputError
from fullrank.data.batches import Streams
from fullrank.experiments.language_model import CausalObjective
from fullrank.experiments.task import begin_pass
from fullrank.seal import read_identity
from fullrank.training.device import begin_draws, end_draws
from fullrank.training.values import TrainingPosition
from moving import narrow
from run_files import resume

# -- value residuals ---------------------------------------------------------------------------------------------------


def residual_model(norm="pre", **changes):
    changes |= {"head_dim": 5, "num_hidden_layers": 3, "position": "sinusoidal", "parts": {"value_residual": {}}}
    return narrow(norm=norm, **changes)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_values_take_a_share_of_the_first_layers(norm):
    """V' = (1 - a) V + a V_1 in every layer after the first, whose inputs and outputs are taken from the running model."""
    model = residual_model(norm)
    seen = list[tuple[torch.Tensor, torch.Tensor]]()
    for block in model.blocks:
        block.attention.project.value.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0], out)))
    model(torch.randint(11, (1, 9)))
    shares = model.parts["value_residual"].shares
    assert {*shares} == {"1", "2"}
    first = seen[0][1]
    for number, (block, (x, values)) in enumerate(zip(model.blocks, seen, strict=True)):
        layer = block.attention.project.value
        alone = F.linear(x, layer.weight, layer.bias)
        share = shares[str(number)] if number else 0.0
        torch.testing.assert_close(values, (1 - share) * alone + share * first, rtol=0, atol=1e-12)
        assert number == 0 or (values - alone).abs().max() > 1e-2


def test_kept_values_follow_the_first_layers_parameters():
    """Keys and values that a memory keeps are made anew when the first layer's projection has changed."""
    model = residual_model(memory_length=8)
    ids = torch.randint(11, (2, 10))
    with torch.no_grad():
        memory = model(ids[:, :5]).memory
        model.blocks[0].attention.project.value.weight.mul_(-1.5)
        logits = model(ids[:, 5:], memory).logits
        plain = memory.from_tensors(memory.to_tensors())  # the same hidden states without keys and values
        assert torch.allclose(logits, model(ids[:, 5:], plain).logits, rtol=1e-12, atol=1e-12)


# -- parts that only training has ---------------------------------------------------------------------------------------


def tied(kind, **options):
    return narrow(vocab_size=13, output={"kind": kind, "tied": True, **options}).train()


@pytest.mark.parametrize(("kind", "options"), [("softmax", {}), ("mixture_of_softmaxes", {"mixtures": 3})])
def test_past_decode_is_its_equation(kind, options, batch):
    """A loop over tokens after two of context; gradients of all parameters, also of those that only training has."""
    model = tied(kind, **options)
    batch = dataclasses.replace(batch, inputs=torch.cat((torch.randint(13, (3, 2)), batch.inputs), 1))
    plain = CausalObjective(model, TrainConfig())(batch, {}, TrainingPosition(step=1)).value
    objective = CausalObjective(model, TrainConfig(parts={"past_decode": {"coefficient": 0.7}}))
    with torch.no_grad():
        for parameter in model.get_submodule("past_decode").parameters():
            parameter.copy_(torch.randn_like(parameter))
    loss = objective(batch, {}, TrainingPosition(step=1)).value - plain
    table = model.get_parameter("embedding.weight")
    extra = dict(model.get_submodule("past_decode").named_parameters())
    p = model(batch.inputs).logits.softmax(-1)
    losses = []
    for row, column in (batch.weights == 1).nonzero().tolist():
        mean_embedding = sum(p[row, 2 + column, v] * table[v] for v in range(13))
        scores = table @ torch.tanh(extra["weight"] @ mean_embedding + extra["shift"]) + extra["bias"]
        losses.append(scores.logsumexp(0) - scores[batch.inputs[row, 2 + column]])
    expected = 0.7 * torch.stack(losses).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [
        torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True) for value in (loss, expected)
    ]
    for (name, _), gradient, expected_gradient in zip(model.named_parameters(), *gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-8, atol=1e-11, msg=name)
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients[0][-3:])


def test_parts_of_training_are_not_saved_with_the_model(tmp_path):
    names = set(tied("softmax").state_dict())
    model = tied("softmax")
    count = parameters_by_part(model)
    CausalObjective(model, TrainConfig(parts={"past_decode": {}, "input_mask": {}}))
    assert len(list(model.parameters())) == len(list(tied("softmax").parameters())) + 4
    assert set(model.state_dict()) == names
    assert parameters_by_part(model) == count
    model.save(tmp_path)
    assert set(fr.LanguageModel.load(tmp_path).state_dict()) == names


def masked_inputs(model, batch, number=1):
    """Where the inputs (B, N) of a pass are the learned vector; elsewhere they are the embeddings of the tokens."""
    seen = []
    handle = model.embedding.register_forward_hook(lambda _, __, vectors: seen.append(vectors))
    begin_draws(3, number)
    begin_pass(TrainConfig(), batch)
    model.hidden(batch.inputs)
    end_draws()
    handle.remove()
    table = model.get_parameter("embedding.weight")[batch.inputs] * model.embedding.scale
    masked = (seen[0] != table).any(-1)
    assert (seen[0][masked] == model.input_mask.vector).all()
    return masked


def test_masked_inputs_are_a_learned_vector_and_targets_stay(batch):
    model = tied("softmax")
    objective = CausalObjective(model, TrainConfig(parts={"input_mask": {"probability": 0.4}}, seed=3))
    masked = masked_inputs(model, batch)
    assert 0 < masked.sum() < masked.numel()
    begin_draws(3, 1)
    loss = objective(batch, {}, TrainingPosition(step=1))
    end_draws()
    # the same model, with m as a further entry of its table
    config = dataclasses.replace(model.config, vocab_size=14)
    longer = fr.LanguageModel(config).double()
    state = dict(model.state_dict())
    state["embedding.weight"] = torch.cat((state["embedding.weight"], model.input_mask.vector[None].detach()))
    longer.load_state_dict(state)
    logits = longer(batch.inputs.masked_fill(masked, 13)).logits[..., :13]
    counted = batch.weights.bool()
    expected = F.cross_entropy(logits[counted], batch.targets[counted])
    torch.testing.assert_close(loss.value, expected, rtol=1e-12, atol=1e-12)
    loss.value.backward()
    assert model.input_mask.vector.grad.abs().max() > 1e-6
    model.eval()
    assert not masked_inputs(model, batch).any()


# -- distillation ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "elder"
    trained(folder, configuration(text, steps=3))
    return folder


def taught(text, teacher, model=MODEL, **options):
    return configuration(
        text, model, steps=10, parts={"distill": {"run": str(teacher), "weight": 0.25, "temperature": 2.0}}, **options
    )


@pytest.mark.parametrize("memory", [8, pytest.param(0, marks=pytest.mark.full)], ids=["memory", "context"])
def test_the_loss_has_a_share_of_the_teachers_cross_entropy(memory, text, teacher, tmp_path, monkeypatch):
    """0.75 CE(targets, p) + 0.25 T^2 CE(q_T, p_T) of both models by themselves, batch after batch, in fp64."""
    if memory == 0:
        teacher = tmp_path / "elder"
        trained(teacher, configuration(text, PLAIN, steps=2))
    vocabulary = fr.LanguageModel.load(teacher).config.vocab_size
    plain = {"dropout": {}, "attention": {"score": "relative"}, "memory_length": memory, "vocab_size": vocabulary}
    config = build(taught(text, teacher, {**MODEL, **plain}, **({} if memory else {"context": 3})))
    identity = read_identity(teacher)
    identity["parts"] = {"distill": Distillation.identify(identity, run=str(teacher))}
    student = fr.LanguageModel(config.model).double().train()
    objective = CausalObjective(student, config.train, identity)
    teacher_model = objective.parts["distill"].model.double()
    monkeypatch.setattr(Distillation, "CHUNK", 5)  # in the middle of a row
    ids = torch.randint(vocabulary, (240,), generator=torch.Generator().manual_seed(2)).numpy()
    streams = Streams(ids, TrainConfig(batch_size=3, segment_length=8, context=config.train.context), 0)
    carry = {}
    memories = [None, None]
    for step in range(4):
        batch = streams.batch(0, step)
        loss = objective(batch, carry, TrainingPosition(step + 1))
        carry = loss.carry
        logits = []
        for i, model in enumerate((student, teacher_model)):
            output = model(batch.inputs, memories[i])
            memories[i] = output.memory
            logits.append(output.logits[:, -batch.targets.shape[1] :].flatten(0, 1))
        weights = torch.ones_like(batch.targets) if batch.weights is None else batch.weights
        hard = F.cross_entropy(logits[0], batch.targets.flatten(), reduction="none")
        soft = 4 * F.cross_entropy(logits[0] / 2, torch.softmax(logits[1] / 2, -1), reduction="none")
        expected = ((0.75 * hard + 0.25 * soft) * weights.flatten()).sum() / weights.sum()
        assert torch.allclose(loss.value, expected, rtol=1e-12)
        assert torch.allclose(torch.as_tensor(loss.nll), (hard * weights.flatten()).sum(), rtol=1e-12)
    assert any(name.startswith("distill.") for name in carry) == bool(memory)
    assert not any(parameter.requires_grad for parameter in teacher_model.parameters())


def test_teachers_that_are_refused(text, teacher, tmp_path):
    unfinished = tmp_path / "unfinished"
    trained(unfinished, configuration(text, steps=2))
    (unfinished / "result.json").unlink()
    valid = taught(text, teacher)
    for raw, message in (
        (taught(text, unfinished), "not finished"),
        ({**valid, "data": {**valid["data"], "tokens": "character"}}, "another vocabulary"),
        (taught(text, teacher, PLAIN, context=4), "train.order has to be contiguous"),
    ):
        with pytest.raises(InputError, match=message):
            trained(tmp_path / "run", raw)


def test_a_run_goes_on_with_the_teacher_that_it_began_with(text, teacher, tmp_path):
    elder = shutil.copytree(teacher, tmp_path / "elder", symlinks=True)
    trained(tmp_path / "run", taught(text, elder))
    (tmp_path / "run" / "result.json").unlink()
    shutil.rmtree(elder)
    trained(elder, configuration(text, steps=2, seed=2))
    with pytest.raises(InputError, match="elder was changed after this training began"):
        resume(tmp_path / "run", quiet=True)


def test_parts_are_checked_by_name_and_option():
    for section, name, message in (
        ("train", "inputmask", r"train\.parts\.inputmask: 'inputmask' is not available; did you mean 'input_mask'"),
        ("model", "residual", r"model\.parts\.residual: 'residual' is not available"),
    ):
        with pytest.raises(ConfigError, match=message):
            build({section: {"parts": {name: {}}}})
    with pytest.raises(ConfigError, match=r"train\.parts\.input_mask: probability at least 0 and below 1, given 2"):
        build({"train": {"parts": {"input_mask": {"probability": 2}}}})


# -- dynamic evaluation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_length", [0, 6])
def test_dynamic_evaluation_is_its_equation(memory_length):
    """Segments by hand, from logits; a score does not depend on later tokens, and the parameters come back."""
    model = fr.LanguageModel(
        fr.ModelConfig(vocab_size=13, hidden_size=12, num_attention_heads=3, num_hidden_layers=2, memory_length=memory_length,
                       position="relative", attention=fr.AttentionConfig(score="relative"))
    ).double()  # fmt: skip
    ids = torch.randint(13, (31,))
    before = deepcopy(model.state_dict())
    scores = score_segments(model, fr.Text.from_ids(ids, 7), 0.3, 0.2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    by_hand, original = deepcopy(model), deepcopy(model)
    memory = None
    expected = []
    for start in range(0, 30, 7):
        piece = ids[None, start : start + 8]
        output = by_hand(piece[:, :-1], memory)
        memory = output.memory
        nll = F.cross_entropy(output.logits[0], piece[0, 1:], reduction="none")
        expected.append(nll.detach())
        gradients = torch.autograd.grad(nll.mean(), list(by_hand.parameters()), materialize_grads=True)
        for parameter, origin, gradient in zip(by_hand.parameters(), original.parameters(), gradients, strict=True):
            parameter.data = parameter.data + 0.2 * (origin.data - parameter.data) - 0.3 * gradient
    torch.testing.assert_close(scores, torch.cat(expected), rtol=1e-9, atol=1e-12)
    changed = ids.clone()
    changed[20] = (changed[20] + 1) % 13
    again = score_segments(model, fr.Text.from_ids(changed, 7), 0.3, 0.2)
    assert torch.equal(again[:19], scores[:19])
    assert not torch.equal(again[21:], scores[21:])
    static, dynamic = measure_dynamic(fr.open_model(model), fr.Text.from_ids(ids, 7), rate=0.3, decay=0.2)
    assert dynamic.value == pytest.approx(float(scores.mean().exp()))
    assert static.value == pytest.approx(float(score_segments(model, fr.Text.from_ids(ids, 7), 0, 0).mean().exp()))
