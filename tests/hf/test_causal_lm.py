"""Our language model as Hugging Face's: what it computes, saves and loads, for everything registered."""

import json

import pytest
import torch
import transformers
from paired_models import IDS, VOCABULARY, kinds, pair, small, tokens
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import combinations
import fullrank as fr
from fullrank.core.errors import InputError

every = pytest.mark.parametrize("combination", combinations.sparse(combinations.pairwise(), 9))


@every
def test_it_computes_what_ours_does(combination):
    """Bit for bit, with and without a cache; it starts with the same numbers."""
    config = combination.config()
    torch.manual_seed(3)
    initial = fr.FullRankForCausalLM(fr.FullRankConfig.of(config)).state_dict()
    our_model = combination.model()
    assert list(initial) == [f"model.{name}" for name in our_model.state_dict()]
    for name, tensor in our_model.state_dict().items():
        assert torch.equal(initial[f"model.{name}"], tensor), f"{name} starts otherwise"
    hf_model, our_model = pair(config, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    input_ids = combinations.tokens()
    with torch.no_grad():
        expected = our_model(input_ids).logits
        assert torch.equal(hf_model(input_ids, use_cache=False).logits, expected)
        assert torch.equal(hf_model(input_ids).logits, expected)


@kinds
def test_saving_loses_nothing(config, tmp_path):
    """Also in several files, and in another precision."""
    hf_model, _ = pair(config)
    hf_model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is fr.FullRankForCausalLM
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, hf_model(tokens()).logits)
        double = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        assert double.dtype == torch.float64
        torch.testing.assert_close(double(tokens()).logits, hf_model.double()(tokens()).logits)
        half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert half.dtype == torch.bfloat16
        assert half(tokens()).logits.isfinite().all()


def test_what_a_checkpoint_lacks_starts_as_ours(tmp_path):
    """A plain checkpoint with position-wise mixing is the plain model still: only what it lacks is initialised."""
    plain, _ = pair(small())
    plain.save_pretrained(tmp_path)
    config = fr.FullRankConfig.of(small(attention={"mix": "position_wise"}), **IDS)
    mixed, info = fr.FullRankForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert info["missing_keys"]
    assert all(".attend.mix." in name for name in info["missing_keys"])
    with fr.kernel("reference"), torch.no_grad():
        assert torch.equal(mixed(tokens()).logits, plain(tokens()).logits)


def test_the_configuration(tmp_path, monkeypatch):
    config = fr.FullRankConfig.of(small(memory_length=4), **IDS)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "fullrank"
    assert written["fullrank"]["memory_length"] == 4
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is fr.FullRankConfig
    assert loaded.model_config() == small(memory_length=4)
    assert fr.FullRankConfig().model_config() == fr.ModelConfig()  # Hugging Face compares with a default one
    warnings = []
    monkeypatch.setattr(transformers.configuration_utils.logger, "warning_once", warnings.append)
    assert fr.FullRankConfig.of(small(), pad_token_id=VOCABULARY).pad_token_id == VOCABULARY
    assert not warnings


@kinds
def test_the_loss_is_the_mean_nll_of_what_counts(config):
    """The loss is that of every token after its predecessors; -100 does not count; `num_items_in_batch` divides it."""
    hf_model, our_model = pair(config)
    input_ids = tokens(3, 8)
    labels = input_ids.clone()
    labels[0, 5:] = -100
    labels[2, 3] = -100
    counts = labels[:, 1:] != -100
    nll = our_model.nll(input_ids[:, :-1], input_ids[:, 1:]).per_token[counts]
    for training in (False, True):
        hf_model.train(training)
        torch.testing.assert_close(hf_model(input_ids, labels=labels).loss, nll.mean())
        for count in (50, torch.tensor(50)):
            loss = hf_model(input_ids, labels=labels, num_items_in_batch=count).loss
            torch.testing.assert_close(loss, nll.sum() / 50)


@kinds
def test_vectors_in_place_of_ids(config):
    """The logits are those of the ids. PEFT passes both arguments, one of them None."""
    hf_model, _ = pair(config, eos_token_id=None)
    input_ids = tokens()
    vectors = hf_model.get_input_embeddings()(input_ids).detach()
    if config.document_token_id is not None:
        with pytest.raises(InputError, match="inputs_embeds: model"):
            hf_model(inputs_embeds=vectors)
        return
    assert torch.equal(hf_model(inputs_embeds=vectors).logits, hf_model(input_ids, inputs_embeds=None).logits)
    options = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(
        hf_model.generate(inputs_embeds=vectors, **options), hf_model.generate(input_ids, **options)[:, 7:]
    )
    for both in ({}, {"input_ids": input_ids, "inputs_embeds": vectors}):
        with pytest.raises(InputError, match="exactly one"):
            hf_model(**both)


@kinds
def test_hidden_states_and_attention_weights(config):
    hf_model, our_model = pair(config)
    input_ids = tokens()
    with torch.no_grad():
        for use_cache in (False, True):
            out = hf_model(input_ids, output_hidden_states=True, use_cache=use_cache)
            assert len(out.hidden_states) == 3
            torch.testing.assert_close(our_model.output(out.hidden_states[-1]), out.logits)
            embedded = our_model.position(our_model.embedding(input_ids), torch.arange(7))
            torch.testing.assert_close(out.hidden_states[0], embedded)
        if config.attention.kind == "multilinear":
            with pytest.raises(InputError, match="weights"):
                hf_model(input_ids, output_attentions=True)
            return
        out = hf_model(input_ids, output_attentions=True)
        trace = fr.Trace()
        our_model(input_ids, trace=trace)
        assert len(out.attentions) == 2
        for weights, layer in zip(out.attentions, trace.layers, strict=True):
            torch.testing.assert_close(weights, layer.mixed)
    assert isinstance(hf_model(input_ids, return_dict=False), tuple)


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "activation_checkpointing_enable"),
    reason="has another name in older versions of transformers",
)
@pytest.mark.parametrize("every_n_layers", [1, 2])
def test_activation_checkpointing_changes_no_gradient(every_n_layers):
    dropout = fr.DropoutConfig(embedding=0.1, attention=0.2, activation=0.1, residual=0.1, output=0.1)
    hf_model, _ = pair(small(dropout=dropout, attention={"mix": "position_wise", "cross_head": 0.5}))
    hf_model.train()
    runs = []
    for block in hf_model.model.blocks:
        block.feed_forward.register_forward_hook(lambda *arguments: runs.append(1))
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            hf_model.activation_checkpointing_enable(every_n_layers=every_n_layers)
        runs.clear()
        hf_model.zero_grad()
        torch.manual_seed(4)
        hf_model(tokens(), labels=tokens()).loss.backward()
        assert len(runs) == (2 + 2 // every_n_layers if checkpointed else 2)
        gradients.append([parameter.grad.clone() for parameter in hf_model.parameters()])
    for expected, gradient in zip(*gradients, strict=True):
        assert torch.equal(gradient, expected)
