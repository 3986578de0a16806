"""Memory: segments one after the other are one long text with the same visibility, whatever else the model is made of."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.errors import InputError
from fullrank.model.memory import Memory

V, E, H, LAYERS = 11, 12, 3, 3
POSITIONS = ["sinusoidal", "learned", "relative", "rotary", "none"]


def model(
    position: str = "sinusoidal", *, memory_length: int = 5, score: Any = None, seed: int = 0, **parts: Any
) -> Any:
    attention = {
        "score": score or ("relative" if position == "relative" else "dot_product"),
        **{key: parts.pop(key) for key in ("mix", "normalize", "cross_head", "bias") if key in parts},
    }
    config = fr.ModelConfig(
        vocab_size=V, hidden_size=E, num_hidden_layers=parts.pop("layers", LAYERS), num_attention_heads=H,
        intermediate_size=16, position=position, memory_length=memory_length, max_position_embeddings=64,
        attention=fr.AttentionConfig(**attention), **parts,
    )  # fmt: skip
    torch.manual_seed(seed)
    made = fr.LanguageModel(config).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():  # nothing may hide behind zeros, identities and small numbers
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def text(rows: int = 2, tokens: int = 19, seed: int = 1) -> Tensor:
    return torch.randint(V, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def in_segments(made: Any, ids: Tensor, sizes: list[int], **more: Any) -> tuple[Tensor, Memory]:
    memory, parts = None, []
    for first, end in pairwise([0, *accumulate(sizes)]):
        out = made(ids[:, first:end], memory, **more)
        parts.append(out.logits)
        memory = out.memory
    return torch.cat(parts, dim=1), memory


@dataclass(frozen=True)
class Seen(fr.Layout):
    """A layout that is told who sees whom."""

    pairs: Tensor | None = None

    def visible(self) -> Tensor:
        assert self.pairs is not None
        return self.pairs[None, None]


def one_pass(made: Any, ids: Tensor, sizes: list[int], memory_length: int, *, same_length: bool = False) -> Tensor:
    """All tokens at once through the reference kernel; who sees whom is written down pair by pair."""
    total = sum(sizes)
    begins = [first for first, size in zip([0, *accumulate(sizes)][:-1], sizes, strict=True) for _ in range(size)]
    pairs = torch.zeros(total, total, dtype=torch.bool)
    for query in range(total):
        for key in range(query + 1):
            pairs[query, key] = query - key < memory_length if same_length else key >= begins[query] - memory_length
    places = torch.arange(total)
    layout = Seen(places, places, pairs=pairs)
    x = made.position(made.embedding(ids), places)
    with fr.kernel("reference"):
        for block in made.blocks:
            x = block(x, layout)
    return made.output(made.final_norm(x))


LENGTHS = [[4, 4, 4, 4], [7, 1, 3, 6, 2], [5, 5, 5], [3, 9, 2, 5], [19]]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("memory_length", [2, 5, 40])
@pytest.mark.parametrize("position", POSITIONS)
def test_segments_equal_one_long_pass(position: str, memory_length: int, cached: bool) -> None:
    made, ids = model(position, memory_length=memory_length), text()
    for sizes in LENGTHS:
        with torch.no_grad() if cached else torch.enable_grad():
            found, memory = in_segments(made, ids, sizes)
        known = [layer.heads is not None for layer in memory.layers]
        assert known == [cached] * LAYERS
        expected = one_pass(made, ids[:, : sum(sizes)], sizes, memory_length)
        assert (found - expected).abs().max() < 1e-10, sizes
        assert memory.length == sum(sizes)
        assert [layer.tokens for layer in memory.layers] == [min(memory_length, sum(sizes))] * LAYERS


@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("mix", ["position_independent", "position_wise", "random", "average"])
@pytest.mark.parametrize("position", ["relative", "rotary"])
def test_every_mixing_and_normaliser(position: str, mix: str, normalize: str) -> None:
    made, ids = model(position, mix=mix, normalize=normalize, norm="post", memory_length=4), text()
    for sizes in ([4, 4, 4], [5, 2, 6]):
        expected = one_pass(made, ids[:, : sum(sizes)], sizes, 4)
        assert (in_segments(made, ids, sizes)[0] - expected).abs().max() < 1e-10
        with torch.no_grad():
            assert (in_segments(made, ids, sizes)[0] - expected).abs().max() < 1e-10


@pytest.mark.parametrize("score", ["dense_synthesizer", "random_synthesizer"])
def test_synthesizers_remember_up_to_their_longest_text(score: str) -> None:
    made, ids = model("none", score=score, memory_length=5), text()
    sizes = [4, 6, 3]
    assert (in_segments(made, ids, sizes)[0] - one_pass(made, ids[:, :13], sizes, 5)).abs().max() < 1e-10
    with pytest.raises(InputError, match="max_position_embeddings is 64"):
        in_segments(made, text(1, 70), [10] * 7)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
def test_same_length_is_a_window(position: str, cached: bool) -> None:
    ids = text()
    for memory_length in (1, 3, 6):
        made = model(position, memory_length=memory_length, same_length=True)
        for sizes in LENGTHS:
            with torch.no_grad() if cached else torch.enable_grad():
                found, _ = in_segments(made, ids, sizes)
            expected = one_pass(made, ids[:, : sum(sizes)], sizes, memory_length, same_length=True)
            assert (found - expected).abs().max() < 1e-10, (memory_length, sizes)


@pytest.mark.parametrize("position", POSITIONS)
def test_enough_memory_is_plain_causal_attention(position: str) -> None:
    made, ids = model(position, memory_length=30), text()
    plain = fr.LanguageModel(replace(made.config, memory_length=0)).double().eval()
    plain.load_state_dict(made.state_dict())
    expected = plain(ids).logits
    assert (in_segments(made, ids, [6, 1, 8, 4])[0] - expected).abs().max() < 1e-10
    cache, parts = made.new_cache(), []
    for first, end in pairwise([0, 6, 7, 15, 19]):
        out = made(ids[:, first:end], cache=cache)
        cache = out.cache
        assert out.memory is None
        parts.append(out.logits)
    assert (torch.cat(parts, 1) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("position", POSITIONS)
def test_texts_of_different_lengths_are_read_as_if_alone(position: str, norm: str) -> None:
    """Every row has its own ragged segments, padded on either side; its memory holds its own last tokens."""
    for memory_length, same_length in ((2, False), (5, False), (5, True), (30, False)):
        made = model(position, memory_length=memory_length, same_length=same_length, norm=norm)
        sizes = [[4, 1, 5, 3], [2, 5, 0, 4], [4, 4, 4, 4]]  # per row
        for cached in (False, True):
            with torch.no_grad() if cached else torch.enable_grad():
                rows = [text(1, 16, seed)[0] for seed in range(3)]
                alone = [
                    in_segments(made, row[None], [n for n in each if n])[0][0]
                    for row, each in zip(rows, sizes, strict=True)
                ]
                memory, found = None, [[] for _ in rows]
                taken = [0, 0, 0]
                for step in range(4):
                    ids, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.bool)
                    for row, each in enumerate(sizes):
                        size = each[step]
                        at = slice(5 - size, 5) if row == 1 else slice(0, size)
                        ids[row, at] = rows[row][taken[row] : taken[row] + size]
                        mask[row, at] = True
                        taken[row] += size
                    out = made(ids, memory, attention_mask=mask)
                    memory = out.memory
                    for row in range(3):
                        found[row].append(out.logits[row][mask[row]])
            for row in range(3):
                assert (torch.cat(found[row]) - alone[row]).abs().max() < 1e-10, (memory_length, row)
            assert memory.lengths.tolist() == [sum(each) for each in sizes]


def test_the_first_mask_may_come_late() -> None:
    made, ids = model("relative", memory_length=4), text(2, 12)
    first = made(ids[:, :5])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    second = made(ids[:, 5:9], first.memory, attention_mask=mask)
    assert (second.logits[1] - made(ids[1:, 5:9], made(ids[1:, :5]).memory).logits[0]).abs().max() < 1e-12
    assert (second.logits[0, :3] - made(ids[:1, 5:8], made(ids[:1, :5]).memory).logits[0]).abs().max() < 1e-12


def test_gradients_stop_at_the_memory() -> None:
    made, ids = model("relative", memory_length=6), text()
    first = made(ids[:, :6])
    assert not any(layer.hidden.requires_grad for layer in first.memory.layers)
    kept = [layer.hidden.clone() for layer in first.memory.layers]
    made.loss(ids[:, 6:12], ids[:, 7:13], memory=first.memory).backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in made.parameters())
    assert all(torch.equal(layer.hidden, k) for layer, k in zip(first.memory.layers, kept, strict=True))


def test_keys_and_values_of_the_memory_receive_gradient() -> None:
    """The value projection reads the memory too: its gradient is that of one long pass whose past is detached."""
    made, ids = model("none", memory_length=4, layers=1, bias=False), text(1, 8)
    cotangent = torch.randn(1, 4, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    memory = made(ids[:, :4]).memory
    (made(ids[:, 4:], memory).logits * cotangent).sum().backward()
    block = made.blocks[0]
    found = block.attention.project.value.weight.grad.clone()
    made.zero_grad()
    x = made.embedding(ids)
    x = torch.cat((x[:, :4].detach(), x[:, 4:]), dim=1)
    (made.output(made.final_norm(block(x, fr.Layout.of(8))))[:, 4:] * cotangent).sum().backward()
    assert (found - block.attention.project.value.weight.grad).abs().max() < 1e-12


def test_cached_keys_are_not_used_after_the_weights_have_changed() -> None:
    made, ids = model("relative"), text()
    with torch.no_grad():
        memory = made(ids[:, :6]).memory
        before = made(ids[:, 6:9], memory).logits
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    made.loss(ids[:, :6], ids[:, 1:7]).backward()
    optimizer.step()
    with torch.no_grad():
        found = made(ids[:, 6:9], memory).logits
        forgetful = Memory.from_tensors(memory.to_tensors())  # hidden states alone
        assert torch.equal(found, made(ids[:, 6:9], forgetful).logits)
    assert (found - before).abs().max() > 1e-3


def test_all_ways_in_return_the_memory() -> None:
    made, ids = model("relative"), text()
    inputs, targets = ids[:, :6], ids[:, 1:7]
    expected = made(inputs).memory
    for memory in (made.nll(inputs, targets).memory, made.loss_parts(inputs, targets).memory):
        assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(memory.layers, expected.layers, strict=True))
    per_token = made.nll(ids[:, 6:12], ids[:, 7:13], expected).per_token
    log_probs = torch.log_softmax(made(ids[:, 6:12], expected).logits, -1)
    assert (per_token + log_probs.gather(-1, ids[:, 7:13, None])[..., 0]).abs().max() < 1e-12
    assert abs(made.loss(ids[:, 6:12], ids[:, 7:13], memory=expected) - per_token.mean()) < 1e-12


def test_a_memory_is_a_value() -> None:
    made, ids = model("rotary"), text()
    first = made(ids[:, :6]).memory
    again = [made(ids[:, 6:9], first).logits for _ in range(2)]
    assert torch.equal(*again)
    assert first.length == 6


def test_ages_count_tokens_to_the_next_one() -> None:
    made, ids = model(memory_length=5), text()
    memory = made(ids[:, :7]).memory
    assert memory.ages(0).tolist() == [5, 4, 3, 2, 1]
    rested = made(ids[:, 7:10], memory, skip={1}).memory
    assert rested.ages(0).tolist() == [5, 4, 3, 2, 1]
    assert rested.ages(1).tolist() == [8, 7, 6, 5, 4]
    ran = made(ids[:, 10:12], rested).memory
    assert ran.ages(1).tolist() == [8, 7, 6, 2, 1]  # three old ones behind a gap of three tokens


@pytest.mark.parametrize("position", POSITIONS)
def test_a_layer_that_rests_is_the_identity_and_keeps_its_memory(position: str) -> None:
    made, ids = model(position), text()
    memory = made(ids[:, :6]).memory
    called: list[int] = []
    for i, block in enumerate(made.blocks):
        for part in block.modules():
            part.register_forward_hook(lambda *_, i=i: called.append(i))
    out = made(ids[:, 6:10], memory, skip={0, 2})
    assert set(called) == {1}
    assert out.memory.layers[0].hidden is memory.layers[0].hidden
    assert out.memory.layers[2].hidden is memory.layers[2].hidden
    everything = made(ids[:, 6:10], memory, skip=range(LAYERS))
    x = made.position(made.embedding(ids[:, 6:10]), torch.arange(6, 10))
    assert torch.equal(everything.logits, made.output(made.final_norm(x)))
    out.logits.sum().backward()
    assert all(p.grad is None for p in made.blocks[0].parameters())
    assert all(p.grad is not None for p in made.blocks[1].parameters())


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("position", ["relative", "rotary", "sinusoidal"])
@pytest.mark.parametrize("memory_length", [3, 4, 9])
def test_positions_follow_the_true_ages(position: str, kernel: str, memory_length: int, cached: bool) -> None:
    """Scripted rests: the layer alone, fed with the inputs it had and the positions of the tokens it remembers."""
    made, ids = model(position, memory_length=memory_length, layers=2, norm="post"), text(2, 24)
    script = [set(), {1}, set(), {1}, {1}, set()]
    memory, remembered = None, [(torch.empty(2, 0, E), []), (torch.empty(2, 0, E), [])]
    for step, skip in enumerate(script):
        places = list(range(4 * step, 4 * step + 4))
        part = ids[:, places[0] : places[-1] + 1]
        with fr.kernel(kernel), torch.no_grad() if cached else torch.enable_grad():
            out = made(part, memory, skip=skip)
        memory = out.memory
        x = made.position(made.embedding(part), torch.tensor(places))
        for i, block in enumerate(made.blocks):
            if i in skip:
                continue
            hidden, old = remembered[i]
            keys = torch.tensor(old + places)
            layout = fr.Layout(torch.tensor(places), keys, farthest=int(keys.max() - keys.min()))
            joined = torch.cat((hidden.double(), x), dim=1)
            with fr.kernel("reference"):
                before, x = x, block.feed_forward_norm(_ff(block, _att(block, x, joined, layout)))
            remembered[i] = (
                torch.cat((hidden.double(), before), dim=1)[:, -memory_length:],
                (old + places)[-memory_length:],
            )
        assert (out.logits - made.output(made.final_norm(x))).abs().max() < 1e-10, step
        for i, (_, places_known) in enumerate(remembered):
            assert memory.ages(i).tolist() == [4 * step + 4 - place for place in places_known]


def _att(block: Any, x: Tensor, joined: Tensor, layout: fr.Layout) -> Tensor:
    return block.attention_norm(x + block.attention(x, joined, layout))


def _ff(block: Any, x: Tensor) -> Tensor:
    return x + block.feed_forward(x)


def test_rests_with_texts_of_different_lengths() -> None:
    made = model("relative", memory_length=4, layers=2)
    script = [(), (1,), (), (1,), ()]
    rows, sizes = [text(1, 15, 5)[0], text(1, 15, 6)[0]], [[3, 2, 3, 1, 3], [2, 3, 1, 3, 3]]
    alone = []
    for row, each in zip(rows, sizes, strict=True):
        memory, parts, at = None, [], 0
        for size, skip in zip(each, script, strict=True):
            out = made(row[None, at : at + size], memory, skip=skip)
            memory, at = out.memory, at + size
            parts.append(out.logits[0])
        alone.append(torch.cat(parts))
    memory, at, found = None, [0, 0], [[], []]
    for step, skip in enumerate(script):
        ids, mask = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool)
        for r in range(2):
            size = sizes[r][step]
            ids[r, :size], mask[r, :size] = rows[r][at[r] : at[r] + size], True
            at[r] += size
        out = made(ids, memory, skip=skip, attention_mask=mask)
        memory = out.memory
        for r in range(2):
            found[r].append(out.logits[r][mask[r]])
    for r in range(2):
        assert (torch.cat(found[r]) - alone[r]).abs().max() < 1e-10


def test_drifting_labels_are_the_released_ones() -> None:
    """The gap of a layer is as many segments as it ever rested, also after it ran again (facts about the released code)."""
    made, ids = model("relative", memory_length=4, layers=2, norm="post"), text(1, 24)
    memory = None
    for step, skip in enumerate([(), (1,), (), (1,), ()]):
        part = ids[:, 4 * step : 4 * step + 4]
        before = memory
        out = made.hidden(part, memory, skip=skip, drifting=True)
        memory = out.memory
    # the last step, layer 1: it rested twice, so its memory is labelled 8 tokens farther than it is
    x = made.blocks[0](made.embedding(part), fr.Layout.of_runs(4, ((12, 4), (16, 4))), None, before.layers[0].hidden)
    layout = fr.Layout.of_runs(4, ((16 - 8 - 4, 4), (16, 4)))
    expected = made.blocks[1](x, layout, None, before.layers[1].hidden)
    assert (out.hidden - expected).abs().max() < 1e-12
    true = made.hidden(part, before)
    assert (true.hidden - expected).abs().max() > 1e-3


def test_a_memory_of_zeros_is_attended() -> None:
    made, ids = model("relative", memory_start="zeros", norm="post", bias=False), text()
    empty = model("relative", norm="post", bias=False)
    found = made(ids[:, :4]).logits
    assert (found - empty(ids[:, :4]).logits).abs().max() > 1e-3
    x = made.embedding(ids[:, :4])
    layout = fr.Layout.of_runs(4, ((-5, 5), (0, 4)))
    for block in made.blocks:
        x = block(x, layout, None, torch.zeros(2, 5, E, dtype=torch.float64))
    assert (found - made.output(x)).abs().max() < 1e-12


def test_tensors_of_a_memory_are_the_memory() -> None:
    made, ids = model("relative", memory_length=7), text()
    memory = in_segments(made, ids, [4, 3])[1]
    memory = made(ids[:, 7:9], memory, skip={1}).memory
    memory = made(ids[:, 9:11], memory).memory
    back = Memory.from_tensors({name: tensor.clone() for name, tensor in memory.to_tensors().items()})
    assert [layer.runs for layer in back.layers] == [layer.runs for layer in memory.layers]
    assert torch.equal(made(ids[:, 11:15], back).logits, made(ids[:, 11:15], memory).logits)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    ragged = made(ids[:, :3], attention_mask=mask).memory
    back = Memory.from_tensors(ragged.to_tensors())
    assert torch.equal(made(ids[:, 3:6], back).logits, made(ids[:, 3:6], ragged).logits)
    assert Memory.from_tensors(Memory.empty(3).to_tensors()) == Memory.empty(3)


def test_rows_of_a_memory_can_be_chosen() -> None:
    made, ids = model("relative"), text(3)
    index = torch.tensor([2, 0, 0])
    for cached in (False, True):
        with torch.no_grad() if cached else torch.enable_grad():
            memory = made(ids[:, :6]).memory
            found = made(ids[index, 6:9], memory.reorder(index)).logits
            assert (found - made(ids[:, 6:9], memory).logits[index]).abs().max() < 1e-12


def test_other_lengths_at_evaluation() -> None:
    made, ids = model("relative", memory_length=3), text()
    sizes = [4, 5, 6]
    before = in_segments(made, ids, sizes)[0]
    with made.remembers(8):
        assert (in_segments(made, ids, sizes)[0] - one_pass(made, ids[:, :15], sizes, 8)).abs().max() < 1e-10
    with made.remembers(6, same_length=True):
        expected = one_pass(made, ids[:, :15], sizes, 6, same_length=True)
        assert (in_segments(made, ids, sizes)[0] - expected).abs().max() < 1e-10
    with made.remembers(0):
        assert made(ids[:, :4]).memory is None
    with made.remembers(8, clamp_length=4):
        other = fr.LanguageModel(
            replace(
                made.config,
                memory_length=8,
                attention=replace(made.config.attention, score={"name": "relative", "clamp_length": 4}),
            )
        )
        other.double().eval().load_state_dict(made.state_dict())
        clamped = in_segments(made, ids, sizes)[0]
        assert torch.equal(clamped, in_segments(other, ids, sizes)[0])
        assert (clamped - before).abs().max() > 1e-3
    assert torch.equal(in_segments(made, ids, sizes)[0], before)
    longer = in_segments(made, ids, sizes)[1]
    with made.remembers(2):  # of a longer memory, the last tokens are used
        short = in_segments(made, ids, sizes)[1]
        after = [layer.last(2) for layer in longer.layers]
        assert torch.equal(
            made(ids[:, 15:], longer).logits, made(ids[:, 15:], replace(longer, layers=tuple(after))).logits
        )
        assert short.layers[0].tokens == 2
        assert made(ids[:, 15:], longer).memory.layers[0].tokens == 2


def test_load_with_other_lengths(tmp_path: Any) -> None:
    made, ids = model("relative", memory_length=3), text()
    made.save(tmp_path)
    loaded = fr.LanguageModel.load(tmp_path, memory_length=6, same_length=True, clamp_length=5)
    with made.remembers(6, same_length=True, clamp_length=5):
        assert torch.equal(in_segments(loaded, ids, [5, 6])[0], in_segments(made, ids, [5, 6])[0])
    assert fr.LanguageModel.load(tmp_path).memory_length == 3
    loaded.save(tmp_path / "again")
    again = fr.LanguageModel.load(tmp_path / "again")
    assert (again.memory_length, again.same_length) == (6, True)
    assert torch.equal(in_segments(again, ids, [5, 6])[0], in_segments(loaded, ids, [5, 6])[0])
    without = fr.LanguageModel.load(tmp_path / "again", memory_length=0)
    assert (without.memory_length, without.same_length) == (0, False)
    with pytest.raises(InputError, match="memory_length"):
        fr.LanguageModel.load(tmp_path, memory_length=-1)
    rotary = model("rotary")
    rotary.save(tmp_path / "rotary")
    with pytest.raises(InputError, match=r"clamp_length: goes with model\.position: relative"):
        fr.LanguageModel.load(tmp_path / "rotary", clamp_length=5)


def test_learned_positions_end() -> None:
    made, ids = model("learned", memory_length=4), text(1, 66)
    memory = in_segments(made, ids, [32, 32])[1]
    with pytest.raises(InputError, match="max_position_embeddings is 64"):
        made(ids[:, 64:], memory)


def test_misuse() -> None:
    made, ids = model(), text()
    memory = made(ids[:, :4]).memory
    with pytest.raises(InputError, match="of 2 texts, input_ids of 3"):
        made(text(3, 4), memory)
    with pytest.raises(InputError, match="of 3 layers, the model has 2"):
        model(layers=2)(ids, memory)
    with pytest.raises(InputError, match=r"skip: layers 0 to 2, given \[3\]"):
        made(ids, skip={1, 3})
    with pytest.raises(InputError, match="give no memory and no skip"):
        made(ids, memory, cache=made.new_cache())
    with pytest.raises(InputError, match=r"model\.memory_length is 0"):
        model(memory_length=0)(ids, memory)
    with pytest.raises(InputError, match=r"attention_mask must be \(2, 19\)"):
        made(ids, attention_mask=torch.ones(2, 3))
    with pytest.raises(InputError, match="same_length: goes with a memory"), made.remembers(0, same_length=True):
        pass
    with (
        pytest.raises(InputError, match=r"clamp_length: .* model\.position: sinusoidal"),
        made.remembers(clamp_length=3),
    ):
        pass
    for length in (-1, 1.5, True):
        with pytest.raises(InputError, match=f"zero or more tokens, given {length}"), made.remembers(length):
            pass
    with (
        pytest.raises(InputError, match=r"clamp_length: .* given 2\.5"),
        model("relative").remembers(clamp_length=2.5),  # type: ignore[arg-type]
    ):
        pass
    with pytest.raises(InputError, match=r"skip: layers 0 to 2, given \[True, False\]"):
        made(ids, skip=[True, False])  # which layers, not whether they rest
    with pytest.raises(InputError, match="hidden_size 24, this one has 12"):
        made(ids, replace(memory, layers=tuple(_twice_as_wide(layer) for layer in memory.layers)))


def _twice_as_wide(layer: Any) -> Any:
    return replace(layer, hidden=layer.hidden.repeat(1, 1, 2))


def test_without_memory_a_layer_may_rest_too() -> None:
    made, ids = model("rotary", memory_length=0), text()
    x = made.embedding(ids)
    x = made.blocks[1](x, fr.Layout.of(19))
    assert torch.equal(made(ids, skip={0, 2}).logits, made.output(made.final_norm(x)))


def test_the_cost_of_a_memory() -> None:
    """A query sees M keys more, 4 H D multiply-adds each; a training step projects M keys and values a layer again."""
    from fullrank.model.size import size

    n, m, layers, width, heads, head_dim = 6, 9, 2, 12, 3, 5
    sizes = {
        "vocab_size": 20,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
    }
    plain, found = (size(fr.ModelConfig(**sizes, memory_length=length), n) for length in (0, m))
    forward = plain["flops_per_token"]["forward"] + layers * 4 * heads * head_dim * m
    assert found["flops_per_token"]["forward"] == forward
    again = layers * 2 * 2 * width * heads * head_dim * m // n
    assert found["flops_per_token"]["training"] == 3 * (forward + again)
    assert found["bytes"]["memory_per_text_fp32"] == 4 * layers * m * width
    assert plain["bytes"]["memory_per_text_fp32"] == 0
    window = size(fr.ModelConfig(**sizes, memory_length=m, same_length=True), n)["flops_per_token"]["forward"]
    assert forward - window == round(layers * 4 * heads * head_dim * (n + 1) / 2)


def test_cached_keys_of_distances_are_not_used_where_distances_are_clamped_otherwise() -> None:
    made, ids = model("relative"), text()
    with torch.no_grad():
        cached = made(ids[:, :8]).memory
        cache = made(ids[:, :8], cache=made.new_cache()).cache
        with made.remembers(clamp_length=2):
            found = made(ids[:, 8:12], cached).logits
            want = made(ids[:, 8:12], without_heads(cached)).logits
            beside = made(ids[:, 8:12], cache=cache).logits
            whole = made(
                ids[:, 8:12], cache=replace(cache, layers=tuple(kv._replace(relative=None) for kv in cache.layers))
            )
        there = made(ids[:, 8:12], cached).logits
        back = made(ids[:, 8:12], without_heads(cached)).logits
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(there, back, rtol=0, atol=1e-12)
    torch.testing.assert_close(beside, whole.logits, rtol=0, atol=1e-12)
    assert (want - back).abs().max() > 1e-3


def test_a_memory_of_an_evaluation_does_not_end_the_dropout_of_distances() -> None:
    made, ids = model("relative", dropout=fr.DropoutConfig(embedding=0.5)), text()
    with torch.no_grad():
        cached = made(ids[:, :8]).memory
    made.train()
    found = []
    for memory in (cached, without_heads(cached)):
        torch.manual_seed(3)
        found.append(made(ids[:, 8:12], memory).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("cached", [True, False])
def test_a_memory_of_another_precision(position: str, cached: bool) -> None:
    made, ids = model(position), text()
    with torch.no_grad():
        low = copy.deepcopy(made).float()
        memory = low(ids[:, :8]).memory
        want = made(ids[:, 8:12], made(ids[:, :8]).memory).logits
    with torch.set_grad_enabled(not cached):
        torch.testing.assert_close(made(ids[:, 8:12], memory).logits, want, rtol=0, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            low(ids[:, 8:12], memory)
            memory = low(ids[:, :8]).memory
        low(ids[:, 8:12], memory)


@pytest.mark.parametrize("masked", [True, False])
def test_a_memory_made_in_inference_mode_can_be_trained_after(masked: bool) -> None:
    made, ids = model("relative"), text()
    more = {"attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])} if masked else {}
    with torch.inference_mode():
        memory = made(ids[:, :4], **more).memory
    gradients = []
    for before in (memory, made(ids[:, :4], **more).memory):
        made.zero_grad()
        made.loss(ids[:, 4:8], ids[:, 5:9], memory=before, **more).backward()
        gradients.append([p.grad.clone() for p in made.parameters() if p.grad is not None])
    for found, want in zip(*gradients, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


def test_cached_keys_of_one_model_are_not_used_by_another() -> None:
    made, other, ids = model("rotary"), model("rotary", seed=1), text()
    with torch.no_grad():
        memory = made(ids[:, :8]).memory
        found = other(ids[:, 8:12], memory).logits
        assert torch.equal(found, other(ids[:, 8:12], without_heads(memory)).logits)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("masked", [True, False])
def test_a_segment_of_no_tokens_changes_nothing(position: str, masked: bool) -> None:
    made, ids = model(position), text()
    nothing = {"attention_mask": torch.ones(2, 0, dtype=torch.bool)} if masked else {}
    with torch.no_grad():
        begun = made(ids[:, :0], **nothing)
        first = made(ids[:, :8], begun.memory)
        between = made(ids[:, 8:8], first.memory, **nothing)
        assert begun.logits.shape == between.logits.shape == (2, 0, V)
        assert torch.equal(made(ids[:, 8:12], between.memory).logits, made(ids[:, 8:12], first.memory).logits)
        assert torch.equal(first.logits, made(ids[:, :8]).logits)
        cache = made(ids[:, :0], cache=made.new_cache()).cache
        cache = made(ids[:, 8:8], cache=made(ids[:, :8], cache=cache).cache).cache
        assert torch.equal(
            made(ids[:, 8:12], cache=cache).logits,
            made(ids[:, 8:12], cache=made(ids[:, :8], cache=made.new_cache()).cache).logits,
        )


def without_heads(memory: Memory) -> Memory:
    """Nothing projected: keys and values are made anew from the hidden states."""
    return Memory.from_tensors(memory.to_tensors())


@pytest.mark.parametrize("position", ["relative", "rotary"])
def test_no_texts_and_a_cache_of_another_precision(position: str) -> None:
    made, ids = model(position), text()
    assert made(ids[:0]).logits.shape == (0, 19, V)
    assert made(ids[:0], made(ids[:0]).memory).logits.shape == (0, 19, V)
    with torch.no_grad():
        expected = made(ids[:, 6:9], cache=made(ids[:, :6], cache=made.new_cache()).cache).logits
        cache = made.float()(ids[:, :6], cache=made.new_cache()).cache
        found = made.double()(ids[:, 6:9], cache=cache).logits
    assert (found - expected).abs().max() < 1e-4
