"""Kernels that are wrong in one thing, and mixings that do not start as plain attention."""

import dataclasses

import pytest
import torch
from checked_models import XL, find, off, ours, translating

import fullrank as fr
from fullrank.checking.definition import check_plain_start, kernels
from fullrank.kernels import get_forced


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, *gradients):
        return gradients[0] * (1 + 1e-3)


WRONG = {
    "outputs": lambda out: out * (1 + 1e-4),
    "gradients": WrongGradient.apply,
    "not a number": lambda out: out * float("nan"),
}


def wrong_by(name, fault):
    """A language model whose hidden states are wrong with the kernel `name`."""

    class Wrong(fr.LanguageModel):
        def hidden(self, *args, **keys):
            out = super().hidden(*args, **keys)
            return out if (get_forced() or "auto") != name else type(out)(WRONG[fault](out[0]), *out[1:])

    return Wrong


MULTILINEAR = {"attention": fr.AttentionConfig(kind="multilinear", cores=2, rank=6), "position": "sinusoidal"}


@pytest.mark.parametrize(
    ("name", "fault", "precision"),
    [
        ("sdpa", "outputs", torch.float32), ("native", "gradients", torch.float64), ("native", "not a number", torch.float64),
        ("auto", "gradients", torch.float32), ("native", "outputs", torch.float32), ("auto", "not a number", torch.float32),
        ("multilinear", "outputs", torch.float64), ("multilinear", "gradients", torch.float32),
    ],
)  # fmt: skip
def test_a_wrong_kernel(name, fault, precision):
    keys = MULTILINEAR if name == "multilinear" else {} if name == "sdpa" else XL
    finding = find(kernels, ours(wrong_by(name, fault), **keys), dtype=precision)
    assert off(finding)
    assert finding.remark.startswith("worst: gradient of " if fault == "gradients" else "worst: logits")
    assert finding.remark.endswith(f"({name})")


@pytest.mark.parametrize("method", ["nll", "loss"])
def test_a_wrong_vocabulary_kernel(method, monkeypatch):
    subject = ours()
    home = type(subject.model.output)
    right = getattr(home, method)

    def wrong(*args):
        out = right(*args)
        if get_forced() == "reference":
            return out
        return (out[0] * (1 + 1e-4), *out[1:]) if isinstance(out, tuple) else out * (1 + 1e-4)

    monkeypatch.setattr(home, method, wrong)
    assert off(find(kernels, subject, dtype=torch.float32))


def test_a_wrong_kernel_across_the_source():
    class Wrong(fr.Translator):
        def hidden(self, *args, **keys):
            out = super().hidden(*args, **keys)
            return out if get_forced() == "reference" else out * (1 + 1e-4)

    for precision in (torch.float64, torch.float32):
        assert off(find(kernels, translating(Wrong), dtype=precision))


def test_the_report_says_which_kernels_ran():
    relative = find(kernels, ours(**XL), dtype=torch.float64)
    assert relative.verdict == "passes"
    assert relative.looked_at.startswith("auto, native beside reference")
    synthesizer = find(kernels, ours(attention=fr.AttentionConfig(score="dense_synthesizer")), dtype=torch.float64)
    assert synthesizer.looked_at.startswith("auto beside reference")


class Scaled(fr.LanguageModel):
    """Off by a millionth where heads are mixed."""

    def forward(self, *args, **keys):
        out = super().forward(*args, **keys)
        return dataclasses.replace(out, logits=out.logits * (1 + 1e-6)) if self.config.attention.mix != "none" else out


@pytest.mark.parametrize("mix", ["position_independent", "position_wise"])
def test_mixing_that_does_not_start_plain(mix):
    attention = fr.AttentionConfig(mix=mix)
    assert find(check_plain_start, ours(attention=attention)).verdict == "passes"
    assert off(find(check_plain_start, ours(Scaled, attention=attention)))


def test_the_mixing_of_each_layer_is_seen():
    mixed = {"at": [1], "attention": {"mix": "position_wise"}}
    first = {"at": [0], "attention": {"kind": "multilinear", "rank": 3}}
    finding = find(check_plain_start, ours(layers=[first, mixed]))
    assert finding.verdict == "passes"
    assert "(mix: position_wise)" in finding.looked_at
    average = find(check_plain_start, ours(layers=[{"at": [0], "attention": {"mix": "average"}}, mixed]))
    assert average.reason == "'average' mixing does not start as plain attention, by its definition"
    assert find(kernels, ours(layers=[first, mixed]), dtype=torch.float64).verdict == "passes"


PLACES = {
    "encoder": lambda attention: {"encoder": fr.EncoderConfig(vocab_size=23, attention=attention)},
    "decoder": lambda attention: {"decoder": fr.DecoderConfig(attention=attention)},
    "cross": lambda attention: {"decoder": fr.DecoderConfig(cross=attention)},
}


@pytest.mark.parametrize("place", PLACES)
def test_the_mixing_of_each_place_is_seen(place):
    for mix, verdict in (("position_wise", "passes"), ("average", "not applicable")):
        subject = translating(**PLACES[place](fr.AttentionConfig(mix=mix)))
        assert find(check_plain_start, subject).verdict == verdict


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        ("none", "it is plain attention"),
        ("random", "by its definition"),
        ("average", "by its definition"),
        ({"name": "position_wise", "start": "uniform"}, "'position_wise' mixing does not start as plain attention"),
    ],
)
def test_mixing_that_need_not_start_plain(mix, reason):
    finding = find(check_plain_start, ours(attention=fr.AttentionConfig(mix=mix)))
    assert (finding.verdict, reason in finding.reason) == ("not applicable", True)
