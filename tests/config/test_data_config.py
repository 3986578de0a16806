"""The data section: the corpus that is meant, and what fits sentence pairs."""

import pytest

from fullrank.config.load import build
from fullrank.config.run import DataConfig

PARALLEL = {"name": "parallel", "train": "a", "valid": "b", "test": "c", "source": "de", "target": "en"}


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({}, "builtin"),
        ({"tokens": "byte"}, "builtin"),
        ({"train": "novel.txt"}, "text"),
        ({"train": "corpus/train", "source": "de", "target": "en"}, "parallel"),
    ],
)
def test_the_training_files_decide_the_kind_of_corpus(section, name):
    assert DataConfig(**section).name == name
    train = {"batch_tokens": 64} if name == "parallel" else {"steps": 3}
    assert build({"data": section, "train": train}).data.name == name


GOOD = [
    {**PARALLEL, "tokens": "word", "min_count": 2, "max_vocabulary": 100},
    {**PARALLEL, "train": ["a", "b"], "max_length": 100, "max_ratio": 1.5, "moses": True, "lowercase": True},
    {"name": "multi30k-de-en", "source": "en", "target": "de", "concatenate": 240},
]


@pytest.mark.parametrize("section", GOOD)
def test_accepted_sections(section):
    assert build({"data": section, "train": {"batch_tokens": 4096}}).data == DataConfig(**section)
