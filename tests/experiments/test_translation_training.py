"""A translation run with everything training has for it: the best checkpoint by BLEU, the last checkpoints averaged."""

import random
import re

import pytest
import yaml

from fullrank.config.load import resolve
from fullrank.config.run import DataConfig, EvalConfig, RunConfig, TrainConfig
from fullrank.core.translator import Translator
from fullrank.experiments import translation
from fullrank.experiments.measure import Evaluation
from fullrank.experiments.run import train
from fullrank.experiments.translation import Search, TranslationTask
from run_files import read_metrics, read_result

WORDS = {"ein": "a", "der": "the", "hund": "dog", "mann": "man", "vogel": "bird", "sieht": "sees", "ruft": "calls"}


def draw_sentence(draw):
    subject, animal = (f"{draw.choice(['ein', 'der'])} {draw.choice(['hund', 'mann', 'vogel'])}" for _ in range(2))
    return f"{subject} {draw.choice(['sieht', 'ruft'])} {animal}"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Sentences of five words, each translated by a word, in the order of the source."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = random.Random(1)
    for split, count in (("train", 240), ("valid", 24), ("test", 12)):
        source = "".join(draw_sentence(draw) + "\n" for _ in range(count))
        (folder / f"{split}.de").write_text(source, encoding="utf-8")
        (folder / f"{split}.en").write_text(re.sub(r"\w+", lambda word: WORDS[word.group()], source), encoding="utf-8")
    settings = {
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32,
                  "dropout": {"residual": 0.1}, "attention": {"mix": "position_wise"}},
        "data": {"name": "parallel", "dir": str(folder), "train": "train", "valid": "valid", "test": "test", "source": "de",
                 "target": "en", "tokens": "word", "vocabulary": "separate", "cache": str(folder / "cache")},
        "train": {"tokens": 9000, "batch_tokens": 200, "optimizer": "adamw", "weight_decay": 1e-4, "learning_rate": 0.02,
                  "schedule": "inverse_sqrt", "warmup_steps": 10, "warmup_from": 1e-7, "label_smoothing": 0.1,
                  "keep_checkpoints": 3, "threads": 1, "device": "cpu", "log_every_steps": 5},
        "eval": {"every_steps": 10, "metric": "bleu", "max_sentences": 8},
    }  # fmt: skip
    file = folder / "pairs.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return file


def run(config, folder):
    return train(resolve(str(config)), folder, quiet=True)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(config, folder)
    return folder


@pytest.mark.parametrize(
    ("target", "text", "key", "tokens"),
    [
        ("en", "a red dog runs", None, "13a"),
        ("zh", "一只红色的狗在公园里跑", None, "zh"),
        ("zh", "一只红色的狗在公园里跑", "char", "char"),
    ],
)
def test_tokens_of_bleu_are_those_of_the_key_or_the_language(target, text, key, tokens, tmp_path, monkeypatch):
    """A perfect translation of a text that has no spaces has a BLEU of 100, and its signature says by which tokens."""
    for suffix, line in (("xx", "ein roter hund"), (target, text)):
        (tmp_path / f"train.{suffix}").write_text(f"{line}\n" * 40, encoding="utf-8")
    data = DataConfig(name="parallel", dir=str(tmp_path), train="train", source="xx", target=target, tokens="word",
                      vocabulary="separate", cache=str(tmp_path / "cache"))  # fmt: skip
    config = RunConfig(data=data, train=TrainConfig(batch_tokens=100), eval=EvalConfig(bleu_tokenize=key))
    task = TranslationTask(config).prepare(lambda _: None)
    monkeypatch.setattr(translation, "translate_split", lambda *_: ([text, text], [text, text]))
    monkeypatch.setattr(task, "score", lambda *_: Evaluation(1.0, 1))
    figures = task.figures(Translator(task.config.model), "test", Search())
    assert figures["bleu"] == pytest.approx(100)
    assert f"|tok:{tokens}|" in figures["bleu_signature"]


def test_the_best_checkpoint_is_the_one_of_the_highest_bleu(finished):
    lines = read_metrics(finished, "valid")
    result = read_result(finished)
    highest = max(lines, key=lambda line: line["bleu"])
    assert result["best"]["step"] == highest["step"]
    assert result["best"]["nll"] == pytest.approx(highest["nll"], rel=1e-8)
    assert len({line["bleu"] for line in lines}) > 1
