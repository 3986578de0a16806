"""Heads: ablation against zeroed columns of the output projection, intervals, and the similarity of outputs."""

import contextlib
import math

import numpy as np
import pytest
import torch
from scipy import stats

import fullrank as fr
from fullrank.analysis.heads import Heads, LayerHeads, compare_deviations, heads
from fullrank.core.errors import InputError
from moving import moved, narrow

IDS = torch.randint(3, 49, (4, 9), generator=torch.Generator().manual_seed(0))
HEADS, SIZE = 3, 8
SIZES = {"vocab_size": 50, "hidden_size": 24, "num_attention_heads": HEADS}


def nats(model):
    """Nats per token of each text, from logits."""
    log_p = model(IDS[:, :-1]).logits.log_softmax(-1)
    return -log_p.gather(-1, IDS[:, 1:, None]).mean((1, 2)).detach().numpy()


@contextlib.contextmanager
def zeroed(weights):
    """A context in which a part of the output projection, that of a head, is zero."""
    values = weights.detach().clone()
    with torch.no_grad():
        weights.zero_()
        yield
        weights.copy_(values)


@pytest.mark.parametrize("mix", ["none", "position_independent", "position_wise", "average", "low_rank", "dynamic"])
def test_ablation_is_a_zeroed_output_projection(mix):
    model = narrow(**SIZES, attention={"mix": mix}).train()
    ablation = heads(model, [IDS[:1], IDS[1:]])
    assert model.training
    assert (ablation.objective, ablation.length, ablation.weights) == ("next tokens", 9, "by the definition")
    model.eval()
    base = nats(model)
    np.testing.assert_allclose(ablation.nll, base, atol=1e-10)
    assert ablation.perplexity == pytest.approx(math.exp(base.mean()), abs=1e-10)
    for block, layer in zip(model.blocks, ablation.layers, strict=True):
        for head in range(HEADS):
            with zeroed(block.attention.merge.weight.data[:, head * SIZE : (head + 1) * SIZE]):
                expected = nats(model)
            np.testing.assert_allclose(layer.nll[head], expected, atol=1e-10)
            change = math.exp(expected.mean()) - math.exp(base.mean())
            assert layer.change[head] == pytest.approx(change, abs=1e-10)
            interval = stats.ttest_1samp(expected - base, 0).confidence_interval(0.95)
            ends = [math.exp(base.mean() + end) - math.exp(base.mean()) for end in interval]
            assert [*layer.intervals[head]] == pytest.approx(ends, abs=1e-8)
    assert fr.analysis.heads(model, IDS).nll == pytest.approx(ablation.nll)  # nothing stays ablated


def test_memory_is_read_from_segment_to_segment():
    """The texts are one stream, and a memory as long as the stream forgets nothing."""
    model = narrow(**SIZES, memory_length=40, position="relative", attention={"score": "relative"})
    ablation = heads(model, IDS)
    assert ablation.objective == "next tokens, with memory"
    stream = IDS.flatten()[None]
    log_p = model.with_memory(0)(stream[:, :-1]).logits.log_softmax(-1)
    per_token = -log_p.gather(-1, stream[:, 1:, None])[0, :, 0].detach()
    np.testing.assert_allclose(ablation.nll, [part.mean() for part in per_token.split(9)], atol=1e-10)
    assert fr.analysis.spectrum(model, IDS).texts == 4


def test_encoders_predict_the_same_masked_tokens_for_every_head():
    model = narrow(fr.MaskedLanguageModel, **SIZES)
    loaded = fr.open_model(model)
    loaded.marks = (int(IDS[0, 0]),)
    ablation = heads(loaded, IDS)
    assert ablation.objective == "1 masked tokens a text"
    candidates = []  # one of nine tokens is masked: whichever it is, its nats are among these
    for position in range(9):
        read = IDS.clone()
        read[:, position] = model.mask_id
        log_p = model(read).logits.log_softmax(-1)
        candidates.append(-log_p[:, position].gather(-1, IDS[:, position, None])[:, 0].detach())
    differences = (torch.stack(candidates, 1) - torch.from_numpy(ablation.nll)[:, None]).abs()
    assert differences.min(1).values.max() < 1e-10
    assert not (IDS.gather(1, differences.argmin(1)[:, None]) == IDS[0, 0]).any()


def test_models_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    gpt2 = transformers.GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3)
    model = moved(transformers.GPT2LMHeadModel(gpt2).double()).eval()

    def measured():
        log_p = model(IDS).logits.log_softmax(-1)[:, :-1]
        return -log_p.gather(-1, IDS[:, 1:, None]).mean((1, 2)).detach().numpy()

    def check(ablation):
        np.testing.assert_allclose(ablation.nll, measured(), atol=1e-10)
        for block, layer in zip(model.transformer.h, ablation.layers, strict=True):
            for head in range(HEADS):
                with zeroed(block.attn.c_proj.weight.data[head * SIZE : (head + 1) * SIZE]):  # (in, out)
                    np.testing.assert_allclose(layer.nll[head], measured(), atol=1e-10)

    ablation = heads(model, IDS)
    assert ablation.weights == "explicitly, by the model's own attention"
    check(ablation)
    fr.inject(model, cross_head=0.5)  # which acts in training only
    check(heads(model, IDS))
    fr.remove(model)
    moved(fr.inject(model, mix="position_wise", layers=[1]))
    ablation = heads(model, IDS)
    assert ablation.weights.endswith("with what was injected")
    check(ablation)
    spectra = fr.analysis.spectrum(model, IDS).layers
    assert [layer.after is layer.before for layer in spectra] == [True, False]
    assert "fullrank" not in dict(model.transformer.h[0].attn.named_children())


def test_similarity_is_linear_cka():
    """The second head is made a turned copy of the first, the third is another one."""
    model = narrow(**SIZES)
    project = model.blocks[0].attention.project
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64)).Q
    with torch.no_grad():
        for layer in (project.query, project.key):
            layer.weight[SIZE : 2 * SIZE], layer.bias[SIZE : 2 * SIZE] = layer.weight[:SIZE], layer.bias[:SIZE]
        values = project.value
        values.weight[SIZE : 2 * SIZE] = 2 * turn @ values.weight[:SIZE]
        values.bias[SIZE : 2 * SIZE] = 2 * turn @ values.bias[:SIZE]
    first_layer = heads(model, IDS).layers[0]
    assert first_layer.similarity[0, 1] == pytest.approx(1, abs=1e-10)
    inputs = []
    model.blocks[0].attention.merge.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(IDS)
    outputs = inputs[0].detach().flatten(0, 1).unflatten(1, (HEADS, SIZE)).numpy()
    x, y = (outputs[:, head] - outputs[:, head].mean(0) for head in (0, 2))
    cka = np.linalg.norm(x.T @ y) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    assert first_layer.similarity[0, 2] == pytest.approx(cka, abs=1e-10)
    np.testing.assert_allclose(first_layer.similarity.diagonal(), 1)
    assert first_layer.redundancy == pytest.approx(
        (1 + first_layer.similarity[0, 2] + first_layer.similarity[1, 2]) / 3
    )


def table3(changes):
    layer = LayerHeads(np.zeros((8, 1)), np.array(changes.split(), float), (None,) * 8, np.eye(8))
    return Heads((layer,), np.zeros(1), "", 1, "")


def test_deviations_of_the_papers_table():
    """Skip Cross-head Table 3: layers 1, 5 and 6 as printed; deviations to two digits."""
    rows = (
        ("-.01 -.01 -.01 .77 -.01 -.01 -.01 -.01", "0 -.02 -.01 -.01 0 -.01 -.02 -.01", (0.28, 0.008), -97.1),
        (".56 .46 .39 .34 .23 .32 .53 .99", ".15 .16 .18 .21 .09 .15 .16 .29", (0.23, 0.06), -73.9),
        (".19 .47 .31 .36 .61 .46 .51 .24", ".17 .17 .15 .07 .31 .17 .27 .19", (0.14, 0.07), -50),
    )
    for first, second, deviations, change in rows:
        a, b = table3(first), table3(second)
        assert a.layers[0].deviation == pytest.approx(deviations[0], abs=0.006)
        assert b.layers[0].deviation == pytest.approx(deviations[1], abs=0.006)
        records = [[fr.Record({"layer": 0}, "deviation", ablation.layers[0].deviation)] for ablation in (a, b)]
        (compared,) = compare_deviations(*records)
        assert compared.value == pytest.approx(change, abs=3)


@pytest.mark.parametrize(("shape", "message"), [((0, 9), r"input_ids: \(B, N\)"), ((2, 1), "two tokens or more")])
def test_no_text(shape, message):
    with pytest.raises(InputError, match=message):
        heads(narrow(**SIZES), torch.zeros(shape, dtype=torch.int64))
