"""One tiny model of each named family, with what it reads; random parameters, no network."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.t5 import modeling_t5 as t5

VOCABULARY, LENGTH = 60, 11
_IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_CAUSAL = {**_SIZES, **_IDS, "num_key_value_heads": 2}
_ENCODER = {**_SIZES, **_IDS, "max_position_embeddings": 32}
_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {**_CAUSAL, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
           "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2, "moe_intermediate_size": 16,
           "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4, **_IDS}
_IMAGE = {**_SIZES, "image_size": 16, "patch_size": 4, "num_channels": 3}
Inputs = dict[str, Tensor]


def _texts(sides="right"):
    """Three texts of which two are padded."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(3, LENGTH, dtype=torch.int64)
    mask[1, 8:] = mask[2, 4:] = 0
    if sides == "left":
        mask = mask.flip(1)
    return {"input_ids": torch.randint(3, VOCABULARY, (3, LENGTH), generator=generator), "attention_mask": mask}


def _pairs():
    generator = torch.Generator().manual_seed(2)
    return {**_texts(), "decoder_input_ids": torch.randint(3, VOCABULARY, (3, 7), generator=generator)}


def _images():
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))}


def _sounds():
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(2, 8, 24, generator=generator)
    return {"input_features": features, "decoder_input_ids": torch.randint(3, VOCABULARY, (2, 7), generator=generator)}


def _of(kind, config, inputs, **options):
    @functools.cache
    def built():
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**options))
        _stir(model)
        return model.eval()

    return lambda: (copy.deepcopy(built()), inputs())


@torch.no_grad()
def _stir(model):
    """Moves parameters from their start, which is often zero, so that biases, sinks and position biases count."""
    for parameter in model.parameters():
        parameter.add_(0.15 * torch.randn_like(parameter))


class Families(dict[str, Callable[[], tuple[Any, Inputs]]]):
    """Models by name; a test is skipped where transformers lacks the model, or has it off the attention interface."""

    def __missing__(self, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name} that can be injected into")


FAMILIES = Families({
    "bert": _of("BertForMaskedLM", "BertConfig", _texts, **_ENCODER),
    "bert_decoder": _of("BertLMHeadModel", "BertConfig", _texts, is_decoder=True, **_ENCODER),
    "roberta": _of("RobertaForMaskedLM", "RobertaConfig", _texts, **{**_ENCODER, "pad_token_id": 1, "bos_token_id": 0}),
    "distilbert": _of("DistilBertForMaskedLM", "DistilBertConfig", _texts, dim=32, n_layers=2, n_heads=4, hidden_dim=48,
                      vocab_size=VOCABULARY, max_position_embeddings=32),
    "albert": _of("AlbertForMaskedLM", "AlbertConfig", _texts, embedding_size=16, **_ENCODER),
    "electra": _of("ElectraForMaskedLM", "ElectraConfig", _texts, embedding_size=16, **_ENCODER),
    "modernbert": _of("ModernBertForMaskedLM", "ModernBertConfig", _texts, **_SIZES, **_IDS, global_attn_every_n_layers=2,
                      local_attention=4, cls_token_id=1, sep_token_id=2),
    "gpt2": _of("GPT2LMHeadModel", "GPT2Config", _texts, n_embd=32, n_layer=2, n_head=4, n_positions=32, **_IDS),
    "gpt_neox": _of("GPTNeoXForCausalLM", "GPTNeoXConfig", _texts, **_SIZES, **_IDS),
    "opt": _of("OPTForCausalLM", "OPTConfig", _texts, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
               word_embed_proj_dim=32, max_position_embeddings=32, **_IDS),
    "llama": _of("LlamaForCausalLM", "LlamaConfig", _texts, **_CAUSAL),
    "mistral": _of("MistralForCausalLM", "MistralConfig", _texts, sliding_window=4, **_CAUSAL),
    "qwen2": _of("Qwen2ForCausalLM", "Qwen2Config", _texts, **_CAUSAL),
    "qwen3": _of("Qwen3ForCausalLM", "Qwen3Config", _texts, head_dim=16, **_CAUSAL),
    "gemma2": _of("Gemma2ForCausalLM", "Gemma2Config", _texts, head_dim=16, query_pre_attn_scalar=16,
                  attn_logit_softcapping=2.0, **_WINDOWS, **_CAUSAL),
    "gemma3": _of("Gemma3ForCausalLM", "Gemma3TextConfig", _texts, head_dim=16, query_pre_attn_scalar=16, **_WINDOWS,
                  **_CAUSAL),
    "gpt_oss": _of("GptOssForCausalLM", "GptOssConfig", _texts, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                   **_WINDOWS, **_CAUSAL),
    "granite_swa": _of("GraniteSWAForCausalLM", "GraniteSWAConfig", _texts, **_CAUSAL),
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
    "t5": _of("T5ForConditionalGeneration", "T5Config", _pairs, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
              vocab_size=VOCABULARY, decoder_start_token_id=0),
    "bart": _of("BartForConditionalGeneration", "BartConfig", _pairs, d_model=32, encoder_layers=2, decoder_layers=2,
                encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
                max_position_embeddings=32, decoder_start_token_id=2, forced_eos_token_id=2, **_IDS),
    "whisper": _of("WhisperForConditionalGeneration", "WhisperConfig", _sounds, d_model=32, encoder_layers=2,
                   decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
                   decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=12, max_target_positions=16,
                   decoder_start_token_id=1, **_IDS),
    "vit": _of("ViTModel", "ViTConfig", _images, **_IMAGE),
    "clip_vision": _of("CLIPVisionModel", "CLIPVisionConfig", _images, **_IMAGE),
})  # fmt: skip
if "ALL_ATTENTION_FUNCTIONS" not in vars(t5):
    del FAMILIES["t5"]
if not hasattr(transformers, "GraniteSWAForCausalLM"):
    del FAMILIES["granite_swa"]
if "ALL_ATTENTION_FUNCTIONS" not in vars(gptj):
    del FAMILIES["gptj"], FAMILIES["codegen"]

ROTARY = [name for name in FAMILIES if name in (
    "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v2", "deepseek_v3",
    "deepseek_v3_without_rank", "phi", "phi3", "cohere", "olmo2", "stablelm", "persimmon", "diffllama", "qwen3_next", "gptj",
    "codegen",
)]  # fmt: skip
CAUSAL = [*ROTARY, "gpt2", "opt"]
SEQ2SEQ = [name for name in FAMILIES if name in ("t5", "bart")]


def stir(model, scale=0.4):
    """Move what was injected far from its start, as training does: mixing then depends on the query."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".fullrank." in name:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model
