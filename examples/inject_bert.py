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

LENGTH = 12
WORDS = 60


def make_examples(count: int, seed: int) -> list[dict[str, list[int] | int]]:
    """Make sentences of word ids; a third of all words is in both languages."""
    rng = random.Random(seed)
    examples = []
    for _ in range(count):
        label = rng.randrange(2)
        vocabulary = range(WORDS // 3, WORDS) if label else range(2 * WORDS // 3)
        sentence = [2 + rng.choice(vocabulary) for _ in range(LENGTH - 1)]
        examples.append({"input_ids": [1, *sentence], "labels": label})
    return examples


@torch.no_grad()
def measure_accuracy(model: BertForSequenceClassification, rows: list[dict[str, list[int] | int]]) -> float:
    """Return the share of rows whose label the model predicts."""
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    predicted = model.eval()(input_ids).logits.argmax(-1)
    return float((predicted == labels).float().mean())


def main(steps: int) -> None:
    train_rows = make_examples(2000, seed=0)
    test_rows = make_examples(200, seed=1)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS + 2, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, num_labels=2
    )  # fmt: skip
    model = fr.inject(BertForSequenceClassification(config), mix="position_wise", cross_head=0.1)
    injected = [name for name, _ in model.named_parameters() if ".fullrank." in name]
    print("injected:", *injected[:2], "...")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, logging_steps=max(steps // 3, 1), save_strategy="no",
            report_to="none", use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        # mixing parameters learn faster than the rest, and are not decayed
        groups = fr.parameter_groups(model, learning_rate=1e-3, mixing_learning_rate=1e-2, weight_decay=0.01)
        optimizer = torch.optim.AdamW(groups)
        print(f"accuracy before: {measure_accuracy(model, test_rows):.3f}")
        Trainer(model, arguments, train_dataset=train_rows, optimizers=(optimizer, None)).train()
        print(f"accuracy after:  {measure_accuracy(model, test_rows):.3f}")
        model.save_pretrained(folder)
        loaded = fr.load_injected(folder)
    ids = torch.tensor([row["input_ids"] for row in test_rows])
    with torch.no_grad():
        same = torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    print(f"saved and loaded, the same logits: {same}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=60)
    main(options.parse_args().steps)
