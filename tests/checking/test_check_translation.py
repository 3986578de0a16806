"""Translation models: right ones pass, each planted fault is found by the check it belongs to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank import kernels
from fullrank.checking import Finding, future, translation
from fullrank.checking import kernels as definitions
from fullrank.checking.subject import Subject, subject_of
from fullrank.core import across, mix
from fullrank.core import attention as layer
from fullrank.core.encoder import Encoder
from fullrank.core.errors import InputError
from fullrank.core.layout import Layout

SIZES: dict[str, Any] = {
    "vocab_size": 19, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 34,
}  # fmt: skip
PAIRS: dict[str, Any] = {"kind": "multilinear", "cores": 2, "rank": 5}
PLACES: dict[str, dict[str, Any]] = {
    "B, sigsoftmax": {"attention": fr.AttentionConfig(mix="position_wise", normalize="sigsoftmax", cross_head=0.5)},
    "relative": {"position": "relative", "attention": fr.AttentionConfig(score="relative"), "norm": "post"},
    "one table": {"encoder": fr.EncoderConfig(share_embedding=True), "output": fr.OutputConfig(tied=True)},
    "multi-linear everywhere": {"attention": fr.AttentionConfig(**PAIRS)},
    "synthesizer, mixture": {
        "attention": fr.AttentionConfig(score="random_synthesizer", mix="position_independent"),
        "output": fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=2),
    },
}  # fmt: skip


def model(**keys: Any) -> fr.Translator:
    torch.manual_seed(1)
    given = {"encoder": fr.EncoderConfig(vocab_size=23)} | keys
    return fr.Translator(fr.ModelConfig(**SIZES | given))


def subject(**keys: Any) -> Subject:
    return subject_of(translation.given(model(**keys), None))


def off(finding: Finding) -> bool:
    """Whether it fails by its figure, and not because something could not be run."""
    assert finding.difference is not None, finding
    return finding.verdict == "fails"


@pytest.mark.parametrize("place", PLACES)
def test_it_passes(place: str) -> None:
    dropout = fr.DropoutConfig(embedding=0.1, residual=0.1, activation=0.1, output=0.1)
    found = subject(**PLACES[place], dropout=dropout)
    assert found.kind == "translator"
    assert found.model.sources.shape[1] != found.length  # type: ignore[union-attr, operator]
    checks = [*future.future(found), *translation.translations(found)]
    findings = {name: check() for name, check in checks}
    assert {name: f.remark for name, f in findings.items() if f.verdict == "fails"} == {}
    skipped = {name for name, f in findings.items() if f.verdict == "not applicable"}
    mixed = found.model.config.attention.mix != "none"  # type: ignore[union-attr]
    assert skipped == {"memory in segments = one pass"} | (set() if mixed else {"starts as plain attention"})


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from fullrank.checking import last_position

    monkeypatch.setattr(last_position, "_STEPS", 5)
    given = model()
    state = {name: value.clone() for name, value in given.state_dict().items()}
    report = fr.check(given)
    assert report.passes
    assert report.description["source"] == "a translation model of fullrank"
    assert (report.description["model"], report.description["vocab_size"]) == ("Translator", 19)
    assert report.description["parameters"] == given.num_parameters()
    assert report.of("memory in segments = one pass").reason.endswith("it has no memory")
    assert report.of("last position").verdict == "passes"
    assert all(torch.equal(given.state_dict()[name], value) for name, value in state.items())  # left as it was
    with pytest.raises(InputError, match="random sentences"):
        fr.check(given, text=torch.zeros(300, dtype=torch.long))
    with torch.device("meta"):
        imagined = model()
    with pytest.raises(InputError, match="meta device has no numbers"):
        fr.check(imagined)


# -- planted faults ---------------------------------------------------------------------------------------------------


def blind(attention: Any) -> None:
    """The layer's mask of the future is taken away."""
    attend = attention.attend
    forward = attend.forward

    def unmasked(heads: Any, layout: Layout, trace: Any = None) -> Tensor:
        out: Tensor = forward(heads, Layout.of(*layout.shape, causal=False, key_mask=layout.key_mask), trace)
        return out

    attend.forward = unmasked


@pytest.mark.parametrize("keys", [{}, PLACES["one table"], PLACES["B, sigsoftmax"]], ids=["plain", "one table", "B"])
def test_a_decoder_without_its_mask(keys: dict[str, Any]) -> None:
    found = subject(**keys)
    decoder: Any = found.model.decoder
    blind(decoder.blocks[1].attention)
    for one in (
        future.by_perturbation(found, training=False), future.by_perturbation(found, training=True),
        future.by_perturbation(found, training=False, padded=True), future.by_gradient(found, training=False),
        future.by_gradient(found, training=True),
    ):  # fmt: skip
        assert off(one)
        assert one.layers == ("decoder.blocks.1.attention.attend",)
    assert off(translation.decoding(found))


def test_an_encoder_that_hides_something() -> None:
    found = subject()
    encoder: Any = found.model.encoder
    assert translation.whole_source(found).verdict == "passes"
    for block in encoder.blocks:
        forward = block.attention.forward
        block.attention.forward = lambda x, source, layout, trace=None, forward=forward: forward(
            x, source, replace(layout, causal=True), trace=trace
        )
    one = translation.whole_source(found)
    assert off(one)
    assert "token 1 (from 0) of the source is not seen by state 0" in one.remark


def test_a_target_that_does_not_see_the_source() -> None:
    found = subject()
    decoder: Any = found.model.decoder
    for block in decoder.blocks:
        block._across = lambda x, across, trace: x
    one = translation.whole_source(found)
    assert off(one)
    assert "is not seen by logits of target token 0" in one.remark


@pytest.mark.parametrize("mix", ["none", "position_independent", "position_wise"])
def test_released_decoding_is_named(mix: str) -> None:
    released = fr.DecoderConfig(released_decoding=True)
    found = translation.decoding(subject(attention=fr.AttentionConfig(mix=mix), decoder=released))
    if mix == "none":
        assert found.verdict == "passes"
        return
    assert off(found)
    assert "model.decoder.released_decoding: true leaves heads unmixed" in found.remark


def test_released_cross_is_another_model_and_no_fault() -> None:
    found = subject(attention=fr.AttentionConfig(mix="position_wise"), decoder=fr.DecoderConfig(released_cross=True))
    assert {check().verdict for _, check in translation.translations(found)} == {"passes", "not applicable"}


def test_a_mask_of_the_source_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the encoder, by cross-attention, or by cross-attention while a translation is written."""
    right = Encoder.encode
    with monkeypatch.context() as context:
        context.setattr(Encoder, "encode", lambda self, ids, mask=None, **more: right(self, ids, None, **more))
        one = translation.padding(subject())
        assert off(one)
        assert "padding of the source on the" in one.remark
    layout = across._layout
    with monkeypatch.context() as context:
        context.setattr(across, "_layout", lambda queries, keys, mask, *more: layout(queries, keys, None, *more))
        assert off(translation.padding(subject()))
    with monkeypatch.context() as context:
        of_layer = across.Projected.of_layer
        context.setattr(across.Projected, "of_layer", lambda self, *given: of_layer(replace(self, mask=None), *given))
        assert translation.padding(subject()).verdict == "passes"
        one = translation.decoding(subject())
        assert off(one)
        assert "padding of the source" in one.remark


def test_padding_that_takes_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Encoder._layout

    def wrong(self: Encoder, ids: Tensor, mask: Tensor | None, padded_right: bool | None) -> Layout:
        return right(self, ids, mask, True)

    monkeypatch.setattr(Encoder, "_layout", wrong)
    one = translation.padding(subject())
    assert off(one)
    assert "source on the left" in one.remark


def test_a_wrong_cache_and_wrong_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        right = layer.append
        context.setattr(layer, "append", lambda past, room, new: right(past * 1.01, None, new))
        assert off(translation.decoding(subject()))
    unsorted = across.Projected.reorder
    with monkeypatch.context() as context:  # rows of the sentences next to them
        context.setattr(across.Projected, "reorder", lambda self, index: unsorted(self, index.flip(0)))
        one = translation.decoding(subject())
        assert off(one)
        assert "beams" in one.remark


def test_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of cross-attention only: where queries and keys differ in number."""
    found = subject()
    right = kernels.KERNELS["sdpa"]

    def wrong(attend: Any, heads: Any, layout: Layout, trace: Any) -> Tensor:
        out: Tensor = right(attend, heads, layout, trace)
        return out * (1 + 1e-3 * (layout.shape[0] != layout.shape[1]))

    checked = (translation.quiet, translation.computed)
    assert definitions.kernels(found, "fp64", *checked).verdict == "passes"
    monkeypatch.setitem(kernels.KERNELS, "sdpa", wrong)
    for precision in ("fp64", "fp32"):
        assert off(definitions.kernels(found, precision, *checked))


@pytest.mark.parametrize("place", ["encoder", "decoder", "cross"])
def test_mixing_that_does_not_start_plain(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = fr.AttentionConfig(mix="position_wise")
    keys: dict[str, Any] = (
        {"encoder": fr.EncoderConfig(vocab_size=23, attention=own)}
        if place == "encoder"
        else {"decoder": fr.DecoderConfig(**{"attention" if place == "decoder" else "cross": own})}
    )
    found = subject(**keys)
    one = translation.plain_start(found)
    assert one.verdict == "passes"
    assert f"mix: {place} position_wise" in one.looked_at
    right = mix.PositionWiseMixing.forward
    monkeypatch.setattr(mix.PositionWiseMixing, "forward", lambda self, w, query: right(self, w, query) * (1 + 1e-6))
    assert off(translation.plain_start(found))


def test_mixing_that_need_not_start_plain() -> None:
    found = translation.plain_start(subject(decoder=fr.DecoderConfig(cross=fr.AttentionConfig(mix="average"))))
    assert (found.verdict, "'average' mixing (cross)" in found.reason) == ("not applicable", True)


def test_a_file_that_loses_something(monkeypatch: pytest.MonkeyPatch) -> None:
    found = subject()
    right = fr.Translator.load

    def wrong(path: Any, checkpoint: str = "best") -> fr.Translator:
        loaded = right(path, checkpoint)
        with torch.no_grad():
            loaded.get_parameter("encoder.blocks.0.attention.merge.weight").mul_(1.001)
        return loaded

    monkeypatch.setattr(fr.Translator, "load", wrong)
    one = translation.saving(found)
    assert off(one)
    assert "encoder.blocks.0.attention.merge.weight" in one.remark


def test_a_decoder_as_published_is_named() -> None:
    seeing = fr.AttentionConfig(**PAIRS, causal="as_published", not_next_token_perplexity=True)
    found = subject(decoder=fr.DecoderConfig(attention=seeing))
    assert found.sees_future == "model.decoder.attention.causal: as_published"
    one = future.by_perturbation(found, training=False)
    assert off(one)
    assert one.remark.endswith("model.decoder.attention.causal: as_published leaves the mask out")
    assert translation.decoding(found).verdict == "not applicable"
    assert translation.padding(found).verdict == "passes"
    published = fr.AttentionConfig(**PAIRS, causal="as_published")
    encoder = subject(encoder=fr.EncoderConfig(vocab_size=23, attention=published))
    assert encoder.sees_future == ""
    assert future.by_perturbation(encoder, training=False).verdict == "passes"
