"""A whole Transformer-XL, segment by segment, against Hugging Face's: hidden states, nll, memories and gradients.

The figures were written once by `fixtures/make_transformer_xl.py`, which says how; they hold to 1e-10 in double precision.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_loops import ages
from safetensors.torch import load_file
from torch import Tensor

import fullrank as fr

FOLDER = Path(__file__).parent / "fixtures"
ABOUT = json.loads((FOLDER / "transformer_xl.json").read_text())
TENSORS = load_file(FOLDER / "transformer_xl.safetensors")
CASES: dict[str, dict[str, Any]] = ABOUT["cases"]
SIZES: dict[str, Any] = ABOUT["sizes"]
TEXT = TENSORS["text"]
TOLERANCE = 1e-10


def config(case: dict[str, Any]) -> fr.ModelConfig:
    """Our words for a Transformer-XL of theirs."""
    clamp = case["clamp_len"]
    score = {"name": "relative", "shared_biases": not case["untie_r"], "clamp_length": clamp if clamp > 0 else None}
    clusters = {"cutoffs": SIZES["cutoffs"], "div_val": SIZES["div_val"]}
    return fr.ModelConfig(
        vocab_size=SIZES["vocab_size"], hidden_size=SIZES["d_model"], num_hidden_layers=SIZES["n_layer"],
        num_attention_heads=SIZES["n_head"], head_dim=SIZES["d_head"], intermediate_size=SIZES["d_inner"],
        layer_norm_eps=SIZES["layer_norm_epsilon"], norm="pre" if case["pre_lnorm"] else "post", final_norm=False,
        position="relative", memory_length=case["mem_len"], memory_start=case["start"], same_length=case["same_length"],
        scale_embedding=True, attention=fr.AttentionConfig(score=score, bias=False),
        input=fr.InputConfig(kind="adaptive", **clusters),
        output=fr.OutputConfig(kind="adaptive", form="transformer_xl", tied=True, **clusters),
    )  # fmt: skip


def renamed(prefix: str, case: dict[str, Any]) -> dict[str, Tensor]:
    """Their tensors under our names, in double precision; those the case's model has not are left out."""

    def theirs(name: str) -> Tensor:
        return TENSORS[f"{prefix}.{name}"].double()

    found: dict[str, Tensor] = {}
    for i in range(len(SIZES["cutoffs"]) + 1):
        found[f"embedding.weights.{i}"] = theirs(f"transformer.word_emb.emb_layers.{i}.weight")
        found[f"embedding.projections.{i}"] = theirs(f"transformer.word_emb.emb_projs.{i}")
        found[f"output.biases.{i}"] = theirs(f"crit.out_layers.{i}.bias")
    found["output.projections.0"] = theirs("crit.out_projs.0")
    found["output.class_weight"], found["output.class_bias"] = (
        theirs("crit.cluster_weight"),
        theirs("crit.cluster_bias"),
    )
    if not case["untie_r"]:  # u and v; theirs is named by what it multiplies: content words w, distances r
        found["position.biases.content_bias"] = theirs("transformer.r_w_bias")
        found["position.biases.position_bias"] = theirs("transformer.r_r_bias")
    for i in range(SIZES["n_layer"]):
        layer, block = f"transformer.layers.{i}", f"blocks.{i}"
        attention = f"{block}.attention"
        if case["untie_r"]:
            found[f"{attention}.attend.score.biases.content_bias"] = theirs(f"{layer}.dec_attn.r_w_bias")
            found[f"{attention}.attend.score.biases.position_bias"] = theirs(f"{layer}.dec_attn.r_r_bias")
        packed = theirs(f"{layer}.dec_attn.qkv_net.weight").chunk(3)
        for name, matrix in zip(("query", "key", "value"), packed, strict=True):
            found[f"{attention}.project.{name}.weight"] = matrix
        found[f"{attention}.project.relative.weight"] = theirs(f"{layer}.dec_attn.r_net.weight")
        found[f"{attention}.merge.weight"] = theirs(f"{layer}.dec_attn.o_net.weight")
        for part in ("weight", "bias"):
            found[f"{block}.attention_norm.{part}"] = theirs(f"{layer}.dec_attn.layer_norm.{part}")
            found[f"{block}.feed_forward.up.{part}"] = theirs(f"{layer}.pos_ff.CoreNet.0.{part}")
            found[f"{block}.feed_forward.down.{part}"] = theirs(f"{layer}.pos_ff.CoreNet.3.{part}")
            found[f"{block}.feed_forward_norm.{part}"] = theirs(f"{layer}.pos_ff.layer_norm.{part}")
    return found


def build(case: dict[str, Any]) -> fr.LanguageModel:
    model = fr.LanguageModel(config(case)).double()
    model.load_state_dict(renamed("parameter", case))  # strict: every parameter has its counterpart
    return model.eval()


def segments() -> Iterator[tuple[int, Tensor, Tensor]]:
    """Number, ids and targets."""
    start = 0
    for number, size in enumerate(ABOUT["segments"]):
        yield number, TEXT[:, start : start + size], TEXT[:, start + 1 : start + size + 1]
        start += size


def same(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, what
    off = float((found - expected).detach().abs().max())
    assert off <= TOLERANCE * max(1.0, float(expected.abs().max())), f"{what} is off by {off:.1e}"


def test_the_fixture_tells_settings_apart() -> None:
    """Each case's own setting changes the nll of the last segment, so that agreement with all of them says something."""
    last = [TENSORS[f"{name}.{len(ABOUT['segments']) - 1}.nll"] for name in CASES]
    assert len(last) == 11
    for i, one in enumerate(last):
        for other in last[:i]:
            assert float((one - other).abs().max()) > 1e-3


@pytest.mark.parametrize(("kernel", "cached"), [("reference", False), ("auto", True)])
@pytest.mark.parametrize("name", CASES)
def test_segment_by_segment(name: str, kernel: str, cached: bool) -> None:
    """Hidden states and nll of every segment, memories after the last; keys and values of memory cached or projected anew."""
    case = CASES[name]
    model, states, losses = build(case), None, None
    with fr.kernel(kernel), torch.no_grad() if cached else nullcontext():
        for number, ids, targets in segments():
            hidden, states, _ = model.hidden(ids, states)
            nll = model.nll(ids, targets, losses)
            losses = nll.memory
            same(hidden, TENSORS[f"{name}.{number}.hidden"], f"hidden states of segment {number}")
            same(nll.per_token, TENSORS[f"{name}.{number}.nll"], f"nll of segment {number}")
    for memory in (states, losses):
        found = torch.stack([layer.hidden for layer in memory.layers])
        assert not found.requires_grad
        same(found, TENSORS[f"{name}.memories"], "memories")
        count = found.shape[2]
        for layer in range(SIZES["n_layer"]):
            assert ages(memory, layer) == list(range(count, 0, -1))


@pytest.mark.parametrize(("kernel", "way"), [("auto", "loss"), ("auto", "nll"), ("reference", "logits")])
def test_gradients(kernel: str, way: str) -> None:
    """Gradients of the mean nll of the last segment for every parameter; memory is a constant."""
    name = ABOUT["gradients_of"]
    case = CASES[name]
    model, memory = build(case), None
    *before, (_, ids, targets) = segments()
    with fr.kernel(kernel):
        for _, earlier, _ in before:
            memory = model(earlier, memory).memory
        if way == "loss":
            loss = model.loss(ids, targets, memory=memory)
        elif way == "nll":
            loss = model.nll(ids, targets, memory).per_token.mean()
        else:
            loss = -model(ids, memory).logits.gather(-1, targets[..., None]).mean()
        loss.backward()
    expected = renamed("gradient", case)
    found = {parameter: value.grad for parameter, value in model.named_parameters()}
    assert found.keys() == expected.keys()
    for parameter, gradient in found.items():
        assert gradient is not None, parameter
        same(gradient, expected[parameter], f"gradient of {parameter}")
