"""fullrank: transformer language models without their bottlenecks.

    import fullrank as fr
    config = fr.ModelConfig(vocab_size=10_000, attention=fr.AttentionConfig(mix="position_wise"))
    model = fr.LanguageModel(config)

Names are imported when first used, so that `import fullrank` costs nothing.
"""

from __future__ import annotations

import sys

# `python -m fullrank` puts the working directory before the library: a `queue.py` of one's own would be imported there
if getattr(sys, "argv", [])[:1] == ["-m"] and not sys.flags.safe_path:  # the module that Python is looking for
    _module = sys.orig_argv[-len(sys.argv)]
    if _module == "fullrank" or (_module.startswith("-") and _module.endswith("mfullrank")):
        del sys.path[0]

import importlib
from typing import TYPE_CHECKING, Any

from fullrank.core import engine as _engine

__version__ = "0.1.0"

_HOMES = {
    "ModelConfig": "fullrank.core.config",
    "AttentionConfig": "fullrank.core.config",
    "InputConfig": "fullrank.core.config",
    "OutputConfig": "fullrank.core.config",
    "DropoutConfig": "fullrank.core.config",
    "EncoderConfig": "fullrank.core.config",
    "DecoderConfig": "fullrank.core.config",
    "DataConfig": "fullrank.config.data",
    "TrainConfig": "fullrank.config.training",
    "EvalConfig": "fullrank.config.run",
    "RunConfig": "fullrank.config.run",
    "register": "fullrank.config",
    "LanguageModel": "fullrank.core.decoder",
    "LayerConfig": "fullrank.core.config",
    "Translator": "fullrank.core.translator",
    "Encoder": "fullrank.core.encoder",
    "MaskedLanguageModel": "fullrank.core.masked",
    "AdaptiveInput": "fullrank.core.embedding",
    "AdaptiveSoftmax": "fullrank.core.output",
    "MixtureOfSoftmaxes": "fullrank.core.output",
    "Attention": "fullrank.core.attention",
    "MultiLinearAttention": "fullrank.core.multilinear",
    "Layout": "fullrank.core.layout",
    "Trace": "fullrank.core.trace",
    "kernel": "fullrank.kernels",
    "SkipRetain": "fullrank.core.skip_retain",
    "orthogonality": "fullrank.core.penalty",
    "overlap": "fullrank.core.penalty",
    "Record": "fullrank.records",
    "Table": "fullrank.records",
    "Column": "fullrank.records",
    "Lines": "fullrank.records",
    "HeatMap": "fullrank.records",
    "Dots": "fullrank.records",
    "measurement": "fullrank.records",
    "check": "fullrank.checking",
    "check_scoring": "fullrank.checking",
    "LoadedModel": "fullrank.models",
    "open_model": "fullrank.models",
    "Text": "fullrank.text",
    "generate": "fullrank.experiments.generation",
    "FullRankConfig": "fullrank.hf",
    "FullRankCache": "fullrank.hf",
    "FullRankForCausalLM": "fullrank.hf",
    "FullRankForMaskedLM": "fullrank.hf",
    "FullRankForSeq2SeqLM": "fullrank.hf",
    "inject": "fullrank.hf.inject",
    "remove": "fullrank.hf.inject",
    "traced": "fullrank.hf.interface",
    "parameter_groups": "fullrank.hf.inject",
    "load_injected": "fullrank.hf.load",
}

_PACKAGES = ("analysis",)

__all__ = ["__version__", *_HOMES, *_PACKAGES]

if TYPE_CHECKING:
    from fullrank import analysis as analysis
    from fullrank.checking import check as check
    from fullrank.checking import check_scoring as check_scoring
    from fullrank.config import register as register
    from fullrank.config.data import DataConfig as DataConfig
    from fullrank.config.run import EvalConfig as EvalConfig
    from fullrank.config.run import RunConfig as RunConfig
    from fullrank.config.training import TrainConfig as TrainConfig
    from fullrank.core.attention import Attention as Attention
    from fullrank.core.config import AttentionConfig as AttentionConfig
    from fullrank.core.config import DecoderConfig as DecoderConfig
    from fullrank.core.config import DropoutConfig as DropoutConfig
    from fullrank.core.config import EncoderConfig as EncoderConfig
    from fullrank.core.config import InputConfig as InputConfig
    from fullrank.core.config import LayerConfig as LayerConfig
    from fullrank.core.config import ModelConfig as ModelConfig
    from fullrank.core.config import OutputConfig as OutputConfig
    from fullrank.core.decoder import LanguageModel as LanguageModel
    from fullrank.core.embedding import AdaptiveInput as AdaptiveInput
    from fullrank.core.encoder import Encoder as Encoder
    from fullrank.core.layout import Layout as Layout
    from fullrank.core.masked import MaskedLanguageModel as MaskedLanguageModel
    from fullrank.core.multilinear import MultiLinearAttention as MultiLinearAttention
    from fullrank.core.output import AdaptiveSoftmax as AdaptiveSoftmax
    from fullrank.core.output import MixtureOfSoftmaxes as MixtureOfSoftmaxes
    from fullrank.core.penalty import orthogonality as orthogonality
    from fullrank.core.penalty import overlap as overlap
    from fullrank.core.skip_retain import SkipRetain as SkipRetain
    from fullrank.core.trace import Trace as Trace
    from fullrank.core.translator import Translator as Translator
    from fullrank.experiments.generation import generate as generate
    from fullrank.hf import FullRankCache as FullRankCache
    from fullrank.hf import FullRankConfig as FullRankConfig
    from fullrank.hf import FullRankForCausalLM as FullRankForCausalLM
    from fullrank.hf import FullRankForMaskedLM as FullRankForMaskedLM
    from fullrank.hf import FullRankForSeq2SeqLM as FullRankForSeq2SeqLM
    from fullrank.hf.inject import inject as inject
    from fullrank.hf.inject import parameter_groups as parameter_groups
    from fullrank.hf.inject import remove as remove
    from fullrank.hf.interface import traced as traced
    from fullrank.hf.load import load_injected as load_injected
    from fullrank.kernels import kernel as kernel
    from fullrank.models import LoadedModel as LoadedModel
    from fullrank.models import open_model as open_model
    from fullrank.records import Column as Column
    from fullrank.records import Dots as Dots
    from fullrank.records import HeatMap as HeatMap
    from fullrank.records import Lines as Lines
    from fullrank.records import Record as Record
    from fullrank.records import Table as Table
    from fullrank.records import measurement as measurement
    from fullrank.text import Text as Text


def _engines() -> _engine.Engines:
    from fullrank import kernels

    return kernels


def _storage() -> Any:
    from fullrank import storage

    return storage


def _generate(*given: Any, **options: Any) -> Any:
    from fullrank import decoding

    return decoding.generate(*given, **options)


_engine.load, _engine.load_storage, _engine.generate = _engines, _storage, _generate


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"fullrank.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fullrank' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
