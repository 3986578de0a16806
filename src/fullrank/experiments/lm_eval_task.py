"""A split of a corpus as a task of lm-eval: one document, its counts, and nothing to download."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from fullrank.core.errors import InputError
from fullrank.data import Corpus
from fullrank.files import write_text

_AGGREGATION = {
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
}
_COUNTS = '''"""Figures per word and byte of tasks written by `fullrank lm-eval-task`; the counts are in the documents."""

try:  # so that `lm_eval --model fullrank` knows the model, where fullrank is installed
    from fullrank.experiments.lm_eval import register
except ImportError:
    pass
else:
    register()


def process_results(doc, results):
    """Log-probability of a document with its words and bytes, which lm-eval sums over documents before it divides."""
    (log_prob,) = results
    found = {"word_perplexity": (log_prob, doc["words"])}
    if doc.get("bytes"):
        found["byte_perplexity"] = found["bits_per_byte"] = (log_prob, doc["bytes"])
    return found
'''


def write_task(corpus: Corpus, split: str, folder: Path) -> Path:
    """Write the task `fullrank_<corpus>_<split>` into `folder`: YAML, its document (JSON lines) and `fullrank_counts.py`.

    The document is the whole split. Its `words` are those that `fullrank eval` divides by: white space apart, plus one for
    each line end; of a word vocabulary all tokens but `<sos>`. So lm-eval's word_perplexity is its `perplexity_per_word`.
    Returns the YAML file. Raises InputError if there is no such split, or its tokens do not come back from text.
    """
    ids = corpus.ids(split)
    tokenizer, counts = corpus.tokenizer, corpus.splits[split]
    text = tokenizer.decode(ids.tolist())
    if not np.array_equal(np.asarray(tokenizer.encode(text)), ids):
        raise InputError(
            f"--split {split}: the tokens of {corpus.label} do not come back from their text (bytes that are no UTF-8, or "
            "unknown characters), so lm-eval would score another text"
        )
    if tokenizer.kind == "word":  # it is told <unk> for words it lacks, so figures per byte would flatter it
        document = {"text": text, "words": len(ids) - int((ids == tokenizer.sos_id).sum())}
        metrics = ["word_perplexity"]
    else:
        document = {"text": text, "words": counts.words, "bytes": counts.bytes}
        metrics = list(_AGGREGATION)
    task = f"fullrank_{re.sub('[^0-9a-z]+', '_', corpus.name.lower())}_{split}"
    folder.mkdir(parents=True, exist_ok=True)
    documents = (folder / f"{task}.jsonl").resolve()
    write_text(documents, json.dumps(document, ensure_ascii=False) + "\n")
    write_text(folder / "fullrank_counts.py", _COUNTS)
    lines = [
        f"# {corpus.label}, {split}: {len(ids):,} {tokenizer.kind} tokens, written by `fullrank lm-eval-task`",
        f"task: {task}",
        "dataset_path: json",
        f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(documents), ensure_ascii=False)}}}}}",
        "test_split: test",
        "output_type: loglikelihood_rolling",
        'doc_to_text: ""',
        "doc_to_target: text",
        "process_results: !function fullrank_counts.process_results",
        "metric_list:",
        *[f"  - {{metric: {name}, aggregation: {_AGGREGATION[name]}, higher_is_better: false}}" for name in metrics],
        "metadata: {version: 1.0}",
    ]
    file = folder / f"{task}.yaml"
    write_text(file, "\n".join(lines) + "\n")
    return file
