"""`fullrank eval` under every protocol: right once, and wrong in every way a flag can be."""

import math

import pytest

from cli_runs import SMALL, called, document, succeeds, write_config
from run_files import read_result

XL = ["model.position=relative", "model.attention.score=relative", "model.memory_length=8"]


def train(text, name, *settings):
    config = write_config(text / f"{name}.yaml", text, text / "cache", steps=12)
    succeeds("train", config, *SMALL, *settings, "--out", text / name, "--quiet")
    return text / name


@pytest.fixture(scope="module")
def plain(text):
    """Words, no memory; its final figures are those of a sliding window."""
    return train(text, "plain", "eval.context=5")


@pytest.fixture(scope="module")
def xl(text):
    """Bytes, memory of 8; test figures are those of a longer one."""
    return train(text, "xl", *XL, "data.tokens=byte", "eval.test.memory_length=24", "eval.test.clamp_length=20")


def figures(folder, *flags):
    return document("eval", folder, "--device", "cpu", *flags)


def test_the_final_figures_are_those_of_eval(plain, xl):
    for folder, words in ((plain, "windows of 8 tokens that overlap by 5"), (xl, "up to 24 tokens of memory")):
        result = read_result(folder)
        measured = figures(folder)
        assert measured["perplexity"] == pytest.approx(result["final"]["test"]["perplexity"], rel=1e-6)
        assert measured["tokens"] == result["corpus"]["tokens"]["test"]
        assert words in measured["protocol"]
        assert measured["protocol_settings"] == result["protocol_settings"]


def test_figures_per_word_character_and_byte(plain, xl):
    """The tokens of a word model are words; of a byte model, the words and characters are counted in the text."""
    of_words = figures(plain)
    assert of_words["perplexity_per_word"] == of_words["perplexity"]
    assert "bits_per_character" not in of_words
    of_bytes = figures(xl)
    text = (xl.parent / "test.txt").read_text(encoding="utf-8")
    nats = of_bytes["nll"] * len(text.encode())
    assert of_bytes["bits_per_byte"] == pytest.approx(of_bytes["nll"] / math.log(2), rel=1e-12)
    assert of_bytes["bits_per_character"] == pytest.approx(nats / math.log(2) / len(text), rel=1e-12)
    words = len(text.replace("\n", " <eos> ").split())
    assert of_bytes["perplexity_per_word"] == pytest.approx(math.exp(nats / words), rel=1e-9)
    out = succeeds("eval", xl, "--device", "cpu")
    assert f"  bits per byte            {of_bytes['bits_per_byte']:.4f}" in out.splitlines()
    assert f"{of_bytes['bits_per_byte']:.3f}" in called("train", xl)[1]  # finished: only its figures are shown
