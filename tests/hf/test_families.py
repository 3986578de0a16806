"""Every named family: nothing changes at the start, on both paths; what is mixed is what an independent loop mixes.

`python -m pytest tests/hf/test_families.py` checks a new release of transformers; `benchmarks/families.py` looks at every
model type that it has.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from tiny_families import FAMILIES, GENERATE, Inputs  # noqa: E402

import fullrank as fr  # noqa: E402
from fullrank import kernels  # noqa: E402

# with a soft-cap, sinks, or a position bias: what our kernels do not compute
OWN_RULES = {"gemma2", "gpt_oss", "granite_swa", "t5"}


# Mixhead A is a part of B: alone it is of the full tier
mixings = pytest.mark.parametrize(
    "mix", [pytest.param("position_independent", marks=pytest.mark.full), "position_wise"]
)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def output(model: Any, inputs: Inputs) -> Tensor:
    actual = model(**inputs)
    return actual.logits if "logits" in actual else actual.last_hidden_state


def own_output(model: Any, inputs: Inputs, **asked: Any) -> Any:
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    return own(**inputs, **asked) if asked else output(own, inputs)


def on_tokens(values: Tensor, inputs: Inputs) -> Tensor:
    """Outputs at tokens: nobody reads those at padding, and a kernel may give others there."""
    mask = inputs.get("attention_mask")
    return values if mask is None or mask.shape != values.shape[:2] else values[mask.bool()]


def trained(model: Any) -> Any:
    """Move the mixing far from the identity, so that it depends on the query, as training does."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".fullrank." in name:
                parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


@mixings
def test_output_is_the_models_own_at_the_start(family, mix):
    model, inputs = FAMILIES[family]()
    expected = own_output(model, inputs)
    injected = fr.inject(model, mix=mix, cross_head=0.3)
    with fr.kernel("reference"):
        actual = output(injected, inputs)
    if family == "granite_swa":  # it scales the output, where mixing has to scale weights
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * max(1, expected.abs().max().item()))
    else:
        assert torch.equal(actual, expected)
    with kernels.chosen() as names:
        fast = output(injected, inputs)
    difference = (on_tokens(fast, inputs) - on_tokens(expected, inputs)).abs().max()
    assert difference <= 1e-6 * max(1, expected.abs().max())
    assert bool(names) == (family not in OWN_RULES)
    assert injected.config.fullrank["query"] == "projected"


def test_dropout_is_the_models_own_at_the_start():
    for name in ("bert", "gpt2", "llama", "t5", "gpt_oss", "vit"):
        model, inputs = FAMILIES[name]()
        for module in model.modules():
            for attribute in ("attention_dropout", "dropout"):
                if type(getattr(module, attribute, None)) is float:
                    setattr(module, attribute, 0.2)
        model.train()
        torch.manual_seed(7)
        expected = own_output(model, inputs)
        injected = fr.inject(model, mix="position_wise")
        torch.manual_seed(7)
        with fr.kernel("reference"):
            assert torch.equal(output(injected, inputs), expected), name
        assert not torch.equal(output(injected.eval(), inputs), expected), name


def slow_mixing(weights: Tensor, query: Tensor, value: Tensor, mixing: Tensor, from_query: Tensor | None) -> Tensor:
    """O_i(n) = sum_j m_ji(n) sum_k P_j(n, k) V_i(k),  m_ji(n) = sum_d Q_j(n)_d W_di + B_ji, number by number of heads."""
    texts, heads, queries, _ = weights.shape
    out = torch.zeros(texts, queries, heads, value.shape[-1], dtype=weights.dtype)
    shared = heads // value.shape[1]  # query heads 0 .. shared - 1 read value head 0
    for i in range(heads):
        for j in range(heads):
            factor = mixing[j, i].expand(texts, queries)
            if from_query is not None:
                factor = factor + query[:, j] @ from_query[:, i]
            out[:, :, i] += factor[..., None] * (weights[:, j] @ value[:, i // shared])
    return out


def projected_queries(model: Any) -> dict[Any, Tensor]:
    """The output of each module's projection of queries, filled in a pass; of a fused projection the columns of queries."""
    projected = {}
    for module in model.modules():
        if hasattr(module, "fullrank"):
            names = ("q_proj", "query", "q_lin", "q", "query_key_value", "Wqkv", "c_attn")
            name, layer = next((name, part) for name in names if (part := getattr(module, name, None)) is not None)

            def keep(_: Any, __: Any, output: Tensor, module: Any = module, name: str = name) -> None:
                if name == "query_key_value":  # q, k and v of each head
                    output = output.unflatten(-1, (module.fullrank.size.num_heads, 3, -1))[..., 0, :]
                projected[module] = output.chunk(3, -1)[0] if name in ("Wqkv", "c_attn") else output

            layer.register_forward_hook(keep)
    return projected


@mixings
@pytest.mark.parametrize("kernel", [pytest.param("reference", marks=pytest.mark.full), "auto"])
def test_mixing_is_that_of_the_equation(family, mix, kernel):
    from fullrank.hf import interface

    model, inputs = FAMILIES[family]()
    injected, seen = trained(fr.inject(model, mix=mix)), []
    attend = interface.attend
    projected = projected_queries(injected)

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any) -> Any:
        actual = attend(module, query, key, value, mask, **given)
        eager = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
        _, weights = eager(module, query, key, value, mask, **given)
        if family == "granite_swa":  # what its sink takes from a query is taken from the weights that are mixed
            scores = given["scaling"] * query @ key.repeat_interleave(2, 1).transpose(2, 3) + mask
            weights = weights * (scores.logsumexp(-1) - module.sinks.view(1, -1, 1)).sigmoid()[..., None]
        stages, read = module.fullrank.mix, projected[module].view(query.transpose(1, 2).shape).transpose(1, 2)
        seen.append(
            (actual[0], slow_mixing(weights, read, value, stages.mixing, getattr(stages, "from_query", None)), mask)
        )
        return actual

    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("fullrank", watched)
    try:
        with torch.no_grad(), fr.kernel(kernel):
            output(injected, inputs)
    finally:
        transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("fullrank", attend)
    assert len(seen) >= 2
    for actual, slow, mask in seen:
        if mask is not None:  # queries that are padding may see others
            seen_by = (mask[:, 0] > -1e30).any(-1).expand(actual.shape[:2])
            if inputs.get("attention_mask") is not None and inputs["attention_mask"].shape == actual.shape[:2]:
                seen_by = seen_by & inputs["attention_mask"].bool()
            actual, slow = actual[seen_by], slow[seen_by]
        torch.testing.assert_close(actual, slow, rtol=0, atol=2e-6 * max(1, slow.abs().max().item()))


def test_every_mixing_matrix_has_a_gradient_and_both_paths_the_same(family):
    model, inputs = FAMILIES[family]()
    injected = trained(fr.inject(model, mix="position_wise"))
    gradients = []
    for kernel in ("reference", "auto"):
        injected.zero_grad()
        with fr.kernel(kernel):
            values = on_tokens(output(injected, inputs), inputs)
        (values * torch.linspace(-1, 1, values.numel()).view_as(values)).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in injected.named_parameters() if p.grad is not None})
    mixing = {name for name, _ in injected.named_parameters() if ".fullrank." in name}
    assert len(mixing) >= 2
    for name in mixing:
        assert gradients[0][name].abs().max() > 0, name
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][name], gradient, rtol=1e-4, atol=2e-5 * max(1, gradient.abs().max().item()), msg=name
        )


@pytest.mark.parametrize("mix", ["position_independent", pytest.param("position_wise", marks=pytest.mark.full)])
def test_weights_are_given_mixed(family, mix):
    model, inputs = FAMILIES[family]()
    own = own_output(model, inputs, output_attentions=True)
    key = next(key for key in ("attentions", "decoder_attentions") if own.get(key) is not None)
    injected = fr.inject(model, mix=mix)
    actual = injected(**inputs, output_attentions=True)[key]
    assert len(actual) == len(own[key]) >= 2
    if family != "granite_swa":  # its own function returns weights before its sinks take their part
        assert all(map(torch.equal, actual, own[key]))
    if (mix, key) == ("position_independent", "attentions") and family != "granite_swa":
        first = next(p for name, p in injected.named_parameters() if ".fullrank." in name)
        torch.nn.init.normal_(first)
        actual = injected(**inputs, output_attentions=True)[key][0]
        torch.testing.assert_close(actual, torch.einsum("bjnm,ji->binm", own[key][0], first))


@pytest.mark.parametrize("name", GENERATE)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_generation_is_the_same_with_and_without_a_cache(name, options):
    model, inputs = FAMILIES[name]()
    injected = trained(fr.inject(model, mix="position_wise", cross_head=0.5))
    inputs = {key: value for key, value in inputs.items() if not key.startswith("decoder")}
    if not model.config.is_encoder_decoder:
        inputs = {key: value.flip(1) for key, value in inputs.items()}  # padded on the left
    results = [
        injected.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=cache, **options)
        for cache in (True, False)
    ]
    assert torch.equal(*results)
    assert not torch.equal(results[0], fr.remove(injected).generate(**inputs, max_new_tokens=6, min_new_tokens=6,
                                                                  do_sample=False, **options))  # fmt: skip
