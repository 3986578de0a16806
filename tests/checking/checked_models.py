"""Tiny models of ours for the checks, and what is made of them to see that a check notices."""

from __future__ import annotations

from typing import Any

import torch

import fullrank as fr
from fullrank.checking import Finding, run_guarded
from fullrank.checking.subject import Subject, open_subject

SIZES: dict[str, Any] = {
    "vocab_size": 19, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 34,
}  # fmt: skip
XL: dict[str, Any] = {"position": "relative", "attention": fr.AttentionConfig(score="relative"), "memory_length": 5}


def language_model(kind: type[fr.LanguageModel] = fr.LanguageModel, **keys: Any) -> fr.LanguageModel:
    torch.manual_seed(1)
    return kind(fr.ModelConfig(**SIZES | keys))


def ours(kind: type[fr.LanguageModel] = fr.LanguageModel, **keys: Any) -> Subject:
    return open_subject(language_model(kind, **keys))


def translator(kind: type[fr.Translator] = fr.Translator, **keys: Any) -> fr.Translator:
    torch.manual_seed(1)
    return kind(fr.ModelConfig(**SIZES | {"encoder": fr.EncoderConfig(vocab_size=23)} | keys))


def translating(kind: type[fr.Translator] = fr.Translator, **keys: Any) -> Subject:
    return open_subject(translator(kind, **keys))


def off(finding: Finding) -> bool:
    """It fails by its figure, and not because something could not be run."""
    assert finding.difference is not None, finding
    return finding.verdict == "fails"


def run(check: Any, subject: Subject, *args: Any, **options: Any) -> Finding:
    """The finding of a check, also of one that does not apply."""
    return run_guarded(lambda subject: check(subject, *args, **options), subject)
