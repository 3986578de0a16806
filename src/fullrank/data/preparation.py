"""One way to a prepared corpus, of text and of sentence pairs: opened where it was prepared before, else built."""

from __future__ import annotations

import shutil
from pathlib import Path

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data.files import Report, cache_root, new_folder
from fullrank.data.pairs import plan_pairs
from fullrank.data.prepared import FORMAT, Corpus, Plan, load_corpus, write_corpus
from fullrank.data.texts import plan_text
from fullrank.data.tokenizers import Tokenizer
from fullrank.files import digest, silent


def prepare(
    config: DataConfig, *, report: Report = silent, allow_slice: bool = True, tokenizer: Tokenizer | None = None
) -> Corpus:
    """The corpus of a configuration: found or downloaded, checked against published counts, tokenized, and kept.

    A second call with the same text and settings only opens it. `report` is called with a line at each step and with
    every departure from the published corpus. `allow_slice=False` (paper scale) refuses a corpus whose counts differ.
    tokenizer: of another text, in place of one that is made from this one.
    Raises InputError for bad data or settings, RunError for a failed download or a full disk.
    """
    cache = cache_root(config.cache)
    plan = plan_pairs(config, cache, report) if config.has_pairs else plan_text(config, cache, report, tokenizer)
    folder = cache / "corpora" / f"{plan.name}-{_compute_key(plan)}"
    corpus = _open(folder, report)
    if corpus is None:
        with new_folder(folder) as new:
            write_corpus(new, plan)
        corpus = load_corpus(folder)
    if corpus.is_slice:
        _report_slice(corpus, report, allow_slice)
    return corpus


def _compute_key(plan: Plan) -> str:
    sources = [{**row, "file": Path(row["file"]).name} for row in plan.sources]
    return digest([FORMAT, plan.info.name, plan.settings, sources, plan.identity])[:16]


def _open(folder: Path, report: Report) -> Corpus | None:
    """The corpus in `folder`, which is removed where it is damaged."""
    if not folder.exists():
        return None
    try:
        return load_corpus(folder)
    except (InputError, RunError) as error:
        report(f"the prepared corpus cannot be used, preparing it again: {error}")
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _report_slice(corpus: Corpus, report: Report, allowed: bool) -> None:
    differs = "; ".join(
        f"{split} has {counts['here']:,} {corpus.details['unit']}, published are {counts['published']:,}"
        for split, counts in corpus.details["differs_from_published"].items()
    )
    if not allowed:
        raise InputError(
            f"data.name: {corpus.label} is not the published corpus ({differs}), and the paper scale needs it; give the "
            "full files with --from DIR (data.dir), leave data.max_tokens and data.max_length out, or choose --scale small"
        )
    report(f"{corpus.label}: {differs}; figures are not comparable with published ones")
