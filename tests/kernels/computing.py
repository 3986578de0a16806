"""Whether a kernel computes a call."""

from __future__ import annotations

from fullrank.core.engine import Problem
from fullrank.kernels import KERNELS


def native_computes(problem: Problem) -> bool:
    return KERNELS["native"].reason(problem) is None


def blocks_compute(problem: Problem) -> bool:
    return KERNELS["blocks"].reason(problem) is None


def triton_computes(problem: Problem) -> bool:
    return KERNELS["triton"].reason(problem) is None
