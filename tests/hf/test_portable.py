"""The modelling code of an export computes what the package computes: logits, gradients, memory, caches, generation."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `hf`")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "properties"))

from combinations import Combination, every_attention, noisy, pairwise, tokens
from portable_models import check_close, check_gradients, portable, shifted_loss
from transformers.cache_utils import DynamicCache

import fullrank as fr
from fullrank.core import registry
from fullrank.core.config import DropoutConfig
from fullrank.decoding import beam_search, sample
from fullrank.experiments.generation import Remembering
from fullrank.hf import portable as package
from fullrank.hf.export import _STAGES, portable_files
from fullrank.hf.portable import layers_fullrank
from moving import moved

ALL = every_attention()
PAIRS = pairwise()
CUTS = (0, 4, 5, 6, 12)
LEFT = torch.tensor([[1] * 12, [0] * 4 + [1] * 8, [0] + [1] * 11])


@pytest.mark.parametrize(("combination", "memory_length"), list(zip(ALL, itertools.cycle((0, 5)))), ids=str)
@torch.no_grad()
def test_every_model_reads_a_text_in_pieces_as_ours_does(combination: Combination, memory_length: int) -> None:
    """With memory, or with a cache of keys and values; and a batch with padding."""
    model = combination.moved(dtype=torch.float64, memory_length=memory_length)
    other, read = portable(model), tokens(3, 12)
    state = None if memory_length else model.new_cache()
    past: Any = None
    for start, end in itertools.pairwise(CUTS):
        piece = read[:, start:end]
        out = model(piece, state) if memory_length else model(piece, cache=state)
        state = out.memory if memory_length else out.cache
        given = other(piece, past_key_values=past)
        past = given.past_key_values
        check_close(given.logits, out.logits, what=f"tokens {start} to {end}")
    assert past.get_seq_length() == 12
    for mask in (LEFT, LEFT.flip(1)):
        seen = mask.bool()
        check_close(other(read, mask).logits[seen], model(read, attention_mask=mask).logits[seen], what="padded")


@pytest.mark.parametrize("combination", PAIRS, ids=str)
def test_loss_and_every_gradient_are_ours(combination: Combination) -> None:
    """Of two segments, the second after the memory of the first: keys and values of the memory have gradients too."""
    model = combination.moved(dtype=torch.float64, memory_length=4)
    other, read = portable(model), tokens(3, 12)
    memory = model(read[:, :5]).memory
    past = other(read[:, :5], use_cache=True).past_key_values
    expected = shifted_loss(model, read[:, 5:], memory)
    given = other(read[:, 5:], past_key_values=past, labels=read[:, 5:]).loss
    check_close(given, expected)
    expected.backward()
    given.backward()
    check_gradients(other.model, model)


@pytest.mark.parametrize("combination", PAIRS, ids=str)
@torch.no_grad()
def test_single_precision(combination: Combination) -> None:
    """Both round; to 1e-6 of the greatest where parameters are as large as those of a model that starts."""
    model = moved(combination.model(), 0.05)
    check_close(portable(model)(tokens(3, 12)).logits, model(tokens(3, 12)).logits, 1e-6)


MULTILINEAR = {"kind": "multilinear", "cores": 2, "rank": 5}
RELATIVE: dict[str, Any] = {"position": "relative"}
CLUSTERED = {"kind": "adaptive", "cutoffs": [4, 8], "div_val": 2}

# settings that no combination has: (model, attention)
SPECIAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "memory of zeros": ({"memory_length": 5, "memory_start": "zeros"}, {}),
    "memory of zeros, relative": ({"memory_length": 5, "memory_start": "zeros", **RELATIVE}, {"score": "relative"}),
    "same length": ({"memory_length": 3, "same_length": True, **RELATIVE}, {"score": "relative"}),
    "same length, fused": ({"memory_length": 3, "same_length": True}, {}),
    "same length, multi-linear": ({"memory_length": 3, "same_length": True}, MULTILINEAR),
    "clamped distances": ({"memory_length": 5, **RELATIVE}, {"score": {"name": "relative", "clamp_length": 3}}),
    "biases of each layer": (RELATIVE, {"score": {"name": "relative", "shared_biases": False}}),
    "published distances": (RELATIVE, {"score": {"name": "relative", "as_published": True}}),
    "idle key projection": ({}, {"score": {"name": "dense_synthesizer", "keep_key_projection": True}}),
    "random mixing of another size": ({}, {"mix": {"name": "random", "std": 0.7}}),
    "no biases": ({"mlp_bias": False}, {"bias": False, "mix": "position_wise"}),
    "scaled embedding, no final norm": ({"scale_embedding": True, "final_norm": False}, {}),
    "post-norm with a final one": ({"norm": "post", "final_norm": True, "layer_norm_eps": 1e-3}, {}),
    "other turns": ({"position": "rotary", "rope_theta": 50.0}, {"mix": "position_wise"}),
    "free cores": ({}, MULTILINEAR | {"core_weights": "free"}),
    "position term of each layer": (RELATIVE, MULTILINEAR | {"score": {"name": "relative", "shared_biases": False}}),
    "one decay": ({"memory_length": 5}, MULTILINEAR | {"output_map": "decayed", "decays": 1}),
    "multi-linear without bias": ({}, MULTILINEAR | {"bias": False}),
    "tied": ({"output": fr.OutputConfig(tied=True, bias=True)}, {}),
    "tied mixture, smoothed": (
        {"output": fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=3, tied=True, epsilon=1e-3)}, {}),
    "mixture of one": ({"output": fr.OutputConfig(kind="mixture_of_softmaxes", latent=False, epsilon=1e-3)}, {}),
    "tied clusters": ({"input": fr.InputConfig(**CLUSTERED), "output": fr.OutputConfig(kind="adaptive", tied=True)}, {}),
    "tied clusters, own projections": (
        {"input": fr.InputConfig(**CLUSTERED),
         "output": fr.OutputConfig(kind="adaptive", tied=True, tied_projections=False, form="transformer_xl")}, {}),
    "clusters of one width": ({"output": fr.OutputConfig(kind="adaptive", cutoffs=[4])}, {}),
    "fairseq's clusters": ({"output": fr.OutputConfig(**CLUSTERED, form="fairseq", normalize="sigsoftmax")}, {}),
}  # fmt: skip


def special(name: str) -> fr.LanguageModel:
    model, attention = SPECIAL[name]
    settings: dict[str, Any] = {
        "vocab_size": 11, "hidden_size": 10, "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 4,
        "intermediate_size": 13, "max_position_embeddings": 20,
    }  # fmt: skip
    torch.manual_seed(3)
    return moved(
        fr.LanguageModel(fr.ModelConfig(**settings | model, attention=fr.AttentionConfig(**attention))).double()
    )


@pytest.mark.parametrize("name", SPECIAL)
def test_settings_apart(name: str) -> None:
    model = special(name).eval()
    other, read = portable(model), tokens(3, 12)
    if model.config.memory_length:
        memory, past = None, None
        for start, end in itertools.pairwise(CUTS):
            with torch.set_grad_enabled(
                start < 6
            ):  # a memory that was read with gradients, then one with keys and values
                out, given = model(read[:, start:end], memory), other(read[:, start:end], past_key_values=past)
            memory, past = out.memory, given.past_key_values
            check_close(given.logits, out.logits, what=f"tokens {start} to {end}")
    else:
        check_close(other(read, LEFT).logits[LEFT.bool()], model(read, attention_mask=LEFT).logits[LEFT.bool()])
    expected, given = shifted_loss(model, read), other(read, labels=read).loss
    expected.backward()
    given.backward()
    check_gradients(other.model, model)


@pytest.mark.parametrize("score", ["dot_product", "relative"])
def test_tokens_that_see_later_ones(score: str) -> None:
    """It reads a text whole, and refuses to go on with one or to write."""
    config = fr.ModelConfig(
        vocab_size=11, hidden_size=10, num_hidden_layers=2, max_position_embeddings=16,
        position="relative" if score == "relative" else "sinusoidal",
        attention=fr.AttentionConfig(**MULTILINEAR, score=score, causal="as_published", not_next_token_perplexity=True),
    )  # fmt: skip
    model = moved(fr.LanguageModel(config).double().eval())
    other, read = portable(model), tokens(2, 12)
    out = other(read)
    check_close(out.logits, model(read).logits)
    assert out.past_key_values is None
    with pytest.raises(ValueError, match="read it whole"):
        other(read, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cannot write a text token by token"):
        other.generate(read, max_new_tokens=2, do_sample=False)


# -- memory ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_another_memory_at_evaluation() -> None:
    model = PAIRS[0].moved(dtype=torch.float64, memory_length=4)
    other, read = portable(model), tokens(3, 12)
    other.config.memory_length = 2
    changed = model.with_memory(2)
    memory, past = None, None
    for start, end in itertools.pairwise(CUTS):
        out, given = changed(read[:, start:end], memory), other(read[:, start:end], past_key_values=past)
        memory, past = out.memory, given.past_key_values
        check_close(given.logits, out.logits)
    assert other.config.fullrank["memory_length"] == 2


@pytest.mark.parametrize("memory_length", [0, 100])
@torch.no_grad()
def test_a_text_that_outgrows_its_first_table_of_distances(memory_length: int) -> None:
    combination = next(c for c in ALL if c.score == "relative" and c.normalize == "softmax")
    model = combination.moved(dtype=torch.float64, memory_length=memory_length)
    other, read, past = portable(model), tokens(1, 150), None
    expected = model(read).logits
    for start, end in ((0, 60), (60, 63), (63, 64), (64, 66), (66, 150)):
        given = other(read[:, start:end], past_key_values=past)
        past = given.past_key_values
        if memory_length == 0 or end <= 66:
            check_close(given.logits, expected[:, start:end], what=f"tokens {start} to {end}")


@pytest.mark.parametrize("memory_length", [0, 3])
@torch.no_grad()
def test_padding_between_pieces(memory_length: int) -> None:
    """Texts that begin late and pause; the mask covers the new tokens, or all of them."""
    model = ALL[0].moved(dtype=torch.float64, memory_length=memory_length)
    other, read = portable(model), tokens(3, 12)
    mask = torch.tensor([[1] * 12, [0] * 5 + [1] * 7, [1] * 4 + [0, 0] + [1] * 6])
    state = None if memory_length else model.new_cache()
    past: Any = None
    for start, end in itertools.pairwise(CUTS):
        piece, own = read[:, start:end], mask[:, start:end]
        out = (
            model(piece, state, attention_mask=own) if memory_length else model(piece, cache=state, attention_mask=own)
        )
        state = out.memory if memory_length else out.cache
        given = other(piece, mask[:, :end] if start == 5 else own, past_key_values=past)
        past = given.past_key_values
        check_close(given.logits[own.bool()], out.logits[own.bool()], what=f"tokens {start} to {end}")
    with pytest.raises(ValueError, match="hides other earlier tokens"):
        other(read[:, :1], torch.ones(3, 13), past_key_values=past)
    with pytest.raises(ValueError, match="attention_mask is"):
        other(read[:, :1], torch.ones(3, 4), past_key_values=past)


def test_the_memory_has_no_gradient() -> None:
    model = portable(ALL[0].moved(dtype=torch.float64, memory_length=4))
    first = model.get_input_embeddings()(tokens(2, 4)).detach().requires_grad_()
    past = model(inputs_embeds=first).past_key_values
    model(tokens(2, 3), past_key_values=past).logits.sum().backward()
    assert first.grad is None


# -- generation -----------------------------------------------------------------------------------------------------------

WRITERS = [c for c in ALL[::13] if c.attend == "weighted"] + [c for c in ALL if c.attend != "weighted"][::4]


@pytest.mark.parametrize(("combination", "memory_length"), list(zip(WRITERS, itertools.cycle((0, 3)))), ids=str)
@torch.no_grad()
def test_generation_is_ours(combination: Combination, memory_length: int) -> None:
    model = combination.moved(dtype=torch.float64, memory_length=memory_length)
    reader = Remembering(model) if memory_length else model
    other, prompt = portable(model), tokens(2, 5)
    new = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ones = torch.ones_like(prompt)
    expected = sample(reader, prompt, max_new_tokens=6, greedy=True).ids
    for cached in (True, False):
        given = other.generate(prompt, attention_mask=ones, use_cache=cached, **new)
        assert torch.equal(given[:, 5:], expected), f"use_cache: {cached}"
    beams = beam_search(reader, prompt, max_new_tokens=6, beams=3, n_best=1, length_penalty=1.0, eos_id=None).ids[:, 0]
    assert torch.equal(other.generate(prompt, attention_mask=ones, num_beams=3, **new)[:, 5:], beams)
    padded = torch.cat((torch.zeros(2, 2, dtype=torch.int64), prompt), dim=1)
    mask = torch.cat((torch.zeros(2, 2, dtype=torch.int64), ones), dim=1)
    mask[0], padded[0, :5], padded[0, 5:] = torch.tensor([1] * 5 + [0] * 2).roll(2), 0, prompt[0, :2]
    mask[0] = torch.tensor([0] * 5 + [1] * 2)
    given = other.generate(padded, attention_mask=mask, **new)
    assert torch.equal(given[1, 7:], expected[1])
    assert torch.equal(given[0, 7:], other.generate(prompt[:1, :2], attention_mask=ones[:1, :2], **new)[0, 2:])


@torch.no_grad()
def test_going_on_from_a_returned_cache() -> None:
    other = portable(ALL[0].moved(dtype=torch.float64))
    new = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = other.generate(tokens(1, 5), attention_mask=torch.ones(1, 5), max_new_tokens=6, **new)
    some = other.generate(
        tokens(1, 5), attention_mask=torch.ones(1, 5), max_new_tokens=2, return_dict_in_generate=True, **new
    )
    more = other.generate(
        some.sequences, attention_mask=torch.ones(1, 7), past_key_values=some.past_key_values, max_new_tokens=4, **new
    )
    assert torch.equal(more, whole)


def test_caches_of_other_kinds_are_refused() -> None:
    other = portable(ALL[0].moved())
    filled = DynamicCache()
    filled.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    with pytest.raises(ValueError, match="an empty DynamicCache"):
        other(tokens(1, 2), past_key_values=filled)


# -- training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["dot_product", "relative", "random_synthesizer"])
def test_heads_are_permuted_as_ours_are(score: str) -> None:
    """Without dropout the only numbers that training draws are those of the permutation."""
    combination = next(c for c in ALL if c.score == score and c.mix == "position_wise" and c.normalize == "softmax")
    quiet = {"attention": {"cross_head": 1.0}, "output": fr.OutputConfig(kind="softmax")}
    model = combination.moved(dtype=torch.float64, **quiet).train()
    other = portable(model)
    torch.manual_seed(8)
    expected = model(tokens()).logits
    torch.manual_seed(8)
    check_close(other(tokens()).logits, expected)
    check_close(other.eval()(tokens()).logits, model.eval()(tokens()).logits)
    assert not torch.allclose(other.train()(tokens()).logits, expected)


@pytest.mark.parametrize("locked", [False, True])
def test_dropout_acts_in_every_place(locked: bool) -> None:
    for place in ("embedding", "attention", "activation", "residual", "output"):
        dropout = DropoutConfig(**{place: 0.5}, locked=locked)
        other = portable(ALL[0].moved(dropout=dropout, output=fr.OutputConfig(kind="softmax")).train())
        assert not torch.equal(other(tokens()).logits, other(tokens()).logits), place
        other.eval()
        assert torch.equal(other(tokens()).logits, other(tokens()).logits), place


def test_activation_checkpointing_changes_no_gradient() -> None:
    model = PAIRS[0].moved(dtype=torch.float64, memory_length=4)
    plain, other = portable(model).train(), portable(model).train()
    other.activation_checkpointing_enable()
    for one in (plain, other):
        past = one(tokens(2, 5), use_cache=True).past_key_values
        one(tokens(2, 6), past_key_values=past, labels=tokens(2, 6)).loss.backward()
    check_gradients(other.model, plain.model)


def test_labels_count_items_and_leave_some_out() -> None:
    model = portable(ALL[0].moved(dtype=torch.float64))
    read = tokens(2, 6)
    labels = read.clone()
    labels[0, :4] = -100
    log_prob = model(read).logits.log_softmax(-1)[:, :-1].gather(-1, read[:, 1:, None])[..., 0]
    counted = -torch.cat((log_prob[0, 3:], log_prob[1]))
    check_close(model(read, labels=labels).loss, counted.mean())
    check_close(model(read, labels=labels, num_items_in_batch=4).loss, counted.sum() / 4)
    kept = model(read, labels=labels, logits_to_keep=2)
    assert kept.logits.shape[:2] == (2, 2)
    check_close(kept.loss, -log_prob[:, -1].mean())


def test_what_outputs_hold() -> None:
    combination = next(c for c in ALL if c.mix == "position_wise" and c.score == "dot_product")
    model = combination.moved(dtype=torch.float64)
    out = portable(model)(tokens(), output_attentions=True, output_hidden_states=True)
    trace = fr.Trace()
    model(tokens(), trace=trace)
    for given, layer in zip(out.attentions, trace.layers, strict=True):
        check_close(given, layer.mixed)
    check_close(out.hidden_states[-1], model.hidden(tokens()).hidden)
    assert len(out.hidden_states) == 3
    assert portable(model)(tokens(), return_dict=False)[0].shape == out.logits.shape


def test_a_start_without_weights_is_plain_attention() -> None:
    combination = next(c for c in ALL if c.mix == "position_wise" and c.score == "dot_product")
    from fullrank.hf.portable.configuration_fullrank import FullRankConfig
    from fullrank.hf.portable.modeling_fullrank import FullRankForCausalLM

    mixed, plain = (
        FullRankForCausalLM(FullRankConfig(fullrank=c.config().to_dict())).eval()
        for c in (combination, combination.but("mix", "none"))
    )
    for name, tensor in mixed.state_dict().items():
        assert tensor.isfinite().all(), name
    plain.load_state_dict({name: tensor for name, tensor in mixed.state_dict().items() if ".mix." not in name})
    assert torch.allclose(mixed(tokens()).logits, plain(tokens()).logits, atol=1e-6)


# -- the code itself ------------------------------------------------------------------------------------------------------


def test_it_knows_every_stage_of_ours() -> None:
    for slot, home in (
        ("score", "score"), ("normalize", "normalize"), ("mix", "mix"), ("kind", "attend"), ("position", "position"),
        ("hidden_act", "activation"), ("input.kind", "input"), ("output.kind", "output"),
    ):  # fmt: skip
        assert sorted(_STAGES[slot]) == registry.names(home), slot
    assert set(layers_fullrank.SCORES) == set(_STAGES["score"])


def test_it_imports_nothing_of_ours() -> None:
    folder = Path(package.__path__[0])
    assert portable_files() == sorted(file.name for file in folder.glob("*.py") if file.name != "__init__.py")
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    for name in portable_files():
        for node in ast.walk(ast.parse((folder / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= allowed, name
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert str(node.module).partition(".")[0] in allowed, f"{name} imports {node.module}"
            elif isinstance(node, ast.ImportFrom):
                assert f"{node.module}.py" in portable_files(), f"{name} imports {node.module}"


def test_noise_of_every_kind_trains() -> None:
    """One step down the gradient of a model with all its noise lowers the loss that it was made of."""
    model = portable(ALL[0].moved(**noisy(ALL[0]))).train()
    torch.manual_seed(1)
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad
    torch.manual_seed(1)
    assert model(tokens(), labels=tokens()).loss < loss
