"""The softmax bottleneck: rank of log-probabilities against numpy, its bounds, and the gradient that is let through."""

import copy

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import fullrank as fr
import hugging_face_models as tiny
from fullrank.analysis import gradient_share
from fullrank.core.errors import InputError
from moving import moved

V = 47


def random_model(output, *, width=8, final_norm=False, **model):
    """A model of one layer whose every parameter was moved, so that nothing is zero or equal by its start."""
    config = fr.ModelConfig(
        vocab_size=V, hidden_size=width, num_hidden_layers=1, num_attention_heads=2, final_norm=final_norm,
        output=fr.OutputConfig(**output), **model,
    )  # fmt: skip
    return moved(fr.LanguageModel(config), 0.5)


def ids(rows=6, length=12, vocab_size=V):
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))


def log_probs(model, input_ids, contexts):
    """Contexts by words in double precision, context by context: one forward pass for every prefix that is new."""
    model = copy.deepcopy(model).double().eval()
    rows = []
    seen = []
    for row in input_ids.tolist():
        for end in range(1, len(row) + 1):
            if row[:end] not in seen and len(rows) < contexts:
                seen.append(row[:end])
                with torch.no_grad():
                    logits = model(torch.tensor([row[:end]])).logits[0, -1]
                rows.append(torch.log_softmax(logits, dim=-1).numpy())
    return np.stack(rows)


@pytest.mark.parametrize(
    ("width", "tied", "bias"), [(6, False, False), (8, True, True), (10, False, True), (10, True, False)]
)
def test_a_softmax_has_rank_d_plus_1_and_with_a_bias_d_plus_2(width, tied, bias):
    report = fr.analysis.rank(random_model({"tied": tied, "bias": bias}, width=width), ids())
    assert report.rank == report.layer.bound == width + 1 + bias
    assert report.layer.exempt is None
    assert report.contexts == 2 * (width + 2) + 32
    assert (report.columns, report.vocab_size) == (V, V)
    assert report.conclusive


@pytest.mark.parametrize("bias", [False, True])
def test_after_a_layer_norm_a_bias_adds_nothing(bias):
    """H = N G + 1 beta' with N 1 = 0: d - 1 dimensions, W beta + b, and the normaliser."""
    report = fr.analysis.rank(random_model({"bias": bias}, final_norm=True), ids())
    assert report.rank == 8 + 1
    assert report.layer.bound == 8 + 1 + bias


@pytest.mark.parametrize("div_val", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_an_adaptive_softmax_has_a_normaliser_for_every_cluster(div_val, bias):
    output = {"kind": "adaptive", "cutoffs": [15, 30], "div_val": div_val, "bias": bias}
    report = fr.analysis.rank(random_model(output), ids(), contexts=60)
    assert report.rank == report.layer.bound == 8 + 3 + bias


ESCAPES = {
    "mixture of 3 softmaxes": ({"kind": "mixture_of_softmaxes", "mixtures": 3}, "sum of softmaxes"),
    "sigsoftmax": ({"normalize": "sigsoftmax"}, "log sigmoid"),
    "adaptive sigsoftmax": ({"kind": "adaptive", "cutoffs": [15, 30], "normalize": "sigsoftmax"}, "log sigmoid"),
    "mixture of 2 sigsoftmaxes": (
        {"kind": "mixture_of_softmaxes", "mixtures": 2, "normalize": "sigsoftmax"},
        "sum of softmaxes",
    ),
    "sigsoftmax of a latent state": (
        {"kind": "mixture_of_softmaxes", "mixtures": 1, "normalize": "sigsoftmax"},
        "log sigmoid",
    ),
}


@pytest.mark.parametrize(("kind", "contexts"), [(kind, (33, 60)[i % 2]) for i, kind in enumerate(ESCAPES)])
def test_what_escapes_the_bound_has_as_many_dimensions_as_can_be_seen(kind, contexts):
    output, why = ESCAPES[kind]
    report = fr.analysis.rank(random_model(output), ids(), contexts=contexts)
    assert report.layer.kind == kind
    assert why in report.layer.exempt
    assert report.layer.bound == 8 + (4 if report.layer.clusters == 3 else 2)
    assert report.rank == min(contexts, V)


@pytest.mark.parametrize("output", [{}, {"kind": "mixture_of_softmaxes", "mixtures": 2}])
@pytest.mark.parametrize("contexts", [30, 60])  # a wide matrix and a long one
def test_figures_are_those_of_numpy(output, contexts):
    model = random_model(output, memory_length=5)
    report = fr.analysis.rank(model, ids(), contexts=contexts)
    matrix = log_probs(model, ids(), contexts)
    expected = np.linalg.svd(matrix, compute_uv=False)
    assert matrix.shape == (report.contexts, report.columns) == (contexts, V)
    np.testing.assert_allclose(report.singular_values, expected, rtol=0, atol=1e-12 * expected[0])
    assert report.rank == np.linalg.matrix_rank(matrix)
    assert report.tolerance == pytest.approx(expected[0] * max(contexts, V) * 2.0**-52, rel=1e-12)
    shares = expected / expected.sum()
    assert report.effective_rank == pytest.approx(np.exp(-sum(q * np.log(q) for q in shares if q > 0)), rel=1e-6)


def test_contexts_are_not_taken_twice():
    """Rows of one text: their beginnings are shared, and a repeated context would be a repeated row of the matrix."""
    twice = ids(4, 9)
    twice[1, :5] = twice[0, :5]
    twice = torch.cat([twice, twice])
    report = fr.analysis.rank(random_model({}), twice, contexts=1000)
    assert report.contexts == 4 * 9 - 5
    assert report.repeats == 4 * 9 + 5
    in_parts = fr.analysis.rank(random_model({}), iter([twice[:3], twice[3:]]), contexts=1000)
    assert (in_parts.contexts, in_parts.repeats) == (4 * 9 - 5, 4 * 9 + 5)


def test_a_part_of_the_vocabulary():
    """12 contexts of 47 words are 4,512 bytes. The 20 columns that fit are those of the whole matrix, with its normaliser."""
    model = random_model({"kind": "mixture_of_softmaxes", "mixtures": 2})
    matrix = log_probs(model, ids(), 12)
    report = fr.analysis.rank(model, ids(), contexts=12, most_bytes=20 * 12 * 8 + 7)
    assert (report.contexts, report.columns, report.vocab_size) == (12, 20, V)
    repeated = fr.analysis.rank(model, ids(), contexts=12, most_bytes=20 * 12 * 8 + 7)
    other = fr.analysis.rank(model, ids(), contexts=12, most_bytes=20 * 12 * 8 + 7, seed=1)
    assert (report.singular_values == repeated.singular_values).all()
    assert not np.allclose(report.singular_values, other.singular_values)
    drawn = torch.randperm(V, generator=torch.Generator().manual_seed(0))[:20].tolist()
    expected = np.linalg.svd(matrix[:, drawn], compute_uv=False)
    np.testing.assert_allclose(report.singular_values, expected, rtol=0, atol=1e-12 * expected[0])
    assert fr.analysis.rank(model, ids(), contexts=12, most_bytes=1).columns == 12  # never fewer words than contexts
    assert fr.analysis.rank(model, ids(), contexts=12, most_bytes=8 * 12 * V).columns == V


FOREIGN = torch.randint(tiny.VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(3))


def test_a_head_without_bias():
    for model in (tiny.gpt2(), tiny.llama(), tiny.llama(tie_word_embeddings=True), tiny.gemma2(cap=None)):
        report = fr.analysis.rank(model, FOREIGN)
        assert (report.rank, report.layer.bound, report.layer.exempt) == (9, 9, None), type(model)
        assert report.contexts == 2 * 10 + 32
        assert report.eps == 2.0**-52


def test_a_head_with_bias():
    """After a LayerNorm it adds nothing, after an RMSNorm one dimension."""
    after_layer_norm = fr.analysis.rank(tiny.gptj(), FOREIGN)
    assert (after_layer_norm.rank, after_layer_norm.layer.bound) == (9, 10)
    model = tiny.llama()
    model.lm_head = nn.Linear(tiny.WIDTH, tiny.VOCABULARY)
    report = fr.analysis.rank(model, FOREIGN)
    assert (report.rank, report.layer.bound, report.layer.bias) == (10, 10, True)


def test_a_soft_cap_is_exempt_and_escapes():
    for cap in (30.0, 2.0):
        report = fr.analysis.rank(tiny.gemma2(cap), FOREIGN, contexts=30)
        assert "soft-cap" in str(report.layer.exempt)
        assert report.layer.bound == 9
        assert report.rank == 30


@pytest.mark.parametrize("family", ["ours", "bert"])
def test_a_model_of_masked_tokens_has_no_contexts(family):
    if family == "ours":
        model = fr.MaskedLanguageModel(random_model({}).config)
    else:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=V, **sizes))
    with pytest.raises(InputError, match="rank: give a causal model"):
        fr.analysis.rank(model, ids())


@pytest.mark.parametrize("given", [ids().float(), [ids().tolist()], ["a text"]])
def test_what_is_no_tensor_of_token_ids_is_refused(given):
    with pytest.raises(InputError, match=r"input_ids: .*\(B, N\)"):
        fr.analysis.rank(random_model({}), given)


TARGETS = torch.where(torch.rand(8, 12, generator=torch.Generator().manual_seed(1)) < 0.3, -100, FOREIGN.roll(-1, 1))


@pytest.mark.parametrize("family", ["ours", "gpt2", "llama"])
def test_the_share_is_that_of_a_projection(family):
    """The gradient of a softmax is p - 1[y]; W (W'W)^-1 W' projects it."""
    torch.manual_seed(1)
    if family == "ours":
        model = random_model({"bias": True})
    else:
        model = tiny.gpt2() if family == "gpt2" else tiny.llama()
    model = model.double().eval()
    ids = FOREIGN % V
    counts = TARGETS != -100
    targets = torch.where(counts, TARGETS % V, TARGETS)
    share = gradient_share(model, [(ids[:1], targets[:1]), (ids[1:], targets[1:])])
    with torch.no_grad():
        gradient = model(ids).logits[counts].softmax(-1)
        gradient[torch.arange(int(counts.sum())), targets[counts]] -= 1
        weight = model.output.weight if family == "ours" else model.get_output_embeddings().weight
        part = (gradient @ weight @ torch.linalg.pinv(weight)).square().sum()
    assert share == pytest.approx(float(part / gradient.square().sum()) ** 0.5, rel=1e-10)
