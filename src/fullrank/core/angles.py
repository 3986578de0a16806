"""Angles of sinusoidal and rotary positions, exact also where a text has gone on for a million tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def halves(positions: Tensor, width: int, like: Tensor) -> Tensor:
    """Sinusoids as Transformer-XL has them, all sines and then all cosines: (T,) -> (T, E) in the dtype of `like`.

    PE(p, i) = sin(p / 10000^(2i/E)),   PE(p, E/2 + i) = cos(p / 10000^(2i/E)),      i < E/2
    """
    angle = angles(positions, width, 10000.0, like)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)[:, :width].to(like.dtype)


def angles(positions: Tensor, size: int, theta: float, like: Tensor) -> Tensor:
    """p theta^(-2i / size) for 2i < size, without whole turns; positions (...,) -> (..., ceil(size / 2)).

    The product is made in fp64: in fp32 an angle of 10^6 is off by 0.06. The result is fp32, or fp64 if `like` is.
    """
    wide = torch.float32 if positions.device.type == "mps" else torch.float64  # mps has no fp64
    exponent = torch.arange(0, size, 2, device=positions.device, dtype=wide) / size
    angle = positions.to(wide)[..., None] * torch.exp(-math.log(theta) * exponent)
    return angle if like.dtype == torch.float64 else angle.remainder(2 * math.pi).to(torch.float32)
