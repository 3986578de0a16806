"""lm-eval (EleutherAI's evaluation harness): its command with our model, and a split of a corpus as a task of it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np

from fullrank.core.errors import InputError, pip_install
from fullrank.data import Corpus
from fullrank.files import check_own, write_text

MODEL = "fullrank"
_SUBCOMMANDS = ("run", "ls", "validate")


def register() -> None:
    """Make `--model fullrank` known to lm-eval in this process; a second call does nothing.

    lm-eval after 0.4.13 finds it by itself, as the entry point `lm_eval.models` of this package.
    Raises InputError if lm-eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(f"lm-eval is not installed; install it: {pip_install('eval')}")
    import lm_eval.models  # noqa: F401 - registers lm-eval's own, which it does only while nothing is registered
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    from fullrank.experiments.lm_eval_model import FullRankLM

    if MODEL not in MODEL_REGISTRY:
        register_model(MODEL)(FullRankLM)


def run(arguments: Sequence[str]) -> None:
    """The command `lm_eval` with these arguments; `--model fullrank` is added where they name no model.

    Raises InputError if lm-eval is not installed, and whatever lm-eval raises.
    """
    register()
    from lm_eval.__main__ import cli_evaluate

    words = list(arguments)
    evaluates = bool(words) and (words[0] == "run" or words[0] not in _SUBCOMMANDS)
    named = any(word in ("-M", "-C") or word.split("=")[0] in ("--model", "--config") for word in words)
    if evaluates and not named and not {"-h", "--help"} & {*words}:
        words += ["--model", MODEL]
    with patch.object(sys, "argv", ["lm_eval", *words]):  # where lm-eval looks for its arguments
        cli_evaluate()


# -- a split as a task -----------------------------------------------------------------------------------------------

_MARK = "# Written by `fullrank lm-eval-task`"
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
    documents, counts_file, file = (
        folder.resolve() / f"{task}.jsonl",
        folder / "fullrank_counts.py",
        folder / f"{task}.yaml",
    )
    for path, beginning in ((documents, '{"text": '), (counts_file, _COUNTS[:40]), (file, _MARK)):
        check_own(path, beginning, "a task")
    write_text(documents, json.dumps(document, ensure_ascii=False) + "\n")
    write_text(counts_file, _COUNTS)
    lines = [
        f"{_MARK}: {corpus.label}, {split}, {len(ids):,} {tokenizer.kind} tokens",
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
    write_text(file, "\n".join(lines) + "\n")
    return file
