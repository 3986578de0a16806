"""Mixed heads and cross-head in a BERT-like classifier, trained by Hugging Face's Trainer. Offline, half a minute.

    python examples/inject_bert.py [--steps 60]

The task: which of two languages a sentence is, of made-up words. It is easy; what matters here is how the parts go together.
"""

from __future__ import annotations

import argparse
import random
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import fullrank as fr

LENGTH, WORDS = 12, 60


def examples(count: int, seed: int) -> list[dict[str, list[int] | int]]:
    """Sentences of word ids; a third of all words is in both languages."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        label = rng.randrange(2)
        words = range(WORDS // 3, WORDS) if label else range(2 * WORDS // 3)
        found.append({"input_ids": [1, *(2 + rng.choice(words) for _ in range(LENGTH - 1))], "labels": label})
    return found


def accuracy(model: BertForSequenceClassification, rows: list[dict[str, list[int] | int]]) -> float:
    with torch.no_grad():
        chosen = model.eval()(torch.tensor([row["input_ids"] for row in rows])).logits.argmax(-1)
    return float((chosen == torch.tensor([row["labels"] for row in rows])).float().mean())


def main(steps: int) -> None:
    train_rows, test_rows = examples(2000, seed=0), examples(200, seed=1)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS + 2, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, num_labels=2
    )  # fmt: skip
    model = fr.inject(BertForSequenceClassification(config), mix="position_wise", cross_head=0.1)
    print("injected:", *[name for name, _ in model.named_parameters() if ".fullrank." in name][:2], "...")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, logging_steps=max(steps // 3, 1), save_strategy="no",
            report_to="none", use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        # mixing parameters learn faster than the rest, and are not decayed
        groups = fr.parameter_groups(model, learning_rate=1e-3, mixing_learning_rate=1e-2, weight_decay=0.01)
        optimizer = torch.optim.AdamW(groups)
        print(f"accuracy before: {accuracy(model, test_rows):.3f}")
        Trainer(model, arguments, train_dataset=train_rows, optimizers=(optimizer, None)).train()
        print(f"accuracy after:  {accuracy(model, test_rows):.3f}")
        model.save_pretrained(folder)
        again = fr.load_injected(folder)
    ids = torch.tensor([row["input_ids"] for row in test_rows])
    with torch.no_grad():
        same = torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
    print(f"saved and loaded, the same logits: {same}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=60)
    main(options.parse_args().steps)
