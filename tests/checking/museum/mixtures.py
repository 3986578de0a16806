"""Mixtures of experts whose routing looks at later tokens, or at other texts of the batch."""

import leaky_models as leaky
import torch
from torch import nn

from museum.exhibit import BY_PERTURBATION, Exhibit, another_row, later, with_block

EXPERTS, CAPACITY = 4, 6


class Mixture(nn.Module):
    """Experts (linear layers), summed up with the weights (B, N, experts) that `route` gives."""

    def __init__(self, route):
        super().__init__()
        self.router = nn.Linear(leaky.WIDTH, EXPERTS)
        self.experts = nn.Linear(leaky.WIDTH, EXPERTS * leaky.WIDTH)
        self.route = route

    def forward(self, x):
        weights = self.route(x, self.router(x).softmax(-1))
        return (self.experts(x).unflatten(-1, (EXPERTS, leaky.WIDTH)) * weights[..., None]).sum(-2)


def token_choice(x, gates):
    """Each token takes its best expert."""
    return _only(gates, gates.topk(1, dim=-1).indices, dim=-1)


def expert_choice(x, gates):
    """Each expert takes the best quarter of the tokens: a later token takes the place of an earlier one.

    https://github.com/piotrpiekos/MoSA/issues/3
    """
    return _only(gates, gates.topk(max(1, x.shape[1] // EXPERTS), dim=1).indices, dim=1)


def capacity_by_score(x, gates):
    """Each token takes its best expert; of those beyond the expert's capacity, the least scored are dropped.

    https://github.com/deepseek-ai/DeepSeek-V2/issues/5
    """
    taken = token_choice(x, gates)
    return _only(taken, taken.topk(min(CAPACITY, x.shape[1]), dim=1).indices, dim=1)


def capacity_by_order(x, gates, capacity=CAPACITY):
    """Each token takes its best expert; the first of the text are served."""
    taken = token_choice(x, gates)
    return taken * ((taken > 0).cumsum(1) <= capacity)


def capacity_over_batch(x, gates):
    """The first of the batch are served: what the first text takes is missing to the second.

    https://github.com/marin-community/marin/issues/8134
    """
    flat = capacity_by_order(x.flatten(0, 1)[None], gates.flatten(0, 1)[None], CAPACITY * len(x))
    return flat[0].unflatten(0, x.shape[:2])


def _only(gates, chosen, dim):
    return torch.zeros_like(gates).scatter(dim, chosen, gates.gather(dim, chosen))


ROWS = frozenset(("rows of a batch are independent", "rows of a batch are independent, training"))

EXHIBITS = [
    Exhibit(
        "Mixture of Sparse Attention: experts choose tokens",
        "https://github.com/piotrpiekos/MoSA/issues/3",
        with_block(feed_forward=lambda: Mixture(expert_choice)),
        with_block(feed_forward=lambda: Mixture(token_choice)),
        later(),
        BY_PERTURBATION,
        layer="blocks.1.feed_forward",
    ),
    Exhibit(
        "DeepSeek-V2: over capacity, the least scored tokens are dropped",
        "https://github.com/deepseek-ai/DeepSeek-V2/issues/5",
        with_block(feed_forward=lambda: Mixture(capacity_by_score)),
        with_block(feed_forward=lambda: Mixture(capacity_by_order)),
        later(),
        BY_PERTURBATION,
        layer="blocks.1.feed_forward",
    ),
    Exhibit(
        "marin: a capacity for the whole batch",
        "https://github.com/marin-community/marin/issues/8134",
        with_block(feed_forward=lambda: Mixture(capacity_over_batch)),
        with_block(feed_forward=lambda: Mixture(capacity_by_order)),
        another_row(),
        ROWS,
        layer="blocks.1.feed_forward",
    ),
]
