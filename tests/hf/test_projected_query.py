"""Position-wise mixing reads the projected query: before norms, rotation and scale, wherever the text stands."""

from __future__ import annotations

import copy
import inspect
import json
import sys
import threading

import peft
import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_families import _CAUSAL, _IDS, _SIZES, FAMILIES, _of, _texts  # noqa: E402

import fullrank as fr  # noqa: E402
from fullrank.core.errors import InputError  # noqa: E402

_LATENT = {**_CAUSAL, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
           "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2, "moe_intermediate_size": 16,
           "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4, **_IDS}
ROTARY = {
    **{name: FAMILIES[name] for name in ("gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss")},
    "deepseek_v2": _of("DeepseekV2ForCausalLM", "DeepseekV2Config", _texts, **_LATENT),
    "deepseek_v3": _of("DeepseekV3ForCausalLM", "DeepseekV3Config", _texts, **_LATENT),
    "deepseek_v3_without_rank": _of("DeepseekV3ForCausalLM", "DeepseekV3Config", _texts, **{**_LATENT, "q_lora_rank": None}),
    "phi": _of("PhiForCausalLM", "PhiConfig", _texts, qk_layernorm=True, **{**_CAUSAL, "num_key_value_heads": 4}),
    "phi3": _of("Phi3ForCausalLM", "Phi3Config", _texts, **_CAUSAL),
    "cohere": _of("CohereForCausalLM", "CohereConfig", _texts, use_qk_norm=True, **_CAUSAL),
    "olmo2": _of("Olmo2ForCausalLM", "Olmo2Config", _texts, **_CAUSAL),
    "stablelm": _of("StableLmForCausalLM", "StableLmConfig", _texts, **_CAUSAL),
    "persimmon": _of("PersimmonForCausalLM", "PersimmonConfig", _texts, **_SIZES, **_IDS),
    "diffllama": _of("DiffLlamaForCausalLM", "DiffLlamaConfig", _texts, **_CAUSAL),
    "qwen3_next": _of("Qwen3NextForCausalLM", "Qwen3NextConfig", _texts, head_dim=16, num_experts=4, num_experts_per_tok=2,
                      moe_intermediate_size=16, shared_expert_intermediate_size=16,
                      layer_types=["full_attention", "full_attention"], **_CAUSAL),
    "gptj": _of("GPTJForCausalLM", "GPTJConfig", _texts, **_GPT),
    "codegen": _of("CodeGenForCausalLM", "CodeGenConfig", _texts, **_GPT),
}  # fmt: skip


def rotary_model(name):
    """A trained mixing in a family of rotary models, and the same model without."""
    plain, _ = ROTARY[name]()
    if name in ("gptj", "codegen") and not fr.hf.inject.attention_modules(plain):
        pytest.skip(f"transformers {transformers.__version__} has {name} off the attention interface")
    return stir(fr.inject(copy.deepcopy(plain), mix="position_wise")), plain


def stir(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".fullrank." in name:
                parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


IDS = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(8))
PADDED = {"input_ids": torch.nn.functional.pad(IDS, (4, 0)),
          "attention_mask": torch.nn.functional.pad(torch.ones_like(IDS), (4, 0))}  # fmt: skip


@pytest.mark.parametrize("kernel", [pytest.param("reference", marks=pytest.mark.full), "auto"])
@pytest.mark.parametrize("name", ROTARY)
@torch.no_grad()
def test_the_same_text_further_right_has_the_same_output(name, kernel):
    """Padded on the left without position_ids, as Trainer and lm-eval pass it; rotary attention sees distances alone."""
    model, plain = rotary_model(name)
    assert model.config.fullrank["query"] == "projected"
    with fr.kernel(kernel):
        alone, padded = model(IDS).logits, model(**PADDED).logits[:, 4:]
    scale = max(1, alone.abs().max().item())
    assert (alone - plain(IDS).logits).abs().max() > 1e-2 * scale
    as_plain = (plain(**PADDED).logits[:, 4:] - plain(IDS).logits).abs().max().item()
    assert (padded - alone).abs().max() <= max(1e-5 * scale, 3 * as_plain)
    assert as_plain <= 1e-5 * max(1, plain(IDS).logits.abs().max().item())


def query_columns(name, module):
    """Columns of a projection's output that are queries, head after head, from the published layouts of fused projections."""
    heads, width = module.fullrank.size.num_heads, module.fullrank.size.head_dim
    columns = torch.arange(heads * width).view(heads, width)
    by_head = {"gpt_neox": 3, "persimmon": 3, "qwen3_next": 2}  # q, k, v of a head; q and its gate
    if name in by_head:
        columns = columns + torch.arange(heads)[:, None] * (by_head[name] - 1) * width
    if name == "codegen":  # four parts, each with its own q, v, k of one head here
        columns = columns + torch.arange(heads)[:, None] * 2 * width
    return columns


@pytest.mark.parametrize("name", ROTARY)
@torch.no_grad()
def test_the_query_is_the_one_of_the_projection(name):
    """M(n) = Q(n) W + B with Q(n) from the module's own projection of the states that it reads."""
    model, _ = rotary_model(name)
    module = next(iter(fr.hf.inject.attention_modules(model).values()))
    outputs = {}
    parts = dict(module.named_children())
    names = ("q_b_proj", "q_proj", "query_key_value", "qkv_proj")
    projection = next(parts[key] for key in names if parts.get(key) is not None)
    projection.register_forward_hook(lambda _, __, output: outputs.update(own=output))
    trace = fr.Trace()
    with fr.traced(trace):
        model(IDS)
    query = outputs["own"][..., query_columns(name, module)]  # (B, N, H, D)
    mix = module.fullrank.mix
    torch.testing.assert_close(trace.layers[0].mixing, query @ mix.from_query + mix.mixing, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ROTARY)
@torch.no_grad()
def test_with_a_cache_outputs_are_those_of_the_whole_text(name):
    model, _ = rotary_model(name)
    whole = model(IDS).logits
    takes = inspect.signature(model.forward).parameters
    past = {"cache" if "cache" in takes else "past_key_values": transformers.DynamicCache(config=model.config)}
    steps = [model(part, use_cache=True, **past).logits for part in IDS.split([4, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-5 * max(1, whole.abs().max().item()))


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_the_same_with_checkpoints_and_in_other_threads(name):
    """Nothing of a pass is left on the model: threads that share it, and passes that are computed again, do not meet."""
    model, _ = rotary_model(name)
    model(IDS, labels=IDS).loss.backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert sum("from_query" in key for key in expected) == 2
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()(IDS, labels=IDS).loss.backward()
    for key, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(key).grad, gradient, rtol=1e-5, atol=1e-6, msg=key)
    model.gradient_checkpointing_disable()
    model.eval()
    texts = [IDS[:, : 3 + n % 5] for n in range(16)]
    with torch.no_grad():
        alone, together = [model(text).logits for text in texts], {}

        def run(number):
            with torch.no_grad():
                together[number] = model(texts[number]).logits

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(texts))]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for step in (threading.Thread.start, threading.Thread.join):
                for thread in threads:
                    step(thread)
        finally:
            sys.setswitchinterval(interval)
    for number, logits in enumerate(alone):
        torch.testing.assert_close(together[number], logits)


def test_a_model_saved_with_the_rotated_query_computes_as_before(tmp_path):
    """Earlier versions wrote `query: rotated` into config.json, and no query into fullrank_config.json."""
    for adapter in (False, True):
        base, _ = FAMILIES["llama"]()
        folder = tmp_path / f"{adapter}"
        old = stir(fr.inject(copy.deepcopy(base), mix="position_wise", query="given"))
        new = fr.inject(copy.deepcopy(base), mix="position_wise")
        new.load_state_dict(old.state_dict())
        assert (old(**PADDED).logits[:, 4:] - old(IDS).logits).abs().max() > 1e-3
        assert (old(IDS).logits - new(IDS).logits).abs().max() > 1e-3
        if adapter:
            fr.save_adapter(old, folder)
            file = folder / "fullrank_config.json"
            written = json.loads(file.read_text())
            assert written.pop("query") == "rotated"
            file.write_text(json.dumps(written))
            fr.load_adapter(old, folder)
            again = fr.load_adapter(copy.deepcopy(base), folder)
            with pytest.raises(InputError, match=r"'query': 'given'.*'query': 'projected'"):
                fr.load_adapter(new, folder)
        else:
            old.save_pretrained(folder)
            again = fr.load_injected(folder).eval()
        assert again.config.fullrank["query"] == "rotated"
        assert torch.equal(again(IDS).logits, old(IDS).logits)
        new.save_pretrained(folder / "new")
        loaded = fr.load_injected(folder / "new").eval()
        assert torch.equal(loaded(**PADDED).logits, new(**PADDED).logits)


def test_other_words_for_the_query_are_refused():
    for given in ("rotatd", None, {"model.layers.0.self_attn": "turned"}):
        with pytest.raises(InputError, match=r"query: 'projected'"):
            fr.inject(FAMILIES["llama"]()[0], mix="position_wise", query=given)


def test_a_projection_that_is_not_known_is_named_and_other_mixings_need_none():
    config = transformers.JetMoeConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2,
                                       kv_channels=8, intermediate_size=16, num_local_experts=2)  # fmt: skip
    model = transformers.JetMoeForCausalLM(config).eval()
    with pytest.warns(UserWarning, match=r"JetMoeForCausalLM: 1 .*rotated query.*model\.layers\.0\.self_attention"):
        fr.inject(model, mix="position_wise")
    assert model.config.fullrank["query"] == "rotated"
    assert "fullrank-rotated-query" in model.model_tags
    model(IDS)
    fr.inject(fr.remove(model), mix="position_independent")  # a warning would be an error
    assert model.model_tags == ["fullrank"]
    assert fr.remove(model).model_tags is None


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_projection_that_peft_replaces_hands_over_with_its_adapter():
    model = stir(fr.inject(FAMILIES["llama"]()[0], mix="position_wise"))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["fullrank"], r=2))
    for name, parameter in wrapped.named_parameters():
        if "lora" in name:
            parameter.normal_()
    wrapped.eval()
    trace, attention = fr.Trace(), wrapped.base_model.model.model.layers[0].self_attn
    states = {}
    attention.q_proj.register_forward_hook(lambda _, __, output: states.update(own=output))
    with fr.traced(trace):
        expected = wrapped(IDS).logits
    query = states["own"].unflatten(-1, (4, -1))
    mix = attention.fullrank.mix
    torch.testing.assert_close(trace.layers[0].mixing, query @ mix.from_query + mix.mixing)
    torch.testing.assert_close(wrapped(**PADDED).logits[:, 4:], expected, rtol=0, atol=2e-5)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    fr.remove(merged)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in merged.modules())


def test_images_of_a_batch_are_parts_of_one_projection():
    """Qwen2-VL projects the patches of all images at once and attends to each image by itself."""
    config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
        depth=1, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=1, patch_size=4)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(config).eval()
    stir(fr.inject(model, mix="position_wise"))
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    patches = torch.randn(24, 3 * 2 * 4 * 4)
    with torch.no_grad():
        both = model(patches, grid_thw=grid).last_hidden_state
        each = [model(patches[:16], grid_thw=grid[:1]), model(patches[16:], grid_thw=grid[1:])]
    torch.testing.assert_close(both, torch.cat([one.last_hidden_state for one in each]), rtol=0, atol=1e-5)
