"""Built-in corpora: prose of the running Python, and sentence pairs of invented languages by their rules."""

import numpy as np

from fullrank.config.run import DataConfig
from fullrank.data import builtin, prepare
from fullrank.data.invented import SIZES

SOURCE = b'''#!/usr/bin/env python
# -*- coding: utf-8 -*-
"""Module docstring.  It has two sentences

    >>> indented_example(1)
    2
and a line after.
"""
# A comment over
# two lines.

# Another one.
x = "# no comment"  # Trailing words.
class C:
    """About C."""
    def f(self):
        """* An item that
          goes on here.
        * Another item.
        """

        #----------
        return 1  # noqa
'''


def test_docstrings_and_comments_in_their_order():
    assert builtin.read_module(SOURCE) == [
        "Module docstring.", "It has two sentences", ">>> indented_example(1)", "and a line after.",
        "A comment over two lines.", "Another one.", "Trailing words.", "About C.", "* An item that goes on here.",
        "* Another item.",
    ]  # fmt: skip


def test_split_by_name_about_90_5_5():
    splits = [builtin.choose_split(f"document{i}") for i in range(20_000)]
    for split, share in {"train": 0.90, "valid": 0.05, "test": 0.05}.items():
        expected = 20_000 * share
        assert abs(splits.count(split) - expected) < 5 * (expected * (1 - share)) ** 0.5
    # fixed for ever: a document must not change its split with the version (sha256("json.decoder")[:8] mod 100 = 65)
    assert builtin.choose_split("json.decoder") == "train"


def test_words_are_lower_case_and_seen_three_times():
    corpus = prepare(DataConfig())
    vocabulary = corpus.tokenizer
    assert all(word == word.lower() for word in vocabulary.entries)
    assert {"the", ".", "function", "<unk>", "\n"} <= set(vocabulary.entries)
    counts = np.bincount(corpus.ids("train"), minlength=len(vocabulary))
    assert counts.min() >= 3
    unknown = (corpus.ids("valid") == vocabulary.unk_id).mean()
    assert 0.005 < unknown < 0.10
    ids = vocabulary.encode("Returns the list, or None.")
    assert vocabulary.decode(ids) == "returns the list , or none ."


# sentence pairs of invented languages


def test_prepared_as_a_corpus(tmp_path):
    config = DataConfig(name="synthetic-translation", cache=str(tmp_path))
    corpus = prepare(config)
    assert corpus.label == "synthetic-translation (not a language)"
    assert not corpus.is_slice
    assert {split: counts["pairs"] for split, counts in corpus.splits.items()} == SIZES
    for split in ("valid", "test"):
        assert corpus.splits[split]["source_unknown"] == corpus.splits[split]["target_unknown"] == 0
    assert (corpus.source.name, corpus.target.name) == ("svo", "sov")
    assert len(corpus.source) != len(corpus.target)  # a vocabulary for each
    assert prepare(config).folder == corpus.folder
    turned = prepare(DataConfig(name="synthetic-translation", cache=str(tmp_path), source="sov"))
    assert "sov to svo" in turned.label
    assert turned.pairs("test").source.read_lines() == corpus.pairs("test").target.read_lines()
