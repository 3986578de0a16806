"""The papers' analyses: each reads a model or a configuration, and gives figures."""

from fullrank.analysis.context import Distribution, Drift, LayerReach, Reach, context
from fullrank.analysis.rank import LogProbRank, OutputLayer, rank

__all__ = ["Distribution", "Drift", "LayerReach", "LogProbRank", "OutputLayer", "Reach", "context", "rank"]
