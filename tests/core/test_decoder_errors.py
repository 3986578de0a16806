"""Calls that cannot be right are refused, not answered."""

import pytest
import torch

import fullrank as fr
from fullrank.core.errors import InputError

IDS = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(0))


def build(layers=2, **changes):
    keys = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": layers, **changes}
    return fr.LanguageModel(fr.ModelConfig(**keys)).eval()


def test_a_cache_of_another_model_or_of_other_texts():
    model = build()
    deeper = build(layers=3)(IDS, cache=build(layers=3).new_cache()).cache
    with pytest.raises(InputError, match=r"has \(layers, rows\) \(3, \d\), the model and input_ids \(2, "):
        model(IDS, cache=deeper)
    two_rows = model(IDS, cache=model.new_cache()).cache
    with pytest.raises(InputError, match=r"rows\) \(2, 2\), the model and input_ids \(2, 1\)"):
        model(IDS[:1], cache=two_rows)


def test_a_mask_over_the_past_must_be_the_one_it_was_read_with():
    model = build()
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    cache = model(IDS[:, :3], cache=model.new_cache(), attention_mask=mask[:, :3]).cache
    expected = model(IDS, attention_mask=mask).logits
    torch.testing.assert_close(model(IDS[:, 3:], cache=cache, attention_mask=mask).logits, expected[:, 3:])
    with pytest.raises(InputError, match="hides other earlier tokens"):
        model(IDS[:, 3:], cache=cache, attention_mask=torch.ones(2, 5))
    unmasked = model(IDS[:, :3], cache=model.new_cache()).cache
    with pytest.raises(InputError, match="hides other earlier tokens"):
        model(IDS[:, 3:], cache=unmasked, attention_mask=mask)


def test_a_forced_kernel_does_what_it_says_or_refuses():
    words = "'sdpa' cannot compute .* a trace asks for attention weights"
    with fr.kernel("sdpa"), pytest.raises(InputError, match=words):
        build()(IDS, trace=fr.Trace())


HIGH, LOW = IDS.clone(), IDS.clone()
HIGH[0, 0], LOW[0, 0] = 11, -1
HIDDEN = torch.zeros(2, 5, 8)
TWO = {"vocab_size": 11, "hidden_size": 8}
CLUSTERS = {"kind": "adaptive", "cutoffs": [4]}


def parts():
    config = build(1).config
    return {
        "lm": build(1),
        "remembering": build(1, memory_length=4),
        "clustered": build(1, input=fr.InputConfig(**CLUSTERS), output=fr.OutputConfig(**CLUSTERS)),
        "masked": fr.MaskedLanguageModel(config),
        "translator": fr.Translator(config),
        "attention": fr.Attention(fr.AttentionConfig(), hidden_size=8, num_attention_heads=2),
        "multilinear": fr.MultiLinearAttention(hidden_size=8, rank=4, max_position_embeddings=10),
        "mixture": fr.MixtureOfSoftmaxes(fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=2), **TWO),
        "adaptive": fr.AdaptiveSoftmax(fr.OutputConfig(**CLUSTERS), **TWO),
    }


RANGE = r"an index from 0 to 10 \(model\.vocab_size is 11\), given (11|-1)"
CALLS = {
    **{
        f"{name} {what}": (lambda name=name, ids=ids, **made: made[name](ids), words)
        for name in ("lm", "clustered", "masked")
        for what, ids, words in (
            ("float", IDS.float(), "whole numbers in torch.int64, given torch.float32"),
            ("high", HIGH, RANGE), ("low", LOW, RANGE),
        )
    },
    **{
        f"{name} {way} of {what}": (lambda name=name, way=way, ids=ids, **made: getattr(made[name], way)(IDS, ids), words)
        for name in ("lm", "clustered", "masked")
        for way in ("nll", "loss")
        for what, ids, words in (
            ("floats", IDS.float(), "targets .*whole numbers in torch.int64"), ("high", HIGH, RANGE), ("low", LOW, RANGE),
        )
    },
    "a high source": (lambda translator, **_: translator(HIGH, IDS), RANGE),
    "a high target": (lambda translator, **_: translator(IDS, HIGH), RANGE),
    "a cache of a language model": (
        lambda lm, translator, **_: translator.of_source(translator.encode(IDS))(IDS, cache=lm.new_cache()), "given a Cache",
    ),
    "a tensor as memory": (lambda remembering, **_: remembering(IDS, HIDDEN), "memory, cache: .* given Tensor"),
    "2-d attention": (lambda attention, **_: attention(HIDDEN[0]), r"x must be numbers \(B, N, 8\).* \(5, 8\)"),
    "a source of other rows": (lambda attention, **_: attention(HIDDEN, HIDDEN[:1]), "one B for x and source"),
    "2-d multi-linear attention": (lambda multilinear, **_: multilinear(HIDDEN[0]), "x must be numbers"),
    "a narrow mixture": (lambda mixture, **_: mixture(HIDDEN[..., 1:]), r"hidden states: \(B, N, 8\)"),
    "a low word of an adaptive softmax": (lambda adaptive, **_: adaptive.nll(HIDDEN, LOW), RANGE),
    "a dictionary as model": (lambda **_: fr.LanguageModel({"vocab_size": 5}), "built from a ModelConfig, given dict"),
    "a misspelt key": (lambda **_: fr.ModelConfig(hiden_size=8), "did you mean 'model.hidden_size'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made():
    return parts()


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_named(name, made):
    call, words = CALLS[name]
    with pytest.raises(InputError, match=words):
        call(**made)
