"""Pairs of models, with parameters away from their start: one of Hugging Face's kind, and the same one of ours."""

import pytest
import torch

import fullrank as fr
from moving import moved

VOCABULARY, EOS = 23, 2
IDS = {"eos_token_id": EOS, "bos_token_id": EOS, "pad_token_id": EOS}
MULTILINEAR = {"kind": "multilinear", "cores": 2, "rank": 5}


def small(**settings):
    """Two narrow layers; an option of attention is given as `attention=dict(...)`, of the output as `output=dict(...)`."""
    attention = fr.AttentionConfig(**settings.pop("attention", {}))
    output = fr.OutputConfig(**settings.pop("output", {}))
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 4,
        "intermediate_size": 17, "max_position_embeddings": 32, "attention": attention, "output": output,
    }  # fmt: skip
    return fr.ModelConfig(**sizes | settings)


XL = {"position": "relative", "attention": {"score": "relative", "mix": "position_wise"}}

# one of each kind of state that a text leaves behind
CAUSAL = {
    "keys and values": small(attention={"mix": "position_wise", "normalize": "sigsoftmax"}),
    "rotary, mixture": small(position="rotary", output={"kind": "mixture_of_softmaxes", "mixtures": 3}),
    "keys of distances": small(**XL),
    "block of Qwen3": small(
        num_key_value_heads=1, norm_type="rms_norm", hidden_act="swiglu", mlp_bias=False,
        attention={"mix": "position_wise", "qk_norm": True, "bias": False},
    ),
    "biases of distances": small(position="t5", attention={"mix": "position_wise"}),
    "documents": small(position="alibi", document_token_id=7, attention={"mix": "position_wise"}),
    "tied": small(scale_embedding=True, output={"tied": True}),
    "sums": small(attention=MULTILINEAR | {"output_map": "decayed"}, position="none"),
    "pairs of positions": small(attention=MULTILINEAR),
    "memory": small(memory_length=5, **XL),
    "memory of one length": small(memory_length=5, same_length=True, **XL),
    "memory of sums": small(memory_length=5, attention=MULTILINEAR | {"output_map": "decayed"}, position="none"),
}  # fmt: skip


# a model with a cache, one with another cache and one with a memory; the others are of the full tier
EVERYDAY = ("keys and values", "block of Qwen3", "sums", "memory")
kinds = pytest.mark.parametrize(
    "config",
    [pytest.param(kind, id=name, marks=() if name in EVERYDAY else pytest.mark.full) for name, kind in CAUSAL.items()],
)


def pair(config, **options):
    """(model of Hugging Face's kind, the same model of ours), both in evaluation mode."""
    return both(fr.FullRankForCausalLM, fr.FullRankConfig.of(config, **IDS | options), fr.LanguageModel(config))


def both(kind, config, our_model):
    torch.manual_seed(3)
    hf_model = moved(kind(config)).eval()
    our_model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in hf_model.state_dict().items()})
    return hf_model, our_model.eval()


def tokens(rows=2, length=7, seed=5):
    """Without <eos>, which would end a text."""
    drawn = torch.randint(VOCABULARY - 1, (rows, length), generator=torch.Generator().manual_seed(seed))
    return drawn + (drawn >= EOS)


def padded(texts, side="left"):
    """Texts (1, N_i) as one batch and its mask."""
    longest = max(text.shape[1] for text in texts)
    ids = torch.full((len(texts), longest), EOS)
    mask = torch.zeros_like(ids)
    for i, text in enumerate(texts):
        length = text.shape[1]
        columns = slice(longest - length, None) if side == "left" else slice(0, length)
        ids[i, columns] = text[0]
        mask[i, columns] = 1
    return ids, mask


def masked_of(config, **options):
    """(masked language model of Hugging Face's kind, the same model of ours), both in evaluation mode."""
    settings = fr.FullRankConfig.of(config, objective="masked", **options)
    return both(fr.FullRankForMaskedLM, settings, fr.MaskedLanguageModel(config))
