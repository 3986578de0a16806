"""Recipes resolved and counted, once each: what the tests of recipes have in common."""

import functools

import torch

from fullrank.config.load import resolve
from fullrank.core.decoder import LanguageModel
from fullrank.core.translator import Translator


@functools.cache
def _count(model, translates):
    config = _configs[model]
    with torch.device("meta"):
        built = Translator(config) if translates else LanguageModel(config)
    return built.num_parameters()


_configs = {}


def total(name, row, scale="paper", overrides=()):
    """Parameters; where the data decide on the vocabulary, it has 20,000 words."""
    vocabulary = [] if scale == "paper" else ["model.vocab_size=20000"]
    config = config_of(name, row, scale, (*vocabulary, *overrides))
    return count_of(config.model, config.translates)


def count_of(model, translates=False):
    """Parameters of a model of this configuration."""
    _configs[repr(model)] = model
    return _count(repr(model), translates)


@functools.cache
def config_of(name, row, scale="paper", overrides=()):
    return resolve(name, row, scale, overrides).config
