"""Tiny models of ours to be checked, and ways to run one check on them."""

import functools

import torch

import fullrank as fr
from fullrank.checking import Check, run_guarded
from fullrank.checking.calls import PLAIN
from fullrank.checking.subject import open_subject

SIZES = {
    "vocab_size": 19, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 34,
}  # fmt: skip
XL = {"position": "relative", "attention": fr.AttentionConfig(score="relative"), "memory_length": 5}


def language_model(kind=fr.LanguageModel, **keys):
    torch.manual_seed(1)
    return kind(fr.ModelConfig(**SIZES | keys))


def ours(kind=fr.LanguageModel, **keys):
    return open_subject(language_model(kind, **keys))


def translator(kind=fr.Translator, **keys):
    torch.manual_seed(1)
    return kind(fr.ModelConfig(**SIZES | {"encoder": fr.EncoderConfig(vocab_size=23)} | keys))


def translating(kind=fr.Translator, **keys):
    return open_subject(translator(kind, **keys))


def off(finding):
    """True if a check fails by its figure, and not because it could not be run."""
    assert finding.difference is not None, finding
    return finding.verdict == "fails"


def find(check, subject, call=PLAIN[0], **options):
    """The finding of a check."""
    return Check(call, functools.partial(check, **options))(subject)


def run(check, subject, call=PLAIN[0]):
    """The finding of a check, also of one that does not apply."""
    return run_guarded(Check(call, check), subject)
