"""A whole Transformer-XL, segment by segment, against Hugging Face's: hidden states, nll, memories and gradients.

The figures were written once by `fixtures/make_transformer_xl.py`, which says how; they hold to 1e-10 in double precision.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from memory_loops import ages
from safetensors.torch import load_file

import fullrank as fr
from closeness import close
from fullrank.core.config import WeightedConfig
from fullrank.hf.transfo_xl import make_config, rename_tensors

FOLDER = Path(__file__).parent / "fixtures"
ABOUT = json.loads((FOLDER / "transformer_xl.json").read_text())
TENSORS = load_file(FOLDER / "transformer_xl.safetensors")
CASES = ABOUT["cases"]
SIZES = ABOUT["sizes"]
TEXT = TENSORS["text"]


def renamed(prefix, case):
    """Their tensors under our names, in double precision, by the reader of published checkpoints."""
    theirs = {name.removeprefix(f"{prefix}."): tensor.double() for name, tensor in TENSORS.items() if prefix in name}
    return rename_tensors(theirs, SIZES | case)


def build(case):
    config = replace(make_config(SIZES | case, WeightedConfig(bias=False)), memory_start=case["start"])
    model = fr.LanguageModel(config).double()
    model.load_state_dict(renamed("parameter", case))  # strict: every parameter has its counterpart
    return model.eval()


def segments():
    """Number, ids and targets."""
    start = 0
    for number, size in enumerate(ABOUT["segments"]):
        yield number, TEXT[:, start : start + size], TEXT[:, start + 1 : start + size + 1]
        start += size


@pytest.mark.parametrize(("kernel", "cached"), [("reference", False), ("auto", True)])
@pytest.mark.parametrize("name", CASES)
def test_segment_by_segment(name, kernel, cached):
    """Hidden states and nll of every segment, memories after the last; keys and values of memory cached or projected anew."""
    case = CASES[name]
    model = build(case)
    states = losses = None
    with fr.kernel(kernel), torch.no_grad() if cached else nullcontext():
        for number, ids, targets in segments():
            hidden, states, _ = model.hidden(ids, states)
            nll = model.nll(ids, targets, losses)
            losses = nll.memory
            close(hidden, TENSORS[f"{name}.{number}.hidden"], f"hidden states of segment {number}")
            close(nll.per_token, TENSORS[f"{name}.{number}.nll"], f"nll of segment {number}")
    for memory in (states, losses):
        remembered = torch.stack([layer.hidden for layer in memory.layers])
        assert not remembered.requires_grad
        close(remembered, TENSORS[f"{name}.memories"], "memories")
        count = remembered.shape[2]
        for layer in range(SIZES["n_layer"]):
            assert ages(memory, layer) == list(range(count, 0, -1))


@pytest.mark.parametrize(("kernel", "way"), [("auto", "loss"), ("auto", "nll"), ("reference", "logits")])
def test_gradients(kernel, way):
    """Gradients of the mean nll of the last segment for every parameter; memory is a constant."""
    name = ABOUT["gradients_of"]
    case = CASES[name]
    model = build(case)
    memory = None
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
    gradients = {parameter: value.grad for parameter, value in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        assert gradient is not None, parameter
        close(gradient, expected[parameter], f"gradient of {parameter}")
