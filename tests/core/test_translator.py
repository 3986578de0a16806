"""Translator: what a token depends on, where mixing starts, shared embeddings, files, and misuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fullrank as fr
from fullrank.core.errors import InputError
from translator_models import (
    PAIRS,
    TARGET,
    WIDTH,
    close,
    padding,
    sentences,
    tokens,
    translator,
)  # fmt: skip

LENGTHS = [7, 3, 5]


# -- what penalties and pictures read ----------------------------------------------------------------------------------


def test_a_trace_holds_encoder_then_decoder_and_leaves_out_what_has_no_weights() -> None:
    for changes, shapes in (
        ({}, [(7, 7)] * 2 + [(5, 5), (5, 7)] * 2),
        ({"encoder": PAIRS}, [(5, 5), (5, 7)] * 2),
        ({"cross": PAIRS}, [(7, 7)] * 2 + [(5, 5)] * 2),
        ({"decoder": PAIRS, "encoder_keys": {"num_hidden_layers": 1}}, [(7, 7)] + [(5, 7)] * 2),
    ):
        model = translator("B", **changes)
        source, target = sentences(model)
        mask = padding(LENGTHS, 7, "right")
        trace = fr.Trace()
        with torch.no_grad():
            traced = model(source, target, mask, trace=trace).logits
            close(traced, model(source, target, mask).logits, "tracing changes nothing")
        assert [tuple(layer.weights.shape) for layer in trace.layers] == [(3, 3, *shape) for shape in shapes]
        for layer in trace.layers:
            close(layer.weights.sum(-1), torch.ones_like(layer.weights[..., 0]), "weights sum to one")
            if layer.weights.shape[3] == 7:
                assert not layer.weights[~mask.bool()[:, None, None].expand(layer.weights.shape)].any()
    everywhere = translator("multi-linear everywhere")
    with pytest.raises(InputError, match="no attention weights to collect"):
        everywhere(*sentences(everywhere), trace=fr.Trace())


# -- one table for two languages --------------------------------------------------------------------------------------


def test_one_table_is_saved_once_and_its_gradients_add_up() -> None:
    shared, separate = translator("one table"), translator("tied", encoder_keys={"vocab_size": TARGET})
    tables = [name for name, value in shared.state_dict().items() if value.shape == (TARGET, WIDTH)]
    assert tables == ["decoder.embedding.weight"]
    assert shared.num_parameters() == separate.num_parameters() - TARGET * WIDTH
    assert [name for name, _ in shared.named_parameters()] == list(shared.state_dict())
    state = separate.state_dict()
    state["encoder.embedding.weight"] = state["decoder.embedding.weight"]
    separate.load_state_dict(state)
    shared.load_state_dict({name: value for name, value in state.items() if name != "encoder.embedding.weight"})
    source, target = sentences(separate)
    wanted = tokens(TARGET, 3, 5, seed=9)
    for model in (shared, separate):
        model.loss(source, target, wanted).backward()
    grads = {name: p.grad for name, p in separate.named_parameters()}
    both = grads["decoder.embedding.weight"], grads["encoder.embedding.weight"]
    assert both[0] is not None
    assert both[1] is not None
    found: Any = shared
    close(found.decoder.embedding.weight.grad, both[0] + both[1], "gradient of the table", 1e-12)
    with torch.no_grad():
        assert torch.equal(shared(source, target).logits, separate(source, target).logits)
