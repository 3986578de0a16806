"""A language model with memory and resting layers as loops over texts, layers, heads, queries and keys.

Written from the equations: a layer is a list of (position, input) pairs that it remembers, and a token looks at every pair.
The loops read the parameters of a model by name, and nothing else of it.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

import fullrank as fr

E, HEADS, D, LAYERS, INNER, VOCABULARY, ROWS = 8, 2, 6, 3, 9, 11, 2
LENGTHS = (3, 5, 1, 4, 2)
STARTS = (0, *accumulate(LENGTHS[:-1]))
TOKENS = sum(LENGTHS)
Vector = np.ndarray
Remembered = list[tuple[int, Vector]]  # positions and inputs, oldest first


def ages(memory, layer):
    """Distances from the remembered tokens of `layer` to the next token, 1 for the token directly before it."""
    return [memory.length - place for start, size in memory.layers[layer].runs for place in range(start, start + size)]


@dataclass(frozen=True)
class Setting:
    """Sizes and options of a model."""

    position: str
    norm: str = "post"
    memory_length: int = 3
    same_length: bool = False
    clamp_length: int | None = None
    mixed: bool = False  # sigsoftmax and position-wise mixing
    zeros: bool = False

    def build(self):
        """Away from its start, in double precision."""
        relative = {"name": "relative", "clamp_length": self.clamp_length}
        stages = {"normalize": "sigsoftmax", "mix": "position_wise"} if self.mixed else {}
        config = fr.ModelConfig(
            vocab_size=VOCABULARY, hidden_size=E, num_hidden_layers=LAYERS, num_attention_heads=HEADS, head_dim=D,
            intermediate_size=INNER, norm=self.norm, position=self.position, memory_length=self.memory_length,
            memory_start="zeros" if self.zeros else "empty", same_length=self.same_length, max_position_embeddings=TOKENS,
            attention=fr.AttentionConfig(score=relative if self.position == "relative" else "dot_product", **stages),
        )  # fmt: skip
        torch.manual_seed(7)
        model = fr.LanguageModel(config).double().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(std=0.5).add_("norm.weight" in name)
        return model


@dataclass(frozen=True)
class Expected:
    """For each segment the nll of its tokens and the memory of every layer after it."""

    nll: list[list[float]]
    memories: list[list[Remembered]]


class Loops:
    """The model of a `Setting` with the parameters p."""

    def __init__(self, setting, p):
        self.setting = setting
        self.p = p

    def linear(self, name, x):
        return self.p[f"{name}.weight"] @ x + self.p[f"{name}.bias"]

    def norm(self, name, x):
        centred = x - x.mean()
        return centred / math.sqrt((centred**2).mean() + 1e-5) * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]

    def embed(self, token, position):
        x = self.p["embedding.weight"][token].copy()
        if self.setting.position == "learned":
            x += self.p["position.weight"][position]
        elif self.setting.position == "sinusoidal":
            for i in range(E):
                angle = position / 10000 ** ((i - i % 2) / E)
                x[i] += math.cos(angle) if i % 2 else math.sin(angle)
        return x

    def distance(self, tokens):
        """Transformer-XL's sinusoid of a distance: sines, then cosines."""
        near = min(tokens, self.setting.clamp_length or tokens)
        angles = [near / 10000 ** (2 * i / E) for i in range(E // 2)]
        return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])

    def rotated(self, head, position):
        half = D // 2
        out = np.empty(D)
        for i in range(half):
            turn = complex(head[i], head[i + half]) * np.exp(1j * position * 10000 ** (-2 * i / D))
            out[i], out[i + half] = turn.real, turn.imag
        return out

    def score(self, layer, h, query, key, apart):
        """query, key: (position, projected head); apart: the distance that relative positions count."""
        if self.setting.position == "relative":
            u = self.p["position.biases.content_bias"][h]
            v = self.p["position.biases.position_bias"][h]
            r = self.p[f"{layer}.attention.project.relative.weight"][h * D : (h + 1) * D] @ self.distance(apart)
            product = (query[1] + u) @ key[1] + (query[1] + v) @ r
        elif self.setting.position == "rotary":
            product = self.rotated(query[1], query[0]) @ self.rotated(key[1], query[0] - apart)
        else:
            product = query[1] @ key[1]
        return float(product) / math.sqrt(D)

    def normalized(self, scores):
        """Softmax: e^a; sigsoftmax: e^a sigmoid(a); divided by their sum."""
        raw = [math.exp(a) / (1 + math.exp(-a)) if self.setting.mixed else math.exp(a) for a in scores]
        return [x / sum(raw) for x in raw]

    def attention(self, layer, current, remembered, labels):
        """What each token of `current` reads from itself, from those before it in `current`, and from `remembered`.

        labels: the position that each remembered input counts with; its true one but for the drifting gap.
        """

        def read(x):
            return self.norm(f"{layer}.attention_norm", x) if self.setting.norm == "pre" else x

        sources = [(place, read(x)) for place, (_, x) in zip(labels, remembered, strict=True)]
        sources += [(place, read(x)) for place, x in current]
        project = f"{layer}.attention.project"
        keys = [(place, self.linear(f"{project}.key", x)) for place, x in sources]
        values = [self.linear(f"{project}.value", x) for _, x in sources]
        outputs = []
        for place, x in current:
            query = self.linear(f"{project}.query", read(x))
            seen = [m for m, (other, _) in enumerate(keys) if other <= place]
            if self.setting.same_length:
                seen = [m for m in seen if place - keys[m][0] < self.setting.memory_length]
            weights = []
            for h in range(HEADS):
                part = slice(h * D, (h + 1) * D)
                head = (place, query[part])
                weights.append(
                    self.normalized(
                        [self.score(layer, h, head, (keys[m][0], keys[m][1][part]), place - keys[m][0]) for m in seen]
                    )
                )
            out = np.zeros(HEADS * D)
            for i in range(HEADS):
                part = slice(i * D, (i + 1) * D)
                for j in range(HEADS):
                    share = float(i == j)
                    if self.setting.mixed:
                        mix = f"{layer}.attention.attend.mix"
                        share = query[j * D : (j + 1) * D] @ self.p[f"{mix}.from_query"][:, i]
                        share += self.p[f"{mix}.mixing"][j, i]
                    for weight, m in zip(weights[j], seen, strict=True):
                        out[part] += share * weight * values[m][part]
            outputs.append(self.linear(f"{layer}.attention.merge", out))
        return outputs

    def feed_forward(self, layer, x):
        return self.linear(f"{layer}.feed_forward.down", np.maximum(self.linear(f"{layer}.feed_forward.up", x), 0))

    def block(self, layer, current, remembered, labels):
        outputs = []
        for (_, x), attended in zip(current, self.attention(layer, current, remembered, labels), strict=True):
            if self.setting.norm == "pre":
                y = x + attended
                outputs.append(y + self.feed_forward(layer, self.norm(f"{layer}.feed_forward_norm", y)))
            else:
                y = self.norm(f"{layer}.attention_norm", x + attended)
                outputs.append(self.norm(f"{layer}.feed_forward_norm", y + self.feed_forward(layer, y)))
        return outputs

    def nll(self, hidden, target):
        logits = self.linear("output", hidden)
        return math.log(sum(math.exp(a) for a in logits)) - float(logits[target])

    def segment(self, text, first, size, resting, memories, rested):
        """nll of the `size` tokens from `first` on, each with the next one as its target, and what layers remember then.

        rested: for each layer the number of tokens at which it rested so far, if labels are those of the released code.
        """
        places = range(first, first + size)
        after = list(memories)
        xs = [self.embed(text[place], place) for place in places]
        for i in range(LAYERS):
            if i in resting:
                continue
            current = list(zip(places, xs, strict=True))
            labels = [place for place, _ in memories[i]]
            if rested is not None:
                labels = [first - rested[i] - len(labels) + m for m in range(len(labels))]
            xs = self.block(f"blocks.{i}", current, memories[i], labels)
            after[i] = (memories[i] + current)[-self.setting.memory_length :]
        if self.setting.norm == "pre":
            xs = [self.norm("final_norm", x) for x in xs]
        return [self.nll(x, text[place + 1]) for place, x in zip(places, xs, strict=True)], after

    def read(self, text, pattern, drifting=False):
        """One text, segment by segment."""
        length = self.setting.memory_length
        start = [(place, np.zeros(E)) for place in range(-length, 0)] if self.setting.zeros else []
        memories = [start] * LAYERS
        rested = [0] * LAYERS
        expected = Expected([], [])
        for first, size, resting in zip(STARTS, LENGTHS, pattern, strict=True):
            for i in resting:
                rested[i] += size
            nll, memories = self.segment(text, first, size, resting, memories, rested if drifting else None)
            expected.nll.append(nll)
            expected.memories.append(memories)
        return expected
