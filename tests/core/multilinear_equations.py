"""The equations of multi-linear attention, independent of our code: from the parameters of a layer, by name."""

import itertools
import math

import torch

import closeness
import fullrank as fr
from moving import moved

E, R, P = 6, 5, 16
WIDE = torch.float64


def layer(**keys):
    """In double precision, with every parameter away from its start."""
    torch.manual_seed(3)
    sizes = {"hidden_size": E, "rank": R, "max_position_embeddings": P}
    return moved(fr.MultiLinearAttention(**sizes | keys).double())


def tokens(rows, count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, E, generator=generator, dtype=WIDE).requires_grad_()


def factors(module, x, source):
    """Q, K, V and the mean core from the parameters."""
    weights = dict(module.named_parameters())

    def linear(name, of):
        out = of @ weights[f"project.{name}.weight"].T
        bias = weights.get(f"project.{name}.bias")
        return out if bias is None else out + bias

    raw = weights["attend.cores.weight"]
    cores = [raw[c] if module.attend.cores.free else raw[c].exp() / raw[c].exp().sum() for c in range(len(raw))]
    core = torch.stack(cores).sum(0) / len(cores)
    return linear("query", x), linear("key", source), linear("value", source), core


def pairs_equation(module, x, source=None, sees=lambda b, i, j: j <= i):
    """O_i = sum_jm T_ijm W_jm + b; sees(b, i, j): whether query i sees place j."""
    source = x if source is None else source
    query, keys, values, core = factors(module, x, source)
    weights = dict(module.named_parameters())
    places = source.shape[1]
    seen = torch.empty(len(x), x.shape[1], places, dtype=WIDE)
    for index in itertools.product(*map(range, seen.shape)):
        seen[index] = sees(*index)
    met = torch.einsum("bjr,bmr->bjmr", keys, values)
    if "attend.score.weight" in weights:  # the position term
        u, v = (weights[f"attend.score.biases.{name}_bias"][0] for name in ("content", "position"))
        places_keys = torch.stack([sinusoid(P - 1 - j) for j in range(places)]) @ weights["attend.score.weight"].T
        beside = torch.einsum("jr,bmr->bjmr", places_keys, values)
        entries = torch.einsum("r,bir,bjmr->bijm", core, query + u, met)
        entries = entries + torch.einsum("r,bir,bjmr->bijm", core, query + v, beside)
    else:
        entries = torch.einsum("r,bir,bjmr->bijm", core, query, met)
    entries = entries * seen[:, :, :, None] * seen[:, :, None, :]
    out = torch.einsum("bijm,jme->bie", entries, weights["attend.weight"][:places, :places])
    return out + weights["attend.bias"] if "attend.bias" in weights else out


def sinusoid(position):
    """Sines, then cosines."""
    angles = [position / 10000 ** (2 * i / E) for i in range((E + 1) // 2)]
    return torch.tensor(([math.sin(a) for a in angles] + [math.cos(a) for a in angles])[:E], dtype=WIDE)


def decayed_equation(module, x, distance, seen, source=None):
    """The direct triple sum; distance and seen (B, N, M)."""
    query, keys, values, core = factors(module, x, x if source is None else source)
    weights = dict(module.named_parameters())
    a, b = (1 / (1 + (-weights[f"attend.decayed.{name}_decay"]).exp()) for name in ("key", "value"))
    kernel = weights["attend.decayed.weight"] * ((1 - a) * (1 - b))[:, None, None]
    to_keys, to_values = ((decay[:, None, None, None] ** distance) * seen for decay in (a, b))  # (S, B, N, M)
    out = torch.einsum("r,bir,bjr,bmr,sbij,sbim,sre->bie", core, query, keys, values, to_keys, to_values, kernel)
    return out + weights["attend.bias"] if "attend.bias" in weights else out


def distances(queries, keys, rows=2):
    """|p_i - p_j| and whether p_j <= p_i, (B, N, M)."""
    apart = (torch.tensor(queries)[:, None] - torch.tensor(keys)).expand(rows, -1, -1)
    return apart.abs().to(WIDE), (apart >= 0).to(WIDE)


def agree(module, out, expected, inputs):
    """Values, and the gradients of all parameters and inputs."""
    leaves = dict(module.named_parameters()) | {f"input {i}": x for i, x in enumerate(inputs)}
    closeness.agree(out, expected, leaves)


MASKS = {"masked": lambda b, i, j: j <= i, "as_published": lambda b, i, j: True}

# (B, N), 1 for tokens
ENCODER = {"none": None, "right": [[1] * 7, [1] * 4 + [0] * 3], "left": [[1] * 7, [0, 0, 1, 1, 1, 0, 1]]}
