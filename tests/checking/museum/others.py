"""Models with other inputs than token ids: a source beside the target, numbers instead of tokens."""

import leaky_models as leaky
import torch
from torch import nn

from museum.exhibit import EVERY_WAY, LENGTH, Exhibit, difference, later, tokens


class Translator(nn.Module):
    """The decoder sees its whole target: 98% right with a model that is far too small, and no translation to speak of.

    https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/19
    """

    def __init__(self, masked):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(leaky.VOCABULARY, leaky.WIDTH)
        self.encoder = leaky.Block(leaky.Attention(leaky.everything))
        self.blocks = nn.ModuleList(
            leaky.Block(leaky.Attention(leaky.causal if masked or i == 0 else leaky.everything)) for i in range(2)
        )
        self.output = nn.Linear(leaky.WIDTH, leaky.VOCABULARY)

    def forward(self, input_ids, decoder_input_ids):
        source = self.encoder(self.embedding(input_ids)).mean(1, keepdim=True)
        x = self.embedding(decoder_input_ids) + source
        for block in self.blocks:
            x = block(x)
        out = self.output(x)
        return out


class Speech(nn.Module):
    """Frames in, frames out; `causal=True` had left the normalisation over time as it was.

    BSRNN of ESPnet: https://github.com/espnet/espnet/issues/5900
    """

    def __init__(self, over_time):
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.GroupNorm(1, leaky.WIDTH)
        self.recurrent = nn.GRU(leaky.WIDTH, leaky.WIDTH, batch_first=True)
        self.output = nn.Linear(leaky.WIDTH, leaky.WIDTH)
        self.over_time = over_time

    def forward(self, frames):
        if self.over_time:
            x = self.norm(frames.transpose(1, 2)).transpose(1, 2)
        else:
            x = self.norm(frames.flatten(0, 1)).view_as(frames)
        out = self.output(self.recurrent(x)[0])
        return out


def _translated(model, ids):
    out = model(tokens()[:, :11], ids)
    return out


def _heard(model):
    frames = torch.randn(2, LENGTH, leaky.WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    changed = frames.clone()
    changed[:, 43:] += 1
    return difference(lambda m, x: m(x), model.eval(), frames, changed, slice(None, 43))


EXHIBITS = [
    Exhibit(
        "a translator whose decoder sees its whole target",
        "https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/19",
        lambda: Translator(masked=False),
        lambda: Translator(masked=True),
        later(_translated),
        EVERY_WAY,
        length=None,
        inputs=lambda: {"input_ids": tokens()[:, :11], "decoder_input_ids": tokens()[:, :37]},
    ),
    Exhibit(
        "BSRNN of ESPnet: normalisation over time",
        "https://github.com/espnet/espnet/issues/5900",
        lambda: Speech(over_time=True),
        lambda: Speech(over_time=False),
        _heard,
        EVERY_WAY,
        layer="norm",
        length=None,
        inputs=lambda: torch.randn(2, 37, leaky.WIDTH, generator=torch.Generator().manual_seed(7)),
    ),
]
