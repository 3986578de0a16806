"""Size and cost of models: parameters, multiply-adds, caches and memory of training beside formulas and PyTorch's counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fullrank as fr
from fullrank.analysis.size import (
    count_optimizer_states,
    measure_masked_size,
    parameters_by_part,
    size,
    size_of_run,
    translation_size,
)
from fullrank.config.run import RunConfig, TrainConfig
from fullrank.core.config import EncoderConfig
from fullrank.kernels import multilinear as engine
from fullrank.training.optimizer import make_optimizer, parameter_groups


@pytest.mark.parametrize("share", [0.15, 1.0])
def test_work_of_a_masked_model(share):
    """Every token sees all 10, and the output layer works on a share of them."""
    config = fr.ModelConfig(
        vocab_size=101, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40,
        attention=fr.AttentionConfig(mix="position_independent"),
    )  # fmt: skip
    sizes = measure_masked_size(config, 10, 2, share)
    matrices = 3 * (4 * 16 * 16 + 2 * 16 * 40)
    attention = 3 * 2 * 16 * 10  # scores and weighted values
    forward = 2 * (matrices + attention + 3 * 4 * 4 * 10 + share * 16 * 101)
    assert sizes["flops_per_token"] == {"length": 10, "forward": round(forward), "training": round(3 * forward)}
    total = fr.MaskedLanguageModel(config).num_parameters()
    parts = sizes["parameters"]
    assert (parts["total"], parts["mixing"], parts["output"]) == (total, 3 * 16, 101 * 17)
    assert sum(parts.values()) == 2 * total, "every parameter has its part"
    assert sizes["bytes"] == {"weights_fp32": 4 * total, "training_adam_fp32": 16 * total}


MIXERS = {
    "Mixhead B": {"mix": "position_wise"},
    "low rank": {"mix": {"name": "low_rank", "rank": 3}},
    "differential": {"mix": "differential"},
    "talking heads": {"mix_scores": "talking_heads", "mix": "talking_heads"},
    "multi-token": {"mix_scores": {"name": "multi_token", "queries": 3, "keys": 5}},
    "dynamic": {"mix_scores": {"name": "dynamic", "rank": 3}, "mix": "dynamic"},
    "dynamic, by the query": {"mix": {"name": "dynamic", "keys": False}},
    "knocking": {"mix_qkv": "knocking"},
    "knocking, linear": {"mix_qkv": {"name": "knocking", "form": "linear"}},
    "interleaved": {"mix_qkv": {"name": "interleaved", "pseudo_heads": 3}, "mix": "position_wise"},
    "gate of heads": {"gate": "head"},
    "gate of numbers": {"gate": "elementwise", "mix_scores": "talking_heads"},
    "exclusive": {"gate": {"name": "exclusive", "learned": True}},
    "differential 2": {"gate": "differential"},
}


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("length", [9, 12])
def test_work_of_a_mixer_is_what_the_definition_multiplies(name, length):
    """PyTorch's count, where every token sees all. What is made once for all tokens is left out: U V^T of low rank."""
    groups = {} if name == "interleaved" else {"num_key_value_heads": 2}
    config = fr.ModelConfig(
        vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=4, head_dim=5, intermediate_size=20,
        attention=fr.AttentionConfig(**MIXERS[name]), **groups,
    )  # fmt: skip
    model = fr.MaskedLanguageModel(config).eval()
    with fr.kernel("reference"), torch.no_grad(), FlopCounterMode(display=False) as count:
        model(torch.zeros(2, length, dtype=torch.int64))
    once = 2 * 2 * 4 * 4 * 3 if name == "low rank" else 0
    work = measure_masked_size(config, length, 2, 1.0)["flops_per_token"]
    assert work["training"] == 3 * work["forward"]
    assert count.get_total_flops() == 2 * length * work["forward"] + once


def multilinear(score="dot_product", memory=0, same=False, **attention):
    """E = 12, R = 5, two layers, 10 positions."""
    return fr.ModelConfig(
        vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
        max_position_embeddings=10, position="relative" if score == "relative" else "none", memory_length=memory,
        same_length=same, attention=fr.AttentionConfig(kind="multilinear", rank=5, score=score, **attention),
    )  # fmt: skip


@pytest.mark.parametrize("score", ["dot_product", "relative"])
@pytest.mark.parametrize("same", [False, True])
def test_flops_are_what_a_model_multiplies(score, same, monkeypatch):
    """PyTorch's count of two segments, the second with the first as memory; it also counts keys of positions, and no more."""
    # the count does not look into operators
    monkeypatch.setattr(engine, "_apply", lambda operands: engine._forward(operands)[0])
    settings = vars(multilinear(score, memory=40, same=same)) | {"max_position_embeddings": 90}
    model = fr.LanguageModel(fr.ModelConfig(**settings)).eval()
    batch, n = 2, 40
    text = torch.zeros(batch, n, dtype=torch.int64)
    position_keys = 2 * 12 * 5 * 2 * (score == "relative")  # a layer and position
    memory = None
    for keys in (n, 2 * n):
        with torch.no_grad(), FlopCounterMode(display=False) as count:
            out = model(text, memory=memory)
        memory = out.memory
        expected = size(
            fr.ModelConfig(**settings | {"memory_length": keys - n, "same_length": same and keys > n}), n, batch
        )
        more = count.get_total_flops() - batch * n * expected["flops_per_token"]["forward"]
        assert abs(more - position_keys * keys) <= batch * n / 2  # rounded, a token


def cache_bytes(model, tokens):
    """Bytes of all tensors in a cache, for each of its two texts."""
    with torch.no_grad():
        cache = model(torch.zeros(2, tokens, dtype=torch.int64), cache=model.new_cache()).cache
    layers = [layer if isinstance(layer, tuple) else vars(layer).values() for layer in cache.layers]
    values = [value for layer in layers for value in layer]
    values += [note for layer in cache.layers for note in getattr(layer, "notes", ())]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor)) // 2


@pytest.mark.parametrize("config", [
    multilinear(), multilinear("relative"), multilinear(output_map="decayed", decays=4),
    fr.ModelConfig(vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, head_dim=5, position="none"),
    fr.ModelConfig(vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, head_dim=5, position="none",
                   attention=fr.AttentionConfig(mix_qkv={"name": "interleaved", "pseudo_heads": 3})),
    fr.ModelConfig(vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, head_dim=5, position="none",
                   attention=fr.AttentionConfig(mix_scores="multi_token", mix="dynamic")),
], ids=["pairs", "with positions", "decayed", "multi-head", "interleaved", "with notes"])  # fmt: skip
def test_the_bytes_of_a_cache(config):
    model = fr.LanguageModel(config)
    sizes = size(config, 8)["bytes"]
    for tokens in (1, 2, 7):
        assert cache_bytes(model, tokens) == tokens * sizes["cache_per_token_fp32"] + sizes["state_per_text_fp32"]
    decayed = getattr(config.attention, "decays", None) is not None
    assert (sizes["state_per_text_fp32"] > 0) == decayed == (sizes["cache_per_token_fp32"] == 0)


TOKENS = 25


def test_work_is_what_a_model_multiplies():
    """Counted by torch on a forward pass, where the causal mask saves nothing: scores of N keys instead of (N + 1) / 2."""
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = fr.ModelConfig(**sizes, encoder=EncoderConfig(vocab_size=20))
    model = fr.Translator(config).eval()
    n = 9
    counter = FlopCounterMode(display=False)
    with fr.kernel("reference"), torch.no_grad(), counter:
        model(torch.zeros(1, n, dtype=torch.int64), torch.zeros(1, n, dtype=torch.int64))
    hidden = 2 * 4 * 16 * (n - 1) / 2  # of 2 layers, per token: what the mask hides
    work = translation_size(config, n)["flops_per_token"]["forward"]
    assert counter.get_total_flops() == n * (work + hidden)


def test_nothing_is_allocated():
    """A model of 29 terabytes."""
    sizes = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 64, "num_attention_heads": 4}
    assert translation_size(fr.ModelConfig(vocab_size=100, **sizes), TOKENS)["bytes"]["weights_fp32"] > 2**44


VOCABULARY, WIDTH, LAYERS, ROWS, LENGTH = 300, 48, 2, 3, 192
MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 3,
    "max_position_embeddings": LENGTH, "hidden_act": "gelu",
}  # fmt: skip


def run_of(**train):
    settings = {"steps": 1, "batch_size": ROWS, "segment_length": LENGTH, **train}
    return RunConfig.from_dict({"model": MODEL, "train": settings})


def test_activations_are_within_a_tenth_of_what_autograd_saves():
    run = run_of()
    model = fr.LanguageModel(run.model).train()
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.loss_parts(ids, ids, None, None)
    saved_bytes = sum(size for pointer, size in saved.items() if pointer not in parameters)
    assert size_of_run(run)["memory"]["activations"] == pytest.approx(saved_bytes, rel=0.1)


@pytest.mark.parametrize(
    "options",
    [{"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.5}, {"optimizer": "nag", "momentum": 0.9},
     {"optimizer": "adam"}, {"optimizer": "adamw"}, {"optimizer": "muon"}],
)  # fmt: skip
def test_states_of_optimizers(options):
    """The number that is known without an optimizer, and what an optimizer holds after an update."""
    config = TrainConfig(steps=1, **options)
    model = fr.LanguageModel(run_of().model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    groups = parameter_groups(model, weight_decay=0.1, muon=config.optimizer == "muon")
    optimizer = make_optimizer(groups, config)
    optimizer.step()
    buffers = [state for states in optimizer.state.values() for state in states.values() if state is not None]
    elements = sum(state.numel() for state in buffers if state.ndim)
    biases = 0.02 if config.optimizer == "muon" else 0
    assert count_optimizer_states(config, parameters_by_part(model)) == pytest.approx(elements, rel=biases)
