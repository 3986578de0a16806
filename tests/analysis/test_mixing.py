"""Mixing matrices: their distance from identity, orthogonality, and variation over the positions of a text."""

import numpy as np
import pytest
import torch

import fullrank as fr
from fullrank.analysis.mixing import mixing
from fullrank.core import registry
from fullrank.core.errors import InputError
from fullrank.core.stages import Mixing

IDS = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(0))


def model(mix):
    torch.manual_seed(1)
    config = fr.ModelConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32,
        attention=fr.AttentionConfig(mix=mix),
    )  # fmt: skip
    return fr.LanguageModel(config).double().eval()


def test_a_matrix_that_is_known():
    """M = 2 I + the first row of ones: differences and M^T M by hand."""
    language_model = model("position_independent")
    with torch.no_grad():
        language_model.blocks[1].attention.attend.mix.mixing.copy_(torch.tensor([[2.0, 1, 1], [0, 2, 0], [0, 0, 2]]))
    first, second = mixing(language_model)
    assert (first.layer, first.distance, first.orthogonality, first.deviation) == (0, 0, 0, None)
    assert second.distance == pytest.approx(5**0.5)  # three entries are 1 on the diagonal, two beside it
    # M^T M = [[4, 2, 2], [2, 5, 1], [2, 1, 5]]
    assert second.orthogonality == pytest.approx(3**2 + 4**2 + 4**2 + 4 * 2**2 + 2 * 1**2)
    assert second.orthogonality == pytest.approx(fr.orthogonality(language_model).item())
    np.testing.assert_array_equal(second.matrix[0], [2, 1, 1])
    assert [layer.variation for layer in mixing(language_model, IDS)] == [None, None]


def test_position_wise_mixing_over_positions():
    language_model = model("position_wise")
    with torch.no_grad():
        for block in language_model.blocks:
            block.attention.attend.mix.from_query.normal_()
    shared = mixing(language_model)
    assert [(layer.distance, layer.variation) for layer in shared] == [(0, None)] * 2
    layers = mixing(language_model, [IDS[:1], IDS[1:]])
    trace = fr.Trace()
    with torch.no_grad():
        language_model(IDS, trace=trace)
    for layer, traced in zip(layers, trace.layers, strict=True):
        m = traced.mixing.numpy().reshape(-1, 3, 3)
        np.testing.assert_allclose(layer.matrix, m.mean(0))
        np.testing.assert_allclose(layer.deviation, m.std(0))
        assert layer.variation == pytest.approx(m.var(0).mean() ** 0.5)
        assert layer.distance == pytest.approx(np.linalg.norm(m - np.eye(3), axis=(1, 2)).mean())
        gram = m.transpose(0, 2, 1) @ m - np.eye(3)
        assert layer.orthogonality == pytest.approx((gram**2).sum((1, 2)).mean())
    assert sum(layer.orthogonality for layer in layers) == pytest.approx(fr.orthogonality(trace).item())


def test_injected_models_and_models_without_mixing():
    with pytest.raises(InputError, match="LanguageModel: no layer of it mixes heads"):
        mixing(model("none"))
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3)).eval()
    with pytest.raises(InputError, match="no layer of it mixes heads"):
        mixing(gpt2)
    fr.inject(gpt2, mix="average", layers=[1])
    (layer,) = mixing(gpt2, IDS)
    assert layer.layer == 1
    np.testing.assert_allclose(layer.matrix, 1 / 3, atol=1e-7)
    assert layer.distance == pytest.approx(2**0.5, abs=1e-6)  # I minus a projection of rank one


def test_a_registered_mixing_that_states_no_needs():
    """Its matrix is the same at all positions, though a mixing by default reads the query."""

    @fr.register("mix", "test_static")
    class Static(Mixing):
        def matrix(self, query):
            return 2 * torch.eye(3, dtype=torch.float64)

    try:
        layers = mixing(model("test_static"), IDS)
    finally:
        registry.unregister("mix", "test_static")
    assert [(layer.distance, layer.variation) for layer in layers] == [(pytest.approx(3**0.5), None)] * 2
