"""Translator: what a token depends on, where mixing starts, shared embeddings, files, and misuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullrank as fr
from fullrank.core.errors import InputError
from translator_models import (
    PAIRS,
    TARGET,
    WIDE,
    WIDTH,
    close,
    every_mechanism,
    padding,
    sentences,
    shared,
    tokens,
    translator,
)  # fmt: skip

LENGTHS = [7, 3, 5]


def taken(module: nn.Module, kept: list[Tensor]) -> None:
    """Vectors of tokens as leaves, in the order in which they are looked up."""

    def leaf(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        kept.append(out.detach().requires_grad_())
        return kept[-1]

    module.register_forward_hook(leaf)


# -- who sees what ----------------------------------------------------------------------------------------------------


@every_mechanism
def test_targets_see_no_later_ones_and_the_whole_source(mechanism: str) -> None:
    """By gradient: exactly zero from later targets, and some from every token of the source and from the token itself."""
    model = translator(mechanism)
    read: list[Tensor] = []
    taken(model.decoder.embedding, read)
    if model.encoder.embedding is not None:
        taken(model.encoder.embedding, read)
    model.train()
    source, target = sentences(model)
    logits = model(source, target).logits
    of_source, of_target = read  # the encoder reads first
    assert (of_source.shape[1], of_target.shape[1]) == (7, 5)
    for place in range(5):
        cotangent = torch.randn(logits[:, place].shape, dtype=WIDE)
        back, own = torch.autograd.grad(logits[:, place], (of_source, of_target), cotangent, retain_graph=True)
        assert not own[:, place + 1 :].any(), f"logits of token {place} depend on later ones"
        assert (own[:, : place + 1].abs().amax(2) > 0).all(), f"logits of token {place} leave an earlier one out"
        assert (back.abs().amax(2) > 0).all(), f"logits of token {place} leave a token of the source out"


@every_mechanism
def test_padding_of_the_source_changes_nothing(mechanism: str) -> None:
    """On either side, whatever stands there; a batch gives each sentence what it gets alone."""
    model = shared(mechanism)
    source, target = sentences(model)
    with torch.no_grad():
        for side in ("right", "left"):
            mask = padding(LENGTHS, 7, side)
            found = [model(source.masked_fill(mask == 0, junk), target, mask).logits for junk in (0, TARGET - 1)]
            assert torch.equal(*found), "what stands in the padding is read"
            for row, length in enumerate(LENGTHS):
                own = source[row][mask[row].bool()][None]
                assert own.shape[1] == length
                close(found[0][row], model(own, target[row : row + 1]).logits[0], f"{side}, row {row}")
        whole = torch.ones(3, 7)
        assert torch.equal(model(source, target, whole).logits, model(source, target).logits)


# -- the start --------------------------------------------------------------------------------------------------------


def test_dropout_of_weights_and_cross_head_reach_every_place() -> None:
    """With the rest of the network fixed, only they move the outputs; evaluation leaves them out."""
    for changes in ({"dropout": fr.DropoutConfig(attention=0.5)}, {"attention": {"cross_head": 1.0}}):
        model: Any = translator(**changes)
        source, target = sentences(model)
        with torch.no_grad():
            x, y = torch.randn(2, 6, WIDTH, dtype=WIDE), torch.randn(2, 6, WIDTH, dtype=WIDE)
            for layer in (
                model.encoder.blocks[1].attention, model.decoder.blocks[0].attention, model.decoder.blocks[1].cross_attention,
            ):  # fmt: skip
                quiet = layer(x, y)
                layer.train()
                assert not all(torch.equal(layer(x, y), quiet) for _ in range(8))
                layer.eval()
            assert torch.equal(model(source, target).logits, model(source, target).logits)


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
