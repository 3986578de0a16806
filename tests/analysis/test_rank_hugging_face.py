"""The rank of causal models of Hugging Face: what stands behind the output embedding decides whether the bound holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fullrank as fr
import hugging_face_models as tiny
from fullrank.core.errors import InputError

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


def test_d_is_the_width_of_the_head() -> None:
    found = fr.analysis.rank(tiny.opt(), IDS)
    assert (found.layer.hidden_size, found.rank) == (6, 7)


def test_a_soft_cap_is_exempt_and_escapes() -> None:
    for cap in (30.0, 2.0):
        found = fr.analysis.rank(tiny.gemma2(cap), IDS, contexts=30)
        assert "more follows after it" in str(found.layer.exempt)
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


class Behind(nn.Module):
    """A causal model whose logits went through something that no configuration names."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.model, self.change = tiny.llama(), change
        self.config = self.model.config

    def get_output_embeddings(self) -> nn.Module | None:
        return None if self.change == "none" else self.model.get_output_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, ids: Tensor) -> object:
        if self.change == "own product":
            hidden = self.model.model(ids).last_hidden_state
            return type("Output", (), {"logits": hidden @ self.model.lm_head.weight.T})()
        out = self.model(ids)
        z = out.logits
        row = torch.linspace(0.5, 2, z.shape[1], dtype=z.dtype)[:, None]
        changed = {
            "scale": lambda: 3 * z,
            "row by row": lambda: row * z - z.amax(-1, keepdim=True),
            "cut": lambda: z[..., :40],
            "single": lambda: (2 * z).float(),
            "double": lambda: z.double(),
            "cubic": lambda: z + 1e-9 * z**3,
            "hidden": lambda: out,
            "none": lambda: z,
        }[self.change]()
        return changed if self.change == "hidden" else type("Output", (), {"logits": changed})()


@pytest.mark.parametrize("change", ["scale", "row by row", "cut"])
def test_scales_and_shifts_keep_the_bound(change: str) -> None:
    found = fr.analysis.rank(Behind(change), IDS)
    assert (found.rank, found.layer.bound, found.layer.exempt) == (9, 9, None)
    assert found.vocab_size == (40 if change == "cut" else tiny.VOCABULARY)


def test_logits_in_single_precision_are_read_at_the_output_embedding() -> None:
    """Rounded to floats they would have full rank at the tolerance of doubles."""
    model = Behind("single")
    found = fr.analysis.rank(model, IDS, contexts=40)
    assert (found.rank, found.layer.exempt, found.eps) == (9, None, 2.0**-52)
    with torch.no_grad():
        z = model.double().eval().model(IDS).logits.flatten(0, 1)[:40]
    expected = np.linalg.svd(torch.log_softmax(2 * z, dim=-1).numpy(), compute_uv=False)
    assert found.singular_values[:9] == pytest.approx(expected[:9], rel=1e-5)


class SingleHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight.float())


@pytest.mark.parametrize("change", ["double", "row by row"])
def test_an_output_embedding_in_single_precision(change: str) -> None:
    """Nothing more exact is there to be read: the rounding is that of floats, whatever dtype the logits have later."""
    model = Behind(change)
    head = SingleHead(model.model.lm_head.in_features, 1, bias=False)
    head.weight = model.model.lm_head.weight
    model.model.lm_head = head
    found = fr.analysis.rank(model, IDS, contexts=40)
    assert (found.layer.exempt, found.eps) == (None, 2.0**-23)
    assert found.rank <= found.layer.bound


def test_what_no_configuration_names_is_seen() -> None:
    found = fr.analysis.rank(Behind("cubic"), IDS)
    assert (
        found.layer.exempt == "its logits are not those of the output embedding up to a factor: more follows after it"
    )
    assert found.rank > found.layer.bound
    unseen = fr.analysis.rank(Behind("own product"), IDS)
    assert unseen.layer.exempt is not None
    assert "is not called" in unseen.layer.exempt
    assert unseen.rank == 9


def test_the_model_is_left_as_it_was() -> None:
    model = tiny.gpt2()  # from_config leaves it in training mode, with dropout
    assert model.training
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, again = fr.analysis.rank(model, IDS), fr.analysis.rank(model, IDS)
    assert (first.singular_values == again.singular_values).all()
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32
    assert not model.get_output_embeddings()._forward_hooks
    ready = model.double().eval()
    fr.analysis.rank(ready, IDS)
    assert not ready.get_output_embeddings()._forward_hooks


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"Behind .* has no output embedding"):
        fr.analysis.rank(Behind("none"), IDS)
    headless = tiny.llama().model
    with pytest.raises(InputError, match=r"LlamaModel .* has no output embedding"):
        fr.analysis.rank(headless, IDS)
    small = tiny.llama()
    small.resize_token_embeddings(40)
    with pytest.raises(InputError, match="token ids from 0 to 46, but the model reads 0 to 39"):
        fr.analysis.rank(small, torch.arange(47)[None])
