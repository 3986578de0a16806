"""Multi-linear attention whose output map does not depend on length: a product of two decayed prefix sums.

    W_r(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr       for j, m <= i, with 0 < a_s, b_s < 1
    A_s(i) = sum_{j<=i} a_s^(i-j) K_j = a_s A_s(i-1) + K_i,        B_s(i) likewise of b_s and V
    O_i = sum_s sum_r g_r Q_ir A_sr(i) B_sr(i) U_sr

so that a token costs 2 S R numbers of state, whatever came before. In chunks of c tokens the sums are L K + a^(1..c) A_s, with
L_in = a^(i-n) below and on the diagonal: only powers with exponents >= 0, never a quotient of powers. Decays are given as
logarithms, which keeps those near 0 and near 1 exact. The backward pass goes through the chunks from the end, from the kept
states before each, and computes everything else again:

    dF = dO U^T,  dA = dF o q o B,  dB = dF o q o A,  dK = L^T dA,  dA_s(before) = sum_i a^(i+1) dA(i),
    d log a = sum_in (i - n) L_in (dA K^T)_in + sum_i (i + 1) a^(i+1) dA(i) . A(before)
Sums are fp32 (or fp64); the product with U has the dtype that autocast asks for.
Limits: no double backward, no functorch transforms; `fullrank.kernel("reference")` has them.
docs/derivations/multilinear.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullrank.core.errors import InputError
from fullrank.kernels import forced
from fullrank.kernels.precision import device_kind, product_dtype, refuse_second_order

_CHUNK = 16  # tokens


class DecayedState(NamedTuple):
    """A_s and B_s after the last token, (B, S, R) each."""

    keys: Tensor
    values: Tensor


def decayed_multilinear(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cores: Tensor,
    log_decays: tuple[Tensor, Tensor],
    weight: Tensor,
    *,
    key_mask: Tensor | None = None,
    state: DecayedState | None = None,
) -> tuple[Tensor, DecayedState]:
    """O (B, N, E) and the state after the last token, of which a next call goes on; gradients flow through states.

    query (B, N, R), keys and values (B, M, R), cores (C, R). Queries are the last N of M tokens; those before them, and
    `state`, are the past. log_decays: log a and log b, (S,) each, below 0. weight U (S, R, E), or (S, E) for U_sr = U_s.
    key_mask (B, M): False where a token is padding; it counts as a distance and as nothing else.
    |A_s| <= max |K| / (1 - a_s) at any length: a U_s scaled by (1 - a_s)(1 - b_s) keeps outputs bounded as a_s nears 1.
    Raises InputError for more queries than keys.
    """
    queries, length = query.shape[1], keys.shape[1]
    if queries > length:
        raise InputError(f"{queries} causal queries over {length} keys: they are the last ones of the keys")
    if key_mask is not None:
        keys, values = (tensor.masked_fill(~key_mask[..., None], 0.0) for tensor in (keys, values))
    wide, dtype = torch.promote_types(query.dtype, torch.float32), product_dtype(query, weight)
    with torch.autocast(device_kind(query), enabled=False):
        scaled, keys, values = query.to(wide) * cores.to(wide).mean(0), keys.to(wide), values.to(wide)
        logs = [log.to(wide) for log in log_decays]
        if state is None:
            empty = scaled.new_zeros(query.shape[0], logs[0].shape[0], query.shape[2])
            state = DecayedState(empty, empty)
        if past := length - queries:
            before = (
                absorb(tensor[:, :past], log, of) for tensor, log, of in zip((keys, values), logs, state, strict=True)
            )
            state = DecayedState(*before)
            keys, values = keys[:, past:], values[:, past:]
        if queries == 0:
            return scaled.new_zeros(query.shape[0], 0, weight.shape[-1], dtype=dtype), state
        if forced() == "reference" or query.is_meta:
            return _recurrence(scaled, keys, values, logs, weight.to(dtype), state)
        scan = operator if torch.compiler.is_compiling() else _Scan.apply
        out, a, b = scan(scaled, keys, values, *logs, weight, *state, dtype)[:3]
    return out, DecayedState(a, b)


def absorb(tokens: Tensor, log_decay: Tensor, state: Tensor | None, distances: Tensor | None = None) -> Tensor:
    """The state (B, S, R) after tokens (B, P, R) without queries: a^P A + sum_j a^(P-1-j) K_j.

    distances (P,): how far each token lies before the last position, P - 1 .. 0 by default; others go without a state.
    """
    count = tokens.shape[1]
    if distances is None:
        distances = torch.arange(count - 1, -1, -1, device=tokens.device)
    found = torch.exp(log_decay[:, None] * distances) @ tokens  # (S, P) @ (B, P, R)
    return found if state is None else found + torch.exp(log_decay * count)[:, None] * state


def _recurrence(
    query: Tensor, keys: Tensor, values: Tensor, logs: list[Tensor], weight: Tensor, state: DecayedState
) -> tuple[Tensor, DecayedState]:
    """Token by token, as often differentiable as one likes."""
    (a, b), outs = (torch.exp(log)[:, None] for log in logs), []
    for i in range(query.shape[1]):
        state = DecayedState(a * state.keys + keys[:, i, None], b * state.values + values[:, i, None])
        outs.append(mapped((query[:, i, None] * state.keys * state.values)[:, None], weight))
    return torch.cat(outs, 1), state


def mapped(features: Tensor, weight: Tensor) -> Tensor:
    """(B, c, S, R) -> (B, c, E)."""
    if weight.dim() == 2:
        return features.sum(-1).to(weight.dtype) @ weight
    return features.flatten(2).to(weight.dtype) @ weight.flatten(0, 1)


class _Powers:
    """Of the decays (S,): within a chunk, and from the state before it."""

    def __init__(self, log: Tensor, count: int) -> None:
        index = torch.arange(count, device=log.device)
        self.distance = (index[:, None] - index).clamp_min(0)  # (c, c)
        self.inside = torch.exp(log[:, None, None] * self.distance).tril()  # L (S, c, c)
        self.after = index + 1
        self.before = torch.exp(log[:, None] * self.after)  # (S, c)

    def sums(self, tokens: Tensor, state: Tensor) -> Tensor:
        """(B, c, S, R), of tokens (B, c, R) and the state (B, S, R) before them."""
        scales, count, _ = self.inside.shape
        local = (self.inside.flatten(0, 1) @ tokens).view(-1, scales, count, tokens.shape[2])
        return local.addcmul_(self.before[..., None], state[:, :, None]).transpose(1, 2)

    def backward(self, given: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of tokens, of the state before them and of log a, from that of the sums, (B, c, S, R)."""
        given = given.transpose(1, 2)  # (B, S, c, R)
        d_tokens = self.inside.flatten(0, 1).t() @ given.flatten(1, 2)
        d_state = (self.before[:, None] @ given).squeeze(2)
        at_pairs = torch.einsum("bsir,bnr->sin", given, tokens)
        d_log = (at_pairs * self.inside * self.distance).sum((1, 2))
        at_state = (given * state[:, :, None]).sum((0, 3))  # (S, c)
        return d_tokens, d_state, d_log + (at_state * self.before * self.after).sum(1)


def _forward(
    query: Tensor, keys: Tensor, values: Tensor, log_a: Tensor, log_b: Tensor, weight: Tensor, state_a: Tensor,
    state_b: Tensor, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """The output, both states after it, and A, B, A, B .. before each chunk."""
    operand, outs, states = weight.to(dtype), [], []
    for chunk, of_keys, of_values in _chunks(query.shape[1], log_a, log_b):
        states += [state_a, state_b]
        a, b = of_keys.sums(keys[:, chunk], state_a), of_values.sums(values[:, chunk], state_b)
        state_a, state_b = a[:, -1].contiguous(), b[:, -1].contiguous()
        outs.append(mapped(a * b * query[:, chunk, None], operand))
    return torch.cat(outs, 1), state_a, state_b, states


def _backward(
    given: Tensor, given_a: Tensor, given_b: Tensor, states: Sequence[Tensor], query: Tensor, keys: Tensor, values: Tensor,
    log_a: Tensor, log_b: Tensor, weight: Tensor, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """The gradients of query, keys, values, log a, log b, weight and both states before."""
    d_query, d_keys, d_values = (torch.empty_like(tensor) for tensor in (query, keys, values))
    d_log_a, d_log_b = torch.zeros_like(log_a), torch.zeros_like(log_b)
    d_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    operand = weight.to(dtype)
    with torch.autocast(query.device.type, enabled=False):
        before = list(states)
        for chunk, of_keys, of_values in reversed(_chunks(query.shape[1], log_a, log_b)):
            state_b, state_a = before.pop(), before.pop()
            a, b = of_keys.sums(keys[:, chunk], state_a), of_values.sums(values[:, chunk], state_b)
            at_query, product = query[:, chunk, None], a * b
            at_out = given[:, chunk]
            if weight.dim() == 2:
                features = (product * at_query).sum(-1).to(dtype)
                d_features = (at_out @ operand.t()).to(query.dtype)[..., None]
            else:
                features = (product * at_query).flatten(2).to(dtype)
                d_features = (at_out @ operand.flatten(0, 1).t()).to(query.dtype).view_as(product)
            d_weight += (features.flatten(0, 1).t() @ at_out.flatten(0, 1)).view_as(weight)
            d_query[:, chunk] = (d_features * product).sum(2)
            d_a, d_b = d_features * at_query * b, d_features * at_query * a
            d_a[:, -1] += given_a
            d_b[:, -1] += given_b
            d_keys[:, chunk], given_a, more = of_keys.backward(d_a, keys[:, chunk], state_a)
            d_log_a += more
            d_values[:, chunk], given_b, more = of_values.backward(d_b, values[:, chunk], state_b)
            d_log_b += more
    return [d_query, d_keys, d_values, d_log_a, d_log_b, d_weight.to(weight.dtype), given_a, given_b]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, a, b, states = _forward(*inputs)
        ctx.save_for_backward(*inputs[:6], *states)
        ctx.dtype = inputs[8]
        return out, a, b

    @staticmethod
    def backward(ctx: Any, given: Tensor, given_a: Tensor, given_b: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("multi-linear attention", "goes token by token")
        saved: list[Any] = list(ctx.saved_tensors)
        query, keys, values, log_a, log_b, weight, *states = saved
        found = _backward(given, given_a, given_b, states, query, keys, values, log_a, log_b, weight, ctx.dtype)
        return *found, None


def _chunks(count: int, log_a: Tensor, log_b: Tensor) -> list[tuple[slice, _Powers, _Powers]]:
    whole = (_Powers(log_a, _CHUNK), _Powers(log_b, _CHUNK)) if count >= _CHUNK else None
    found = [(slice(i, i + _CHUNK), *whole) for i in range(0, count - _CHUNK + 1, _CHUNK)] if whole else []
    if rest := count % _CHUNK:
        found.append((slice(count - rest, count), _Powers(log_a, rest), _Powers(log_b, rest)))
    return found


# What a compiler sees: one operator each way, whose insides it does not look into.
_TENSORS = "Tensor query, Tensor keys, Tensor values, Tensor log_a, Tensor log_b, Tensor weight"


def _operator(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, a, b, states = _forward(*inputs)
    return out, a, b, torch.stack(states)


def _operator_backward(given: Tensor, given_a: Tensor, given_b: Tensor, states: Tensor, *inputs: Any) -> list[Tensor]:
    return [tensor.contiguous() for tensor in _backward(given, given_a, given_b, states.unbind(), *inputs)]


operator = torch.library.custom_op(
    "fullrank::decayed_multilinear",
    _operator,
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor state_a, Tensor state_b, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
_backward_operator = torch.library.custom_op(
    "fullrank::decayed_multilinear_backward",
    _operator_backward,
    mutates_args=(),
    schema=f"(Tensor given, Tensor given_a, Tensor given_b, Tensor states, {_TENSORS}, ScalarType dtype) -> Tensor[]",
)


@operator.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, weight, state, dtype = inputs[0], inputs[5], inputs[6], inputs[8]
    out = query.new_empty(*query.shape[:2], weight.shape[-1], dtype=dtype)
    chunks = -(-query.shape[1] // _CHUNK)
    return out, torch.empty_like(state), torch.empty_like(state), state.new_empty(2 * chunks, *state.shape)


@_backward_operator.register_fake
def _(given: Tensor, given_a: Tensor, given_b: Tensor, states: Tensor, *inputs: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (*inputs[:6], given_a, given_b)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], output[3])
    ctx.dtype = inputs[8]


def _gradients(ctx: Any, given: Tensor, given_a: Tensor, given_b: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, states = ctx.saved_tensors
    return *_backward_operator(given, given_a, given_b, states, *inputs, ctx.dtype), None


operator.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: _keep(ctx, inputs, output))
