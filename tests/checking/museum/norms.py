"""Normalisation over all positions and the batch."""

import leaky_models as leaky
from torch import nn
from torch.nn.functional import batch_norm

from museum.exhibit import Exhibit, future, later, with_block


class BatchNorm(nn.BatchNorm1d):
    """In training, mean and variance are those of all texts and positions; in evaluation, those of the past.

    https://github.com/Globe-Research/deep-orderbook/issues/5
    """

    def __init__(self, frozen):
        super().__init__(leaky.WIDTH)
        self.frozen = frozen

    def forward(self, x):
        x = x.transpose(1, 2)
        if self.frozen:
            return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias).transpose(1, 2)
        return super().forward(x).transpose(1, 2)


EXHIBITS = [
    Exhibit(
        "batch normalisation: in training only",
        "https://github.com/Globe-Research/deep-orderbook/issues/5",
        with_block(norm=lambda: BatchNorm(frozen=False)),
        with_block(norm=lambda: BatchNorm(frozen=True)),
        later(training=True),
        future("perturbation, training", "gradient, training") | {"rows of a batch are independent, training"},
        layer="blocks.1.norm",
    )
]
