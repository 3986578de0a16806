"""Injecting, removing, saving; a model that is refused gets one clear message, and nothing is changed."""

import copy

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


@pytest.mark.parametrize("mix", ["position_independent", "position_wise"])
def test_penalties_of_an_injected_model_are_those_of_the_equations(bert, mix):
    """Compare the penalties with Eq. 16 and 20, computed from the attention weights of the plain model."""
    plain = copy.deepcopy(bert).eval()
    plain.set_attn_implementation("eager")
    weights = [w.double() for w in plain(**INPUTS, output_attentions=True).attentions]
    model = fr.inject(bert, mix=mix).eval()
    trace = fr.Trace()
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
    first_layer = fr.Trace()
    first_layer.layers = trace.layers[:1]
    torch.testing.assert_close(fr.overlap(first_layer).double(), fr.overlap(first), atol=1e-4, rtol=1e-4)
    (fr.orthogonality(trace) + fr.overlap(trace)).backward()
    for layer, mixing in zip(model.bert.encoder.layer, mixings, strict=True):
        assert all(parameter.grad.abs().max() > 0 for parameter in mixing.parameters())
        assert layer.attention.self.query.weight.grad.abs().max() > 0
    model(**INPUTS)
    assert len(trace.layers) == 2


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


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
B = {"mix": "position_wise"}
SIGSOFTMAX = {"normalize": "sigsoftmax"}


def bert_with(**settings):
    model = FAMILIES["bert"]()[0]
    vars(model.config).update(settings)
    return model


def described(**fields):
    return {**B, "interface": {"BertSelfAttention": fields}}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: transformers.DebertaV2Model(transformers.DebertaV2Config(**SIZES)), B,
         "DebertaV2Model: its attention .*DisentangledSelfAttention.* not on transformers.* attention interface.*BERT"),
        (lambda: fr.LanguageModel(fr.ModelConfig(**SIZES)), B, r"model\.attention"),
        (bert_with, {}, "nothing to inject"),
        (bert_with, {**B, "layers": [0, 2]}, "layers: 2 .* it has 0, 1"),
        (bert_with, {**B, "layers": 0.5}, "layers: a list of layer numbers .* given 0.5"),
        (bert_with, {"mix": "differential"}, "mix 'differential' is more than a matrix"),
        (FAMILIES["gpt_oss"], SIGSOFTMAX, "soft-cap"),
        (FAMILIES["gemma2"], SIGSOFTMAX, "soft-cap"),
        (FAMILIES["t5"], SIGSOFTMAX, "position biases"),
        (bert_with, {**B, "interface": "query"}, "interface: a mapping of class names"),
        (bert_with, described(query="q_proj"), "query: the name of a submodule of each BertSelfAttention, given 'q_proj'"),
        (bert_with, described(query=3), "query: the name of a submodule of each BertSelfAttention, given 3"),
        (bert_with, described(query="query", blocks=3), "blocks: a number that divides the 4 heads, given 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_injected_is_named(make, options, message):
    built = make()
    model = built[0] if isinstance(built, tuple) else built
    before = set(model.state_dict())
    with pytest.raises((InputError, ConfigError), match=message):
        fr.inject(model, **options)
    assert set(model.state_dict()) == before
    assert not hasattr(model.config, "fullrank")


def test_injected_once_and_removed_as_a_whole(bert):
    with pytest.raises(InputError, match="nothing was injected"):
        fr.remove(bert)
    fr.inject(bert, cross_head=0.1)
    with pytest.raises(InputError, match=r"fullrank\.remove"):
        fr.inject(bert, mix="position_wise")
    fr.inject(fr.remove(bert), mix="position_wise")
    with pytest.raises(InputError, match="only a part"):
        fr.remove(bert.bert)


def test_chosen_layers_alone_are_mixed():
    model, inputs = FAMILIES["t5"]()
    count = {None: 6, (1,): 3, ("decoder",): 4, ("encoder", 0): 4, ("EncDecAttention",): 2}
    for layers, expected in count.items():
        injected = fr.inject(
            copy.deepcopy(model), mix="position_independent", layers=None if layers is None else list(layers)
        )
        assert sum(".fullrank." in name for name, _ in injected.named_parameters()) == expected
        eager_model = copy.deepcopy(model)
        eager_model.set_attn_implementation("eager")
        with fr.kernel("reference"):
            assert torch.equal(injected(**inputs).logits, eager_model(**inputs).logits)
        torch.testing.assert_close(injected(**inputs).logits, eager_model(**inputs).logits, rtol=0, atol=1e-5)


def test_a_class_is_described_by_its_user(tmp_path):
    """JetMoE's queries come from a mixture of experts, so that mixing reads those of the attention function."""
    config = transformers.JetMoeConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2,
                                       kv_channels=8, intermediate_size=16, num_local_experts=2)  # fmt: skip
    model = transformers.JetMoeForCausalLM(config).eval()
    with pytest.raises(InputError, match=r"JetMoeAttention.*interface="):
        fr.inject(model, mix="position_wise")
    with pytest.raises(InputError, match="interface: Other: no class of a module of JetMoeForCausalLM"):
        fr.inject(model, mix="position_wise", interface={"Other": {}})
    ids = torch.arange(3, 12)[None]
    expected = model(ids).logits
    fr.inject(model, mix="position_wise", interface={"JetMoeAttention": {}})
    torch.testing.assert_close(model(ids).logits, expected)
    assert model.config.fullrank["query"] == "given"
    torch.nn.init.normal_(model.model.layers[0].self_attention.fullrank.mix.from_query, std=0.3)
    model.save_pretrained(tmp_path)
    assert torch.equal(fr.load_injected(tmp_path).eval()(ids).logits, model(ids).logits)
    assert model.model.layers[0].self_attention.fullrank.projection is None


def test_what_cannot_be_loaded_is_named(bert, tmp_path):
    with pytest.raises(InputError, match="no model that transformers can load"):
        fr.load_injected(tmp_path)
    fr.inject(bert, mix="position_wise").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="AutoModelForSpeechSeq2Seq: has no class for a model of type bert"):
        fr.load_injected(tmp_path, transformers.AutoModelForSpeechSeq2Seq)
