"""What a language model has to keep to: no look into the future, and agreement of two ways to compute the same."""

from fullrank.checking.examine import check
from fullrank.checking.finding import Finding, Report

__all__ = ["Finding", "Report", "check"]
