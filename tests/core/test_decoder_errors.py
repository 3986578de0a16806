"""Calls that cannot be right are refused, not answered."""

from __future__ import annotations

import pytest
import torch

import fullrank as fr
from fullrank.core.errors import InputError


def build(layers: int = 2, **sizes: object) -> fr.LanguageModel:
    given = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": layers, **sizes}
    return fr.LanguageModel(fr.ModelConfig(**given)).eval()  # type: ignore[arg-type]


def test_a_layout_of_another_size() -> None:
    attention = fr.Attention(build().config)
    for layout in (fr.Layout.of(1), fr.Layout.of(3), fr.Layout.of(5, 7)):
        with pytest.raises(ValueError, match="layout"):
            attention(torch.randn(2, 5, 8), layout=layout)


def test_weights_of_a_loss_take_no_gradient() -> None:
    ids = torch.randint(11, (2, 5))
    with pytest.raises(InputError, match="no gradient"):
        build().loss(ids, ids, torch.ones(2, 5, requires_grad=True))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 2.0, float("nan")])
def test_label_smoothing_is_a_share(smoothing: float) -> None:
    ids = torch.randint(11, (2, 5))
    with pytest.raises(InputError, match="label_smoothing"):
        build().loss(ids, ids, label_smoothing=smoothing)


def test_a_loss_of_no_tokens() -> None:
    ids = torch.randint(11, (2, 0))
    with pytest.raises(InputError, match="no tokens"):
        build().loss(ids, ids)


def test_a_cache_of_another_model_or_of_other_texts() -> None:
    model, ids = build(), torch.randint(11, (2, 5))
    cache = build(layers=3)(ids, cache=build(layers=3).new_cache()).cache
    with pytest.raises(InputError, match="3 layers, the model 2"):
        model(ids, cache=cache)
    own = model(ids, cache=model.new_cache()).cache
    with pytest.raises(InputError, match="2 rows, input_ids 1"):
        model(ids[:1], cache=own)


def test_a_mask_over_the_past_must_be_the_one_it_was_read_with() -> None:
    model, ids = build(), torch.randint(11, (2, 5))
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    cache = model(ids[:, :3], cache=model.new_cache(), attention_mask=mask[:, :3]).cache
    whole = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(model(ids[:, 3:], cache=cache, attention_mask=mask).logits, whole[:, 3:])
    with pytest.raises(InputError, match="hides other earlier tokens"):
        model(ids[:, 3:], cache=cache, attention_mask=torch.ones(2, 5))
    unmasked = model(ids[:, :3], cache=model.new_cache()).cache
    with pytest.raises(InputError, match="hides other earlier tokens"):
        model(ids[:, 3:], cache=unmasked, attention_mask=mask)


def test_learned_positions_count_tokens_not_padding() -> None:
    model, ids = build(position="learned", max_position_embeddings=6), torch.randint(11, (1, 9))
    mask = torch.ones(1, 9)
    mask[:, :4] = 0
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 4:], model(ids[:, 4:]).logits)
    with pytest.raises(InputError, match="max_position_embeddings"):
        model(ids)


def test_random_mixing_differs_between_layers_on_every_device() -> None:
    model = build(layers=3, attention=fr.AttentionConfig(mix="random"))
    matrices = [block.attention.attend.mix.mixing for block in model.blocks]
    assert not torch.equal(matrices[0], matrices[1])
    assert not torch.equal(matrices[1], matrices[2])


def test_losses_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = build()
        ids = torch.empty(2, 5, dtype=torch.long)
    assert model.nll(ids, ids).per_token.shape == (2, 5)
    model.loss(ids, ids).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("grad", [True, False])
def test_a_memory_on_the_meta_device(grad: bool) -> None:
    attention = fr.AttentionConfig(score="relative")
    with torch.device("meta"):
        config = fr.ModelConfig(
            vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, position="relative", memory_length=3,
            attention=attention,
        )  # fmt: skip
        model, ids = fr.LanguageModel(config).eval(), torch.zeros(2, 4, dtype=torch.int64)
        with torch.set_grad_enabled(grad):
            assert model(ids, model(ids).memory).logits.shape == (2, 4, 7)


def test_a_forced_kernel_does_what_it_says_or_refuses() -> None:
    model, ids = build(), torch.randint(11, (2, 5))
    with (
        fr.kernel("sdpa"),
        pytest.raises(InputError, match=r"'sdpa' cannot compute .* a trace asks for attention weights"),
    ):
        model(ids, trace=fr.Trace())


def test_a_foreign_class_of_the_same_name_does_not_replace_a_built_in_one() -> None:
    with pytest.raises(InputError, match="already registered"):
        fr.register("normalize", "softmax")(type("Softmax", (torch.nn.Module,), {"__module__": "elsewhere"}))
