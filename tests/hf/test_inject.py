"""Injecting, removing and merging; a model that is refused gets one clear message, and nothing is changed."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_families import FAMILIES  # noqa: E402

import fullrank as fr  # noqa: E402
from fullrank.core.errors import ConfigError, InputError  # noqa: E402

INPUTS = FAMILIES["bert"]()[1]


@pytest.fixture
def bert():
    return FAMILIES["bert"]()[0]


def test_cross_head_alone_stays_with_the_fused_attention(bert):
    expected = bert(**INPUTS).logits
    injected = fr.inject(copy.deepcopy(bert), cross_head=1.0)
    assert torch.equal(injected(**INPUTS).logits, expected)
    assert sum(p.numel() for p in injected.parameters()) == sum(p.numel() for p in bert.parameters())
    torch.manual_seed(0)
    assert not torch.allclose(injected.train()(**INPUTS).logits, copy.deepcopy(bert).train()(**INPUTS).logits)


def test_removed_is_as_before(bert):
    names = set(bert.state_dict())
    removed = fr.remove(fr.inject(copy.deepcopy(bert), mix="position_wise", cross_head=0.1))
    assert set(removed.state_dict()) == names
    assert removed.config._attn_implementation == bert.config._attn_implementation
    assert not hasattr(removed.config, "fullrank")
    assert torch.equal(removed(**INPUTS).logits, bert(**INPUTS).logits)


@pytest.mark.parametrize("mix", ["position_independent", "position_wise"])
def test_penalties_of_an_injected_model_are_those_of_the_equations(bert, mix):
    """Eq. 16 over the matrices themselves, and Eq. 16 and 20 over a pass, from what the model itself gives."""
    plain = copy.deepcopy(bert).eval()
    plain.set_attn_implementation("eager")
    weights = [w.double() for w in plain(**INPUTS, output_attentions=True).attentions]
    model, trace = fr.inject(bert, mix=mix).eval(), fr.Trace()
    mixings = [layer.attention.self.fullrank.mix for layer in model.bert.encoder.layer]
    for mixing in mixings:
        torch.nn.init.normal_(mixing.mixing)

    def equation_16(matrix):
        return (matrix.mT @ matrix - torch.eye(4)).square().sum((-1, -2)).mean()

    expected = sum(equation_16(mixing.mixing) for mixing in mixings)
    torch.testing.assert_close(fr.orthogonality(model), expected)
    assert expected > 10
    with fr.traced(trace):
        model(**INPUTS)
    assert len(trace.layers) == 2
    torch.testing.assert_close(fr.orthogonality(trace), expected)  # W is zero
    first = weights[0]  # the second layer reads what the first one mixed
    torch.testing.assert_close(trace.layers[0].weights.double(), first, atol=1e-6, rtol=1e-5)
    pairs = [(i, j) for j in range(4) for i in range(j)]
    both = sum((first[:, i] @ first[:, j].mT).square().sum() + (first[:, i].mT @ first[:, j]).square().sum()
               for i, j in pairs) / len(first)  # fmt: skip
    torch.testing.assert_close(fr.overlap(fr.Trace([trace.layers[0]])).double(), both, atol=1e-4, rtol=1e-4)
    (fr.orthogonality(trace) + fr.overlap(trace)).backward()
    for layer, mixing in zip(model.bert.encoder.layer, mixings, strict=True):
        assert all(parameter.grad.abs().max() > 0 for parameter in mixing.parameters())
        assert layer.attention.self.query.weight.grad.abs().max() > 0
    model(**INPUTS)
    assert len(trace.layers) == 2


def test_other_starts_of_mixing_in_an_injected_model(bert, tmp_path):
    """Mixhead §3.2: M starts at 1/H or at random numbers, other ones in every layer, and is kept."""
    uniform = fr.inject(copy.deepcopy(bert), mix={"name": "position_wise", "start": "uniform"})
    assert torch.equal(uniform.bert.encoder.layer[0].attention.self.fullrank.mix.mixing, torch.full((4, 4), 0.25))
    drawn = fr.inject(bert, mix={"name": "position_independent", "start": "random"}).eval()
    first, second = (layer.attention.self.fullrank.mix.mixing for layer in drawn.bert.encoder.layer)
    assert (first - second).abs().max() > 0.1 < (first - torch.eye(4)).abs().max()
    drawn.save_pretrained(tmp_path)
    assert torch.equal(fr.load_injected(tmp_path)(**INPUTS).logits, drawn(**INPUTS).logits)


@pytest.mark.filterwarnings("ignore")
def test_penalties_of_a_model_in_peft_are_of_the_trained_mixing(bert):
    model = fr.inject(bert, mix="position_independent")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], modules_to_save=["fullrank"]))
    trained = [p for name, p in wrapped.named_parameters() if "mixing" in name and p.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter)
    expected = sum((m.mT @ m - torch.eye(4)).square().sum() for m in trained)
    assert len(trained) == 2
    torch.testing.assert_close(fr.orthogonality(wrapped), expected)


def test_groups_never_decay_mixing(bert):
    injected = fr.inject(bert, mix="position_wise")
    groups = fr.parameter_groups(injected, learning_rate=1e-4, mixing_learning_rate=1e-2, weight_decay=0.1)
    counted = [p for group in groups for p in group["params"]]
    assert len(counted) == len(set(counted)) == len(list(injected.parameters()))
    mixing = {p for name, p in injected.named_parameters() if ".fullrank." in name}
    assert len(mixing) == 4
    (of_mixing,) = [group for group in groups if mixing & set(group["params"])]
    assert set(of_mixing["params"]) == mixing
    assert (of_mixing["lr"], of_mixing["weight_decay"]) == (1e-2, 0.0)
    assert {group["weight_decay"] for group in groups if group is not of_mixing} == {0.0, 0.1}


# -- refusals -----------------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
OFF_THE_INTERFACE = {
    "DebertaV2Model": lambda: transformers.DebertaV2Config(**SIZES),
    "XLNetModel": lambda: transformers.XLNetConfig(d_model=8, n_layer=1, n_head=2, d_inner=8, vocab_size=9),
    "LongformerModel": lambda: transformers.LongformerConfig(**SIZES, attention_window=4),
}  # fmt: skip


def unchanged(model, before):
    return set(model.state_dict()) == set(before.state_dict()) and (
        model.config._attn_implementation == before.config._attn_implementation
        and not hasattr(model.config, "fullrank")
    )


@pytest.mark.parametrize("name", OFF_THE_INTERFACE)
def test_models_off_the_interface_are_refused_by_name(name):
    model = getattr(transformers, name)(OFF_THE_INTERFACE[name]())
    with pytest.raises(InputError, match=f"{name}: .*attention interface"):
        fr.inject(model, mix="position_wise")


def test_our_own_models_have_it_in_their_configuration():
    model = fr.LanguageModel(fr.ModelConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(InputError, match=r"model\.attention"):
        fr.inject(model, mix="position_wise")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing to inject"),
        ({"mix": "position_wise", "layers": [0, 2]}, "layers: 2 .* it has 0, 1"),
        ({"mix": "position_wise", "layers": ["encoder.layers"]}, "layers: 'encoder.layers'"),
        ({"mix": "position_wise", "layers": 1}, "a list of layer numbers"),
        ({"mix": "position_wise", "layers": []}, "a list of layer numbers"),
        ({"mix": "position_wise", "layers": [True]}, "a list of layer numbers"),
    ],
)
def test_layers_that_are_not_there(bert, given, message):
    before = copy.deepcopy(bert)
    with pytest.raises(InputError, match=message):
        fr.inject(bert, **given)
    assert unchanged(bert, before)


@pytest.mark.parametrize("given", [{"mix": "positionwise"}, {"normalize": "softmx"}, {"cross_head": 1.5}])
def test_unknown_words(bert, given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        fr.inject(bert, **given)


def test_once_is_enough(bert):
    fr.inject(bert, cross_head=0.1)
    with pytest.raises(InputError, match=r"fullrank\.remove"):
        fr.inject(bert, mix="position_wise")
    fr.inject(fr.remove(bert), mix="position_wise")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "granite_swa"])
def test_scores_that_are_more_than_products_keep_their_softmax(name):
    model, _ = FAMILIES[name]()
    before = copy.deepcopy(model)
    if name == "gemma2":  # the soft-cap is an argument of each call, and may be left out
        with pytest.raises(InputError, match="soft-cap"):
            fr.inject(model, normalize="sigsoftmax")(**FAMILIES[name]()[1])
        return
    with pytest.raises(InputError, match="soft-cap"):
        fr.inject(model, normalize="sigsoftmax")
    assert unchanged(model, before)


def test_gpt2_that_reorders_is_refused():
    model, _ = FAMILIES["gpt2"]()
    model.transformer.h[0].attn.reorder_and_upcast_attn = True
    with pytest.raises(InputError, match="reorder_and_upcast_attn"):
        fr.inject(model, mix="position_wise")


def test_cross_head_alone_needs_an_attention_that_it_can_keep(bert):
    bert.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(InputError, match=r"set_attn_implementation\('sdpa'\)"):
        fr.inject(bert, cross_head=0.1)


def test_only_the_whole_model_is_restored(bert):
    with pytest.raises(InputError, match="nothing was injected"):
        fr.remove(bert)
    fr.inject(bert, mix="position_wise")
    with pytest.raises(InputError, match="only a part"):
        fr.remove(bert.bert)


def test_chosen_layers_alone_are_mixed():
    model, inputs = FAMILIES["t5"]()
    count = {None: 6, (1,): 3, ("decoder",): 4, ("encoder", 0): 4, ("EncDecAttention",): 2}
    for layers, expected in count.items():
        again = fr.inject(
            copy.deepcopy(model), mix="position_independent", layers=None if layers is None else list(layers)
        )
        assert sum(".fullrank." in name for name, _ in again.named_parameters()) == expected
        own = copy.deepcopy(model)
        own.set_attn_implementation("eager")
        with fr.kernel("reference"):
            assert torch.equal(again(**inputs).logits, own(**inputs).logits)
        torch.testing.assert_close(again(**inputs).logits, own(**inputs).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mix", ["position_independent", "position_wise"])
@pytest.mark.parametrize("name", ["bert", "llama", "distilbert", "t5"])
def test_a_diagonal_mixing_is_merged_into_values(name, mix):
    model, inputs = FAMILIES[name]()
    fr.inject(model, mix=mix)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("fullrank.mix.mixing"):
                factors = torch.rand(2, generator=generator).repeat_interleave(2) + 0.5  # groups of two share values
                parameter.copy_(torch.diag(factors))
    expected = model(**inputs).logits
    fr.remove(model, merge=True)
    assert not any("fullrank" in name for name in model.state_dict())
    mask = inputs["attention_mask"].bool() if expected.shape[:2] == inputs["attention_mask"].shape else ...
    torch.testing.assert_close(model(**inputs).logits[mask], expected[mask], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "stacks"),
    [
        ("bert", ["bert.encoder.layer"]),
        ("gpt2", ["transformer.h"]),
        ("bart", ["model.encoder.layers", "model.decoder.layers"]),
    ],
)
def test_negative_layers_count_from_the_end_of_each_stack(name, stacks):
    model, _ = FAMILIES[name]()
    for negative, positive in ((-1, 1), (-2, 0)):
        again = fr.inject(copy.deepcopy(model), mix="position_independent", layers=[negative])
        injected = {key for key, _ in again.named_parameters() if ".fullrank." in key}
        assert {key.partition(f".{positive}.")[0] for key in injected} == set(stacks)
    with pytest.raises(InputError, match=r"layers: -3 .* it has 0, 1"):
        fr.inject(model, mix="position_independent", layers=[-3])


@pytest.mark.parametrize("given", [{"mix": "position_wise"}, {"cross_head": 0.5}])
def test_an_attention_that_is_set_later_is_refused_and_mixing_is_never_left_out(bert, given):
    injected = copy.deepcopy(fr.inject(bert, **given))
    injected.set_attn_implementation("sdpa")
    with pytest.raises(InputError, match=r"BertSelfAttention: its attention was set to 'sdpa' .*fullrank\.remove"):
        injected(**INPUTS)
    fr.remove(injected).set_attn_implementation("eager")
    assert injected.config._attn_implementation == "eager"
    assert injected(**INPUTS).logits.isfinite().all()


@pytest.mark.parametrize("name", ["bert", "bart", "clip_vision"])
def test_models_of_one_configuration_do_not_meet(name):
    model, inputs = FAMILIES[name]()
    config, implementation = model.config, model.config._attn_implementation
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    before = other(**inputs)[0]
    fr.inject(model, mix="position_wise")
    assert not hasattr(config, "fullrank")
    assert config._attn_implementation == implementation
    assert torch.equal(other(**inputs)[0], before)
    fr.inject(other, mix="average")
    assert (model.config.fullrank["mix"], other.config.fullrank["mix"]) == ("position_wise", "average")
    fr.remove(other)
    assert torch.equal(other(**inputs)[0], before)
    model(**inputs)


def test_attention_off_the_interface_is_left_out_with_a_warning():
    config = transformers.LongT5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
    with pytest.warns(
        UserWarning, match=r"LongT5Model: 2 attention modules .*encoder\.block\.1\.layer\.0\.LocalSelfAttention"
    ):
        model = fr.inject(transformers.LongT5Model(config), mix="position_wise")
    fr.inject(fr.remove(model), mix="position_wise", layers=["decoder"])  # a warning would be an error


def test_what_cannot_be_merged_stays(bert):
    llama = FAMILIES["llama"]()[0]
    cases = [
        (bert, {"mix": "average"}, None, "exchange weights"),
        (bert, {"mix": "random"}, None, "exchange weights"),
        (bert, {"normalize": "sigsoftmax"}, None, "normalised otherwise"),
        (bert, {"mix": "position_independent"}, "mixing", "not diagonal"),
        (bert, {"mix": "position_wise"}, "from_query", "depends on the query"),
        (llama, {"mix": "position_independent"}, "diagonal", "share their values"),
        (FAMILIES["gpt2"]()[0], {"mix": "position_independent"}, "diagonal", "no projection of values"),
    ]
    for model, given, changed, message in cases:
        again = fr.inject(copy.deepcopy(model), **given)
        with torch.no_grad():
            for name, parameter in again.named_parameters():
                if changed == "diagonal" and ".fullrank." in name:
                    parameter.copy_(torch.diag(torch.tensor([0.5, 1.0, 1.5, 2.0])))
                elif name.endswith(f"fullrank.mix.{changed}"):
                    parameter.add_(0.1)
        before = copy.deepcopy(again.state_dict())
        with pytest.raises(InputError, match=message):
            fr.remove(again, merge=True)
        assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())


def test_an_untouched_mixing_is_merged_without_a_trace(bert):
    before = copy.deepcopy(bert.state_dict())
    fr.remove(fr.inject(bert, mix="position_wise", cross_head=0.1), merge=True)
    assert all(torch.equal(value, before[name]) for name, value in bert.state_dict().items())
