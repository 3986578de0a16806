"""The public names and where they live: read by type checkers, and by `__init__.py`, which imports each when it is used."""

from fullrank import analysis as analysis
from fullrank.checking import check as check
from fullrank.checking import check_scoring as check_scoring
from fullrank.config import register as register
from fullrank.config.run import DataConfig as DataConfig
from fullrank.config.run import EvalConfig as EvalConfig
from fullrank.config.run import RunConfig as RunConfig
from fullrank.config.run import TrainConfig as TrainConfig
from fullrank.core.attention import Attention as Attention
from fullrank.core.compressed_embedding import AdaptiveInput as AdaptiveInput
from fullrank.core.config import AttentionConfig as AttentionConfig
from fullrank.core.config import DecoderConfig as DecoderConfig
from fullrank.core.config import DropoutConfig as DropoutConfig
from fullrank.core.config import EncoderConfig as EncoderConfig
from fullrank.core.config import InputConfig as InputConfig
from fullrank.core.config import LayerConfig as LayerConfig
from fullrank.core.config import ModelConfig as ModelConfig
from fullrank.core.config import OutputConfig as OutputConfig
from fullrank.core.decoder import LanguageModel as LanguageModel
from fullrank.core.encoder import Encoder as Encoder
from fullrank.core.encoder import MaskedLanguageModel as MaskedLanguageModel
from fullrank.core.layout import Layout as Layout
from fullrank.core.multilinear import MultiLinearAttention as MultiLinearAttention
from fullrank.core.output import AdaptiveSoftmax as AdaptiveSoftmax
from fullrank.core.output import MixtureOfSoftmaxes as MixtureOfSoftmaxes
from fullrank.core.skip_retain import SkipRetain as SkipRetain
from fullrank.core.trace import Trace as Trace
from fullrank.core.trace import orthogonality as orthogonality
from fullrank.core.trace import overlap as overlap
from fullrank.core.translator import Translator as Translator
from fullrank.experiments.generation import generate as generate
from fullrank.hf import FullRankCache as FullRankCache
from fullrank.hf import FullRankConfig as FullRankConfig
from fullrank.hf import FullRankForCausalLM as FullRankForCausalLM
from fullrank.hf import FullRankForMaskedLM as FullRankForMaskedLM
from fullrank.hf.inject import inject as inject
from fullrank.hf.inject import parameter_groups as parameter_groups
from fullrank.hf.inject import remove as remove
from fullrank.hf.interface import traced as traced
from fullrank.hf.load import load_injected as load_injected
from fullrank.kernels import kernel as kernel
from fullrank.models import LoadedModel as LoadedModel
from fullrank.models import open_model as open_model
from fullrank.records import Column as Column
from fullrank.records import HeatMap as HeatMap
from fullrank.records import Lines as Lines
from fullrank.records import Record as Record
from fullrank.records import Table as Table
from fullrank.records import measurement as measurement
from fullrank.text import Text as Text

__version__: str
__all__: list[str]
_HOMES: dict[str, str]
