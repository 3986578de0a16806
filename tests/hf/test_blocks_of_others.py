"""Our models beside transformers' Llama, Qwen3, Falcon and T5 with the same random numbers, in fp64.

transformers computes norms, angles, slopes and softmax in fp32 whatever the model's dtype is. `in_double` reads the same code
with fp64 in their place, so that outputs and every gradient have to agree to 1e-10.
"""

from types import ModuleType

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.falcon import modeling_falcon
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.t5 import modeling_t5
from transformers.models.t5.modeling_t5 import T5Attention

import fullrank as fr
from fullrank.core.config import EncoderConfig

VOCABULARY, E, LAYERS, INNER, N = 19, 18, 3, 11, 13


class DoubleTorch(ModuleType):
    """torch, whose fp32 is fp64."""

    def __getattr__(self, name):
        return getattr(torch, {"float32": "float64", "float": "float64"}.get(name, name))


@pytest.fixture(autouse=True)
def in_double(monkeypatch):
    for module in (modeling_llama, modeling_qwen3, modeling_falcon, modeling_t5):
        monkeypatch.setattr(module, "torch", DoubleTorch("torch"))
    buckets = T5Attention._relative_position_bucket

    def in_single(*arguments, **options):  # T5's buckets are those of fp32
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "float", single)
            return buckets(*arguments, **options)

    single = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    monkeypatch.setattr(T5Attention, "_relative_position_bucket", staticmethod(in_single))
    torch.manual_seed(3)


def start(model):
    """Random numbers everywhere, around 1 in the norms."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name and "weight" in name), std=0.3)
    return model.double().eval()


def rename(theirs, names):
    """Tensors under our names; {i} stands for the number of a layer."""
    ours = {}
    for number in range(LAYERS):
        ours |= {our.format(i=number): theirs[their.format(i=number)] for our, their in names.items()}
    return ours


def compare(theirs, ours, translate, calls):
    """Logits and the gradients of all parameters under a random cotangent."""
    ours.load_state_dict(translate(theirs.state_dict()), strict=True)
    expected, logits = calls[0](theirs).logits, calls[1](ours).logits
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    logits.backward(cotangent)
    scale = float(expected.detach().abs().max())
    assert scale > 0.1
    assert float((logits - expected).detach().abs().max()) < 1e-10 * scale
    gradients = translate({name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        apart, size = float((parameter.grad - gradients[name]).abs().max()), float(gradients[name].abs().max())
        assert apart < 1e-10 * max(1.0, size), f"{name}: {apart:.1e} of {size:.1e}"
        assert size > 0 or name.endswith("key.bias"), name


def our_model(**options):
    attention = {"bias": False, **options.pop("attention", {})}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": E, "num_hidden_layers": LAYERS, "intermediate_size": INNER,
             "output": fr.OutputConfig(bias=False)}  # fmt: skip
    config = fr.ModelConfig(**sizes | options, attention=fr.AttentionConfig(**attention))
    return fr.LanguageModel(config).double().eval()


IDS = torch.randint(VOCABULARY, (2, N), generator=torch.Generator().manual_seed(1))
CAUSAL = [lambda model: model(input_ids=IDS), lambda model: model(IDS)]

LLAMA = {
    "embedding.weight": "model.embed_tokens.weight",
    "blocks.{i}.attention.project.query.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blocks.{i}.attention.project.key.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blocks.{i}.attention.project.value.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blocks.{i}.attention.merge.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blocks.{i}.feed_forward.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "blocks.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blocks.{i}.feed_forward_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "final_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
QWEN3 = {
    "blocks.{i}.attention.project.query_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "blocks.{i}.attention.project.key_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
}
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": E, "num_hidden_layers": LAYERS, "intermediate_size": INNER,
    "num_attention_heads": 6, "head_dim": 4, "rms_norm_eps": 1e-3, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
BLOCK = {"num_attention_heads": 6, "head_dim": 4, "norm_type": "rms_norm", "layer_norm_eps": 1e-3, "hidden_act": "swiglu",
         "mlp_bias": False, "rope_theta": 500.0}  # fmt: skip


def from_llama(theirs, names=LLAMA):
    ours = rename(theirs, names)
    for i in range(LAYERS):
        parts = [theirs[f"model.layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        ours[f"blocks.{i}.feed_forward.up.weight"] = torch.cat(parts)
    return ours


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_llama(groups, kernel):
    theirs = start(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=groups)))
    with fr.kernel(kernel):
        compare(theirs, our_model(**BLOCK, num_key_value_heads=groups), from_llama, CAUSAL)


def test_qwen3():
    theirs = start(Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2)))
    ours = our_model(**BLOCK, num_key_value_heads=2, attention={"qk_norm": True})
    compare(theirs, ours, lambda tensors: from_llama(tensors, LLAMA | QWEN3), CAUSAL)


FALCON = {
    "embedding.weight": "transformer.word_embeddings.weight",
    "blocks.{i}.attention.merge.weight": "transformer.h.{i}.self_attention.dense.weight",
    "blocks.{i}.attention.merge.bias": "transformer.h.{i}.self_attention.dense.bias",
    "blocks.{i}.feed_forward.up.weight": "transformer.h.{i}.mlp.dense_h_to_4h.weight",
    "blocks.{i}.feed_forward.up.bias": "transformer.h.{i}.mlp.dense_h_to_4h.bias",
    "blocks.{i}.feed_forward.down.weight": "transformer.h.{i}.mlp.dense_4h_to_h.weight",
    "blocks.{i}.feed_forward.down.bias": "transformer.h.{i}.mlp.dense_4h_to_h.bias",
    "blocks.{i}.attention_norm.weight": "transformer.h.{i}.input_layernorm.weight",
    "blocks.{i}.attention_norm.bias": "transformer.h.{i}.input_layernorm.bias",
    "blocks.{i}.feed_forward_norm.weight": "transformer.h.{i}.post_attention_layernorm.weight",
    "blocks.{i}.feed_forward_norm.bias": "transformer.h.{i}.post_attention_layernorm.bias",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
}


@pytest.mark.parametrize("heads", [3, 7])
@pytest.mark.parametrize("shared", [False, True], ids=["heads", "multi-query"])
def test_falcon(heads, shared):
    """Heads that are no power of two; Falcon scales the biases with the scores."""
    width = heads * 6
    key_heads = 1 if shared else heads
    theirs = start(
        FalconForCausalLM(
            FalconConfig(
                vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=LAYERS, num_attention_heads=heads, alibi=True,
                bias=True, parallel_attn=False, new_decoder_architecture=False, multi_query=shared, ffn_hidden_size=INNER,
            )
        )
    )  # fmt: skip

    def from_falcon(tensors):
        ours = rename(tensors, FALCON)
        for i in range(LAYERS):
            for kind in ("weight", "bias"):
                packed = tensors[f"transformer.h.{i}.self_attention.query_key_value.{kind}"]
                if shared:  # H heads of queries, then one of keys and one of values
                    parts = packed.split([heads * 6, 6, 6])
                else:  # query, key and value of each head
                    parts = [part.flatten(0, 1) for part in packed.unflatten(0, (heads, 3, 6)).unbind(1)]
                for name, part in zip(("query", "key", "value"), parts, strict=True):
                    ours[f"blocks.{i}.attention.project.{name}.{kind}"] = part
        return ours

    ours = our_model(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=key_heads, position="alibi", alibi_scale=6**-0.5,
        hidden_act="gelu", attention={"bias": True}, output=fr.OutputConfig(tied=True, bias=False),
    )  # fmt: skip
    compare(theirs, ours, from_falcon, CAUSAL)


T5_ATTENTION = {"query": "q", "key": "k", "value": "v"}


def from_t5(tensors):
    ours = {"decoder.embedding.weight": tensors["shared.weight"]}
    for side, parts in (("encoder", 2), ("decoder", 3)):
        names = {f"{side}.final_norm.weight": f"{side}.final_layer_norm.weight"}
        layers = [("attention", "SelfAttention"), ("cross_attention", "EncDecAttention")][: parts - 1]
        for number, (our, their) in enumerate(layers):
            prefix = f"{side}.block.{{i}}.layer.{number}."
            for name, short in T5_ATTENTION.items():
                names[f"{side}.blocks.{{i}}.{our}.project.{name}.weight"] = f"{prefix}{their}.{short}.weight"
            names[f"{side}.blocks.{{i}}.{our}.merge.weight"] = f"{prefix}{their}.o.weight"
            names[f"{side}.blocks.{{i}}.{our}_norm.weight"] = f"{prefix}layer_norm.weight"
        last = f"{side}.block.{{i}}.layer.{parts - 1}."
        names[f"{side}.blocks.{{i}}.feed_forward.up.weight"] = f"{last}DenseReluDense.wi.weight"
        names[f"{side}.blocks.{{i}}.feed_forward.down.weight"] = f"{last}DenseReluDense.wo.weight"
        names[f"{side}.blocks.{{i}}.feed_forward_norm.weight"] = f"{last}layer_norm.weight"
        biases = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        names[f"{side}.position.relative_attention_bias"] = biases
        ours |= rename(tensors, names)
    return ours


def test_t5():
    """The whole model: both directions of distances, one table for all layers of a side, scores without scale."""
    theirs = start(
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY, d_model=E, d_kv=4, d_ff=INNER, num_layers=LAYERS, num_heads=3, dropout_rate=0.0,
                layer_norm_epsilon=1e-3, relative_attention_num_buckets=10, relative_attention_max_distance=9,
                tie_word_embeddings=False, pad_token_id=0, decoder_start_token_id=0, use_cache=False,
            )
        )
    )  # fmt: skip
    attention = fr.AttentionConfig(bias=False, score={"name": "dot_product", "scale": 1.0})
    ours = fr.Translator(
        fr.ModelConfig(
            vocab_size=VOCABULARY, hidden_size=E, num_hidden_layers=LAYERS, num_attention_heads=3, head_dim=4,
            intermediate_size=INNER, mlp_bias=False, norm_type="rms_norm", layer_norm_eps=1e-3, position="t5",
            relative_attention_num_buckets=10, relative_attention_max_distance=9, attention=attention,
            output=fr.OutputConfig(tied=True, bias=False), encoder=EncoderConfig(share_embedding=True),
        )
    ).double().eval()  # fmt: skip
    source = torch.randint(1, VOCABULARY, (2, N + 4), generator=torch.Generator().manual_seed(2))
    calls = [lambda model: model(input_ids=source, decoder_input_ids=IDS), lambda model: model(source, IDS)]
    compare(theirs, ours, from_t5, calls)
