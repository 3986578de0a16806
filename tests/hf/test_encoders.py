"""Our masked language model as Hugging Face's."""

import paired_models
import pytest
import torch
from paired_models import MULTILINEAR, VOCABULARY, masked_of, small, tokens
from transformers import AutoModelForMaskedLM

import combinations

every = pytest.mark.parametrize("combination", combinations.sparse(combinations.pairwise(), 9))
ENCODERS = {
    "mixed": small(attention={"mix": "position_wise"}),
    "relative": small(position="relative", attention={"score": "relative"}),
    "mixture": small(output={"kind": "mixture_of_softmaxes", "mixtures": 3, "tied": True}),
    "pairs": small(attention=MULTILINEAR),
}
encoders = pytest.mark.parametrize("config", ENCODERS.values(), ids=ENCODERS)


@every
def test_a_masked_model_computes_what_ours_does(combination, tmp_path):
    """Bit for bit, also padded on either side and after saving."""
    hf_model, our_model = masked_of(combination.config())
    input_ids = combinations.tokens(3)
    with torch.no_grad():
        expected = our_model(input_ids).logits
        assert torch.equal(hf_model(input_ids).logits, expected)
        assert torch.equal(hf_model(inputs_embeds=hf_model.get_input_embeddings()(input_ids)).logits, expected)
        for side in ("left", "right"):
            ids, mask = paired_models.padded([input_ids[:1], input_ids[1:2, :4]], side)
            assert torch.equal(hf_model(ids, mask).logits, our_model(ids, mask).logits)
        hf_model.save_pretrained(tmp_path)
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(input_ids).logits, expected)


@encoders
def test_the_loss_of_what_is_asked_for(config):
    hf_model, our_model = masked_of(config)
    input_ids = tokens(3)
    labels = torch.full_like(input_ids, -100)
    labels[0, 2], labels[2, 5] = 4, 7
    input_ids[0, 2] = input_ids[2, 5] = hf_model.config.mask_token_id
    assert hf_model.config.mask_token_id == our_model.mask_id == VOCABULARY - 1
    nll = our_model.nll(input_ids, labels.clamp_min(0)).per_token[labels != -100]
    torch.testing.assert_close(hf_model(input_ids, labels=labels).loss, nll.mean())
    torch.testing.assert_close(hf_model(input_ids, labels=labels, num_items_in_batch=5).loss, nll.sum() / 5)
