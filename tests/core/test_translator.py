"""Translator: beams, what the released code does, where dropout acts, what a trace holds, and one table for two languages.

Who sees what, padding, decoding, starts and files: tests/properties/test_every_translator.py.
"""

import pytest
import torch

import fullrank as fr
from closeness import close
from translator_models import PAIRS, TARGET, WEIGHTED, WIDE, WIDTH, padding, sentences, shared, tokens, translator

LENGTHS = [7, 3, 5]


def read_again(model, source, mask, texts, of):
    """The last logits of each text, (R, V): sentence `of` and text are both read from their first token."""
    out = []
    for text, row in zip(texts, of, strict=True):
        sentence = source[row : row + 1] if mask is None else source[row][mask[row].bool()][None]
        out.append(model(sentence, torch.tensor([text])).logits[0, -1])
    return torch.stack(out)


# what is kept at each step, of what the step before kept: (index, ...)
SELECTIONS = {
    "groups of one size": [[0, 0, 1, 1, 2, 2], [1, 0, 3, 3, 4, 5], [0, 1, 2, 3, 5, 4], [0, 2, 4]],
    "groups of other sizes": [[0, 0, 0, 1, 2], [0, 2, 2, 3, 4, 4], [1, 0, 2, 3, 5]],
    "sentences that end": [[0, 0, 1, 1, 2, 2], [0, 1, 4, 5], [3, 2], [0, 0]],
    "the first ends": [[0, 0, 1, 1, 2, 2], [2, 3, 4, 5], [0, 0, 2, 3], [2, 2]],
    "another order": [[2, 0, 1], [0, 0, 1, 1, 2, 2], [4, 5, 0, 1, 2, 3], [5, 1, 3]],
    "a sentence in two places": [[0, 1, 0, 2, 2, 0], [5, 2, 0, 1, 3], [1, 1, 2, 3, 3, 0]],
    "equal groups in two places": [[0, 0, 1, 1, 0, 0], [4, 5, 2, 3, 0, 1], [0, 2, 4]],
    "growing": [[0, 1], [0, 0, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3], [7]],
    "one": [[1], [0, 0, 0], [2, 1, 0], [0]],
}


BEAMS = [  # every day each mechanism, selection and side; their product in the full tier
    pytest.param(mechanism, selection, side, marks=() if (j, k) == (i % 3, i // 3) else pytest.mark.full)
    for i, selection in enumerate(SELECTIONS)
    for j, mechanism in enumerate(["B", "multi-linear everywhere", "relative positions"])
    for k, side in enumerate(["", "right", "left"])
]


@pytest.mark.parametrize(("mechanism", "selection", "side"), BEAMS)
def test_beams_equal_reading_each_text_again(mechanism, selection, side):
    model = shared(mechanism)
    source, _ = sentences(model, 3, 7)
    mask = padding(LENGTHS, 7, side) if side else None
    generator = torch.Generator().manual_seed(3)
    texts = [[1], [2], [3]]
    of = [0, 1, 2]
    with torch.no_grad():
        writer = model.of_source(model.encode(source, mask))
        out = writer(torch.tensor([[text[-1]] for text in texts]), cache=writer.new_cache())
        for index in SELECTIONS[selection]:
            cache = out.cache.reorder(torch.tensor(index))
            new = torch.randint(TARGET, (len(index),), generator=generator)
            texts = [[*texts[i], int(token)] for i, token in zip(index, new, strict=True)]
            of = [of[i] for i in index]
            out = writer(new[:, None], cache=cache)
            close(out.logits[:, 0], read_again(model, source, mask, texts, of), f"{selection} {index}")
            assert cache.length == len(texts[0]) - 1


def test_beams_that_change_places_copy_no_source():
    """A row of keys and values for each target row, copied only where a sentence comes or goes."""
    model = translator("B")
    source, _ = sentences(model, 3, 7)
    written = model.of_source(model.encode(source, padding(LENGTHS, 7, "right"))).new_cache()
    beams = written.reorder(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]))
    again = beams.reorder(torch.tensor([3, 1, 1, 0, 4, 4, 4, 4, 11, 10, 9, 8]))
    assert again.layers is beams.layers
    for index in ([4, 5, 6, 7], [0, 4, 1], []):
        some = beams.reorder(torch.tensor(index, dtype=torch.long))
        assert some.rows.tolist() == [place // 4 for place in index]
        assert {layer.batch for layer in some.layers} == {len(index)} == {len(some.mask)}


RELEASED = [
    pytest.param(name, marks=() if name in {"plain", "B", "sigsoftmax with B", "random mixing"} else pytest.mark.full)
    for name in WEIGHTED
]


@pytest.mark.parametrize("mechanism", RELEASED)
def test_released_decoding_changes_only_decoding_with_a_cache(mechanism):
    model = translator(mechanism)
    released = translator(mechanism, decoder_keys={"released_decoding": True})
    assert released.state_dict().keys() == model.state_dict().keys()
    source, target = sentences(model)
    attention = model.config.get_decoder_config().attention
    kept = {key: getattr(attention, key) for key in ("score", "normalize", "cross_head")}
    plain = translator(mechanism, decoder={"mix": "none"} | kept)
    plain.load_state_dict({n: v for n, v in model.state_dict().items() if n in plain.state_dict()}, strict=True)
    mixes = attention.mix != "none"

    def cached(of):
        writer = of.of_source(of.encode(source))
        first = writer(target[:, :2], cache=writer.new_cache())
        return torch.cat((first.logits, writer(target[:, 2:], cache=first.cache).logits), 1)

    with torch.no_grad():
        assert torch.equal(released(source, target).logits, model(source, target).logits)
        assert torch.equal(released.of_source(released.encode(source))(target).logits, model(source, target).logits)
        close(cached(released), plain(source, target).logits, "as without mixing in the decoder's self-attention")
        close(cached(model), model(source, target).logits, "ours mixes")
        assert (float((cached(released) - cached(model)).abs().max()) > 1e-3) == mixes


def test_released_cross_never_mixes_across():
    released = translator("B", decoder_keys={"released_cross": True})
    assert not [name for name in released.state_dict() if "cross_attention.attend.mix" in name]
    model = translator("B", cross={"mix": "none"})
    model.load_state_dict(released.state_dict())
    source, target = sentences(model)
    with torch.no_grad():
        assert torch.equal(released(source, target).logits, model(source, target).logits)


def test_dropout_of_weights_and_cross_head_reach_every_place():
    """With the rest of the network fixed, only they move the outputs; evaluation leaves them out."""
    for changes in ({"dropout": fr.DropoutConfig(attention=0.5)}, {"attention": {"cross_head": 1.0}}):
        model = translator(**changes)
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


def test_a_trace_holds_encoder_then_decoder_and_leaves_out_what_has_no_weights():
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
    trace = fr.Trace()
    everywhere(*sentences(everywhere), trace=trace)
    assert trace.layers == []


def test_one_table_is_saved_once_and_its_gradients_add_up():
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
    targets = tokens(TARGET, 3, 5, seed=9)
    for model in (shared, separate):
        model.loss(source, target, targets).backward()
    grads = {name: p.grad for name, p in separate.named_parameters()}
    both = grads["decoder.embedding.weight"], grads["encoder.embedding.weight"]
    close(shared.decoder.embedding.weight.grad, both[0] + both[1], "gradient of the table", 1e-12)
    with torch.no_grad():
        assert torch.equal(shared(source, target).logits, separate(source, target).logits)
