"""Recipes resolved and counted, once each: what the tests of recipes have in common."""

from __future__ import annotations

import functools

import torch

from fullrank.config.recipe import resolve
from fullrank.config.schema import ModelConfig, RunConfig
from fullrank.model.language_model import LanguageModel


@functools.cache
def _count(model: str) -> int:
    config = _configs[model]
    with torch.device("meta"):
        return LanguageModel(config).num_parameters()


_configs: dict[str, ModelConfig] = {}


def total(name: str, row: str, scale: str = "paper", overrides: tuple[str, ...] = ()) -> int:
    """Parameters; where the data decide on the vocabulary, it has 20,000 words."""
    given = [] if scale == "paper" else ["model.vocab_size=20000"]
    config = config_of(name, row, scale, (*given, *overrides)).model
    _configs[repr(config)] = config
    return _count(repr(config))


@functools.cache
def config_of(name: str, row: str, scale: str = "paper", overrides: tuple[str, ...] = ()) -> RunConfig:
    return resolve(name, row, scale, overrides).config
