"""Leaks are found, by the way that shows them, and the layer that leaks is named; honest models pass."""

from __future__ import annotations

from typing import Any

import leaky_models as leaky
import pytest
import torch
from torch import Tensor, nn

import fullrank as fr
from fullrank.checking import last_position
from fullrank.checking.future import by_gradient, by_perturbation, places
from fullrank.checking.subject import subject_of
from fullrank.core.errors import InputError

WAYS = ["by perturbation, evaluation", "by perturbation, training", "by gradient, evaluation", "by gradient, training"]


def verdicts(model: nn.Module) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Of the future checks: verdicts, and the layers of those that fail."""
    subject = subject_of(model)
    found = {}
    for training in (False, True):
        when = "training" if training else "evaluation"
        found[f"by perturbation, {when}"] = by_perturbation(subject, training=training)
        found[f"by gradient, {when}"] = by_gradient(subject, training=training)
    found["with padding"] = by_perturbation(subject, training=False, padded=True)
    return {way: f.verdict for way, f in found.items()}, {w: f.layers for w, f in found.items() if f.verdict == "fails"}


HONEST = {
    "attention": leaky.Model,
    "an object with .logits": leaky.InAnObject,
    "a causal convolution": lambda: leaky.Model({1: leaky.Convolution(ahead=False)}),
    "a convolution that is shifted back": lambda: leaky.Model({1: leaky.Shifted()}),
    "a mask of padding": leaky.Padded,
    "dropout": lambda: leaky.Model({1: nn.Dropout(0.5)}),
}


@pytest.mark.parametrize("kind", HONEST)
def test_honest_models_pass(kind: str) -> None:
    found, _ = verdicts(HONEST[kind]())
    padded = "passes" if kind == "a mask of padding" else "not applicable"
    assert found == {**dict.fromkeys(WAYS, "passes"), "with padding": padded}


# a leaking model, the layers that leak, and the ways that show it
LEAKING: dict[str, tuple[Any, tuple[str, ...], set[str]]] = {
    "attention without mask": (lambda: leaky.Model({1: leaky.Attention(leaky.everything)}), ("blocks.1.attention",), {*WAYS}),
    "the first layer": (lambda: leaky.Model({0: leaky.Attention(leaky.everything)}), ("blocks.0.attention",), {*WAYS}),
    "the last layer": (lambda: leaky.Model({2: leaky.Attention(leaky.everything)}), ("blocks.2.attention",), {*WAYS}),
    "a convolution that looks ahead": (
        lambda: leaky.Model({1: leaky.Convolution(ahead=True)}), ("blocks.1.attention.taps",), {*WAYS},
    ),
    "a norm over positions": (
        lambda: leaky.Model({1: leaky.OverPositions()}), ("blocks.1.attention.norm",), {w for w in WAYS if "training" in w},
    ),
    "in training only": (
        lambda: leaky.Model({1: leaky.TrainingOnly()}), ("blocks.1.attention",), {w for w in WAYS if "training" in w},
    ),
    "backward only": (lambda: leaky.Model({1: leaky.Backwards()}), ("blocks.1.attention",), {w for w in WAYS if "grad" in w}),
    "without a gradient": (
        lambda: leaky.Model({1: leaky.Unfollowed()}), ("blocks.1.attention",), {w for w in WAYS if "pert" in w},
    ),
    "behind a gate that starts at zero": (lambda: leaky.Model({1: leaky.Gated()}), ("blocks.1.attention",), {*WAYS}),
    "in an embedding": (lambda: _with_leaking_embedding(), ("embedding",), {w for w in WAYS if "pert" in w}),
    "in the model's own forward": (
        lambda: OwnForward(), ("the model's own forward",), {*WAYS},
    ),
}  # fmt: skip


class OwnForward(leaky.Model):
    def forward(self, input_ids: Tensor) -> Any:
        logits = self.output(self.hidden(input_ids))
        return logits + logits.flip(1)


def _with_leaking_embedding() -> nn.Module:
    class Bigrams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(leaky.VOCABULARY, leaky.WIDTH))

        def forward(self, ids: Tensor) -> Tensor:
            return self.table[ids] + self.table[ids.roll(-1, 1)]

    model = leaky.Model()
    model.embedding = Bigrams()  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("kind", LEAKING)
def test_leaks_are_found_and_the_layer_is_named(kind: str) -> None:
    build, layers, ways = LEAKING[kind]
    model = build()
    if kind == "in an embedding":
        with pytest.raises(InputError, match="give vocab_size"):
            subject_of(model)
        model.config = type("Config", (), {"vocab_size": leaky.VOCABULARY})()
    found, named = verdicts(model)
    assert {way for way, verdict in found.items() if verdict == "fails"} == ways
    assert all(names == layers for names in named.values()), named


def test_every_layer_that_leaks_is_named() -> None:
    model = leaky.Model({0: leaky.Convolution(ahead=True), 2: leaky.Attention(leaky.everything)})
    found = by_perturbation(subject_of(model), training=False)
    assert found.layers == ("blocks.0.attention.taps", "blocks.2.attention")


def test_a_leak_through_the_mask_of_padding() -> None:
    found, named = verdicts(leaky.Padded(instead=1))
    assert found == {**dict.fromkeys(WAYS, "passes"), "with padding": "fails"}
    assert named == {"with padding": ("blocks.1.attention",)}


def test_a_leak_through_padding_in_the_ids() -> None:
    found, named = verdicts(leaky.PaddingInTheIds())
    assert found["by perturbation, evaluation"] == "fails"
    assert named["by perturbation, evaluation"] == ("blocks.1.attention",)


def test_one_token_ahead_at_any_position() -> None:
    """A leak from one position only."""

    class Somewhere(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            out[:, self.place - 1] = x[:, self.place]
            return out

    for place in (1, 7, 16):
        found = by_perturbation(subject_of(leaky.Model({1: Somewhere(place)})), training=False)
        assert (found.verdict, found.layers) == ("fails", ("blocks.1.attention",))
        assert f"token {place} (from 0)" in found.remark


def test_positions_that_are_looked_at() -> None:
    assert places(5) == [1, 2, 3, 4]
    assert places(100, 4) == [1, 34, 66, 99]
    assert places(25) == list(range(1, 25))


def test_a_model_that_ignores_its_input_cannot_be_judged() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 4)

        def forward(self, input_ids: Tensor) -> Tensor:
            return torch.zeros(*input_ids.shape, 7)

    found, _ = verdicts(Constant())
    assert set(found.values()) == {"not applicable"}


def test_passes_that_differ_by_themselves_fail() -> None:
    class Counting(leaky.Model):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, input_ids: Tensor) -> Any:
            self.calls += 1
            return super().forward(input_ids) * self.calls

    found = by_perturbation(subject_of(Counting()), training=False)
    assert found.verdict == "fails"
    assert "two passes over the same tokens differ" in found.remark


def test_attention_of_ours_without_its_mask() -> None:
    """The layer of a model of ours: its layout is made to see everything in layer 1."""
    config = fr.ModelConfig(vocab_size=19, hidden_size=12, num_hidden_layers=3, num_attention_heads=2)
    for mix in ("none", "position_wise"):
        changed = fr.LanguageModel(fr.ModelConfig(**{**vars(config), "attention": fr.AttentionConfig(mix=mix)}))
        attend = changed.blocks[1].attention.attend
        forward = attend.forward

        def blind(heads: Any, layout: fr.Layout, trace: Any = None, forward: Any = forward) -> Tensor:
            return forward(heads, fr.Layout.of(layout.shape[0], layout.shape[1], causal=False), trace)

        attend.forward = blind
        # a copy keeps calling the layer it was copied from, which is the one that is patched
        found = by_perturbation(subject_of(changed), training=False)
        assert (found.verdict, found.layers) == ("fails", ("blocks.1.attention.attend",))


def test_bad_input_is_explained() -> None:
    class Wrong(leaky.Model):
        def forward(self, input_ids: Tensor) -> Any:
            return self.hidden(input_ids).sum(-1)

    class Broken(leaky.Model):
        def forward(self, input_ids: Tensor) -> Any:
            raise KeyError("no such layer")

    class Nothing(leaky.Model):
        def forward(self, input_ids: Tensor) -> Any:
            return None

    with pytest.raises(InputError, match=r"logits must be \(B, N, V\)"):
        subject_of(Wrong())
    with pytest.raises(InputError, match="raised KeyError: 'no such layer'"):
        subject_of(Broken())
    with pytest.raises(InputError, match="returned NoneType"):
        subject_of(Nothing())
    with pytest.raises(InputError, match="length: 2 tokens"):
        subject_of(leaky.Model(), length=2)
    with pytest.raises(InputError, match="meta device"):
        subject_of(leaky.Model().to("meta"))


def test_the_model_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_position, "_STEPS", 5)
    model = leaky.Model({1: leaky.OverPositions()}).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    fr.check(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert not any(module._forward_hooks for module in model.modules())


def test_fp32_constants_are_checked_in_fp32() -> None:
    class Single(leaky.Model):
        def forward(self, input_ids: Tensor) -> Any:
            return self.output(self.hidden(input_ids) @ torch.eye(leaky.WIDTH))

    subject = subject_of(Single())
    assert subject.dtype == torch.float32
    assert by_perturbation(subject, training=False).verdict == "passes"
