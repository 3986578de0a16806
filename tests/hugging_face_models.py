"""Tiny causal models of Hugging Face, built from configurations and moved away from where they start; no network."""

import random

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WIDTH, VOCABULARY = 8, 47
WORDS = ["<unk>", "<bos>", *(f"w{i}" for i in range(VOCABULARY - 2))]
_IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
_SIZES = {
    "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16,
}  # fmt: skip


def gpt2():
    """LayerNorm before a head without bias."""
    return built(transformers.GPT2Config(n_embd=WIDTH, n_layer=1, n_head=2, n_positions=32, **_IDS))


def llama(**options):
    """RMSNorm before a head without bias."""
    return built(transformers.LlamaConfig(**_SIZES, **_IDS, **options))


def gemma2(cap=30.0):
    """A soft-cap behind the head."""
    config = transformers.Gemma2Config(
        **_SIZES, **_IDS, head_dim=4, query_pre_attn_scalar=4, final_logit_softcapping=cap
    )
    return built(config)


def gptj():
    """LayerNorm before a head with bias."""
    return built(transformers.GPTJConfig(n_embd=WIDTH, n_layer=1, n_head=2, rotary_dim=4, n_positions=32, **_IDS))


def built(config, scale=0.3):
    """The causal model of a configuration with random parameters, also where they start at 0 or 1."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    moved(model, scale)
    return model


@torch.no_grad()
def moved(model, scale):
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn_like(parameter))


def save(model, folder, *, tokenizer=True):
    """The model with a tokenizer of its words, as `save_pretrained` writes them."""
    bars = transformers.utils.logging
    bars.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        bars.enable_progress_bar()
    if tokenizer:
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<bos>")
        fast.save_pretrained(folder)
    return folder


def write_text(path, lines=40):
    """Random words of the vocabulary, nine a line."""
    rng = random.Random(0)
    words = [rng.choice(WORDS[2:]) for _ in range(9 * lines)]
    text = "\n".join(" ".join(words[i : i + 9]) for i in range(0, len(words), 9))
    path.write_text(text + "\n", encoding="utf-8")
    return path
