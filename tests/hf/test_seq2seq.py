"""Our translation model as Hugging Face's: the same numbers, and beams that are ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paired_models
import pytest
import torch
from paired_models import translator_of
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, PreTrainedModel

import fullrank as fr
from fullrank.core.errors import InputError
from fullrank.decoding import beam_search, sample
from translator_models import MECHANISMS, config, padding, sentences

EOS, NEW = paired_models.EOS, 7
FEW = [
    "B", "A in the encoder, B in the decoder", "relative positions with B, own biases", "multi-linear everywhere",
    "multi-linear decoder, decayed", "one adaptive table", "mixture",
]  # fmt: skip
few = pytest.mark.parametrize("mechanism", FEW)
every = pytest.mark.parametrize(
    "mechanism", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in MECHANISMS]
)


def ours(own: fr.Translator, source: Tensor, mask: Tensor | None = None, **how: Any) -> Any:
    """Translations of our own beam search; a translation begins with <eos>."""
    start = torch.full((len(source), 1), EOS)
    with torch.no_grad():
        return beam_search(own.of_source(own.encode(source, mask)), start, max_new_tokens=NEW, eos_id=EOS, **how)


@every
def test_it_computes_what_ours_does(mechanism: str) -> None:
    """Bit for bit in one pass; token by token as closely as our own cache."""
    hf_model, own = translator_of(config(mechanism))
    source, target = sentences(own)
    for side in ("left", "right"):
        mask = padding([7, 3, 5], 7, side)
        with torch.no_grad():
            expected = own(source, target, mask).logits
            assert torch.equal(hf_model(source, mask, target).logits, expected)
            encoded = hf_model.get_encoder()(source, mask)
            assert torch.equal(hf_model(None, mask, target, encoder_outputs=encoded).logits, expected)
            past, parts = None, []
            for token in target.split(2, dim=1):
                out = hf_model(None, mask, token, encoder_outputs=encoded, past_key_values=past, use_cache=True)
                past = out.past_key_values
                parts.append(out.logits)
        assert past.get_seq_length() == 5
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


@few
def test_saving_loses_nothing(mechanism: str, tmp_path: Path) -> None:
    hf_model, own = translator_of(config(mechanism))
    hf_model.save_pretrained(tmp_path)
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is fr.FullRankForSeq2SeqLM
    assert loaded.config.is_encoder_decoder
    assert not any(info.values())
    with torch.no_grad():
        source, target = sentences(own)
        assert torch.equal(loaded(source, None, target).logits, own(source, target).logits)


@few
def test_beams_are_ours(mechanism: str) -> None:
    """With early_stopping=True, which ends a search as ours ends; length penalties are the same exponent."""
    hf_model, own = translator_of(config(mechanism))
    source, _ = sentences(own)
    mask = padding([7, 3, 5], 7, "right")
    for beams, penalty in ((1, 1.0), (3, 0.0), (3, 2.0)):
        expected = ours(own, source, mask, beams=beams, length_penalty=penalty)
        for use_cache in (True, False):
            given = hf_model.generate(
                source, attention_mask=mask, max_new_tokens=NEW, num_beams=beams, do_sample=False,
                early_stopping=beams > 1, length_penalty=penalty if beams > 1 else None, use_cache=use_cache,
            )  # fmt: skip
            assert (given[:, 0] == EOS).all()
            for row in range(len(source)):
                length = int(expected.lengths[row, 0])
                written = given[row, 1:][:length].tolist()
                assert written == expected.ids[row, 0, :length].tolist(), (beams, penalty, use_cache)


def test_a_prompt_of_the_target_may_be_padded_on_the_left() -> None:
    hf_model, own = translator_of(config("B"))
    source, _ = sentences(own, rows=2)
    prompts = [torch.tensor([[EOS, 4, 5]]), torch.tensor([[EOS]])]
    ids, mask = paired_models.padded(prompts)
    given = hf_model.generate(
        source, decoder_input_ids=ids, decoder_attention_mask=mask, max_new_tokens=NEW, do_sample=False
    )
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            reader = own.of_source(own.encode(source[row : row + 1]))
            alone = sample(reader, prompt, max_new_tokens=NEW, greedy=True, eos_id=EOS)
        length = int(alone.lengths[0])
        assert given[row, 3 : 3 + length].tolist() == alone.ids[0, :length].tolist()


def test_the_released_decoding_mixes_without_a_cache_only() -> None:
    """Heads are mixed in training and not while decoding token by token, as in Mixhead's released code."""
    hf_model, own = translator_of(config("B", decoder_keys={"released_decoding": True}))
    source, target = sentences(own)
    with torch.no_grad():
        whole, cached = hf_model(source, None, target).logits, hf_model(source, None, target, use_cache=True).logits
        reader = own.of_source(own.encode(source))
        assert torch.equal(whole, own(source, target).logits)
        torch.testing.assert_close(cached, reader(target, cache=reader.new_cache()).logits)
    assert not torch.allclose(whole, cached)


@few
def test_the_loss_of_labels(mechanism: str) -> None:
    """Shifted to the right behind <eos>; -100 does not count."""
    hf_model, own = translator_of(config(mechanism))
    source, _ = sentences(own)
    labels = torch.tensor([[3, 4, 5, EOS], [6, EOS, -100, -100], [7, 8, EOS, -100]])
    inputs = torch.tensor([[EOS, 3, 4, 5], [EOS, 6, EOS, EOS], [EOS, 7, 8, EOS]])
    counts = labels != -100
    nll = own.nll(source, inputs, labels.clamp_min(0)).per_token[counts]
    torch.testing.assert_close(hf_model(source, labels=labels).loss, nll.mean())
    torch.testing.assert_close(hf_model(source, labels=labels, num_items_in_batch=20).loss, nll.sum() / 20)
    features = [{"input_ids": [3, 4], "labels": [5, EOS]}, {"input_ids": [3], "labels": [EOS]}]

    class Padding:
        """The part of a tokenizer that the collator calls."""

        padding_side = "right"

        def pad(self, rows: list[dict[str, Any]], **options: Any) -> dict[str, Tensor]:
            ids = torch.tensor([row["input_ids"] + [EOS] * (2 - len(row["input_ids"])) for row in rows])
            return {
                "input_ids": ids,
                **({"labels": torch.tensor([r["labels"] for r in rows])} if "labels" in rows[0] else {}),
            }

    batch = DataCollatorForSeq2Seq(Padding(), model=hf_model)(features)
    assert batch["decoder_input_ids"].tolist() == [[EOS, 5], [EOS, EOS]]


def test_hidden_states_and_attention_weights() -> None:
    hf_model, own = translator_of(config("other depths"))
    source, target = sentences(own)
    with torch.no_grad():
        out = hf_model(source, None, target, output_attentions=True, output_hidden_states=True)
    assert [tuple(weights.shape) for weights in out.cross_attentions] == [(3, 3, 5, 7)]
    assert [tuple(weights.shape) for weights in out.decoder_attentions] == [(3, 3, 5, 5)]
    assert [tuple(weights.shape) for weights in out.encoder_attentions] == [(3, 3, 7, 7)] * 3
    assert (len(out.encoder_hidden_states), len(out.decoder_hidden_states)) == (4, 2)
    torch.testing.assert_close(out.encoder_hidden_states[-1], out.encoder_last_hidden_state)


def test_what_is_missing_is_said() -> None:
    hf_model, own = translator_of(config("plain"), decoder_start_token_id=None, eos_token_id=None)
    source, target = sentences(own)
    with pytest.raises(InputError, match="decoder_input_ids or labels"):
        hf_model(source)
    with pytest.raises(InputError, match="needs its source"):
        hf_model(decoder_input_ids=target)
    with pytest.raises(InputError, match="decoder_start_token_id"):
        hf_model(source, labels=target)
    with pytest.raises(InputError, match="takes a model of objective causal"):
        fr.FullRankForCausalLM(fr.FullRankConfig.of(config("plain")))
    causal, _ = paired_models.pair(paired_models.small())
    with torch.no_grad():
        past = causal(paired_models.tokens(3)).past_key_values
    with pytest.raises(InputError, match="of another model"):
        hf_model(source, None, target, past_key_values=past)


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "activation_checkpointing_enable"),
    reason="has another name in older versions of transformers",
)
def test_activation_checkpointing_of_both_halves() -> None:
    hf_model, own = translator_of(config("B", dropout=fr.DropoutConfig(attention=0.2, residual=0.1)))
    source, target = sentences(own)
    hf_model.train()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            hf_model.activation_checkpointing_enable()
        hf_model.zero_grad()
        torch.manual_seed(4)
        hf_model(source, labels=target).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in hf_model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
