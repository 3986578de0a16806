"""Leaks that an earlier check missed or blamed on the wrong layer, and right models that it called wrong."""

import math

import leaky_models as leaky
import numpy as np
import torch
from torch import nn
from torch.nn.functional import dropout

from fullrank.checking.layers import OWN_FORWARD
from museum.exhibit import (
    BY_PERTURBATION,
    CUT,
    EVERY_WAY,
    PREFIX,
    Exhibit,
    another_row,
    future,
    later,
    plainly,
    tokens,
    with_block,
)
from museum.mixtures import ROWS
from museum.paths import When, _in_a_longer_text, when

IN_TRAINING = future("perturbation, training", "gradient, training")
PADDED = frozenset({"padding changes nothing"})
SPECIAL = future("perturbation, special and repeated tokens", "perturbation, special and repeated tokens, training")
AUTOCAST = ("perturbation, under autocast, float16", "perturbation, under autocast, float16, training")


# -- chance and memory -------------------------------------------------------------------------------------------------


class Wavering(leaky.Model):
    """Leaves layers out by chance, or has dropout in every mode: right, unless its second block sees the whole text."""

    def __init__(self, how, sees_all):
        super().__init__({1: When(lambda module, x: sees_all and (how == "dropout" or module.training))})
        self.how = how
        self.generator = np.random.default_rng(0)

    def hidden(self, input_ids):
        x = self.embedding(input_ids)
        for block in self.blocks:
            if self.how == "dropout":
                x = dropout(block(x), 0.1)
            elif not self.training or self.draw() > 0.2:
                x = block(x)
        return x

    def draw(self):
        return float(np.random.rand() if self.how == "numpy" else self.generator.random())


class Remembering(leaky.Model):
    """Keeps what it has read in a list or a dict, and reads on after it."""

    def __init__(self, memory, sees_all):
        super().__init__({1: When(lambda module, x: sees_all)})
        self.memory = memory

    def hidden(self, input_ids):
        x = self.embedding(input_ids)
        last = self.memory.get("last") if isinstance(self.memory, dict) else (self.memory or [None])[-1]
        fits = last is not None and last.shape[::2] == x.shape[::2]
        y = torch.cat((last, x), 1) if fits else x
        for block in self.blocks:
            y = block(y)
        y = y[:, -x.shape[1] :]
        if isinstance(self.memory, dict):
            self.memory["last"] = y.detach()
        else:
            self.memory.append(y.detach())
        return y


def _fresh(model, ids):
    """Logits of a model whose memory is empty and whose generators begin anew."""
    if isinstance(model, Remembering):
        model.memory.clear()
    else:
        np.random.seed(0)
        model.generator = np.random.default_rng(0)
    return plainly(model, ids)


def _is_float16():
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16


def _under_autocast(model, ids):
    with torch.autocast("cpu", torch.float16):
        return plainly(model.float(), ids)


def _by_numpy(model, ids):
    np.random.seed(5)
    return plainly(model, ids)


# -- masks and ids -----------------------------------------------------------------------------------------------------


class Deaf(leaky.Padded):
    """Counts positions by the mask of padding, if it has positions; with `deaf` its attention ignores that mask."""

    def __init__(self, deaf, has_positions):
        super().__init__(deaf=deaf)
        self.positions = nn.Embedding(256, leaky.WIDTH) if has_positions else None
        self.counted = None

    def hidden(self, input_ids):
        x = self.embedding(input_ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(input_ids.shape[1]) if self.counted is None else self.counted)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids, attention_mask=None):
        self.counted = None if attention_mask is None else (attention_mask.cumsum(1) - 1).clamp_min(0)
        return super().forward(input_ids, attention_mask)


class OfIds(leaky.Model):
    """A text that begins in some way is seen whole."""

    def __init__(self, begins):
        super().__init__()
        self.begins = begins

    def forward(self, input_ids):
        if self.begins is not None:
            sees_all = self.begins(input_ids)[:, None, None]
            self.blocks[1].attention.sees = lambda length: leaky.causal(length) | sees_all
        return super().forward(input_ids)


BEGINNINGS = {
    "the first id": (lambda ids: ids[:, 0] == 1, (1,)),
    "the second id": (lambda ids: ids[:, 0] == 2, (2,)),
    "the last id": (lambda ids: ids[:, 0] == leaky.VOCABULARY - 1, (leaky.VOCABULARY - 1,)),
    "four equal ids": (lambda ids: (ids[:, 1:4] == ids[:, :1]).all(1), (5, 5, 5, 5)),
}


def _starting_with(start):
    def run(model, ids):
        return plainly(model, torch.cat((torch.tensor(start).expand(len(ids), -1), ids[:, len(start) :]), 1))

    return run


def _beside_padding(model):
    """Tokens in the padding on the left are changed."""
    ids = tokens()
    real = (torch.arange(67) >= 9).long().expand(2, -1)
    with torch.no_grad():
        other = torch.where(real.bool(), ids, 1 + ids % (leaky.VOCABULARY - 1))
        logits, changed = (plainly(model.double().eval(), x, attention_mask=real)[:, 9:] for x in (ids, other))
    return float((logits - changed).abs().max())


# -- the length of the text --------------------------------------------------------------------------------------------


class FromTheEnd(leaky.Model):
    """Positions are counted from the end."""

    def __init__(self, is_turned):
        super().__init__()
        self.positions = nn.Embedding(256, leaky.WIDTH)
        self.is_turned = is_turned

    def hidden(self, input_ids):
        positions = torch.arange(input_ids.shape[1])
        x = self.embedding(input_ids) + self.positions(positions.flip(0) if self.is_turned else positions)
        for block in self.blocks:
            x = block(x)
        return x


class LogLength(leaky.Attention):
    """Queries are multiplied by the logarithm of the length of the text, always or in training."""

    def __init__(self, applies):
        super().__init__(leaky.causal)
        self.applies = applies

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        scale = math.log(x.shape[1]) if self.applies(self) else 1.0
        scores = scale * query @ key.transpose(1, 2)
        return scores.masked_fill(~leaky.causal(x.shape[1]), float("-inf")).softmax(-1) @ value


def _in_training_too(model):
    ids = tokens()
    model = model.double().train()
    with torch.no_grad():
        return float((plainly(model, ids)[:, :CUT] - plainly(model, ids[:, :CUT])).abs().max())


# -- other layers ------------------------------------------------------------------------------------------------------


class NextId(leaky.Model):
    """The embedding of the next id, made by the model itself, is added."""

    def __init__(self, step):
        super().__init__()
        self.other = nn.Embedding(leaky.VOCABULARY, leaky.WIDTH)
        self.step = step

    def hidden(self, input_ids):
        ids = input_ids.roll(self.step, 1)
        ids = torch.cat((input_ids[:, :1], ids[:, 1:]), 1) if self.step > 0 else ids
        x = self.embedding(input_ids) + self.other(ids)
        for block in self.blocks:
            x = block(x)
        return x


class OverBatch(nn.Module):
    """Takes off the mean over the batch, or over the features."""

    def __init__(self, over):
        super().__init__()
        self.over = over
        self.project = nn.Linear(leaky.WIDTH, leaky.WIDTH)

    def forward(self, x):
        out = self.project(x - x.mean(self.over, keepdim=True))
        return out


def pair(name, make, leaking, control, *rest, **more):
    """An exhibit whose two models are made of other arguments."""
    return Exhibit(name, "", lambda: make(*leaking), lambda: make(*control), *rest, **more)


EXHIBITS = [
    when("under autocast to float16 only", lambda module, x: _is_float16(), later(_under_autocast), *AUTOCAST, full=True),
    when("opened by chance of numpy, in training only", lambda module, x: module.training and np.random.rand() < 0.3,
         later(_by_numpy, training=True), "perturbation, training, gradients on, other seeds"),
    *(pair(f"layers left out by {how}", Wavering, (how, True), (how, False), later(_fresh, training=True),
           IN_TRAINING) for how in ("numpy", "a generator")),
    pair("dropout that is always on", Wavering, ("dropout", True), ("dropout", False), later(), EVERY_WAY),
    *(Exhibit(f"memory in a {kind.__name__}", "", lambda kind=kind: Remembering(kind(), True),
              lambda kind=kind: Remembering(kind(), False), later(_fresh), EVERY_WAY) for kind in (list, dict)),
    pair("padding on the left is seen", Deaf, (True, True), (False, True), _beside_padding, PADDED),
    pair("a mask that is ignored, without positions", Deaf, (True, False), (False, False), _beside_padding, PADDED,
         remark="attention_mask changes nothing"),
    *(pair(f"a text begins with {name}", OfIds, (begins,), (None,), later(_starting_with(start)), SPECIAL)
      for name, (begins, start) in BEGINNINGS.items()),
    pair("positions counted from the end", FromTheEnd, (True,), (False,), _in_a_longer_text, frozenset(PREFIX),
         layer=f"{OWN_FORWARD}, before positions"),
    Exhibit("times the logarithm of the length", "", with_block(lambda: LogLength(lambda module: True)),
            with_block(lambda: LogLength(lambda module: False)), _in_a_longer_text, frozenset(PREFIX)),
    Exhibit("times the logarithm of the length, in training only", "",
            with_block(lambda: LogLength(lambda module: module.training)), with_block(lambda: LogLength(lambda module: False)),
            _in_training_too, frozenset({"future, prefix = whole, training"}), full=True),
    pair("the embedding of the next id", NextId, (-1,), (1,), later(), BY_PERTURBATION,
         layer=f"{OWN_FORWARD}, before other"),
    Exhibit("the mean over the batch", "", with_block(lambda: OverBatch(0)), with_block(lambda: OverBatch(2)),
            another_row(), ROWS),
]  # fmt: skip
