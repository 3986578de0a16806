"""Dynamic evaluation (Krause et al. 2018, 2019): every segment is scored, then the model takes a gradient step on it.

    theta <- theta + min(decay r / mean(r), 1) (theta_0 - theta) - rate g / (r + epsilon mean(r))

g is the gradient of the mean nll of the segment's scored tokens, r the root mean square of such gradients over segments of the
training text, mean(r) its mean over all parameters, theta_0 the trained parameters. This is the form with RMS, which the
scripts of the code for Transformer-XL (benkrause/dynamiceval-transformer) use; its other form is plain SGD.
Differs from that code: r is a mean and not a sum over segments, decay and epsilon are relative to mean(r) (the decay so in the
paper of 2018), so that they mean the same for every model and number of segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fullrank.config.run import DynamicConfig
from fullrank.core.decoder import LanguageModel
from fullrank.decoding.sample import evaluating
from fullrank.evaluation.perplexity import DynamicProtocol, Evaluation, EvaluationProtocol, Tally
from fullrank.experiments.measure import apply_protocol, make_batches, read_states
from fullrank.training.device import device_of

STATISTICS = 1 << 15  # tokens of the training text that r is taken from
_EPSILON = 1.0


def make_dynamic(protocol: EvaluationProtocol, rate: float, decay: float, chosen: bool = False) -> EvaluationProtocol:
    """The dynamic protocol to a static one: a single stream, since side by side a stream would learn from later text."""
    streams = None if protocol.streams is None else 1
    return replace(protocol, streams=streams, dynamic=DynamicProtocol(rate=rate, decay=decay, chosen=chosen))


def choose(
    model: LanguageModel,
    training: np.ndarray,
    validation: np.ndarray,
    protocol: EvaluationProtocol,
    options: DynamicConfig,
    start_id: int,
) -> tuple[EvaluationProtocol, list[Tensor]]:
    """The dynamic protocol to a static one, with the rate and decay of least nll on the validation text, and statistics."""
    grid = options.grid()
    statistics = root_mean_squares(model, training, make_dynamic(protocol, *grid[0]), start_id)
    if len(grid) == 1:
        return make_dynamic(protocol, *grid[0]), statistics

    def nll(one: EvaluationProtocol) -> float:
        found = measure_dynamically(model, validation, one, statistics, start_id=start_id).nll
        return found if math.isfinite(found) else math.inf

    return min((make_dynamic(protocol, *pair, chosen=True) for pair in grid), key=nll), statistics


def root_mean_squares(
    model: LanguageModel, ids: np.ndarray, protocol: EvaluationProtocol, start_id: int
) -> list[Tensor]:
    """r for every trainable parameter, from the beginning of the training text `ids`."""
    squares, segments = [torch.zeros_like(parameter) for parameter in _trainable(model)], 0

    def add(nll: Tensor, gradients: Sequence[Tensor]) -> None:
        nonlocal segments
        segments += 1
        for square, gradient in zip(squares, gradients, strict=True):
            square.addcmul_(gradient, gradient)

    _visit_segments(model, ids[:STATISTICS], protocol, start_id, add)
    return [square.div_(segments).sqrt_() for square in squares]


def measure_dynamically(
    model: LanguageModel,
    ids: np.ndarray,
    protocol: EvaluationProtocol,
    statistics: Sequence[Tensor],
    *,
    start_id: int,
    kept: list[Tensor] | None = None,
) -> Evaluation:
    """Summed nll of the text `ids`, read one block, window or segment at a time; statistics: `root_mean_squares`.

    Parameters are restored bit for bit. kept: as in `measure.measure`; every process reads everything.
    """
    assert protocol.dynamic is not None
    rate, decay = protocol.dynamic.rate, protocol.dynamic.decay
    parameters, tally = _trainable(model), Tally(device_of(model), kept)
    trained = [parameter.detach().clone() for parameter in parameters]
    mean = sum(float(r.sum()) for r in statistics) / sum(r.numel() for r in statistics)

    def learn(nll: Tensor, gradients: Sequence[Tensor]) -> None:
        tally.add(nll)
        for parameter, own, r, gradient in zip(parameters, trained, statistics, gradients, strict=True):
            back = (own - parameter) * (r * (decay / mean)).clamp_(max=1)
            parameter.add_(back.sub_(gradient.div(r + _EPSILON * mean), alpha=rate))

    try:
        _visit_segments(model, ids, protocol, start_id, learn)
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, trained)
    return tally.total()


def _trainable(model: LanguageModel) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _visit_segments(
    model: LanguageModel,
    ids: np.ndarray,
    protocol: EvaluationProtocol,
    start_id: int,
    then: Callable[[Tensor, Sequence[Tensor]], None],
) -> None:
    """Call `then` for one segment after the other: nats (1, T) of its scored tokens, and the gradient of their mean.

    Without dropout.
    """
    batches = make_batches(model, ids, protocol, batch_size=1, start_id=start_id, alone=True)
    with evaluating(model), torch.enable_grad():
        changed = apply_protocol(model, protocol)
        for batch in batches:
            for states in read_states(changed, batch, protocol.segment_length):
                nll = changed.output.nll(states.hidden, states.targets)
                gradients = torch.autograd.grad(nll.mean(), _trainable(model), materialize_grads=True)
                with torch.no_grad():
                    then(nll.detach(), gradients)
