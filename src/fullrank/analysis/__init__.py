"""The papers' analyses: each reads a model or a configuration, and gives figures."""

from fullrank.analysis.context import LayerReach, context
from fullrank.analysis.gradient import GradientShare, gradient_share
from fullrank.analysis.heads import Heads, LayerHeads, ablate, heads, nats_per_token
from fullrank.analysis.mixing import LayerMixing, mixing
from fullrank.analysis.rank import LogProbRank, OutputLayer, rank
from fullrank.analysis.spectrum import AttentionSpectrum, LayerSpectrum, Spectrum, spectrum
from fullrank.analysis.use import ContextUse, context_use

__all__ = [
    "AttentionSpectrum",
    "ContextUse",
    "GradientShare",
    "Heads",
    "LayerHeads",
    "LayerMixing",
    "LayerReach",
    "LayerSpectrum",
    "LogProbRank",
    "OutputLayer",
    "Spectrum",
    "ablate",
    "context",
    "context_use",
    "gradient_share",
    "heads",
    "mixing",
    "nats_per_token",
    "rank",
    "spectrum",
]
