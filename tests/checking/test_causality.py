"""Leaks are found, by the way that shows them, and the layer that leaks is named; honest models pass."""

import leaky_models as leaky
import pytest
import torch
from checked_models import find, run
from torch import nn

import fullrank as fr
from fullrank.checking.calls import PLAIN, Call
from fullrank.checking.causality import check_on_random_tokens, search_by_gradient, search_by_perturbation
from fullrank.checking.report import largest
from fullrank.checking.subject import open_subject

WAYS = ["by perturbation, evaluation", "by perturbation, training", "by gradient, evaluation", "by gradient, training"]


def verdicts(model):
    """Verdicts of the checks for later tokens, and the layers of those that fail."""
    subject = open_subject(model)
    outcome = {}
    for training in (False, True):
        when = "training" if training else "evaluation"
        outcome[f"by perturbation, {when}"] = run(search_by_perturbation, subject, PLAIN[training])
        outcome[f"by gradient, {when}"] = run(search_by_gradient, subject, PLAIN[training])
    outcome["with padding"] = run(search_by_perturbation, subject, Call("with padding", mask="right"))
    layers = {way: finding.layers for way, finding in outcome.items() if finding.verdict == "fails"}
    return {way: finding.verdict for way, finding in outcome.items()}, layers


HONEST = {
    "attention": leaky.Model,
    "a causal convolution": lambda: leaky.Model({1: leaky.Convolution(ahead=False)}),
    "a convolution that is shifted back": lambda: leaky.Model({1: leaky.Shifted()}),
    "a mask of padding": leaky.Padded,
    "dropout": lambda: leaky.Model({1: nn.Dropout(0.5)}),
}


@pytest.mark.parametrize("kind", HONEST)
def test_honest_models_pass(kind):
    outcome, _ = verdicts(HONEST[kind]())
    padded = "passes" if kind == "a mask of padding" else "not applicable"
    assert outcome == {**dict.fromkeys(WAYS, "passes"), "with padding": padded}


# a leaking model, the layers that leak, and the ways that show it; the museum has others
LEAKING = {
    "a convolution that looks ahead": (
        lambda: leaky.Model({1: leaky.Convolution(ahead=True)}), ("blocks.1.attention.taps",), {*WAYS},
    ),
    "in training only": (
        lambda: leaky.Model({1: leaky.TrainingOnly()}), ("blocks.1.attention",), {w for w in WAYS if "training" in w},
    ),
    "backward only": (lambda: leaky.Model({1: leaky.Backwards()}), ("blocks.1.attention",), {w for w in WAYS if "grad" in w}),
    "without a gradient": (
        lambda: leaky.Model({1: leaky.Unfollowed()}), ("blocks.1.attention",), {w for w in WAYS if "pert" in w},
    ),
    "behind a gate that starts at zero": (lambda: leaky.Model({1: leaky.Gated()}), ("blocks.1.attention",), {*WAYS}),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEAKING)
def test_leaks_are_found_and_the_layer_is_named(kind):
    build, layers, ways = LEAKING[kind]
    outcome, named = verdicts(build())
    assert {way for way, verdict in outcome.items() if verdict == "fails"} == ways
    assert all(names == layers for way, names in named.items() if "perturbation" in way), named


def test_every_layer_that_leaks_is_named():
    model = leaky.Model({0: leaky.Convolution(ahead=True), 2: leaky.Attention(leaky.everything)})
    outcome = run(search_by_perturbation, open_subject(model))
    assert outcome.layers == ("blocks.0.attention.taps", "blocks.2.attention")


def test_a_leak_through_padding_in_the_ids():
    outcome, named = verdicts(leaky.PaddingInTheIds())
    assert outcome["by perturbation, evaluation"] == "fails"
    assert named["by perturbation, evaluation"] == ("blocks.1.attention",)


def test_one_token_ahead_at_any_position():
    """A leak from one position only."""

    class Somewhere(nn.Module):
        def __init__(self, position):
            super().__init__()
            self.position = position

        def forward(self, x):
            out = torch.zeros_like(x)
            out[:, self.position - 1] = x[:, self.position]
            return out

    for position in (1, 7, 16):
        outcome = run(search_by_perturbation, open_subject(leaky.Model({1: Somewhere(position)})))
        assert (outcome.verdict, outcome.layers) == ("fails", ("blocks.1.attention",))
        assert f"see tokens from {position} on" in outcome.remark


def test_a_model_that_ignores_its_input_cannot_be_judged():
    outcome, _ = verdicts(leaky.Constant())
    assert set(outcome.values()) == {"not applicable"}
    assert largest(torch.tensor([1.0, torch.inf]), torch.zeros(2)) == torch.inf


def test_passes_that_differ_by_themselves_fail():
    class Counting(leaky.Model):
        calls = 0

        def forward(self, input_ids):
            Counting.calls += 1
            return super().forward(input_ids) * Counting.calls

    outcome = run(search_by_perturbation, open_subject(Counting()))
    assert outcome.verdict == "fails"
    assert "two passes over the same tokens differ" in outcome.remark


def test_a_layer_of_ours_that_leaks():
    config = fr.ModelConfig(vocab_size=19, hidden_size=12, num_hidden_layers=3, num_attention_heads=2)
    model = fr.LanguageModel(config)
    model.blocks[1].feed_forward.register_forward_hook(lambda module, args, out: out + out.mean(dim=1, keepdim=True))
    outcome, named = verdicts(model)
    assert set(outcome.values()) == {"fails"}
    # with padding no layer is named: the leak without padding is enough
    assert set(named.values()) == {("blocks.1.feed_forward",), ()}


def test_fp32_constants_are_checked_in_fp32():
    class Single(leaky.Model):
        def forward(self, input_ids):
            return self.output(self.hidden(input_ids) @ torch.eye(leaky.WIDTH))

    subject = open_subject(Single())
    assert subject.dtype == torch.float32
    assert run(search_by_perturbation, subject).verdict == "passes"


@pytest.mark.full
def test_random_tokens_teach_an_honest_model_nothing():
    honest = find(check_on_random_tokens, open_subject(leaky.Model()))
    assert honest.verdict == "passes"
    outcome = find(check_on_random_tokens, open_subject(leaky.Model({1: leaky.Convolution(ahead=True)})))
    assert outcome.verdict == "fails"
    assert outcome.difference > 1  # nats
