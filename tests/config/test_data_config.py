"""The data section with sentence pairs: what fits a kind of corpus, and what is refused by name."""

import pytest

from fullrank.config.load import build
from fullrank.config.run import DataConfig
from fullrank.core.errors import ConfigError

PARALLEL = {"name": "parallel", "train": "a", "valid": "b", "test": "c", "source": "de", "target": "en"}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "builtin"),
        ({"tokens": "byte"}, "builtin"),
        ({"train": "novel.txt"}, "text"),
        ({"train": "corpus/train", "source": "de", "target": "en"}, "parallel"),
    ],
)
def test_a_text_that_is_given_is_the_text(given, name):
    assert DataConfig(**given).name == name
    train = {"batch_tokens": 64} if name == "parallel" else {"steps": 3}
    assert build({"data": given, "train": train}).data.name == name


GOOD = [
    {**PARALLEL, "tokens": "word", "min_count": 2, "max_vocabulary": 100},
    {**PARALLEL, "train": ["a", "b"], "max_length": 100, "max_ratio": 1.5, "moses": True, "lowercase": True},
    {"name": "multi30k-de-en", "source": "en", "target": "de", "concatenate": 240},
]


@pytest.mark.parametrize("given", GOOD)
def test_what_is_taken(given):
    assert build({"data": given, "train": {"batch_tokens": 4096}}).data == DataConfig(**given)


BAD = {
    "source of text": ({"name": "ptb", "source": "de"}, "data.source"),
    "length of text": ({"name": "ptb", "max_length": 5}, "data.max_length"),
    "min_count of bpe": ({"name": "multi30k-de-en", "min_count": 2}, "data.min_count"),
    "codes and a size": ({**PARALLEL, "codes": "x", "max_vocabulary": 9}, "data.codes"),
    "no target": ({**PARALLEL, "target": None}, "data.target"),
    "one language": ({**PARALLEL, "target": "de"}, "data.target"),
    "no ratio": ({**PARALLEL, "max_ratio": float("nan")}, "data.max_ratio"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case):
    given, message = BAD[case]
    with pytest.raises(ConfigError) as error:
        build({"data": given})
    assert len(error.value.problems) == 1
    assert message in error.value.problems[0]
