"""Spectra of attention weights: exact for known matrices, and of the weights that the models really use."""

import numpy as np
import pytest
import torch

import fullrank as fr
from fullrank.analysis.spectrum import spectrum, summarize_values
from moving import narrow

IDS = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(0))


def blocks(rank, size):
    """Weights that attend evenly inside each of `rank` blocks of `size` tokens: as many singular values of 1, no others."""
    return torch.block_diag(*[torch.full((size, size), 1 / size, dtype=torch.float64)] * rank)


def check(spectrum, weights):
    """Against numpy, from weights (B, H, N, N)."""
    s = np.linalg.svd(weights.astype(np.float64), compute_uv=False)
    q = s / s.sum(-1, keepdims=True)
    entropy = -(q * np.log(np.maximum(q, 1e-300))).sum(-1)
    np.testing.assert_allclose(spectrum.curves, np.cumsum(q, -1).mean(0), atol=1e-6)
    np.testing.assert_allclose(spectrum.effective_rank, np.exp(entropy).mean(0), rtol=1e-5)
    np.testing.assert_allclose(spectrum.stable_rank, ((s**2).sum(-1) / s[..., 0] ** 2).mean(0), rtol=1e-5)


@pytest.mark.parametrize("rank", [1, 3, 12])
def test_matrices_of_known_rank(rank):
    weights = blocks(rank, 12 // rank)
    both = torch.stack((weights, weights.flip(0)))[None]  # order of rows does not matter
    summary = summarize_values(torch.linalg.svdvals(both).numpy())
    np.testing.assert_allclose(summary.effective_rank, rank, atol=1e-10)
    np.testing.assert_allclose(summary.stable_rank, rank, atol=1e-10)
    curve = np.minimum(np.arange(1, 13) / rank, 1)
    np.testing.assert_allclose(summary.curves, np.stack((curve, curve)), atol=1e-10)


@pytest.mark.parametrize("mix", ["none", "position_independent", "position_wise", "average"])
def test_before_and_after_mixing(mix):
    language_model = narrow(vocab_size=50, attention={"mix": mix}).train()
    trace = fr.Trace()
    with torch.no_grad():
        language_model.eval()(IDS, trace=trace)
    language_model.train()
    spectra = spectrum(language_model, [IDS[:1], IDS[1:]])
    assert (spectra.texts, spectra.length, spectra.weights) == (3, 9, "by the definition")
    assert language_model.training
    for layer, traced in zip(spectra.layers, trace.layers, strict=True):
        check(layer.before, traced.weights.numpy())
        mixed = traced.weights
        if traced.mixing is not None:  # Eq. 12: P'_i = sum_j m_ji P_j
            form = "bnji" if traced.mixing.ndim == 4 else "ji"
            mixed = torch.einsum(f"bjnm,{form}->binm", traced.weights, traced.mixing)
        check(layer.after, mixed.detach().numpy())
        assert (layer.after is layer.before) == (mix == "none")
