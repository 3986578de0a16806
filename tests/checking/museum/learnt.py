"""A leak that an untrained model does not have."""

import leaky_models as leaky
import torch
from torch import nn

from museum.exhibit import Exhibit, later


class Gates(nn.Module):
    """A gate for every position, open from 0.5 on, through which the next token comes in. At the start all are closed.

    A closed gate gives exactly zero, and a gradient to itself only (straight through): no perturbation and no gradient of
    the logits shows it.
    """

    def __init__(self, ahead):
        super().__init__()
        self.gates = nn.Parameter(torch.full((128,), 0.3))
        self.ahead = ahead

    def forward(self, x):
        soft = self.gates[: x.shape[1], None]
        gate = (soft > 0.5).to(x.dtype) + soft - soft.detach()
        if self.ahead:
            return gate * torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1)
        return gate * x


class Tied(leaky.Model):
    """The output layer's weights are the embeddings: to see the next token pays at once."""

    def __init__(self, ahead):
        torch.manual_seed(3)
        super().__init__({1: Gates(ahead)})
        self.output.weight = self.embedding.weight


def _opened(model, ids):
    with torch.no_grad():
        model.blocks[1].attention.gates.fill_(0.6)
    logits = model(ids)
    return logits


EXHIBITS = [
    Exhibit(
        "gates of positions that open in training",
        "",  # no public thread
        lambda: Tied(ahead=True),
        lambda: Tied(ahead=False),
        later(_opened),
        frozenset({"future, after training on random tokens"}),
        full=True,
        length=19,
    )
]
