"""`generate` of our models: the cache changes nothing, and the tokens are those of our own decoding."""

import itertools

import paired_models
import pytest
import torch
from paired_models import EOS, XL, kinds, pair, small, tokens
from transformers import DynamicCache

import fullrank as fr
from fullrank.core.errors import InputError
from fullrank.decoding import MemoryReader, beam_search, sample

NEW = 8


def reader(our_model):
    """A model of ours as our own decoding reads it."""
    return MemoryReader(our_model) if our_model.memory_length else our_model


@kinds
def test_padded_prompts_give_what_each_gives_alone(config):
    """Greedy, over many lengths; and alone it is our own decoding."""
    hf_model, our_model = pair(config)
    for lengths in ((3, 7, 1), (1, 9, 8)):
        texts = [tokens(1, length, seed=10 * length + sum(lengths)) for length in lengths]
        alone = [sample(reader(our_model), text, max_new_tokens=NEW, greedy=True, eos_id=EOS) for text in texts]
        ids, mask = paired_models.padded(texts)
        for use_cache in (True, False):
            generated = hf_model.generate(
                ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, use_cache=use_cache
            )
            for written, expected in zip(generated[:, ids.shape[1] :], alone, strict=True):
                length = int(expected.lengths[0])
                assert written[:length].tolist() == expected.ids[0, :length].tolist(), f"use_cache={use_cache}"
                assert (written[length:] == EOS).all()


@kinds
def test_beams_are_ours(config):
    """With early_stopping=True a search ends where ours ends; a length penalty is the same exponent in both."""
    hf_model, our_model = pair(config)
    texts = [tokens(1, length, seed=length) for length in (5, 2)]
    ids, mask = paired_models.padded(texts)
    for penalty in (0.0, 2.0):
        expected = beam_search(
            reader(our_model), ids, attention_mask=mask, max_new_tokens=NEW, beams=3, length_penalty=penalty, eos_id=EOS
        )
        for use_cache in (True, False):
            generated = hf_model.generate(
                ids, attention_mask=mask, max_new_tokens=NEW, num_beams=3, do_sample=False, early_stopping=True,
                length_penalty=penalty, use_cache=use_cache, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            torch.testing.assert_close(generated.sequences_scores, expected.scores[:, 0], rtol=1e-4, atol=1e-4)
            for row in range(2):
                length = int(expected.lengths[row, 0])
                written = generated.sequences[row, ids.shape[1] :][:length]
                assert written.tolist() == expected.ids[row, 0, :length].tolist(), (penalty, use_cache)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # transformers 5.24 says `cache`
@kinds
def test_a_text_goes_on_from_a_returned_cache(config):
    hf_model, _ = pair(config)
    prompt = tokens(1, 6)
    options = {"do_sample": False, "return_dict_in_generate": True}
    expected = hf_model.generate(prompt, max_new_tokens=8, min_new_tokens=8, **options).sequences
    part = hf_model.generate(prompt, max_new_tokens=3, min_new_tokens=3, **options)
    assert isinstance(part.past_key_values, DynamicCache | fr.FullRankCache)
    continued = hf_model.generate(
        part.sequences, past_key_values=part.past_key_values, max_new_tokens=5, min_new_tokens=5, **options
    )
    assert torch.equal(continued.sequences, expected)
    assert continued.past_key_values.get_seq_length() == expected.shape[1] - 1  # the last token was not read


@kinds
def test_a_text_read_in_pieces_is_one_text(config):
    """With a cache: as in one pass. With a memory: as our own model reads the same pieces, also where rows are padded."""
    hf_model, our_model = pair(config)
    input_ids = tokens(2, 12)
    padding = torch.ones_like(input_ids)
    padding[1, :3] = 0
    for mask, cuts in itertools.product((None, padding), ([0, 4, 5, 12], [0, 11, 12])):
        past = memory = None
        parts, our_parts = [], []
        with torch.no_grad():
            for start, end in itertools.pairwise(cuts):
                seen = None if mask is None else mask[:, :end]
                out = hf_model(input_ids[:, start:end], past_key_values=past, attention_mask=seen, use_cache=True)
                past = out.past_key_values
                assert past.get_seq_length() == end
                parts.append(out.logits)
                if our_model.memory_length:
                    new = None if mask is None else mask[:, start:end]
                    piece = our_model(input_ids[:, start:end], memory, attention_mask=new)
                    memory = piece.memory
                    our_parts.append(piece.logits)
            expected = torch.cat(our_parts, 1) if our_parts else our_model(input_ids, attention_mask=mask).logits
        shown = slice(None) if mask is None else mask == 1
        torch.testing.assert_close(torch.cat(parts, 1)[shown], expected[shown], rtol=1e-5, atol=2e-5)


def test_memory_stays_on_whatever_use_cache_says():
    """Trainer sets config.use_cache to False and saves it so."""
    hf_model, _ = pair(small(memory_length=5, **XL))
    prompt = tokens(1, 7)
    before = hf_model.generate(prompt, max_new_tokens=NEW, do_sample=False)
    hf_model.config.use_cache = False
    with torch.no_grad():
        first = hf_model(prompt)
        assert first.past_key_values.get_seq_length() == 7
        second = hf_model(prompt, past_key_values=first.past_key_values)
        assert not torch.allclose(second.logits, first.logits)
    assert torch.equal(hf_model.generate(prompt, max_new_tokens=NEW, do_sample=False, use_cache=False), before)


@kinds
def test_caches_can_be_cut_and_reordered(config):
    hf_model, our_model = pair(config)
    prompt, continuation = tokens(2, 9), tokens(2, 3, seed=8)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0

    def after(past, ids):
        with torch.no_grad():
            logits = hf_model(ids, past_key_values=past).logits
        return logits

    def filled(length=9, rows=slice(None)):
        with torch.no_grad():
            out = hf_model(prompt[rows, :length], attention_mask=mask[rows, :length], use_cache=True)
        return out.past_key_values

    expected = after(filled(), continuation)
    past = filled()
    rows = torch.tensor([1, 1, 0])
    past.reorder_cache(rows)
    assert past.layers[0].batch_size == 3
    torch.testing.assert_close(after(past, continuation[rows]), expected[rows], rtol=1e-5, atol=2e-5)
    past = filled()
    if past.is_croppable:
        past.crop(-4)
        assert past.get_seq_length() == 5
        torch.testing.assert_close(after(past, continuation), after(filled(5), continuation), rtol=1e-5, atol=2e-5)
    else:
        with pytest.raises(InputError, match=r"memory cannot forget|cannot be parted"):
            past.crop(-4)
    past.reset()
    assert past.get_seq_length() == 0
    assert past.state is None
    torch.testing.assert_close(after(past, continuation), our_model(continuation).logits)
