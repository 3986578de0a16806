"""Small causal models written without fullrank, honest ones and ones that leak on purpose, each in its own way."""

import torch
from torch import nn

VOCABULARY, WIDTH, LAYERS = 29, 8, 3


class Attention(nn.Module):
    """Single-head attention; `sees(n)` (N, N) says which keys (columns) a query (row) sees."""

    def __init__(self, sees):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.sees = sees

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5
        scores = scores.masked_fill(~self.sees(x.shape[1]), float("-inf"))
        return scores.softmax(-1) @ value


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def everything(length):
    return torch.ones(length, length, dtype=torch.bool)


class Convolution(nn.Module):
    """Over three tokens: the last three, or with `ahead` one to the left and one to the right."""

    def __init__(self, ahead):
        super().__init__()
        self.taps = nn.Conv1d(WIDTH, WIDTH, 3, padding=1 if ahead else 2)

    def forward(self, x):
        return self.taps(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Shifted(nn.Module):
    """A convolution that sees one token ahead, and whose output is shifted back by one: honest as a whole."""

    def __init__(self):
        super().__init__()
        self.taps = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        seen = self.taps(x.transpose(1, 2)).transpose(1, 2)
        return torch.cat((torch.zeros_like(seen[:, :1]), seen[:, :-1]), dim=1)


class TrainingOnly(nn.Module):
    """Adds the mean over all positions, in training."""

    def forward(self, x):
        return x.mean(dim=1, keepdim=True).expand_as(x) if self.training else x


class Backwards(nn.Module):
    """Honest forward; its gradient is spread over all positions."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, *gradients):
            (gradient,) = gradients
            return gradient + gradient.mean(dim=1, keepdim=True)

    def forward(self, x):
        out = Backwards.Function.apply(x)
        return out


class Unfollowed(nn.Module):
    """Sees the next token, but without a gradient."""

    def forward(self, x):
        return torch.cat((x[:, 1:], x[:, -1:]), dim=1).detach()


class Gated(nn.Module):
    """Sees the mean over all positions, times a parameter that starts at zero."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.gate * x.mean(dim=1, keepdim=True)


class Block(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.attention = mixer
        self.norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(x)


class Model(nn.Module):
    """Logits (B, N, V); `mixers` are the layers by number, causal attention where none is given."""

    def __init__(self, mixers=None):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block((mixers or {}).get(i) or Attention(causal)) for i in range(LAYERS))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def hidden(self, input_ids):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids):
        return self.output(self.hidden(input_ids))


class MaskedAttention(Attention):
    """Attention with a mask of padding, which with `instead` replaces the causal mask."""

    def __init__(self, instead):
        super().__init__(causal)
        self.instead = instead
        self.keys = None  # (B, N), set by the model before a pass

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5
        seen = causal(x.shape[1])[None]
        if self.keys is not None:
            keys = self.keys.bool()[:, None, :]
            itself = torch.eye(x.shape[1], dtype=torch.bool)[None]
            seen = (keys | itself) if self.instead else (seen & keys) | itself
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value


class Padded(Model):
    """Takes an attention_mask."""

    def __init__(self, instead=None, deaf=False):
        super().__init__({i: MaskedAttention(i == instead) for i in range(LAYERS)})
        self.deaf = deaf

    def forward(self, input_ids, attention_mask=None):
        for block in self.blocks:
            block.attention.keys = None if self.deaf else attention_mask
        return super().forward(input_ids)


class PaddingInTheIds(Model):
    """Takes token 0 for padding; in a text with padding, its layer 1 sees every other token, later ones too."""

    def __init__(self):
        super().__init__({1: MaskedAttention(True)})

    def forward(self, input_ids):
        real = input_ids != 0
        self.blocks[1].attention.keys = None if bool(real.all()) else real
        return super().forward(input_ids)


class Constant(nn.Module):
    """Returns the same logits, whatever it reads."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)

    def forward(self, input_ids):
        return torch.zeros(*input_ids.shape, 7)
