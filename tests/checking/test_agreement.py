"""Two ways to compute the same: each check passes what is right and fails what was made wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import leaky_models as leaky
import pytest
import torch
from torch import Tensor, nn
from wrong_kernels import WRONG

import fullrank as fr
from fullrank import kernels
from fullrank.checking import Finding, agreement
from fullrank.checking import kernels as definitions
from fullrank.checking.examine import _guarded
from fullrank.checking.subject import Subject, subject_of
from fullrank.core import attention as layer
from fullrank.core import memory, mix
from fullrank.core.output import SoftmaxOutput

SIZES: dict[str, Any] = {"vocab_size": 19, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}


def ours(**options: Any) -> Subject:
    return subject_of(fr.LanguageModel(fr.ModelConfig(**SIZES, **options)))


def xl(**options: Any) -> Subject:
    return ours(position="relative", attention=fr.AttentionConfig(score="relative"), memory_length=5, **options)


def off(finding: Finding) -> bool:
    """Whether it fails by its figure, and not because something could not be run."""
    assert finding.difference is not None, finding
    return finding.verdict == "fails"


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("name", ["sdpa", "blocks", "native"])
def test_a_wrong_attention_kernel(name: str, fault: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = ours() if name == "sdpa" else xl()
    right = kernels.KERNELS[name]
    assert definitions.kernels(subject, precision).verdict == "passes"
    wrong = lambda *given: WRONG[fault](right(*given))  # noqa: E731
    monkeypatch.setitem(kernels.KERNELS, name, wrong)
    found = definitions.kernels(subject, precision)
    assert off(found)
    assert "worst: " in found.remark
    kind = "gradient of " if fault == "gradients" else "output of "
    assert kind in found.remark.partition("worst: ")[2]


@pytest.mark.parametrize("method", ["nll", "loss", "log_prob"])
def test_a_wrong_vocabulary_kernel(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = ours()
    right = getattr(SoftmaxOutput, method)

    def wrong(*given: Any) -> Any:
        found = right(*given)
        if kernels.forced() == "reference":
            return found
        return (found[0] * (1 + 1e-4), found[1]) if isinstance(found, tuple) else found * (1 + 1e-4)

    monkeypatch.setattr(SoftmaxOutput, method, wrong)
    assert off(definitions.kernels(subject, "fp32"))


def test_the_remark_says_which_kernel_ran() -> None:
    relative = definitions.kernels(xl(), "fp64")
    assert relative.remark.endswith("attention by native, reference")  # the second where relative scores meet padding
    assert relative.looked_at.startswith("auto, blocks, native beside reference")
    synthesizer = definitions.kernels(ours(attention=fr.AttentionConfig(score="dense_synthesizer")), "fp64")
    assert "no fast kernel computes these stages" in synthesizer.remark
    assert synthesizer.looked_at.startswith("auto beside reference")


# -- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["position_independent", "position_wise"])
def test_mixing_that_does_not_start_plain(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = ours(attention=fr.AttentionConfig(mix=kind))
    assert definitions.plain_start(subject).verdict == "passes"
    found = mix.PositionIndependentMixing if kind == "position_independent" else mix.PositionWiseMixing
    right = found.forward
    monkeypatch.setattr(found, "forward", lambda self, weights, query: right(self, weights, query) * (1 + 1e-6))
    assert off(definitions.plain_start(subject))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("none", "it is plain attention"), ("random", "by its definition"), ("average", "by its definition")],
)
def test_mixing_that_need_not_start_plain(kind: str, reason: str) -> None:
    found = definitions.plain_start(ours(attention=fr.AttentionConfig(mix=kind)))
    assert (found.verdict, reason in found.reason) == ("not applicable", True)


# -- padding ----------------------------------------------------------------------------------------------------------


def test_padding() -> None:
    assert agreement.padding(ours()).verdict == "passes"
    assert agreement.padding(subject_of(leaky.Padded())).verdict == "passes"
    assert off(agreement.padding(subject_of(leaky.Padded(instead=1))))
    assert agreement.padding(subject_of(leaky.Model())).verdict == "not applicable"


def test_a_mask_that_is_not_used() -> None:
    """Padding on the right of a causal model harms nobody; on the left it does."""
    subject = ours()
    model: Any = subject.model
    forward = model.forward
    model.forward = lambda input_ids, attention_mask=None: forward(input_ids)
    found = agreement.padding(subject)
    assert off(found)
    assert "padding on the left" in found.remark


# -- repetition -------------------------------------------------------------------------------------------------------


def test_evaluation_that_is_not_deterministic() -> None:
    class AlwaysDropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, training=True)

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(1)
            return x

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count: Tensor
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x

    for mixer, said in (
        (AlwaysDropping(), ""),
        (Drawing(), "random numbers"),
        (Counting(), "attention.count is changed"),
    ):
        found = agreement.determinism(subject_of(leaky.Model({1: mixer})))
        assert found.verdict == "fails"
        assert said in found.remark
    assert agreement.determinism(subject_of(leaky.Model({1: nn.Dropout(0.5)}))).verdict == "passes"


# -- cache and memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [ours, xl])
def test_a_wrong_cache(build: Callable[[], Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    subject = build()
    assert agreement.decoding(subject).verdict == "passes"
    right = layer.append
    monkeypatch.setattr(layer, "append", lambda past, room, new: right(past * 1.01, None, new))
    found = agreement.decoding(subject)
    assert off(found)
    assert found.remark.startswith("worst: ")


def test_a_cache_that_is_right_but_for_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    from fullrank.core.cache import Cache

    right = Cache.mask_after

    def wrong(self: Cache, new: Tensor | None, *given: Any) -> Tensor | None:
        found = right(self, new, *given)
        return found if found is None or self.length == 0 else torch.ones_like(found)

    monkeypatch.setattr(Cache, "mask_after", wrong)
    found = agreement.decoding(ours())
    assert off(found)
    assert "padding" in found.remark


@pytest.mark.parametrize("options", [{}, {"same_length": True}, {"memory_start": "zeros"}])
def test_a_wrong_memory(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    subject = xl(**options)
    assert agreement.memory(subject).verdict == "passes"
    right = memory._last_joined

    def rolled(old: Tensor | None, new: Tensor, limit: int) -> Tensor:
        return right(old, new, limit).roll(1, 1)

    monkeypatch.setattr(memory, "_last_joined", rolled)
    assert off(agreement.memory(subject))


def test_a_window_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right with the whole text in memory, wrong with a window."""
    subject = xl(same_length=True)
    assert agreement.memory(subject).verdict == "passes"
    kept = memory.LayerMemory.last
    monkeypatch.setattr(memory.LayerMemory, "last", lambda self, limit: kept(self, limit if limit > 9 else limit - 2))
    found = agreement.memory(subject)
    assert off(found)
    assert "same_length" in found.remark


def test_no_memory_no_cache() -> None:
    assert "memory_length is 0" in agreement.memory(ours()).reason
    module = subject_of(leaky.Model())
    assert agreement.memory(module).verdict == agreement.decoding(module).verdict == "not applicable"


# -- files ------------------------------------------------------------------------------------------------------------


class Rounded(fr.LanguageModel):
    @classmethod
    def load(cls, *given: Any, **options: Any) -> Any:
        return super().load(*given, **options).half().double()


class Forgetful(fr.LanguageModel):
    @classmethod
    def load(cls, *given: Any, **options: Any) -> Any:
        model = super().load(*given, **options)
        model.final_norm.register_parameter("bias", None)
        return model


@pytest.mark.parametrize("kind", [Rounded, Forgetful])
def test_files_that_lose_something(kind: type[fr.LanguageModel]) -> None:
    config = fr.ModelConfig(**SIZES)
    assert agreement.saving(subject_of(fr.LanguageModel(config))).verdict == "passes"
    assert off(agreement.saving(subject_of(kind(config))))


# -- probabilities ----------------------------------------------------------------------------------------------------

MIXTURE = fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=2)


def test_probabilities_that_do_not_sum_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = ours(output=MIXTURE)
    assert agreement.probabilities(mixture).verdict == "passes"
    smoothed = agreement.probabilities(ours(output=replace(MIXTURE, epsilon=1e-4)))
    assert smoothed.verdict == "passes"
    assert smoothed.difference == pytest.approx(19 * 1e-4, rel=1e-6)
    model: Any = mixture.model
    right = model.output.log_prob
    monkeypatch.setattr(model.output, "log_prob", lambda hidden: right(hidden) + 1e-8)
    assert off(agreement.probabilities(mixture))
    monkeypatch.undo()
    monkeypatch.setattr(model.output, "nll", lambda hidden, targets, nll=model.output.nll: nll(hidden, targets) + 1e-8)
    assert off(agreement.probabilities(mixture))
    monkeypatch.undo()
    assert agreement.probabilities(mixture).verdict == "passes"


# -- what cannot be run -----------------------------------------------------------------------------------------------


def test_a_check_that_cannot_be_run_fails_and_the_others_go_on() -> None:
    class Untrainable(leaky.Model):
        def forward(self, input_ids: Tensor) -> Any:
            if self.training:
                raise RuntimeError("only for evaluation")
            return super().forward(input_ids)

    report = fr.check(Untrainable())
    failed = {finding.check for finding in report.failures}
    assert failed == {"future, by perturbation, training", "future, by gradient, training", "last position"}
    assert "RuntimeError: only for evaluation" in report.failures[0].remark
    assert report.of("future, by perturbation, evaluation").verdict == "passes"
    with pytest.raises(KeyError):
        report.of("another")
    assert _guarded(lambda: Finding("passes")) == Finding("passes")
