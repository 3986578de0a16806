"""The rank of causal models of Hugging Face: what stands behind the output embedding decides whether the bound holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import fullrank as fr
import hugging_face_models as tiny

IDS = torch.randint(tiny.VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(3))


def test_a_head_without_bias() -> None:
    for model in (tiny.gpt2(), tiny.llama(), tiny.llama(tie_word_embeddings=True), tiny.gemma2(cap=None)):
        found = fr.analysis.rank(model, IDS)
        assert (found.rank, found.layer.bound, found.layer.exempt) == (9, 9, None), type(model)
        assert found.contexts == 2 * 10 + 32
        assert found.eps == 2.0**-52


def test_a_head_with_bias() -> None:
    """After a LayerNorm it adds nothing, after an RMSNorm one dimension."""
    after_layer_norm = fr.analysis.rank(tiny.gptj(), IDS)
    assert (after_layer_norm.rank, after_layer_norm.layer.bound) == (9, 10)
    model = tiny.llama()
    model.lm_head = nn.Linear(tiny.WIDTH, tiny.VOCABULARY)
    found = fr.analysis.rank(model, IDS)
    assert (found.rank, found.layer.bound, found.layer.bias) == (10, 10, True)


def test_a_soft_cap_is_exempt_and_escapes() -> None:
    for cap in (30.0, 2.0):
        found = fr.analysis.rank(tiny.gemma2(cap), IDS, contexts=30)
        assert "soft-cap" in str(found.layer.exempt)
        assert found.layer.bound == 9
        assert found.rank == 30


def test_figures_are_those_of_numpy_on_its_logits() -> None:
    model = tiny.gemma2(2.0)
    found = fr.analysis.rank(model, IDS, contexts=20)
    with torch.no_grad():
        logits = model.double().eval()(IDS).logits
    matrix = torch.log_softmax(logits[:2].flatten(0, 1)[:20], dim=-1).numpy()
    expected = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(found.singular_values, expected, rtol=0, atol=1e-12 * expected[0])
