"""Our masked language model and our classifiers as Hugging Face's."""

from __future__ import annotations

from pathlib import Path

import paired_models
import pytest
import torch
from paired_models import CAUSAL, MULTILINEAR, VOCABULARY, masked_of, pair, small, tokens
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

import combinations
import fullrank as fr
from combinations import Combination
from fullrank.core.errors import InputError

every = pytest.mark.parametrize("combination", combinations.sparse(combinations.pairwise(), 3))
ENCODERS = {
    "mixed": small(attention={"mix": "position_wise"}),
    "relative": small(position="relative", attention={"score": "relative"}),
    "mixture": small(output={"kind": "mixture_of_softmaxes", "mixtures": 3, "tied": True}),
    "pairs": small(attention=MULTILINEAR),
}
encoders = pytest.mark.parametrize("config", ENCODERS.values(), ids=ENCODERS)


@every
def test_a_masked_model_computes_what_ours_does(combination: Combination, tmp_path: Path) -> None:
    """Bit for bit, also padded on either side and after saving."""
    hf_model, own = masked_of(combination.config())
    read = combinations.tokens(3)
    with torch.no_grad():
        expected = own(read).logits
        assert torch.equal(hf_model(read).logits, expected)
        for side in ("left", "right"):
            ids, mask = paired_models.padded([read[:1], read[1:2, :4]], side)
            assert torch.equal(hf_model(ids, mask).logits, own(ids, mask).logits)
        hf_model.save_pretrained(tmp_path)
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(read).logits, expected)


@encoders
def test_the_loss_of_what_is_asked_for(config: fr.ModelConfig) -> None:
    hf_model, own = masked_of(config)
    read = tokens(3)
    labels = torch.full_like(read, -100)
    labels[0, 2], labels[2, 5] = 4, 7
    read[0, 2] = read[2, 5] = hf_model.config.mask_token_id
    assert hf_model.config.mask_token_id == own.mask_id == VOCABULARY - 1
    nll = own.nll(read, labels.clamp_min(0)).per_token[labels != -100]
    torch.testing.assert_close(hf_model(read, labels=labels).loss, nll.mean())
    torch.testing.assert_close(hf_model(read, labels=labels, num_items_in_batch=5).loss, nll.sum() / 5)
    hf_model.config.chunked_loss = True
    out = hf_model.train()(read, labels=labels, num_items_in_batch=5)
    torch.testing.assert_close(out.loss, nll.sum() / 5)
    assert out.logits is None


def test_hidden_states_and_attention_weights() -> None:
    hf_model, own = masked_of(ENCODERS["mixed"])
    with torch.no_grad():
        out = hf_model(tokens(), output_hidden_states=True, output_attentions=True)
        trace = fr.Trace()
        own(tokens(), trace=trace)
        torch.testing.assert_close(out.hidden_states[-1], own.encoder(tokens()))
    assert len(out.hidden_states) == 3
    for given, layer in zip(out.attentions, trace.layers, strict=True):
        torch.testing.assert_close(given, layer.mixed)


@encoders
def test_an_encoder_classifies_by_the_mean_of_its_tokens(config: fr.ModelConfig, tmp_path: Path) -> None:
    """From a checkpoint of the masked model; only the classifier is new, N(0, 0.02^2) with bias 0."""
    hf_model, own = masked_of(config)
    hf_model.save_pretrained(tmp_path)
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert not info["unexpected_keys"]
    assert (model.classifier.bias == 0).all()
    assert 0.01 < float(model.classifier.weight.detach().std()) < 0.03
    texts = [tokens(1, length, seed=length) for length in (3, 7)]
    for side in ("left", "right"):
        ids, mask = paired_models.padded(texts, side)
        with torch.no_grad():
            given = model(ids, mask).logits
            for row, text in enumerate(texts):
                expected = model.classifier(own.encoder(text)[0].mean(0))
                torch.testing.assert_close(given[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CAUSAL.values(), ids=CAUSAL)
def test_a_language_model_classifies_by_its_last_token(config: fr.ModelConfig, tmp_path: Path) -> None:
    hf_model, own = pair(config)
    hf_model.save_pretrained(tmp_path)
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2, output_loading_info=True)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert not info["unexpected_keys"]
    texts = [tokens(1, length, seed=length) for length in (3, 7)]
    for side in ("left", "right"):
        ids, mask = paired_models.padded(texts, side)
        with torch.no_grad():
            given = model(ids, mask).logits
            for row, text in enumerate(texts):
                expected = model.classifier(own.hidden(text).hidden[0, -1])
                torch.testing.assert_close(given[row], expected, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(model(texts[1]).logits[0], given[1], rtol=1e-5, atol=2e-5)
    with torch.no_grad():
        again = tmp_path / "again"
        model.save_pretrained(again)
        loaded = AutoModelForSequenceClassification.from_pretrained(again)
        assert torch.equal(loaded(ids, mask).logits, model(ids, mask).logits)


def test_the_losses_of_classes_and_of_values() -> None:
    read = tokens(3)
    for labels, count in ((torch.tensor([0, 2, 1]), 3), (torch.tensor([0.5, -1.0, 2.0]), 1)):
        config = fr.FullRankConfig.of(small(), objective="masked", labels=count)
        model = fr.FullRankForSequenceClassification(config).eval()
        out = model(read, labels=labels)
        expected = F.cross_entropy(out.logits, labels) if count == 3 else F.mse_loss(out.logits[:, 0], labels)
        torch.testing.assert_close(out.loss, expected)
    named = fr.FullRankConfig.of(small(), labels={0: "bad", 1: "good"})
    assert (named.num_labels, named.label2id) == (2, {"bad": 0, "good": 1})


def test_a_translation_model_classifies_nothing() -> None:
    with pytest.raises(InputError, match="takes a model of objective causal or masked, given 'translation'"):
        fr.FullRankForSequenceClassification(fr.FullRankConfig.of(small(), objective="translation"))
