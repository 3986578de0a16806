"""A translation run with everything training has for it: the best checkpoint by BLEU, the last checkpoints averaged."""

import pytest

from fullrank.config.run import DataConfig, EvalConfig, RunConfig, TrainConfig
from fullrank.core.translator import Translator
from fullrank.experiments import translation
from fullrank.experiments.measure import Evaluation
from fullrank.experiments.translation import Search, TranslationTask


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
