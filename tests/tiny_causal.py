"""A pretrained causal model small enough for tests: random weights, and a tokenizer trained on the text of the test."""

from typing import Any

import numpy as np

WORDS = ("the", "cat", "dog", "bird", "runs", "sleeps", "sings", "red", "blue", "old", "not", "and", "because", "house")


def write_text(path, lines=700, seed=0):
    """Lines of words, of which each fixes the next one in nine cases of ten."""
    generator = np.random.default_rng(seed)
    text = []
    for _ in range(lines):
        word = int(generator.integers(len(WORDS)))
        line = []
        for _ in range(int(generator.integers(4, 12))):
            line.append(WORDS[word])
            word = (3 * word + 1) % len(WORDS) if generator.random() < 0.9 else int(generator.integers(len(WORDS)))
        text.append(" ".join(line).capitalize() + " .")
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def tiny_causal(folder, text, kind="gpt2", dropout=0.1, **sizes):
    """A GPT-2 or a Llama of random weights, saved as Hugging Face saves them."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train([str(text)], trainer)
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", bos_token="<|end|>")
    words.save_pretrained(folder)
    torch.manual_seed(0)
    marks = {"vocab_size": len(words), "bos_token_id": 0, "eos_token_id": 0}
    config: Any
    model: Any
    if kind == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=48, **marks, **rates, **sizes)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
            max_position_embeddings=48, **marks, **sizes,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder
