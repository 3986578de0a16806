"""Small files for fine-tuning: an encoder of two layers with a tokenizer of words, and CoLA and RTE."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

NOUNS, VERBS = ["cats", "dogs", "birds", "mice"], ["sleep", "bark", "sing", "hide"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *NOUNS, *VERBS, "the", "in", "rain"]

SETTINGS = [
    "data.max_length=16",
    "train.batch_size=8",
    "train.learning_rate=5e-3",
    "train.device=cpu",
    "train.threads=1",
    "train.keep_model=false",
    "train.log_every_steps=2",
]


def write_encoder(folder: Path) -> Path:
    """A BERT with dropout, and its tokenizer, as `save_pretrained` writes them."""
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=24,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    bars = transformers.utils.logging
    bars.disable_progress_bar()
    try:
        transformers.BertModel(config).save_pretrained(folder)
    finally:
        bars.enable_progress_bar()
    fast.save_pretrained(folder)
    return folder


def write_cola(folder: Path, train: int = 48, dev: int = 24) -> Path:
    """Sentences that are acceptable where the noun comes before the verb; official columns without a header."""
    (folder / "CoLA").mkdir(parents=True, exist_ok=True)
    drawn = random.Random(0)
    for split, count in (("train", train), ("dev", dev)):
        lines = []
        for _ in range(count):
            noun, verb, right = drawn.choice(NOUNS), drawn.choice(VERBS), drawn.random() < 0.6
            lines.append(f"gj04\t{int(right)}\t\tthe {f'{noun} {verb}' if right else f'{verb} {noun}'} in the rain")
        (folder / "CoLA" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_rte(folder: Path, header: str = "index\tsentence1\tsentence2\tlabel") -> Path:
    """Pairs, of which one follows from the other where both are the same."""
    (folder / "RTE").mkdir(parents=True, exist_ok=True)
    drawn = random.Random(1)
    for split, count in (("train", 16), ("dev", 8)):
        lines = [header]
        for index in range(count):
            first, second = (drawn.choice(NOUNS) for _ in range(2))
            label = "entailment" if first == second else "not_entailment"
            lines.append(f"{index}\tthe {first} sleep\tthe {second} sleep\t{label}")
        (folder / "RTE" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
