"""Models that end in a mixture of softmaxes: losses, decoding, files, memory, training in parts, on two processes, compiled."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mixture_equations as equations
import pytest
import torch
from mixture_equations import DOUBLE
from torch import Tensor, nn

import fullrank as fr
from fullrank.decoding import beam_search, sample

V, E = 13, 8
OUTPUTS: dict[str, dict[str, Any]] = {
    "plain": {"mixtures": 3},
    "tied": {"mixtures": 3, "tied": True, "bias": True},
    "sigsoftmax": {"mixtures": 2, "normalize": "sigsoftmax", "epsilon": 1e-8},
    "adaptive": {"mixtures": 2, "components": "adaptive", "tied": True},
}
CLUSTERS = {"kind": "adaptive", "cutoffs": [4, 8], "div_val": 2}
outputs = pytest.mark.parametrize("output", OUTPUTS)
of_one_matrix = pytest.mark.parametrize("output", ["plain", "tied", "sigsoftmax"])


def model(output: str, *, seed: int = 1, **changes: Any) -> fr.LanguageModel:
    """Away from its start, where priors and latents hardly differ."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": V, "hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": 2,
        "input": fr.InputConfig(**CLUSTERS if output == "adaptive" else {}),
        "output": fr.OutputConfig(kind="mixture_of_softmaxes", **OUTPUTS[output]),
    }  # fmt: skip
    made = fr.LanguageModel(fr.ModelConfig(**settings | changes)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


def batch(rows: int = 4, length: int = 6) -> tuple[Tensor, Tensor]:
    ids = torch.randint(V, (rows, length + 1))
    return ids[:, :-1], ids[:, 1:]


def log_prob(made: fr.LanguageModel, hidden: Tensor) -> Tensor:
    """From the equation, with the model's own parameters."""
    tensors, options = dict(made.output.named_parameters()), made.config.output
    if options.tied:
        tensors["weight"] = made.embedding.weight
    found = equations.probabilities(tensors, hidden.flatten(0, 1), options.mixtures, options.normalize)
    return (found + options.epsilon).log().view(*hidden.shape[:2], -1)


def gradients(made: nn.Module, value: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    value.backward(retain_graph=True)
    return {name: parameter.grad.clone() for name, parameter in made.named_parameters()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        equations.close(name, found[name], tensor, tolerance, 1e-2)


@of_one_matrix
@pytest.mark.parametrize("training", [False, True])
def test_nll_loss_and_logits_are_those_of_the_equation(output: str, training: bool) -> None:
    """And the gradient of every parameter of the model; a tied matrix gets both of its own."""
    made, (read, targets) = model(output).train(training), batch()
    logs = log_prob(made, made.hidden(read)[0])
    weights = torch.rand(read.shape)
    weights[1, 2:] = 0
    assert torch.allclose(made(read).logits, logs, atol=1e-12)
    each = -logs.gather(-1, targets[..., None]).squeeze(-1)
    found = made.nll(read, targets)
    assert torch.allclose(found.per_token, each, atol=1e-12)
    same(gradients(made, found.per_token.square().sum()), gradients(made, each.square().sum()))
    for smoothing, share in itertools.product((0.0, 0.1), (None, weights)):
        expected = equations.mean_loss(logs, targets, share, smoothing)
        parts = made.loss_parts(read, targets, share, label_smoothing=smoothing)
        assert abs(float((parts.loss - expected).detach())) < 1e-12
        assert abs(float(parts.nll - equations.mean_loss(logs, targets, share, 0.0).detach())) < 1e-12
        same(gradients(made, parts.loss), gradients(made, expected))


@outputs
def test_losses_agree_with_the_logits(output: str) -> None:
    made, (read, targets) = model(output), batch()
    logs = made(read).logits
    sums = logs.detach().exp().sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-6)
    for smoothing in (0.0, 0.1):
        expected = equations.mean_loss(logs, targets, None, smoothing)
        loss = made.loss(read, targets, label_smoothing=smoothing)
        assert abs(float((loss - expected).detach())) < 1e-12
        same(gradients(made, loss), gradients(made, expected))
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients(made, made.nll(read, targets).per_token.sum()).values()
               if gradient.dim() > 1)  # fmt: skip


# -- decoding ---------------------------------------------------------------------------------------------------------


@of_one_matrix
def test_samples_are_drawn_from_the_mixture(output: str) -> None:
    made, prompt = model(output).eval(), torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        expected = log_prob(made, made.hidden(prompt)[0])[0, -1].exp()
    found = sample(made, prompt.expand(3000, 3), max_new_tokens=1, seed=5)
    counts = torch.bincount(found.ids[:, 0], minlength=V).double()
    assert float(((counts - 3000 * expected).abs() / (3000 * expected * (1 - expected)).sqrt()).max()) < 4.5
    assert torch.allclose(found.log_probs[:, 0], expected.log()[found.ids[:, 0]], atol=1e-6)


@outputs
def test_a_cache_changes_nothing(output: str) -> None:
    made, prompts = model(output).eval(), torch.randint(V, (2, 4))
    kept, reread = (sample(made, prompts, max_new_tokens=6, seed=2, use_cache=cached) for cached in (True, False))
    assert torch.equal(kept.ids, reread.ids)
    assert torch.allclose(kept.log_probs, reread.log_probs, atol=1e-12)
    whole = torch.cat((prompts, kept.ids), 1)
    with torch.no_grad():
        logs = made(whole[:, :-1]).logits[:, 3:]
        assert torch.allclose(logs.gather(-1, kept.ids[..., None]).squeeze(-1), kept.log_probs, atol=1e-6)
    kept, reread = (beam_search(made, prompts, beams=3, max_new_tokens=5, use_cache=cached) for cached in (True, False))
    assert torch.equal(kept.ids, reread.ids)
    assert torch.allclose(kept.log_probs, reread.log_probs, atol=1e-12)


@outputs
def test_beam_search_finds_the_best_text(output: str) -> None:
    """As wide as there are texts, it finds what counting every text finds; its sums are those of the nll."""
    made = model(output).eval()
    found = beam_search(made, torch.tensor([[3]]), beams=V, max_new_tokens=2, eos_id=None, length_penalty=0.0)
    pairs = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    texts = torch.cat((torch.full((V * V, 1), 3), pairs), 1)
    with torch.no_grad():
        total = made.nll(texts[:, :-1], texts[:, 1:]).per_token.sum(1)
    assert found.ids[0, 0].tolist() == pairs[int(total.argmin())].tolist()
    assert abs(float(found.log_probs[0, 0] + total.min())) < 1e-6


# -- files and memory -------------------------------------------------------------------------------------------------


@outputs
def test_saved_once_and_loaded(output: str, tmp_path: Path) -> None:
    made, (read, targets) = model(output), batch()
    made.save(tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        names = json.loads(file.read(int.from_bytes(file.read(8), "little"))).keys() - {"__metadata__"}
    assert names == dict(made.named_parameters()).keys()
    assert {name for name in names if ".mixture." in name} == {
        f"output.mixture.{name}" for name in ("latent.weight", "latent.bias", "prior.weight")
    }
    loaded = fr.LanguageModel.load(tmp_path)
    assert loaded.config == made.config
    with torch.no_grad():
        assert torch.equal(loaded(read).logits, made.eval()(read).logits)
    found, expected = (gradients(each, each.loss(read, targets)) for each in (loaded, made))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())  # what is tied is tied again


@outputs
def test_memory_of_segments(output: str) -> None:
    """Segments after one another, each with the memory of all before it, are one pass."""
    made, (read, targets) = model(output, memory_length=12).eval(), batch(2, 12)
    changed = made.with_memory(0), torch.no_grad()
    whole = changed.nll(read, targets).per_token
    logits = changed(read).logits
    memory, parts, seen, losses = None, [], [], []
    for start, end in itertools.pairwise([0, 5, 6, 12]):
        now = slice(start, end)
        found = made.nll(read[:, now], targets[:, now], memory)
        losses.append(made.loss(read[:, now], targets[:, now], None, memory).detach() * (end - start))
        out = made(read[:, now], memory)
        parts.append(found.per_token.detach())
        seen.append(out.logits.detach())
        memory = found.memory
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-12)
    assert torch.allclose(torch.cat(seen, 1), logits, atol=1e-12)
    assert torch.allclose(torch.stack(losses).sum() / 12, whole.mean(), atol=1e-12)


@outputs
def test_a_call_without_tokens(output: str) -> None:
    assert model(output).eval()(torch.zeros(2, 0, dtype=torch.int64)).logits.shape == (2, 0, V)


@outputs
def test_what_is_derived_from_the_configuration(output: str) -> None:
    """Built without numbers, it has the shapes of the real one."""
    made = model(output)
    with torch.device("meta"):
        imagined = fr.LanguageModel(made.config)
    assert {n: t.shape for n, t in imagined.state_dict().items()} == {n: t.shape for n, t in made.state_dict().items()}
    assert made.output.flops_per_token() > 0


# -- training ---------------------------------------------------------------------------------------------------------


@outputs
def test_two_small_batches_are_one(output: str) -> None:
    made, (read, targets) = model(output), batch()
    expected = gradients(made, made.loss(read, targets, label_smoothing=0.1))
    made.zero_grad()
    for half in (slice(0, 2), slice(2, 4)):
        (made.loss(read[half], targets[half], label_smoothing=0.1) / 2).backward()
    same({name: parameter.grad for name, parameter in made.named_parameters()}, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("output", ["tied", "adaptive"])
def test_beside_compiled_blocks(output: str) -> None:
    torch._dynamo.reset()
    eager, compiled, (read, targets) = model(output), model(output), batch()
    for block in compiled.compile_targets():
        block.compile(backend="aot_eager")
    for run in (
        lambda made: made.loss(read, targets), lambda made: made.nll(read, targets).per_token.square().sum(),
        lambda made: made(read).logits[..., 0].sum(),
    ):  # fmt: skip
        same(gradients(compiled, run(compiled)), gradients(eager, run(eager)))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("output", ["plain", "adaptive"])
def test_a_model_compiled_as_a_whole(output: str) -> None:
    """The output layer breaks the graph, and is right."""
    torch._dynamo.reset()
    made, (read, _) = model(output).eval(), batch()
    compiled = torch.compile(made, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(read).logits, made(read).logits, atol=1e-12)


def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    """DistributedDataParallel over gloo, half a batch each: the mean of both is the gradient of the whole, ties included."""
    read, targets = batch()
    torch.save((read, targets), tmp_path / "batch.pt")
    for output in OUTPUTS:
        model(output).save(tmp_path / output)
    worker = Path(__file__).with_name("mixture_worker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(tmp_path)], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    for output in OUTPUTS:
        made = model(output)
        found = [torch.load(tmp_path / f"{output}-{rank}.pt") for rank in range(2)]
        for smoothing in (0.0, 0.1):
            expected = gradients(made, made.loss(read, targets, label_smoothing=smoothing))
            for rank in range(2):
                same(found[rank][smoothing], expected)


# -- the layer on the states of other models --------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens", ["some", "padded"])
def test_as_head_of_a_masked_language_model_or_a_decoder(tokens: str, smoothing: float) -> None:
    """Weights say which positions count: any of them, or those before the padding; the others have no gradient."""
    torch.manual_seed(3)
    config = fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=3)
    layer = fr.MixtureOfSoftmaxes(config, vocab_size=V, hidden_size=E).double()
    states = torch.randn(3, 7, E, dtype=DOUBLE, requires_grad=True)
    if tokens == "some":
        kept = torch.rand(3, 7) < 0.3
        kept[0] = False  # a text without a mask
    else:
        kept = torch.arange(7) < torch.tensor([[7], [1], [4]])
    assert 0 < int(kept.sum()) < 21
    targets = torch.where(kept, torch.randint(V, (3, 7)), 0)
    loss, nll = layer.loss(states, targets, kept.double(), smoothing)
    chosen = states[kept]
    logs = equations.probabilities(dict(layer.named_parameters()), chosen, 3).log()
    expected = equations.mean_loss(logs, targets[kept], None, smoothing)
    assert abs(float((loss - expected).detach())) < 1e-12
    assert abs(float(nll - equations.mean_loss(logs, targets[kept], None, 0.0).detach())) < 1e-12
    leaves = [states, *layer.parameters()]
    found = torch.autograd.grad(loss, leaves)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, retain_graph=True), strict=True):
        equations.close("gradient", one, other, 1e-11)
    assert torch.equal(found[0][~kept], torch.zeros_like(found[0][~kept]))
    each = layer.nll(states, targets)[kept]
    assert torch.allclose(each, -logs.gather(1, targets[kept][:, None]).squeeze(1), atol=1e-12)
    alone = layer.nll(chosen[None], targets[kept][None])[0]  # gathered first, as a masked head may do
    assert torch.allclose(alone, each, atol=1e-12)
