"""Two ways to compute the same: each check passes what is right and fails what was made wrong."""

import dataclasses
import types
from typing import Any

import leaky_models as leaky
import numpy as np
import pytest
import torch
from checked_models import XL, find, off, ours, run, translating
from torch import nn

import fullrank as fr
import hugging_face_models as tiny
from fullrank.checking import agreement, definition
from fullrank.checking.calls import CERTAIN
from fullrank.checking.subject import open_subject


def scaled(out, factor):
    """An output of a model with other logits."""
    return dataclasses.replace(out, logits=out.logits * factor)


def test_padding():
    assert find(agreement.padding, ours()).verdict == "passes"
    assert find(agreement.padding, open_subject(leaky.Padded())).verdict == "passes"
    assert off(find(agreement.padding, open_subject(leaky.Padded(instead=1))))
    assert find(agreement.padding, open_subject(leaky.Model())).verdict == "not applicable"


class Unmasked(fr.LanguageModel):
    """Padding on the right of a causal model harms nobody; on the left it does."""

    def forward(self, *args, attention_mask=None, **keys):
        return super().forward(*args, **keys)


class UnmaskedTarget(fr.Translator):
    def forward(self, *args, decoder_attention_mask=None, **keys):
        return super().forward(*args, **keys)


def test_a_mask_that_is_not_used():
    for subject, side in ((ours(Unmasked), "padding: left"), (translating(UnmaskedTarget), "padding: left")):
        finding = find(agreement.padding, subject)
        assert off(finding)
        assert side in finding.remark


class WrongCache(fr.LanguageModel):
    """Wrong by a thousandth where a cache holds tokens."""

    def forward(self, input_ids, *args, cache=None, **keys):
        out = super().forward(input_ids, *args, cache=cache, **keys)
        return out if cache is None or cache.length == 0 else scaled(out, 1.001)


DECAYED = {"position": "none", "attention": fr.AttentionConfig(kind="multilinear", rank=6, output_map="decayed")}


@pytest.mark.parametrize("keys", [{}, XL, DECAYED])
def test_a_wrong_cache(keys):
    assert find(agreement.decoding, ours(**keys)).verdict == "passes"
    finding = find(agreement.decoding, ours(WrongCache, **keys))
    assert off(finding)
    assert "worst: " in finding.remark


@dataclasses.dataclass(frozen=True)
class Misordered:
    """A cache that gives each beam the row of another one."""

    cache: Any

    def reorder(self, index):
        return Misordered(self.cache.reorder(index.flip(0)))


class MisorderedBeams(fr.Translator):
    def of_source(self, source):
        decoder = super().of_source(source)

        class Decoder:
            def new_cache(self):
                return Misordered(decoder.new_cache())

            def __call__(self, input_ids, *, cache, attention_mask):
                out = decoder(input_ids, cache=cache.cache, attention_mask=None)
                return types.SimpleNamespace(logits=out.logits, cache=Misordered(out.cache))

        return Decoder()


def test_wrong_decoding_of_translations():
    assert find(agreement.decoding, translating()).verdict == "passes"
    finding = find(agreement.decoding, translating(MisorderedBeams))
    assert off(finding)
    assert "worst: as beams" in finding.remark


@pytest.mark.parametrize("mix", ["none", "position_independent", "position_wise"])
def test_released_decoding_is_found(mix):
    released = fr.DecoderConfig(released_decoding=True)
    finding = find(agreement.decoding, translating(attention=fr.AttentionConfig(mix=mix), decoder=released))
    if mix == "none":
        assert finding.verdict == "passes"
        return
    assert off(finding)


class WrongMemory(fr.LanguageModel):
    """Wrong by a thousandth after a memory; with `only_window` only where every token sees equally many."""

    only_window = False

    def forward(self, input_ids, memory=None, **keys):
        out = super().forward(input_ids, memory, **keys)
        wrong = memory is not None and (self.config.same_length or not self.only_window)
        return scaled(out, 1.001) if wrong else out


class WrongWindow(WrongMemory):
    only_window = True


@pytest.mark.parametrize("options", [{}, {"same_length": True}, {"memory_start": "zeros"}])
def test_a_wrong_memory(options):
    assert find(definition.memory, ours(**XL, **options)).verdict == "passes"
    assert off(find(definition.memory, ours(WrongMemory, **XL, **options)))
    finding = find(definition.memory, ours(WrongWindow, **XL, **options))
    assert finding.verdict == ("fails" if "same_length" in options else "passes")


def test_no_memory_no_cache():
    assert "memory_length is 0" in find(definition.memory, ours()).reason
    module = open_subject(leaky.Model())
    assert find(definition.memory, module).verdict == run(agreement.decoding, module).verdict == "not applicable"


class LastBatch(leaky.Model):
    """Adds the batch that it read before."""

    keeps = 1
    last: Any = 0

    def hidden(self, input_ids):
        x = super().hidden(input_ids)
        y = x + self.last
        self.last = self.keeps * x.detach()
        return y


def test_what_is_kept_between_calls_is_asked_for():
    report = fr.check(LastBatch(), quick=True)
    assert report.passes, report
    (finding,) = (finding for finding in report.findings if finding.check.startswith("the same call after another"))
    assert (finding.verdict, "is that a memory" in finding.reason) == ("not applicable", True)
    forgetful = LastBatch()
    forgetful.keeps = 0
    assert find(agreement.call_after_another, open_subject(forgetful), CERTAIN[0]).verdict == "passes"


def test_a_faint_leak_across_rows_of_a_model_with_parts_in_float32():
    """Norms of Llama are computed in float32, whose rounding is larger than the leak."""
    model = tiny.llama()
    assert find(agreement.compare_prefixes, open_subject(model), CERTAIN[0]).tolerance == 1e-10
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + 1e-7 * out.roll(1, 0))
    finding = find(agreement.change_rows, open_subject(model), CERTAIN[0])
    assert off(finding)
    assert finding.difference < 1e-5
    assert finding.layers == ("model.layers.0.mlp",)


def test_a_number_of_rows_is_not_taken_for_a_length():
    model = leaky.Model()
    model.output.register_forward_hook(lambda module, args, out: out * len(out))
    subject = open_subject(model)
    assert find(agreement.compare_prefixes, subject, CERTAIN[0]).verdict == "passes"
    assert "a row alone" in find(agreement.change_rows, subject, CERTAIN[0]).remark


def test_the_layer_that_sees_padding_is_named():
    """And no other layer, though layers are given a mask, too, where a text is padded."""
    model = tiny.llama()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + 0.1 * out.roll(-1, 1))
    assert find(agreement.padding, open_subject(model)).layers == ("model.layers.0.mlp",)


def test_a_part_that_stays_in_float32_may_round():
    class Rounds(nn.Module):
        def forward(self, x):
            seen = np.tril(np.ones((x.shape[1], x.shape[1]), "float32"))
            return torch.from_numpy(seen @ x.numpy().astype("float32")).to(x.dtype)

    finding = find(agreement.compare_prefixes, open_subject(leaky.Model({1: Rounds()})), CERTAIN[0])
    assert (finding.verdict, finding.tolerance) == ("passes", 1e-4)


def test_a_wrong_cache_of_hugging_face(monkeypatch):
    from transformers.cache_utils import DynamicLayer

    subject = open_subject(tiny.llama())
    assert find(agreement.decoding, subject).verdict == "passes"
    right = DynamicLayer.update

    def wrong(self, key, value, *args, **more):
        keys, values = right(self, key, value, *args, **more)
        return keys, torch.cat((values[:, :, :-1] * 1.001, values[:, :, -1:]), dim=2) if key.shape[2] == 1 else values

    monkeypatch.setattr(DynamicLayer, "update", wrong)
    finding = find(agreement.decoding, subject)
    assert (finding.verdict, finding.remark) == ("fails", "worst: token by token")
