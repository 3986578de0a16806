"""`model.layers`: a model whose layers differ in attention applies one after the other; its size is their sum.

Causality, decoding, memory and padding are tested with `combinations.VARIANTS`.
"""

from dataclasses import replace

import pytest
import torch

import fullrank as fr
from fullrank.analysis.size import size, translation_size
from fullrank.core.attention import WeightedValues
from fullrank.core.layout import Layout
from fullrank.core.trace import Trace
from moving import moved

P = 40
SIZES = {
    "vocab_size": 13, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 11, "max_position_embeddings": P,
}  # fmt: skip
B, PAIRS = {"mix": "position_wise"}, {"kind": "multilinear", "rank": 5}
DECAYED = PAIRS | {"output_map": "decayed", "decays": 3}
RELATIVE = {"score": "relative"}
CASES = {  # keys of the model, and the attention of each layer
    "B in the last two layers": ({}, [{}, B, B]),
    "cross-head in the first": ({}, [{"cross_head": 0.5}, {}]),
    "multi-linear first": ({}, [PAIRS, B, {"normalize": "sigsoftmax"}]),
    "two multi-linear kinds": ({}, [{"gate": "head"}, PAIRS, DECAYED]),
    "decayed first": ({"position": "none"}, [DECAYED, B]),
    "synthesizers": ({}, [{"score": "dense_synthesizer"}, {"score": "random_synthesizer"} | B, {}]),
    "relative": ({"position": "relative"}, [RELATIVE, RELATIVE | B, RELATIVE | {"normalize": "sigsoftmax"}]),
    "own biases": (
        {"position": "relative"},
        [{"score": {"name": "relative", "shared_biases": False}} | mixing for mixing in ({}, B)],
    ),
    "position term": ({"position": "relative"}, [PAIRS | RELATIVE | {"cores": cores} for cores in (1, 2)]),
}


def config(case, **keys):
    """The model of a case."""
    options, layers = CASES[case]
    return fr.ModelConfig(
        **SIZES | {"num_hidden_layers": len(layers), "attention": fr.AttentionConfig(**layers[0])} | options | keys,
        layers=[fr.LayerConfig(attention=fr.AttentionConfig(**stages)) for stages in layers],
    )


def model(case, **keys):
    torch.manual_seed(2)
    return moved(fr.LanguageModel(config(case, **keys)).double().eval(), 0.2)


def tokens(rows, length, seed=1):
    return torch.randint(13, (rows, length), generator=torch.Generator().manual_seed(seed))


def uniform(case, layer, **keys):
    """A model in which all layers are like one of the case, without `model.layers`."""
    options, layers = CASES[case]
    attention = fr.AttentionConfig(**layers[layer])
    return fr.ModelConfig(
        **SIZES | {"num_hidden_layers": len(layers), "position": config(case).position} | options | keys,
        attention=attention,
    )


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_it_is_the_layers_of_uniform_models_one_after_the_other(case):
    combined = model(case)
    read = tokens(2, 9)
    layers = []
    for i, block in enumerate(combined.blocks):
        other = fr.LanguageModel(uniform(case, i)).double().eval()
        assert {*combined.state_dict()} >= {name for name in other.state_dict() if name.startswith(f"blocks.{i}.")}
        assert all(block.state_dict()[name].shape == part.shape for name, part in other.blocks[i].state_dict().items())
        other.blocks[i].load_state_dict(block.state_dict())
        other.position.load_state_dict(combined.position.state_dict())
        layers.append(other.blocks[i])
    x = combined.position(combined.embedding(read), torch.arange(9))
    layout = combined.position.place(Layout.of(9), x)
    for layer in layers:
        x = layer(x, layout)
    torch.testing.assert_close(combined(read).logits, combined.output(combined.final_norm(x)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_work_are_the_sums_of_the_layers(case):
    length, batch = 24, 2
    report = size(config(case), length, batch)
    count = range(len(CASES[case][1]))
    single = [size(uniform(case, i, num_hidden_layers=1), length, batch) for i in count]
    double = [size(uniform(case, i, num_hidden_layers=2), length, batch) for i in count]
    assert report["parameters"]["total"] == model(case).num_parameters()
    exact = [("parameters", "total"), ("parameters", "attention"), ("parameters", "mixing"),
             ("bytes", "cache_per_token_fp32"), ("bytes", "state_per_text_fp32")]  # fmt: skip
    for section, name in (*exact, ("flops_per_token", "forward"), ("flops_per_token", "training")):
        later = sum(double[i][section][name] - single[i][section][name] for i in count[1:])
        off = abs(report[section][name] - single[0][section][name] - later)
        assert off <= (0 if (section, name) in exact else 3), name  # FLOPs are rounded


def test_layers_by_place_and_by_number():
    base = {**SIZES, "num_hidden_layers": 4}
    by_place = fr.ModelConfig(**base, layers=[{"attention": PAIRS}, {}, {"attention": B}, {"attention": B}])
    by_number = fr.ModelConfig(**base, layers=[{"at": [-2, 3], "attention": B}, {"at": [0], "attention": PAIRS}])
    plain, b = fr.AttentionConfig(), fr.AttentionConfig(**B)
    assert by_place.attentions == by_number.attentions == [fr.AttentionConfig(**PAIRS), plain, b, b]
    assert by_place.position == "sinusoidal"  # multi-linear attention has nothing to rotate
    assert fr.ModelConfig.from_dict(by_number.to_dict()) == by_number
    mixed = fr.LanguageModel(by_number)
    assert [hasattr(block.attention.attend, "mix") for block in mixed.blocks] == [False, True, True, True]


@pytest.mark.parametrize("case", ["B in the last two layers", "multi-linear first", "relative"])
@torch.no_grad()
def test_both_sides_of_a_translator(case):
    torch.manual_seed(3)
    settings = replace(config(case), encoder=fr.EncoderConfig(vocab_size=11))
    translator = moved(fr.Translator(settings).double().eval(), 0.2)
    kinds = [attention.kind for attention in settings.attentions]
    for blocks in (translator.encoder.blocks, translator.decoder.blocks):
        assert ["weighted" if hasattr(b.attention.attend, "mix") else "multilinear" for b in blocks] == kinds
    assert all(isinstance(block.cross_attention.attend, type(translator.decoder.blocks[0].cross_attention.attend))
               for block in translator.decoder.blocks)  # fmt: skip
    source, target = tokens(2, 7, 4).clamp_max(10), tokens(2, 6, 5)
    trace = Trace()
    translator(source, target, trace=trace)
    assert len(trace.layers) == sum(isinstance(module, WeightedValues) for module in translator.modules())
    sized = translation_size(settings, 7)
    assert sized["parameters"]["total"] == translator.num_parameters()
