"""Multi-linear attention as its equations read (Ma et al. 2019, Eq. 5 to 8): slow, and differentiable as often as one likes.

    T_ijm = mean_c sum_r g_cr Q_ir K_jr V_mr                   where query i sees key j and value m, 0 elsewhere
    O_i   = sum_jm T_ijm W_jm                                  (split, concatenate, output map)
    sum_j T_ijm                                                (Corollary 1)
    O_i   = sum_jms sum_r g_r Q_ir K_jr V_mr a_s^(i-j) b_s^(i-m) U_sr            (output map of any length)

query (B, N, R), keys and values (B, M, R), cores (C, R); the queries are the last N of the M keys. Builds (B, N, M, M).
docs/derivations/multilinear.md
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError


def tensor(query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, visible: Tensor | None = None) -> Tensor:
    """T (B, N, M, M), its last two indices those of keys and values.

    visible (1 or B, N, M) boolean: True where a query sees a position, as a key and as a value; None: everything.
    """
    blocks = torch.einsum("cr,bir,bjr,bmr->bcijm", cores, query, keys, values)
    found = blocks.mean(1)
    if visible is None:
        return found
    return found.masked_fill(~(visible[..., :, None] & visible[..., None, :]), 0.0)


def multilinear(
    query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, weight: Tensor, visible: Tensor | None = None
) -> Tensor:
    """O (B, N, E); weight (L, L, E), of which M <= L positions use the leading M x M x E.

    The authors' output matrix (E, L^2), keys major and values minor, is `weight.permute(2, 0, 1).flatten(1)`.
    """
    split = tensor(query, keys, values, cores, visible).flatten(2)  # (B, N, M^2)
    return split @ leading(weight, keys.shape[1]).flatten(0, 1)


def leading(weight: Tensor, keys: int) -> Tensor:
    """The part of the output map (L, L, E) that `keys` positions use.

    Raises InputError where there are more positions than the map has.
    """
    length = weight.shape[0]
    if keys > length:
        raise InputError(
            f"{keys} positions, but the output matrix of multi-linear attention has a column for each pair of {length} "
            "positions and none for later ones; use shorter segments, a larger max_position_embeddings, or an output map "
            "that does not depend on length"
        )
    return weight[:keys, :keys]


def causal(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(1, N, M), True where a position is not after the query; the queries are the last N of M."""
    own = torch.arange(keys - queries, keys, device=device)
    return (torch.arange(keys, device=device) <= own[:, None])[None]


def sum_over_keys(query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, visible: Tensor | None = None) -> Tensor:
    """sum_j T_ijm (B, N, M): what Corollary 1 calls attention. It has no softmax in it."""
    return tensor(query, keys, values, cores, visible).sum(2)


def sum_over_keys_closed(
    query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, visible: Tensor | None = None
) -> Tensor:
    """The same without T: (Q_i o g o sum_j K_j) . V_m over visible j, for visible m."""
    if visible is None:
        total = keys.sum(1, keepdim=True)
    else:
        total = visible.to(keys.dtype) @ keys
    found = (query * cores.mean(0) * total) @ values.transpose(1, 2)
    return found if visible is None else found.masked_fill(~visible, 0.0)


def decayed(
    query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, log_decays: tuple[Tensor, Tensor], weight: Tensor
) -> Tensor:
    """O (B, N, E) with W_r(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr over j, m <= i: the direct triple sum.

    log_decays: log a and log b, (S,) each, below 0. weight U (S, R, E), or (S, E) where it does not depend on r.
    """
    queries, length = query.shape[1], keys.shape[1]
    own = torch.arange(length - queries, length, device=query.device)
    distance = own[:, None] - torch.arange(length, device=query.device)  # (N, M)
    seen = distance >= 0
    to_keys, to_values = (
        torch.exp(log[:, None, None] * distance.clamp_min(0)).masked_fill(~seen, 0.0) for log in log_decays
    )
    terms = torch.einsum("r,bir,bjr,bmr->bijmr", cores.mean(0), query, keys, values)
    if weight.dim() == 2:
        return torch.einsum("bijmr,sij,sim,se->bie", terms, to_keys, to_values, weight)
    return torch.einsum("bijmr,sij,sim,sre->bie", terms, to_keys, to_values, weight)
