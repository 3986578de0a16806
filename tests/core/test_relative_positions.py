"""Models with relative positions: what layers share, what is dropped out, what a cache keeps, what is counted."""

import pytest
import torch

import fullrank as fr
from moving import narrow


def model(score="relative", **changes):
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    return narrow(**sizes | changes, position="relative", attention={"score": score})


def biases(made):
    return [name for name in made.state_dict() if "content_bias" in name or "position_bias" in name]


SHARED = ["position.biases.content_bias", "position.biases.position_bias"]


def test_u_and_v_are_one_parameter_of_the_model_or_one_of_each_layer():
    separate = model({"name": "relative", "shared_biases": False})
    assert biases(separate) == [
        f"blocks.{i}.attention.attend.score.biases.{name}"
        for i in range(3)
        for name in ("content_bias", "position_bias")
    ]
    assert separate.num_parameters() == model().num_parameters() + 2 * 2 * 8
    shared = model()
    assert biases(shared) == SHARED
    state = shared.state_dict()
    separate.load_state_dict(
        {name: state["position.biases." + name.rpartition(".")[2]] if "score" in name else state[name]
         for name in separate.state_dict()})  # fmt: skip
    read = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(separate(read).logits, shared(read).logits)
    for made in (separate, shared):
        made.loss(read, read).backward()
    for name in ("content_bias", "position_bias"):
        total = sum(getattr(block.attention.attend.score.biases, name).grad for block in separate.blocks)
        assert torch.allclose(getattr(shared.position.biases, name).grad, total, atol=1e-7)


@pytest.mark.parametrize("locked", [False, True])
def test_sinusoids_are_dropped_out_once_for_all_layers(locked):
    made = model(hidden_size=64, dropout=fr.DropoutConfig(embedding=0.25, locked=locked))
    seen = []
    for block in made.blocks:
        block.attention.project.relative.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    read = torch.randint(9, (2, 50))
    made(read)
    undropped = seen[0].clone()
    assert undropped.shape == (50, 64)
    seen.clear()
    made.train()(read)
    assert len(seen) == 3
    assert all(torch.equal(table, seen[0]) for table in seen)
    dropped = (seen[0] == 0) & (undropped != 0)
    assert torch.allclose(seen[0][~dropped], undropped[~dropped] / 0.75)
    if locked:
        assert torch.equal(dropped[1:, 32:].any(0), dropped[1:, 32:].all(0))  # one mask for all distances
    else:
        assert 0.2 < float(dropped.float().mean()) < 0.3


def test_distances_through_the_projection_of_tokens():
    """A(n, m) = (Q(n) + Q_0) . (K(m) + K_{n-m}) / sqrt(D), with Q_0 = PE(0) W_Q and K_p = PE(p) W_K, written out."""
    score = {"name": "relative", "shared_projection": True}
    made = model(score, num_hidden_layers=1, memory_length=3)
    assert not biases(made)
    assert not [name for name in made.state_dict() if "relative" in name]
    block = made.blocks[0]
    width, heads = 8, 2
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    x = block.attention_norm(made.embedding(tokens))
    project = block.attention.project
    queries, keys, values = (layer(x)[0].view(6, heads, 4) for layer in project.layers())
    places = torch.arange(6, dtype=torch.float64)
    angle = places[:, None] * 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    encoded = torch.cat((angle.sin(), angle.cos()), 1)
    far, nearest = project.key(encoded).view(6, heads, 4), project.query(encoded[0]).view(heads, 4)
    expected = torch.empty(6, heads, 4, dtype=torch.float64)
    for h in range(heads):
        for n in range(6):
            scores = torch.stack(
                [(queries[n, h] + nearest[h]) @ (keys[m, h] + far[n - m, h]) / 2 for m in range(n + 1)]
            )
            expected[n, h] = scores.softmax(0) @ values[: n + 1, h]
    expected = block.attention.merge(expected.flatten(1))[None]
    torch.testing.assert_close(block.attention(x), expected, rtol=0, atol=1e-12)
    logits = made(tokens).logits
    cache = made.new_cache()
    for n in range(6):  # keys and values alone are kept
        step = made(tokens[:, n : n + 1], cache=cache)
        cache = step.cache
        torch.testing.assert_close(step.logits[:, 0], made.with_memory(0)(tokens).logits[:, n], rtol=0, atol=1e-12)
    first = made(tokens[:, :3])
    torch.testing.assert_close(made(tokens[:, 3:], first.memory).logits[:, 0], logits[:, 3], rtol=0, atol=1e-12)
