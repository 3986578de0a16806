"""Models that cannot be are refused with one line (refused.yaml), read from YAML and built in Python alike."""

from pathlib import Path

import pytest

import fullrank as fr
from fullrank.core.errors import ConfigError
from fullrank.files import parse_yaml

FILE = Path(__file__).parent / "refused.yaml"
CASES = parse_yaml(FILE.read_text(encoding="utf-8"), FILE.name)
SIZES = {"vocab_size": 100, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 3}


def refused_in_python(keys):
    fr.ModelConfig(**SIZES | keys)


def refused_in_yaml(keys):
    fr.ModelConfig.from_dict(SIZES | keys)


@pytest.mark.parametrize("read", [refused_in_python, refused_in_yaml])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["says"])[:90])
def test_models_that_cannot_be(case, read):
    with pytest.raises(ConfigError) as caught:
        read(case["model"])
    (line,) = caught.value.problems
    assert [word for word in case["says"] if word not in line] == [], line
