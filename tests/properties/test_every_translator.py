"""The properties of translation models, for everything registered: both halves take each choice of each slot.

And for translators whose parts differ: encoder, decoder, attention between them, tables and depths.
"""

import itertools

import pytest
import torch

import combinations
import fullrank as fr
import translator_models
from closeness import close
from combinations import VOCABULARY, Combination, noisy, starts_plain, tokens
from moving import moved, seed

PAIRS = combinations.pairwise()
SOURCES = 13
Case = Combination | str


def cases(step):
    """Every `step`-th combination, others in the full tier; and each translator of `translator_models.FEW` by its name."""
    return [*combinations.sparse(PAIRS, step), *translator_models.FEW]


def translator(combination, *, fresh=False, **changes):
    """Both halves are what the combination says, and so is cross-attention where it reads no positions."""
    if isinstance(combination, str):
        return translator_models.translator(combination, **changes)
    words = VOCABULARY if combination.input == "adaptive" else SOURCES
    decayed = combination.attend == "multilinear_decayed"
    decoder = fr.DecoderConfig(cross=fr.AttentionConfig()) if decayed else fr.DecoderConfig()
    seed(3)
    config = combination.config(encoder=fr.EncoderConfig(vocab_size=words), decoder=decoder, **changes)
    model = fr.Translator(config).double().eval()
    return model if fresh else moved(model)


def sources(model, length=6):
    return tokens(3, length, seed=9) % (model.encoder.config.vocab_size or 1)


@pytest.mark.parametrize(
    ("combination", "training"),
    [
        pytest.param(row, training, id=f"{name}-{row}", marks=() if i % 6 == 3 * training else pytest.mark.full)
        for i, row in enumerate(PAIRS)
        for name, training in (("evaluation", False), ("training", True))
    ]
    + [(name, False) for name in translator_models.FEW],
)
def test_no_later_target_and_the_whole_source(combination, training):
    model = translator(combination, **noisy(combination) if isinstance(combination, Combination) else {})
    model.train(training)
    read = []

    def leaf(module, args, out):
        read.append(out.detach().requires_grad_())
        return read[-1]

    for half in (model.encoder, model.decoder):
        if "embedding" in half._modules:  # one table for both
            half.get_submodule("embedding").register_forward_hook(leaf)
    logits = model(sources(model), tokens(3, 5)).logits
    for place in range(5):
        cotangent = torch.randn(logits[:, place].shape, dtype=logits.dtype)
        to_source, to_target = torch.autograd.grad(logits[:, place], read, cotangent, retain_graph=True)
        assert not to_target[:, place + 1 :].any(), f"logits of token {place} depend on later ones"
        if not training:  # dropout may hide a token
            assert (to_target[:, : place + 1].abs().amax(2) > 0).all()
            assert (to_source.abs().amax(2) > 0).all(), f"logits of token {place} leave a token of the source out"


@pytest.mark.parametrize("combination", cases(6))
def test_padding_changes_nothing(combination):
    """On either side of the source; by the definition, and by the kernel that is chosen."""
    model = translator(combination)
    source, target = sources(model), tokens(3, 5)
    for kernel, left in itertools.product(("reference", "auto"), (False, True)):
        mask = torch.arange(6) < torch.tensor([6, 1, 4])[:, None]
        mask = mask.flip(1) if left else mask
        with fr.kernel(kernel), torch.no_grad():
            logits = model(torch.where(mask, source, 1), target, mask).logits
            for row in range(3):
                alone = model(source[row][mask[row]][None], target[row : row + 1]).logits[0]
                close(logits[row], alone, f"{kernel}, left: {left}, row {row}", 1e-11)


@pytest.mark.parametrize("combination", cases(6))
def test_written_token_by_token_and_as_beams(combination):
    model = translator(combination)
    source, target = sources(model), tokens(3, 5)
    mask = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    with torch.no_grad():
        writer = model.of_source(model.encode(source, mask))
        expected = model(source, target, mask).logits
        for order in ([0, 1, 2], [0, 0, 1, 1, 2, 2], [0, 0, 2]):
            index = torch.tensor(order)
            cache = writer.new_cache().reorder(index)
            parts = []
            for start, end in itertools.pairwise((0, 1, 2, 5)):
                out = writer(target[index, start:end], cache=cache)
                assert cache.length == start, "a cache is a value"
                cache = out.cache
                parts.append(out.logits)
            close(torch.cat(parts, 1), expected[index], f"rows {order}", 1e-11)


@pytest.mark.parametrize("combination", [c for c in PAIRS if c.mix != "none" and starts_plain(c.mix)], ids=str)
def test_starts_as_plain_attention(combination):
    mixed, plain = translator(combination, fresh=True), translator(combination.but("mix", "none"), fresh=True)
    source, target = sources(mixed), tokens(3, 5)
    for name, value in plain.state_dict().items():
        assert torch.equal(mixed.state_dict()[name], value), f"{name} starts otherwise"
    with torch.no_grad(), fr.kernel("reference"):
        assert torch.equal(mixed(source, target).logits, plain(source, target).logits)


@pytest.mark.parametrize("combination", combinations.sparse(PAIRS, 9))
def test_saved_and_loaded(combination, tmp_path):
    model = translator(combination)
    model.save(tmp_path)
    loaded = fr.Translator.load(tmp_path)
    assert loaded.config == model.config
    with torch.no_grad():
        logits = [translate(sources(model), tokens(3, 5)).logits for translate in (loaded, model)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("combination", combinations.sparse(PAIRS, 18))
def test_learns(combination):
    """To copy: with randomness on, a few pairs are learned in a few steps."""
    model = translator(combination, fresh=True, scale_embedding=True).float().train()
    source, target = sources(model), tokens(3, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(45):
        optimizer.zero_grad()
        loss = model.loss(source, target[:, :-1], target[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.65 * losses[0], f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"no gradient for {name}"
