"""The papers' analyses: each is handed what it looks at, and gives figures."""

from fullrank.analysis.context import Distribution, Drift, LayerReach, Reach, context

__all__ = ["Distribution", "Drift", "LayerReach", "Reach", "context"]
