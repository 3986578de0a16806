"""Each mixer against its equation, written again over single heads, with all gradients."""

import math

import pytest
import torch
from torch.nn import functional as F

import fullrank as fr
from closeness import agree
from fullrank.core.errors import InputError
from moving import moved

B, N, E, H, D = 2, 7, 10, 4, 6


def layer_of(heads=H, layer=0, **attention):
    torch.manual_seed(3)
    made = fr.Attention(
        fr.AttentionConfig(**attention), hidden_size=E, num_attention_heads=heads, head_dim=D, layer=layer
    )
    return moved(made.double())


def projected(linear, x):
    return list(F.linear(x, linear.weight, linear.bias).split(D, dim=-1))


def softmax_of(scores):
    """Over the keys that are not later than the query."""
    later = torch.arange(scores.shape[2])[None] > torch.arange(scores.shape[1])[:, None]
    return torch.softmax(scores.masked_fill(later, float("-inf")), -1)


def by_hand(
    layer, x, projections=lambda layer, projections: projections, scores=lambda layer, maps: maps,
    weights=lambda layer, maps: maps, outputs=lambda layer, x, maps, values: maps,
):  # fmt: skip
    """Causal attention head by head; functions say what a mixer does to projections, scores, weights and outputs."""
    linears = (layer.project.query, layer.project.key, layer.project.value)
    query, keys, values = projections(layer, [projected(linear, x) for linear in linears])
    layer.x = x  # for equations that read it
    maps = scores(layer, [q @ k.mT / math.sqrt(D) for q, k in zip(query, keys, strict=True)])
    maps = weights(layer, [softmax_of(head) for head in maps])
    heads = outputs(layer, x, [p @ v for p, v in zip(maps, values, strict=True)], values)
    return F.linear(torch.cat(heads, -1), layer.merge.weight, layer.merge.bias)


def add_up(shares, maps):
    return sum(share * head for share, head in zip(shares, maps, strict=True))


def combined(maps, matrix):
    """Head i is sum_j matrix_ji of head j."""
    return [add_up(column, maps) for column in matrix.T]


def talking_scores(layer, maps):
    return combined(maps, layer.attend.mix_scores.mixing)


def talking_weights(layer, maps):
    return combined(maps, layer.attend.mix.mixing)


def position_wise(layer, maps):
    """m_ji(n) = sum_d Q_j(n)_d W_di + B_ji: the query of the source head, with its bias and before the scale."""
    mix = layer.attend.mix
    queries = projected(layer.project.query, layer.x)
    mixed = []
    for i in range(len(maps)):
        shares = [query @ mix.from_query[:, i, None] + mix.mixing[j, i] for j, query in enumerate(queries)]
        mixed.append(add_up(shares, maps))
    return mixed


def average(layer, maps):
    return [sum(maps) / len(maps)] * len(maps)


def convolved(layer, maps):
    """Number by number; a score that a query does not see is zero, before the kernel and after it."""
    made = []
    for kernel, scores in zip(layer.attend.mix_scores.kernel, maps, strict=True):
        rows, columns = kernel.shape
        out = torch.zeros_like(scores)
        for n in range(N):
            for m in range(n + 1):
                for a in range(rows):
                    for b in range(columns):
                        query, key = n - a, m + b - columns // 2
                        if 0 <= key <= query:
                            out[:, n, m] = out[:, n, m] + kernel[rows - 1 - a, b] * scores[:, query, key]
        made.append(out)
    return made


def composed(module, x, maps):
    """DCFormer's equations for one pair of tokens at a time."""
    parts, rank, heads = len(module["hidden"][0]), *module["first"].shape[2:]
    out = [head.clone() for head in maps]
    for part in range(parts):
        hidden = F.gelu(x @ module["hidden"][:, part])
        diagonal = torch.tanh(x @ module["diagonal"][:, part])
        token = (slice(None), slice(None), None) if part == 0 else (slice(None), None, slice(None))
        for r in range(rank):
            first, second = hidden @ module["first"][part, :, r], hidden @ module["second"][part, :, r]
            first = first / (first.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            together = sum(first[..., j][token] * maps[j] for j in range(heads))
            out = [head + second[..., i][token] * together for i, head in enumerate(out)]
        out = [head + diagonal[..., i][token] * maps[i] for i, head in enumerate(out)]
    return out


def dynamic_scores(layer, maps):
    return composed(layer.attend.mix_scores.composition, layer.x, maps)


def dynamic_weights(layer, maps):
    return composed(layer.attend.mix.composition, layer.x, maps)


def knocked(layer, projections):
    maps = layer.project.mix_qkv.maps
    return [torch.stack(heads) @ matrix for heads, matrix in zip(projections, maps, strict=True)]


def gated_values(layer, projections):
    up, gate, down = layer.project.mix_qkv.maps
    query, keys, values = projections
    return [query, keys, [2 * ((v @ up) / (1 + torch.exp(-(v @ gate)))) @ down for v in values]]


def low_rank(layer, maps):
    left, right = layer.attend.mix.left, layer.attend.mix.right
    together = [add_up(column, maps) for column in left.T]
    return [head + add_up(row, together) for row, head in zip(right, maps, strict=True)]


def gate_by_head(layer, x, maps, values):
    return [2 / (1 + torch.exp(-(x @ w)))[..., None] * head for w, head in zip(layer.gate.weight, maps, strict=True)]


def gate_by_number(layer, x, maps, values):
    parts = layer.gate.weight.split(D)
    return [2 / (1 + torch.exp(-(x @ w.mT))) * head for w, head in zip(parts, maps, strict=True)]


def exclusive(layer, x, maps, values):
    amount = layer.gate.amount if layer.gate.amount is not None else torch.ones(len(maps))
    shares = [(o * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) for o, v in zip(maps, values, strict=True)]
    return [o - a * s * v for o, a, s, v in zip(maps, amount, shares, values, strict=True)]


# name -> the section of attention, and what the equation does to scores, weights and outputs
CASES = {
    "plain": ({}, {}),
    "Mixhead A": ({"mix": "position_independent"}, {"weights": talking_weights}),
    "Mixhead B": ({"mix": "position_wise"}, {"weights": position_wise}),
    "random": ({"mix": "random"}, {"weights": talking_weights}),
    "average": ({"mix": "average"}, {"weights": average}),
    "talking heads, scores": ({"mix_scores": "talking_heads"}, {"scores": talking_scores}),
    "talking heads": (
        {"mix_scores": "talking_heads", "mix": "talking_heads"},
        {"scores": talking_scores, "weights": talking_weights},
    ),
    "low rank": ({"mix": {"name": "low_rank", "rank": 3}}, {"weights": low_rank}),
    "gate of heads": ({"gate": "head"}, {"outputs": gate_by_head}),
    "gate of numbers": ({"gate": "elementwise"}, {"outputs": gate_by_number}),
    "exclusive": ({"gate": "exclusive"}, {"outputs": exclusive}),
    "exclusive, learned": ({"gate": {"name": "exclusive", "learned": True}}, {"outputs": exclusive}),
    "knocking": ({"mix_qkv": "knocking"}, {"projections": gated_values}),
    "knocking, linear": ({"mix_qkv": {"name": "knocking", "form": "linear"}}, {"projections": knocked}),
    "multi-token": ({"mix_scores": {"name": "multi_token", "queries": 3, "keys": 5}}, {"scores": convolved}),
    "multi-token, longer than the text": (
        {"mix_scores": {"name": "multi_token", "queries": 9, "keys": 17}},
        {"scores": convolved},
    ),
    "dynamic": (
        {"mix_scores": {"name": "dynamic", "rank": 3}, "mix": "dynamic"},
        {"scores": dynamic_scores, "weights": dynamic_weights},
    ),
    "dynamic, by the query": ({"mix": {"name": "dynamic", "keys": False}}, {"weights": dynamic_weights}),
    "all of them": (
        {"mix_scores": "talking_heads", "mix": "low_rank", "gate": "elementwise"},
        {"scores": talking_scores, "weights": low_rank, "outputs": gate_by_number},
    ),
}


def compare(out, expected, layer, x):
    agree(out, expected, {"x": x, **dict(layer.named_parameters())}, 1e-10)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_is_its_equation_with_all_gradients(name, kernel):
    attention, steps = CASES[name]
    layer = layer_of(layer=3, **attention)
    x = torch.randn(B, N, E, dtype=torch.float64, requires_grad=True)
    expected = by_hand(layer, x, **steps)
    with fr.kernel(kernel):
        out = layer(x)
    compare(out, expected, layer, x)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"random", "average", "exclusive", "plain"}))
def test_starts_as_plain_attention(name):
    def build(**attention):
        torch.manual_seed(3)
        return fr.Attention(fr.AttentionConfig(**attention), hidden_size=E, num_attention_heads=H, head_dim=D)

    x = torch.randn(B, N, E)
    with torch.no_grad(), fr.kernel("reference"):
        assert torch.equal(build(**CASES[name][0])(x), build()(x))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_differential_attention_is_the_released_code(kernel):
    """microsoft/unilm Diff-Transformer/multihead_diffattn.py: H/2 heads, whose values are 2 D wide, and its order of rows."""
    layer = layer_of(layer=2, mix="differential")
    x = torch.randn(B, N, E, dtype=torch.float64, requires_grad=True)
    project, mix = layer.project, layer.attend.mix
    query = project.query(x).view(B, N, H, D).transpose(1, 2)
    keys = project.key(x).view(B, N, H, D).transpose(1, 2)
    values = project.value(x).view(B, N, H // 2, 2 * D).transpose(1, 2)
    maps = softmax_of((query @ keys.mT * D**-0.5).flatten(0, 1)).view(B, H // 2, 2, N, N)
    q1, k1, q2, k2 = mix.vectors
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * 2)
    amount = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + lambda_init
    out = (maps[:, :, 0] - amount * maps[:, :, 1]) @ values
    out = F.rms_norm(out, (2 * D,), mix.weight, eps=1e-5) * (1 - lambda_init)
    with fr.kernel(kernel):
        compare(layer(x), layer.merge(out.transpose(1, 2).reshape(B, N, H * D)), layer, x)


def test_interleaved_heads_are_their_equation():
    """Over the tokens (1, 1), (1, 2), .., (N, P), one head at a time; a token sees itself and all before it."""
    layer = layer_of(mix_qkv={"name": "interleaved", "pseudo_heads": 3})
    mix = layer.project.mix_qkv
    x = torch.randn(B, N, E, dtype=torch.float64, requires_grad=True)
    tokens = []
    for matrices, linear in zip(mix.mixing, (layer.project.query, layer.project.key, layer.project.value), strict=True):
        copies = [combined(projected(linear, x), matrices[:, :, p]) for p in range(3)]
        tokens.append([torch.stack(heads, 2).flatten(1, 2) for heads in zip(*copies, strict=True)])
    outputs = [softmax_of(q @ k.mT / math.sqrt(D)) @ v for q, k, v in zip(*tokens, strict=True)]
    parts = [out[:, p::3] for out in outputs for p in range(3)]
    joined = [add_up(shares.flatten(), parts) for shares in mix.collapsing]
    compare(layer(x), layer.merge(torch.cat(joined, -1)), layer, x)


def test_interleaved_heads_start_as_plain_attention():
    """Without rotation two equal tokens at a position share the weight of one; with rotation one token is plain attention."""
    x = torch.randn(B, N, E, dtype=torch.float64)

    def build(position="none", **attention):
        torch.manual_seed(3)
        sizes = {"hidden_size": E, "num_attention_heads": H, "head_dim": D, "position": position}
        return fr.Attention(fr.ModelConfig(attention=fr.AttentionConfig(**attention), **sizes)).double()(x)

    assert torch.allclose(build(mix_qkv="interleaved"), build(), atol=1e-12)
    single = build("rotary", mix_qkv={"name": "interleaved", "pseudo_heads": 1})
    assert torch.allclose(single, build("rotary"), atol=1e-15)


def grouped(**attention):
    return fr.ModelConfig(
        vocab_size=11, hidden_size=E, num_hidden_layers=2, num_attention_heads=H, num_key_value_heads=H // 2, head_dim=D,
        intermediate_size=9, attention=fr.AttentionConfig(**attention),
    )  # fmt: skip


def test_differential_attention_2_is_the_released_code():
    """microsoft/unilm Diff-Transformer-V2/multihead_flashdiffv2.py: 2 H heads of queries over H of keys and values."""
    torch.manual_seed(3)
    layer = moved(fr.Attention(grouped(gate="differential")).double())
    assert layer.merge.in_features == H // 2 * D
    x = torch.randn(B, N, E, dtype=torch.float64, requires_grad=True)
    query = [turned(head) for head in projected(layer.project.query, x)]
    keys = [turned(head) for head in projected(layer.project.key, x)]
    values = projected(layer.project.value, x)
    heads = [softmax_of(query[i] @ keys[i // 2].mT / math.sqrt(D)) @ values[i // 2] for i in range(H)]
    shares = 1 / (1 + torch.exp(-(x @ layer.gate.weight.mT)))
    outputs = [heads[2 * i] - shares[..., i, None] * heads[2 * i + 1] for i in range(H // 2)]
    compare(layer(x), F.linear(torch.cat(outputs, -1), layer.merge.weight, layer.merge.bias), layer, x)


def turned(head):
    """Rotary positions of one head (B, N, D), as complex numbers: dimensions d and d + D / 2 turn by n / 10000^(2 d / D)."""
    rate = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = torch.arange(N, dtype=torch.float64)[:, None] * rate
    pair = torch.complex(head[..., : D // 2], head[..., D // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pair.real, pair.imag), -1)


def test_differential_attention_2_decodes_and_trains():
    model = moved(fr.LanguageModel(grouped(gate="differential"))).double()
    ids = torch.randint(11, (2, 9))
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    report = fr.check(model, length=9, quick=True)
    assert report.passes
    assert report.of("incremental decoding = one pass").verdict == "passes"


@pytest.mark.parametrize(
    "attention",
    [attention for attention, _ in CASES.values() if "multi_token" not in str(attention)]
    + [{"mix_qkv": "interleaved"}, {"mix": "differential"}],
    ids=str,
)
def test_no_mixer_crosses_a_document(attention):
    sizes = {"vocab_size": 11, "hidden_size": E, "num_attention_heads": H, "head_dim": D}
    model = moved(
        fr.LanguageModel(fr.ModelConfig(**sizes, document_token_id=0, attention=fr.AttentionConfig(**attention)))
    )
    ids = torch.tensor([[1, 2, 3, 4, 0, 5, 6, 7]])
    with torch.no_grad():
        assert torch.allclose(model.eval()(ids).logits[:, 4:], model(ids[:, 4:]).logits, atol=1e-5)


@pytest.mark.parametrize(
    "stage", ["mix: dynamic", "mix_scores: multi_token", "gate: exclusive", "mix_qkv: interleaved"]
)
def test_what_reads_its_own_text_refuses_another_source(stage):
    slot, name = stage.split(": ")
    with pytest.raises(InputError, match=f"attention.{stage} takes queries and keys of one text"):
        layer_of(**{slot: name})(*torch.randn(2, B, N, E, dtype=torch.float64))
