"""The papers' analyses: each is handed what it looks at, and gives figures."""

from fullrank.analysis.context import Distribution, Drift, LayerReach, Reach, context
from fullrank.analysis.rank import LogProbRank, rank
from fullrank.analysis.softmax_bound import OutputLayer

__all__ = ["Distribution", "Drift", "LayerReach", "LogProbRank", "OutputLayer", "Reach", "context", "rank"]
