"""Grouped queries, RMS norms and norms of queries and keys against their equations, written again."""

import pytest
import torch

import fullrank as fr
from fullrank.analysis.size import size
from fullrank.core.embedding import Rotary

E, H, G, D, N = 10, 6, 2, 4, 7
RELATIVE = {"name": "relative", "shared_biases": False}


def layer(groups, position="rotary", **attention):
    torch.manual_seed(2)
    config = fr.ModelConfig(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=groups, head_dim=D, position=position,
        attention=fr.AttentionConfig(**attention),
    )  # fmt: skip
    made = fr.Attention(config).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def repeat_rows(rows):
    """Rows of G heads, D each, as rows of H heads: head i is head i // (H / G)."""
    heads = rows.unflatten(0, (G, D))
    return torch.cat([heads[i // (H // G)] for i in range(H)])


def add_up(rows):
    """The sum over the heads that share, the transpose of `repeat_rows`."""
    heads = rows.unflatten(0, (H, D))
    sums = [torch.zeros_like(rows[:D]) for _ in range(G)]
    for i in range(H):
        sums[i // (H // G)] += heads[i]
    return torch.cat(sums)


SHARED = {f"project.{name}" for name in ("key.weight", "key.bias", "value.weight", "value.bias", "relative.weight")}
LAYERS = [
    {"mix": "none"},
    {"mix": "position_wise", "normalize": "sigsoftmax"},
    {"mix": "position_independent", "gate": "head"},
    {"score": RELATIVE, "position": "relative", "mix": "position_wise"},
    {"score": "random_synthesizer", "position": "none"},
]


@pytest.mark.parametrize("options", LAYERS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_grouped_queries_are_heads_whose_keys_and_values_are_equal(options, kernel):
    """Outputs and every gradient of a layer of H heads with the rows of G heads repeated."""
    grouped, plain = layer(G, **options), layer(None, **options)
    shared = {name: value for name, value in grouped.state_dict().items() if name in SHARED}
    assert shared
    plain.load_state_dict(grouped.state_dict() | {name: repeat_rows(value) for name, value in shared.items()})
    x, cotangent = torch.randn(2, 2, N, E, dtype=torch.float64)
    x_grouped, x_plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    with fr.kernel(kernel):
        out, other = grouped(x_grouped), plain(x_plain)
        out.backward(cotangent)
        other.backward(cotangent)
    assert torch.allclose(out, other, atol=1e-12)
    assert torch.allclose(x_grouped.grad, x_plain.grad, atol=1e-12)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in grouped.named_parameters():
        gradient = add_up(gradients[name]) if name in SHARED else gradients[name]
        assert torch.allclose(parameter.grad, gradient, atol=1e-11), name


def test_cross_head_permutes_the_shared_heads():
    """Two shared heads give either the same output or that of the layer whose two heads of keys and values changed places."""
    grouped = layer(G, cross_head=1.0).train()
    changed = layer(G).eval()
    swapped = {
        name: value.unflatten(0, (G, D)).flip(0).flatten(0, 1) if name in SHARED else value
        for name, value in grouped.state_dict().items()
    }
    changed.load_state_dict(swapped)
    x = torch.randn(1, N, E, dtype=torch.float64)
    expected = {"kept": grouped.eval()(x), "swapped": changed(x)}
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        out = grouped.train()(x)
        seen |= {name for name, output in expected.items() if torch.allclose(out, output, atol=1e-12)}
        assert any(torch.allclose(out, output, atol=1e-12) for output in expected.values())
    assert seen == {"kept", "swapped"}


def test_packed_start_counts_the_rows_that_are_there():
    """`pytorch` starts query, key and value as one packed matrix (H + 2 G) D x E, Xavier-uniform."""
    config = fr.ModelConfig(vocab_size=9, hidden_size=60, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
                            initializer="pytorch")  # fmt: skip
    project = fr.LanguageModel(config).blocks[0].attention.project
    bound = (6 / (60 + (6 + 2 + 2) * 10)) ** 0.5
    for linear in (project.query, project.key, project.value):
        assert 0.95 * bound < float(linear.weight.detach().abs().max()) <= bound


def small(**changes):
    sizes = {"vocab_size": 13, "hidden_size": E, "num_hidden_layers": 3, "num_attention_heads": H, "head_dim": D,
             "intermediate_size": 11}  # fmt: skip
    return fr.ModelConfig(**(sizes | changes))


@pytest.mark.parametrize("groups", [1, G, 3, H])
def test_counts_of_grouped_queries(groups):
    """Parameters and FLOPs of a Llama from its matrices, and the bytes that its cache really takes."""
    config = small(
        num_key_value_heads=groups, norm_type="rms_norm", hidden_act="swiglu", mlp_bias=False,
        attention=fr.AttentionConfig(bias=False, qk_norm=True), output=fr.OutputConfig(bias=False),
    )  # fmt: skip
    matrices = E * (2 * H * D + 2 * groups * D) + 3 * E * 11  # of a layer
    counted = size(config, 5)
    assert counted["parameters"]["total"] == 2 * 13 * E + 3 * (matrices + 2 * E + 2 * D) + E
    assert counted["parameters"]["norm"] == (2 * 3 + 1) * E
    scores = 2 * 2 * H * D * 3  # products with the keys, and with the values, of (5 + 1) / 2 tokens
    assert counted["flops_per_token"]["forward"] == 3 * (2 * matrices + scores) + 2 * 13 * E
    model = fr.LanguageModel(config).eval()
    assert model.num_parameters() == counted["parameters"]["total"]
    with torch.no_grad():
        cache = model(torch.zeros(1, 5, dtype=torch.int64), cache=model.new_cache()).cache
    numbers = sum(part.numel() for past in cache.layers for part in (past.keys, past.values))
    assert 4 * numbers == 5 * counted["bytes"]["cache_per_token_fp32"]


def root_mean_square_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("position", ["rotary", "none"])
def test_norms_of_queries_and_keys_come_before_the_rotation(position):
    """And mixing reads the query as projected, with its bias, before the norm."""
    made = layer(G, position, mix="position_wise", qk_norm=True)
    x = torch.randn(1, N, E, dtype=torch.float64)
    project, mix = made.project, made.attend.mix

    def split(linear):
        return linear(x)[0].unflatten(-1, (-1, D)).transpose(0, 1)

    query, keys, values = split(project.query), split(project.key), split(project.value)
    normed = root_mean_square_norm(query, project.query_norm.weight, 1e-5)
    keys = root_mean_square_norm(keys, project.key_norm.weight, 1e-5)
    if position == "rotary":
        turn = Rotary(D, 10000.0)
        normed, keys = turn(normed[None], torch.arange(N))[0], turn(keys[None], torch.arange(N))[0]
    visible = torch.ones(N, N).tril() > 0
    weights = [
        ((normed[i] @ keys[i // 3].T) / D**0.5).masked_fill(~visible, float("-inf")).softmax(-1) for i in range(H)
    ]
    heads = []
    for i in range(H):
        moves = [query[j] @ mix.from_query[:, i] + mix.mixing[j, i] for j in range(H)]
        mixed = sum(move[:, None] * weight for move, weight in zip(moves, weights, strict=True))
        heads.append(mixed @ values[i // 3])
    expected = made.merge(torch.cat(heads, -1))
    assert torch.allclose(made(x)[0], expected, atol=1e-11)
