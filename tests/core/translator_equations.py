"""The equations of a translator, independent of our code: one sentence at a time, head by head, from parameters by name.

A sentence is its tokens alone, so that nothing here knows of padding, and its decoder reads it in one pass.
"""

import math

import torch

from fullrank.core.config import stage_name


def logits(config, read, source, target):
    """source (M,), target (N,) -> (N, V)."""
    return decoded(config, read, encoded(config, read, source), target)


def encoded(config, read, source):
    """(M,) -> (M, E)."""
    encoder = config.encoder
    shared = "decoder.embedding.weight" if encoder.share_embedding else "encoder.embedding.weight"
    x = embedded(config, read, "encoder.", shared, source)
    everything = torch.ones(len(source), len(source), dtype=torch.bool)
    for i in range(encoder.num_hidden_layers or config.num_hidden_layers):
        name = f"encoder.blocks.{i}."
        stages = encoder.attention or config.attention
        shared_biases = "encoder.position.biases.content_bias" in read
        biases = "encoder.position.biases" if shared_biases else f"{name}attention.attend.score.biases"
        x = line(config, read, f"{name}attention_norm", x, lambda h, n=name, s=stages, b=biases: attention(
            config, s, read, f"{n}attention.", h, h, everything, config.position, b))  # fmt: skip
        x = line(config, read, f"{name}feed_forward_norm", x, lambda h, n=name: feed_forward(read, n, h))
    return normed(config, read, "encoder.final_norm", x) if config.final_norm else x


def decoded(config, read, source, target):
    """source (M, E) of the encoder, target (N,) -> (N, V)."""
    decoder = config.decoder
    x = embedded(config, read, "decoder.", "decoder.embedding.weight", target)
    past = torch.ones(len(target), len(target), dtype=torch.bool).tril()
    everything = torch.ones(len(target), len(source), dtype=torch.bool)
    for i in range(decoder.num_hidden_layers or config.num_hidden_layers):
        name = f"decoder.blocks.{i}."
        stages = decoder.attention or config.attention
        shared_biases = "decoder.position.biases.content_bias" in read
        biases = "decoder.position.biases" if shared_biases else f"{name}attention.attend.score.biases"
        across = decoder.cross or config.attention
        x = line(config, read, f"{name}attention_norm", x, lambda h, n=name, s=stages, b=biases: attention(
            config, s, read, f"{n}attention.", h, h, past, config.position, b))  # fmt: skip
        x = line(config, read, f"{name}cross_attention_norm", x, lambda h, n=name, s=across: attention(
            config, s, read, f"{n}cross_attention.", h, source, everything, "none", ""))  # fmt: skip
        x = line(config, read, f"{name}feed_forward_norm", x, lambda h, n=name: feed_forward(read, n, h))
    x = normed(config, read, "decoder.final_norm", x) if config.final_norm else x
    scores = x @ read["decoder.embedding.weight" if config.output.tied else "decoder.output.weight"].T
    return scores + read["decoder.output.bias"] if "decoder.output.bias" in read else scores


def embedded(config, read, part, table, ids):
    width = config.hidden_size
    x = torch.stack([read[table][i] for i in ids.tolist()]) * (math.sqrt(width) if config.scale_embedding else 1)
    if config.position == "learned":
        x = x + read[f"{part}position.weight"][: len(ids)]
    if config.position == "sinusoidal":  # sine and cosine take turns
        for p in range(len(ids)):
            waves = [math.sin(p / 10000 ** (2 * (i // 2) / width) + (i % 2) * math.pi / 2) for i in range(width)]
            x[p] += torch.tensor(waves, dtype=x.dtype)
    return x


def line(config, read, norm, x, f):
    if config.norm == "pre":
        return x + f(normed(config, read, norm, x))
    return normed(config, read, norm, x + f(x))


def normed(config, read, name, x):
    mean = x.mean(1, keepdim=True)
    spread = ((x - mean) ** 2).mean(1, keepdim=True)
    return (x - mean) / (spread + config.layer_norm_eps).sqrt() * read[f"{name}.weight"] + read[f"{name}.bias"]


def feed_forward(read, block, x):
    inner = linear(read, f"{block}feed_forward.up", x)
    return linear(read, f"{block}feed_forward.down", inner * (inner > 0))


def linear(read, name, x):
    out = x @ read[f"{name}.weight"].T
    return out + read[f"{name}.bias"] if f"{name}.bias" in read else out


def attention(config, stages, read, name, x, source, seen, position, biases):
    """x (N, E), source (M, E), seen (N, M) -> (N, E)."""
    query, keys, values = (
        linear(read, f"{name}project.{part}", of) for part, of in (("query", x), ("key", source), ("value", source))
    )
    if stages.kind == "multilinear":
        return pairs(read, name, query, keys, values, seen)
    heads, size = config.num_attention_heads, config.head_dim or 0
    weights, queries, valued = [], [], []
    for i in range(heads):
        q, k, v = (of[:, i * size : (i + 1) * size] for of in (query, keys, values))
        queries.append(q)
        valued.append(v)
        if position == "rotary":
            q = torch.stack([turned(row, place) for place, row in enumerate(q)])
            k = torch.stack([turned(row, place) for place, row in enumerate(k)])
        if position == "relative":
            u, t = (read[f"{biases}.{which}_bias"][i] for which in ("content", "position"))
            table = read[f"{name}project.relative.weight"][i * size : (i + 1) * size]
            rows = []
            for n in range(len(x)):
                far = [table @ distance(config, stages, n - m) for m in range(len(source))]
                rows.append(torch.stack([(q[n] + u) @ k[m] + (q[n] + t) @ far[m] for m in range(len(source))]))
            scores = torch.stack(rows) / math.sqrt(size)
        else:
            scores = q @ k.T / math.sqrt(size)
        raised = scores.exp() * (torch.sigmoid(scores) if stages.normalize == "sigsoftmax" else 1) * seen
        weights.append(raised / raised.sum(1, keepdim=True))
    out = []
    for i in range(heads):  # P'_i = sum_j m_ji P_j
        mixed = sum(share(read, f"{name}attend.mix.", stages, queries[j], j, i) * weights[j] for j in range(heads))
        out.append(mixed @ valued[i])
    return linear(read, f"{name}merge", torch.cat(out, 1))


def share(read, name, stages, query, j, i):
    """m_ji for every query, (N, 1): A's matrix, or B's Q_j W + B."""
    mix = stage_name(stages.mix)
    if mix == "none":
        return torch.full((len(query), 1), float(i == j), dtype=query.dtype)
    mixing = read[f"{name}mixing"][j, i].expand(len(query), 1)
    return mixing if mix != "position_wise" else mixing + (query @ read[f"{name}from_query"][:, i])[:, None]


def turned(row, place):
    """Rotary: (x_i, x_{i + D/2}) by the angle place / 10000^(2i/D)."""
    half = len(row) // 2
    out = [torch.zeros((), dtype=row.dtype)] * len(row)
    for i in range(half):
        angle = place / 10000 ** (2 * i / len(row))
        out[i] = row[i] * math.cos(angle) - row[i + half] * math.sin(angle)
        out[i + half] = row[i + half] * math.cos(angle) + row[i] * math.sin(angle)
    return torch.stack(out)


def distance(config, stages, apart):
    """Sines, then cosines; distances are clamped on both sides."""
    clamp = stages.score.get("clamp_length") if isinstance(stages.score, dict) else None
    apart = apart if clamp is None else max(-clamp, min(clamp, apart))
    width = config.hidden_size
    angles = [apart / 10000 ** (2 * i / width) for i in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def pairs(read, name, query, keys, values, seen):
    """O_i = sum_jm (sum_r g_r Q_ir K_jr V_mr) W_jm + b, over places j and m that i sees."""
    raw = read[f"{name}attend.cores.weight"]
    core = (raw.exp() / raw.exp().sum(1, keepdim=True)).mean(0)
    table = read[f"{name}attend.weight"]
    places = len(keys)
    visible = seen.to(query.dtype)
    out = torch.einsum("r,ir,jr,mr,ij,im,jme->ie", core, query, keys, values, visible, visible, table[:places, :places])
    return out + read[f"{name}attend.bias"]
