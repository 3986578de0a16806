"""The 4-gram line of every text that the ledger's rows were measured on: what counting predicts of the same test text.

    python -m research.ngrams --from CORPORA        measure the lines that ngrams.csv lacks

A line belongs to a test text and a vocabulary, by the beginnings of their checksums. Its n-gram models read the training text
of the rows; the columns are perplexities of the orders 1 to 5, and of order 4 with three discounts (`discount_by_count`).
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.config.load import resolve_any
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.evaluation.ngram import measure_ngrams
from fullrank.experiments.run import task_of
from research import LEDGER, RESEARCH
from research.ledger import Row, identify_text, read_ledger

COLUMNS = ("text.test", "vocabulary", "corpus", "tokens", "order1", "order2", "order3", "order4", "order5", "modified4")
LINE = "order4"
LARGEST_COUNT = 3  # counts above it have its discount


def discount_by_count(counts: np.ndarray) -> np.ndarray:
    """Compute the discounts of Chen and Goodman (1999).

        D_k = k - (k + 1) Y n_{k+1} / n_k    for the counts 1, 2, and 3 or more

    Y is that of `discount_evenly`, and D_k where it is not positive, so that every word keeps a probability.
    """
    number = [int((counts == k).sum()) for k in range(LARGEST_COUNT + 2)]
    share = number[1] / (number[1] + 2 * number[2]) if number[1] else 0.5
    discounts = [0.0] + [share] * LARGEST_COUNT
    for k in range(1, LARGEST_COUNT + 1):
        discount = k - (k + 1) * share * number[k + 1] / number[k] if number[k] else 0.0
        if discount > 0:
            discounts[k] = min(discount, k)
    return np.array(discounts)[np.minimum(counts, LARGEST_COUNT)]


def read_lines(path: Path) -> dict[tuple[str, str], float]:
    """Read the perplexity of the 4-gram model by the checksums of test text and vocabulary. A missing file has none."""
    return {key: float(values[LINE]) for key, values in read_values(path).items()}


def read_values(path: Path) -> dict[tuple[str, str], Mapping[str, str]]:
    """Read the rows of the file by the checksums of test text and vocabulary."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {(values["text.test"], values["vocabulary"]): values for values in csv.DictReader(file)}


def measure(row: Row, corpora: Path) -> dict[str, Any]:
    """Measure the n-gram models of a row's text."""
    words = [f"{key}={json.dumps(value)}" for key, value in (row["settings"] or {}).items()]
    words.append(f"data.dir={json.dumps(str(corpora.resolve()))}")
    config = resolve_any(row["recipe"], row["row"], row["scale"], words).config
    assert isinstance(config, RunConfig)
    corpus = task_of(config).prepare().corpus
    train, test = (np.asarray(corpus.ids(split), np.int64) for split in ("train", "test"))
    size = len(corpus.tokenizer)
    start_id = corpus.tokenizer.start_id
    (orders,) = measure_ngrams(train, [test], vocab_size=size, start_id=start_id)
    (modified,) = measure_ngrams(train, [test], vocab_size=size, start_id=start_id, order=4, discount=discount_by_count)
    perplexities = {f"order{n}": round(value, 3) for n, value in enumerate(orders, start=1)}
    return {
        "text.test": corpus.text_checksums["test"][:16], "vocabulary": corpus.tokenizer.fingerprint[:16],
        "corpus": row["corpus"], "tokens": len(train), **perplexities, "modified4": round(modified[3], 3),
    }  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--from", dest="corpora", type=Path, required=True, help="a folder that holds corpora in subfolders"
    )
    options = parser.parse_args()
    path = RESEARCH / "ngrams.csv"
    values: dict[tuple[str, str], Mapping[str, Any]] = dict(read_values(path))
    for row in read_ledger(LEDGER):
        key = identify_text(row)
        is_recipe = row["settings"] is not None  # else the configuration is not known
        if is_recipe and all(key) and key not in values and row.get("final.test.perplexity") is not None:
            measured = measure(row, options.corpora)
            if (measured["text.test"], measured["vocabulary"]) != key:
                raise InputError(
                    f"{options.corpora}: {row['corpus']} there is another text than that of run {row['run']}"
                )
            print(measured, flush=True)
            values[key] = measured
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(values.values())


if __name__ == "__main__":
    main()
