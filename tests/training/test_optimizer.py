"""Optimizers against their equations, and what weight decay may not touch."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from training_toy import Toy

import fullrank as fr
from fullrank.config.run import RunConfig, TrainConfig
from fullrank.experiments.language_model import LanguageModelTask
from fullrank.training.optimizer import make_optimizer, parameter_groups

GRADIENTS = torch.randn(6, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
RATES = [0.1, 0.1, 0.05, 0.2, 0.2, 0.01]  # a schedule: equations must hold while the rate changes
MU = 0.9
DECAY = 0.3
BETAS = (0.8, 0.95)
EPS = 1e-3

ON_A_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def sgd(p, state, g, lr, t):
    state["v"] = MU * state["v"] + g + DECAY * p
    return p - lr * state["v"]


def fairseq_nag(p, state, g, lr, t):
    """fairseq's form: a velocity that carries the rate and is corrected when the rate changes."""
    g = g + DECAY * p
    correct = lr / RATES[max(t - 2, 0)]
    p = p + MU * MU * correct * state["w"] - (1 + MU) * lr * g
    state["w"] = MU * correct * state["w"] - lr * g
    return p


def adam(p, state, g, lr, t, decay=DECAY):
    g = g + decay * p
    state["m"] = BETAS[0] * state["m"] + (1 - BETAS[0]) * g
    state["s"] = BETAS[1] * state["s"] + (1 - BETAS[1]) * g * g
    return p - lr * (state["m"] / (1 - BETAS[0] ** t)) / ((state["s"] / (1 - BETAS[1] ** t)).sqrt() + EPS)


def adamw(p, state, g, lr, t):
    return adam(p - lr * DECAY * p, state, g, lr, t, decay=0.0)


def muon(p, state, g, lr, t):
    """Newton-Schulz steps as what they do to singular values: s -> a s + b s^3 + c s^5, with the numbers of Jordan et al."""
    state["v"] = MU * state["v"] + (1 - MU) * g
    u, s, v = torch.linalg.svd((1 - MU) * g + MU * state["v"], full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return p - lr * DECAY * p - 0.2 * math.sqrt(max(p.shape)) * lr * u @ s.diag() @ v


EQUATIONS = {"sgd": sgd, "nag": fairseq_nag, "adam": adam, "adamw": adamw, "muon": muon}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def follow(layer, optimizer, equation):
    """The weight that the equation gives after each update that the optimizer has made."""
    expected = layer.weight.detach().clone()
    state = {key: torch.zeros_like(expected) for key in "vwms"}
    for t, (gradient, rate) in enumerate(zip(GRADIENTS, RATES, strict=True), start=1):
        layer.weight.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        expected = equation(expected, state, gradient, rate, t)
        yield expected


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("name", EQUATIONS)
def test_every_optimizer_follows_its_equation(name, skipped):
    """Also for a layer without a gradient at the first step, whose updates count from the second on."""
    layer, other = (nn.Linear(2, 5, bias=False, dtype=torch.float64) for _ in range(2))
    options = TrainConfig(steps=1, optimizer=name, momentum=MU, betas=BETAS, eps=EPS, weight_decay=DECAY)
    groups = parameter_groups(nn.ModuleList([layer, other]), DECAY, muon=name == "muon")
    optimizer = make_optimizer(groups, options)
    if skipped:
        other.weight.grad = GRADIENTS[0].clone()
        optimizer.step()
    for expected in follow(layer, optimizer, EQUATIONS[name]):
        torch.testing.assert_close(layer.weight.detach(), expected, **CLOSE)


def test_a_parameter_can_be_marked_itself_and_a_tied_one_is_spared_if_any_owner_says_so():
    model = Toy()
    model.inner.weight.no_weight_decay = True
    model.output.no_weight_decay = True
    groups = parameter_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.0]


def test_muon_takes_matrices_inside_blocks_and_adamw_the_rest():
    attention = fr.AttentionConfig(score="relative", mix="position_wise")
    sizes = {"vocab_size": 13, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = fr.LanguageModel(fr.ModelConfig(**sizes, position="relative", attention=attention))
    options = TrainConfig(steps=1, optimizer="muon", betas=BETAS, eps=EPS, weight_decay=DECAY)
    optimizer = make_optimizer(parameter_groups(model, DECAY, muon=True), options)
    twin = copy.deepcopy(model)
    adamw = make_optimizer(parameter_groups(twin, DECAY), replace(options, optimizer="adamw"))
    for parameter, same in zip(model.parameters(), twin.parameters(), strict=True):
        parameter.grad = torch.randn_like(parameter)
        same.grad = parameter.grad.clone()
    optimizer.step()
    adamw.step()
    states = {name: set(optimizer.state[p]) for name, p in model.named_parameters()}
    inside = [f"attention.project.{name}" for name in ("query", "key", "value", "relative")]
    inside += ["attention.merge", "feed_forward.up", "feed_forward.down"]
    by_muon = {name for name, state in states.items() if state == {"momentum_buffer"}}
    assert by_muon == {f"blocks.0.{name}.weight" for name in inside}
    assert "blocks.0.attention.attend.mix.from_query" in states  # a matrix, but of a mixing
    for name, parameter in model.named_parameters():
        assert (name in by_muon) != torch.equal(parameter, twin.get_parameter(name)), name


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("shape", [(7, 4), (4, 11), (5, 5)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_muon_is_that_of_torch(shape, device):
    """Five updates, each of entries of about 0.02; torch multiplies in bfloat16, so that they agree to 0.005."""
    ours, theirs = nn.Linear(*shape, bias=False, device=device), nn.Linear(*shape, bias=False, device=device)
    theirs.load_state_dict(ours.state_dict())
    options = TrainConfig(steps=1, optimizer="muon", momentum=MU, weight_decay=DECAY, learning_rate=0.1)
    how = {"momentum": MU, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    pairs = (
        (ours, make_optimizer(parameter_groups(nn.ModuleList([ours]), DECAY, muon=True), options)),
        (theirs, torch.optim.Muon(theirs.parameters(), lr=0.1, **how)),
    )
    for seed in range(5):
        for layer, optimizer in pairs:
            torch.manual_seed(seed)
            layer.weight.grad = torch.randn_like(layer.weight)
            optimizer.step()
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0.0, atol=5e-3)


def test_embedding_and_mixing_learn_at_rates_of_their_own():
    config = fr.ModelConfig(
        vocab_size=9,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention={"mix": "position_wise", "mix_scores": "talking_heads"},
        output={"tied": True},
    )
    model = fr.LanguageModel(config)
    attend = model.blocks[0].attention.attend
    mixing = [attend.mix_scores.mixing, attend.mix.from_query, attend.mix.mixing]
    options = TrainConfig(steps=1, weight_decay=0.1, embedding_rate=2.0, mixing_rate=0.1)
    groups = parameter_groups(model, 0.1, rates=LanguageModelTask(RunConfig(train=options)).choose_rates(model))
    rates_of = {
        p: (group.get("peak"), group.get("scale"), group["weight_decay"]) for group in groups for p in group["params"]
    }
    assert sum(len(group["params"]) for group in groups) == len(rates_of) == len(list(model.parameters()))
    assert rates_of[model.embedding.weight] == (2.0, None, 0.1)
    for p in mixing:
        assert rates_of.pop(p) == (None, 0.1, 0.0)
    assert {rates[:2] for p, rates in rates_of.items() if p is not model.embedding.weight} == {(None, None)}


def fairseq_adam(p, state, g, lr, t, eps):
    """fairseq's form: the decay acts on the parameter, and eps is added before the second moment is corrected."""
    state["m"] = BETAS[0] * state["m"] + (1 - BETAS[0]) * g
    state["s"] = BETAS[1] * state["s"] + (1 - BETAS[1]) * g * g
    size = lr * math.sqrt(1 - BETAS[1] ** t) / (1 - BETAS[0] ** t)
    return p - DECAY * lr * p - size * state["m"] / (state["s"].sqrt() + eps)


def test_adamw_is_what_fairseq_calls_adam():
    """Our eps is its eps / sqrt(1 - b2^t); at 1e-12 the two agree, and plain adam differs."""
    weights = {}
    for name in ("adam", "adamw"):
        layer = nn.Linear(2, 5, bias=False, dtype=torch.float64)
        nn.init.constant_(layer.weight, 0.5)
        options = TrainConfig(steps=1, optimizer=name, betas=BETAS, eps=1e-12, weight_decay=DECAY)
        optimizer = make_optimizer(parameter_groups(layer, DECAY), options)
        *_, expected = follow(layer, optimizer, partial(fairseq_adam, eps=1e-12))
        weights[name] = layer.weight.detach()
    torch.testing.assert_close(weights["adamw"], expected, rtol=1e-10, atol=1e-10)
    assert (weights["adam"] - expected).abs().max() > 1e-2
