"""A pretrained encoder small enough for tests, and task files to fine-tune it on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = ("cat", "dog", "bird", "runs", "sleeps", "sings", "the", "a", "red", "blue", "old", "not")


def tiny_tokenizer(folder: Path, *, padding: bool = True, end: bool = False) -> Path:
    """A tokenizer of whole words; `padding`: it has [PAD], `end`: it has </s>, which no text holds, and no [CLS] or [SEP]."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *WORDS, *(("</s>",) if end else ())))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = (
        {"unk_token": "[UNK]"} | ({"pad_token": "[PAD]"} if padding else {}) | ({"eos_token": "</s>"} if end else {})
    )
    if not end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        marks |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "attention_mask"] if end else ["input_ids", "token_type_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=inputs, **marks
    ).save_pretrained(folder)  # fmt: skip
    return folder


def tiny_encoder(folder: Path, *, layers: int = 2, heads: int = 4, hidden: int = 16, dropout: float = 0.1) -> Path:
    """A BERT of random weights with a tokenizer of whole words, saved as Hugging Face saves them."""
    import torch
    import transformers

    tiny_tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL + WORDS), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=2 * hidden, max_position_embeddings=40,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def write_cola(folder: Path, *, train: int = 60, dev: int = 24, seed: int = 0) -> Path:
    """Files of CoLA in its own form: a sentence is good unless it holds `not`."""
    generator = np.random.default_rng(seed)
    task_folder = folder / "CoLA"
    task_folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("dev", dev)):
        lines = []
        for _ in range(count):
            words = list(generator.choice(WORDS[:-1], size=generator.integers(2, 9)))
            good = int(generator.random() < 0.6)
            if not good:
                words.insert(int(generator.integers(0, len(words))), "not")
            lines.append(f"made\t{good}\t{'' if good else '*'}\t{' '.join(words)}")
        (task_folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_stsb(folder: Path, *, train: int = 40, dev: int = 20, seed: int = 0) -> Path:
    """Files of STS-B with its columns: the score counts common words."""
    generator = np.random.default_rng(seed)
    task_folder = folder / "STS-B"
    task_folder.mkdir(parents=True, exist_ok=True)
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
    for split, count in (("train", train), ("dev", dev)):
        lines = [header]
        for i in range(count):
            first, second = (list(generator.choice(WORDS, size=4)) for _ in range(2))
            score = 5 * len(set(first) & set(second)) / len(set(first) | set(second))
            lines.append(f"{i}\tg\tf\t2012\t0\tn\tn\t{' '.join(first)}\t{' '.join(second)}\t{score:.3f}")
        (task_folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
