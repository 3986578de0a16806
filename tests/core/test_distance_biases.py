"""Positions that add to the scores, against their equations: ALiBi and T5's relative bias."""

import math
from dataclasses import replace

import pytest
import torch

import fullrank as fr
from fullrank.core.embedding import Alibi, T5Bias, bucket_distances
from layouts import LAYOUTS
from moving import moved

H, D, E, N = 3, 4, 10, 7
POSITIONS = {"alibi": Alibi, "t5": T5Bias}


def config(position, **changes):
    sizes = {"vocab_size": 11, "hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": H, "head_dim": D,
             "intermediate_size": 13, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 9}  # fmt: skip
    return fr.ModelConfig(**(sizes | changes), position=position)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [*(2.0**-i for i in range(1, 9)), *(2 ** -(i - 0.5) for i in range(1, 5))]),
    ],
)
def test_slopes_of_alibi(heads, slopes):
    """The numbers of the paper (§3) for powers of two; for others those of the power below, then every other one between."""
    position = Alibi(config("alibi", num_attention_heads=heads))
    biases = -position.bias(torch.tensor([1]), True, torch.empty(0, dtype=torch.float64))[0]
    assert torch.allclose(biases, torch.tensor(slopes, dtype=torch.float64), atol=1e-15)


def find_bucket(distance, buckets, longest, causal):
    """T5's bucket of one distance, in the words of the paper: half of the buckets for one distance each."""
    first = 0
    if not causal:
        buckets //= 2
        first = buckets if distance < 0 else 0
        distance = abs(distance)
    exact = buckets // 2
    distance = max(distance, 0)
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(longest / exact)
    return first + min(buckets - 1, exact + int(share * (buckets - exact) + 1e-6))


@pytest.mark.parametrize("causal", [True, False])
def test_buckets(causal):
    for buckets, longest in ((32, 128), (8, 9), (12, 50)):
        distances = range(-200, 201)
        expected = [find_bucket(distance, buckets, longest, causal) for distance in distances]
        assert bucket_distances(torch.tensor(distances), buckets, longest, causal).tolist() == expected
        assert {*expected} == {*range(buckets)} - ({buckets // 2} if not causal else set())  # -0 is 0


def write_bias(model, distance, head, causal):
    """b of one head and distance, from the equation."""
    if model.config.position == "t5":
        return model.position.relative_attention_bias[find_bucket(distance, 8, 9, causal), head]
    return torch.tensor(-abs(distance) * [2**-4, 2**-8, 2**-2][head], dtype=torch.float64)


MASK = torch.arange(11) >= torch.tensor([[3], [0]])
ROWS = MASK.cumsum(1) - 1
PLACES = {name: LAYOUTS[name] for name in ("causal", "past", "gap of one", "window", "cross")}
PLACES["positions of each text"] = fr.Layout(ROWS[:, 4:], ROWS, True, MASK)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("mix", ["none", "position_wise"])
def test_a_layer_adds_the_bias_of_each_distance(position, where, mix):
    """Scores of a layer, one by one: s Q.K + b(p_n - p_m), with positions in the text."""
    model = moved(fr.LanguageModel(config(position, attention=fr.AttentionConfig(mix=mix))).double())
    layer = model.blocks[0].attention
    layout = PLACES[where]
    queries, keys = layout.shape
    source = torch.randn(2, keys, E, dtype=torch.float64)
    x = source[:, keys - queries :]
    placed = model.position.place(layout, x)
    trace = fr.core.trace.Trace()
    out = layer(x, source, placed, trace=trace)
    project = layer.project
    query, key = project.split(project.query(x)), project.split(project.key(source))
    seen = layout.visible().expand(2, 1, queries, keys)[:, 0]
    at, of = (p.expand(2, -1).tolist() for p in (layout.query_positions, layout.key_positions))
    for row in range(2):
        for head in range(H):
            scores = query[row, head] @ key[row, head].T / D**0.5
            for i, n in enumerate(at[row]):
                scores[i] += torch.stack([write_bias(model, n - m, head, layout.causal) for m in of[row]])
            weights = scores.masked_fill(~seen[row], float("-inf")).softmax(-1)
            assert torch.allclose(trace.layers[0].weights[row, head], weights, atol=1e-12)
    assert torch.allclose(layer(x, source, placed), out, atol=1e-12)


STAGES = {
    "plain": {},
    "sigsoftmax, A": {"normalize": "sigsoftmax", "mix": "position_independent"},
    "B": {"mix": "position_wise"},
}


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("stages", STAGES)
def test_every_kernel_equals_the_definition(position, where, stages):
    """Outputs and every gradient, that of T5's table too."""
    layout = PLACES[where]
    queries, keys = layout.shape
    by_kernel = {}
    for kernel in ("reference", "auto", "native", *(["sdpa"] if stages == "plain" else [])):
        torch.manual_seed(1)
        attention = fr.AttentionConfig(**STAGES[stages])
        model = moved(fr.LanguageModel(config(position, attention=attention)).double())
        source = torch.randn(2, keys, E, dtype=torch.float64, requires_grad=True)
        x = source[:, keys - queries :]
        with fr.kernel(kernel):
            out = model.blocks[0].attention(x, source, model.position.place(layout, x))
        out.backward(torch.randn(out.shape, dtype=torch.float64))
        tensors = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        by_kernel[kernel] = {"out": out.detach(), "x": source.grad, **tensors}
    assert ("position.relative_attention_bias" in by_kernel["reference"]) == (position == "t5")
    for name, expected in by_kernel.pop("reference").items():
        for kernel, tensors in by_kernel.items():
            assert torch.allclose(tensors[name], expected, atol=1e-12), (kernel, name)


@pytest.mark.parametrize("position", POSITIONS)
def test_a_memory_is_at_its_distance(position):
    """A skipped layer has a gap in its memory; distances count it, as in one pass over all tokens with the gap masked."""
    model = moved(fr.LanguageModel(config(position, memory_length=20, num_hidden_layers=1)).double()).eval()
    ids = torch.randint(11, (2, 12))
    memory = model(ids[:, :4]).memory
    memory = model(ids[:, 4:7], memory, skip=[0]).memory
    out = model(ids[:, 7:], memory).logits
    x = model.embedding(ids)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, 4:7] = False
    layout = replace(fr.Layout.of(12), key_mask=mask)
    expected = model.output(model.final_norm(model.blocks[0](x, model.position.place(layout, x))))
    assert torch.allclose(out, expected[:, 7:], atol=1e-12)


def test_t5_starts_as_in_t5():
    model = fr.LanguageModel(config("t5", hidden_size=64, num_attention_heads=16, relative_attention_num_buckets=200,
                                    relative_attention_max_distance=300))  # fmt: skip
    bias = model.position.relative_attention_bias
    assert bias.shape == (200, 16)
    assert abs(float(bias.detach().std()) - 64**-0.5) < 0.005


def test_a_scale_of_dot_products():
    """T5's scale of 1; and the default as a number, which changes nothing."""
    ids = torch.randint(11, (2, N))
    models = {}
    for scale in (None, 1.0, D**-0.5):
        torch.manual_seed(5)
        score = "dot_product" if scale is None else {"name": "dot_product", "scale": scale}
        models[scale] = fr.LanguageModel(config("none", attention=fr.AttentionConfig(score=score))).double().eval()
    assert torch.equal(models[None](ids).logits, models[D**-0.5](ids).logits)
    assert models[1.0].blocks[0].attention.attend.score.scale == 1.0
    with torch.no_grad():
        for block in models[1.0].blocks:
            block.attention.project.query.weight /= D**0.5
            block.attention.project.query.bias /= D**0.5
    assert torch.allclose(models[1.0](ids).logits, models[None](ids).logits, atol=1e-12)
