"""Checks of multi-linear attention: masked forms pass, wrong ones fail, and the published one is flagged by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from wrong_kernels import WRONG

import fullrank as fr
from fullrank import kernels
from fullrank.checking import agreement, future, last_position
from fullrank.checking import kernels as definitions
from fullrank.checking.subject import Subject, subject_of
from fullrank.core import multilinear, multilinear_decayed

KINDS: dict[str, dict[str, Any]] = {
    "pairs": {"attention": {"cores": 2}},
    "position term": {"position": "relative", "attention": {"score": "relative", "core_weights": "free"}},
    "decayed": {"position": "none", "attention": {"output_map": "decayed", "decays": 3}},
}
PUBLISHED = {"causal": "as_published", "not_next_token_perplexity": True}
FUTURE = [f"future, by {how}, {when}" for how in ("perturbation", "gradient") for when in ("evaluation", "training")]


def build(kind: str, attention: dict[str, Any] | None = None, **keys: Any) -> fr.LanguageModel:
    options = {"kind": "multilinear", "rank": 6} | KINDS[kind]["attention"] | (attention or {})
    sizes = {"vocab_size": 19, "hidden_size": 12, "num_hidden_layers": 2, "max_position_embeddings": 34}
    given = {"position": KINDS[kind].get("position", "sinusoidal"), "attention": fr.AttentionConfig(**options)}
    torch.manual_seed(1)
    return fr.LanguageModel(fr.ModelConfig(**sizes | given | keys))


def subject(kind: str, **keys: Any) -> Subject:
    return subject_of(build(kind, **keys))


@pytest.mark.parametrize("kind", KINDS)
def test_masked_forms_pass(kind: str) -> None:
    report = fr.check(build(kind, memory_length=6, norm="post"))
    assert {f.check: f.remark for f in report.failures} == {}
    skipped = {f.check: f.reason for f in report.findings if f.verdict == "not applicable"}
    assert skipped == {
        "starts as plain attention": "model.attention.kind is multilinear, which has no heads to mix",
    }
    assert "sees_future" not in report.description
    for precision in ("fp64", "fp32"):
        found = report.of(f"kernels = reference, {precision}")
        assert found.looked_at.startswith("auto, multilinear beside reference")
        assert found.remark.endswith("attention by multilinear")


@pytest.mark.parametrize("kind", ["pairs", "position term"])
def test_the_published_form_is_flagged_by_name(kind: str) -> None:
    report = fr.check(build(kind, PUBLISHED, norm="post"))
    assert report.description["sees_future"] == "model.attention.causal: as_published"
    assert report.as_dict()["sees_future"] == "model.attention.causal: as_published"
    failed = {f.check: f for f in report.failures}
    leaks = {*FUTURE, "future, by perturbation, with padding"}
    assert set(failed) >= leaks
    assert set(failed) <= {*leaks, last_position.NAME}
    # 200 steps on random tokens are too few for the position term, which has two terms to tell apart
    assert kind == "position term" or last_position.NAME in failed
    for name in (*FUTURE, "future, by perturbation, with padding"):
        assert failed[name].remark.endswith("; model.attention.causal: as_published leaves the mask out")
        assert set(failed[name].layers) <= {"blocks.0.attention.attend", "blocks.1.attention.attend"}
        assert failed[name].layers
    assert report.layers == ("blocks.0.attention.attend", "blocks.1.attention.attend")
    for name in ("incremental decoding = one pass", "memory in segments = one pass"):
        found = report.of(name)
        assert found.verdict == "not applicable"
        assert found.reason.startswith("model.attention.causal: as_published: ")
    for name in ("padding changes nothing", "kernels = reference, fp64", "kernels = reference, fp32"):
        assert report.of(name).verdict == "passes"


def test_the_published_form_inside_a_users_own_module_is_flagged_by_name() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.scores = torch.nn.Embedding(19, 12), torch.nn.Linear(12, 19)
            self.attend = fr.MultiLinearAttention(
                hidden_size=12, rank=6, causal="as_published", max_position_embeddings=34
            )

        def forward(self, input_ids: Tensor) -> Tensor:
            out: Tensor = self.scores(self.attend(self.words(input_ids)))
            return out

    torch.manual_seed(1)
    report = fr.check(Own(), vocab_size=19)
    assert report.layers == ("attend.attend",)
    failed = {f.check: f.remark for f in report.failures}
    assert all(failed[name].endswith("model.attention.causal: as_published leaves the mask out") for name in FUTURE)


def test_another_leak_is_not_laid_at_its_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked model that leaks by a fault: the layer is named, and no key of the configuration."""
    right = multilinear.multilinear
    monkeypatch.setattr(multilinear, "multilinear", lambda *given, **keys: right(*given, **keys | {"causal": False}))
    found = future.by_perturbation(subject("pairs"), training=False)
    assert found.verdict == "fails"
    assert found.layers == ("blocks.0.attention.attend", "blocks.1.attention.attend")
    assert "as_published" not in found.remark


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("kind", ["pairs", "decayed"])
def test_a_wrong_kernel(kind: str, fault: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home: Any = multilinear if kind == "pairs" else multilinear_decayed
    name = "multilinear" if kind == "pairs" else "decayed_multilinear"
    right = getattr(home, name)

    def wrong(*given: Any, **keys: Any) -> Any:
        found = right(*given, **keys)
        if kernels.forced() == "reference":
            return found
        return (WRONG[fault](found[0]), found[1]) if isinstance(found, tuple) else WRONG[fault](found)

    monkeypatch.setattr(home, name, wrong)
    found = definitions.kernels(subject(kind), precision)
    assert found.verdict == "fails"
    assert found.difference is not None
    assert f"{'gradient' if fault == 'gradients' else 'output'} of " in found.remark.partition("worst: ")[2]


def test_wrong_sums_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    given = subject("decayed")
    assert agreement.decoding(given).verdict == "passes"
    right = multilinear_decayed.Summed

    def wrong(keys: Tensor | None = None, values: Tensor | None = None, length: int = 0) -> Any:
        return right(keys if keys is None else keys * 1.01, values, length)

    monkeypatch.setattr(multilinear_decayed, "Summed", wrong)
    found = agreement.decoding(given)
    assert found.verdict == "fails"
    assert found.difference is not None
