"""Tiny models of model types: each kind runs, has every kind of layer, and windows shorter than a text."""

import pytest
import torch

from fullrank.hf.tiny import build_tiny

pytest.importorskip("transformers")
LENGTH = 67
KINDS = [  # model type, class, settings that it must have
    ("llama", None, {"num_attention_heads": 4, "num_key_value_heads": 4}),
    ("mistral", None, {"sliding_window": 8, "num_key_value_heads": 2}),
    ("llama4_text", None, {"attention_chunk_size": 8}),
    ("deepseek_v3", None, {"kv_lora_rank": 16, "first_k_dense_replace": 1}),
    ("jamba", None, {"attn_layer_period": 2, "attn_layer_offset": 1}),
    ("mamba", None, {}),
    ("qwen2_audio", None, {}),
    ("bart", "BartForConditionalGeneration", {"is_encoder_decoder": True}),
]


@pytest.mark.parametrize(("model_type", "class_name", "settings"), KINDS, ids=[kind for kind, *_ in KINDS])
def test_kinds(model_type, class_name, settings):
    model, inputs = build_tiny(model_type, class_name)
    with torch.no_grad():
        ids = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        logits = model(**(inputs or {"input_ids": ids, "use_cache": False})).logits
    assert logits.shape == (1 if inputs else 2, LENGTH, 64)
    assert logits.isfinite().all()
    assert model.dtype == torch.float32
    assert not model.training
    assert model.num_parameters() < 500_000
    assert {name: getattr(model.config, name) for name in settings} == settings
