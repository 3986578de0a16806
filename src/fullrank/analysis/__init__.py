"""The papers' analyses: each reads a model or a configuration, and gives figures."""

from fullrank.analysis.heads import Heads, heads
from fullrank.analysis.mixing import mixing
from fullrank.analysis.rank import LogProbRank, OutputLayer, gradient_share, rank
from fullrank.analysis.spectrum import Spectrum, spectrum

__all__ = [
    "Heads",
    "LogProbRank",
    "OutputLayer",
    "Spectrum",
    "gradient_share",
    "heads",
    "mixing",
    "rank",
    "spectrum",
]
