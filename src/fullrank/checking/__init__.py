"""Checks of a language model: no token sees the future, and two ways to compute the same agree."""

from fullrank.checking.check import check
from fullrank.checking.report import Finding, Report

__all__ = ["Finding", "Report", "check"]
