"""Every kernel computes what `reference` computes: outputs and all gradients under a random cotangent, at odd sizes."""

import copy
import functools
import itertools
from dataclasses import replace

import pytest
import torch

import combinations
import fullrank as fr
from closeness import all_close
from fullrank import kernels
from fullrank.core.attention import WeightedValues
from fullrank.core.stages import Heads, HeadSize, Matrices
from fullrank.kernels import KERNELS
from layouts import LAYOUTS
from moving import moved
from pairs import covering, product

H, D = 3, 5
PAIRED = {"differential": 4}  # heads of mixings that take them in pairs


# positions up to 23
NAMES = (
    "causal", "past", "one query", "padding", "past and padding", "gap of one", "window", "gaps and window", "cross",
    "cross, more queries", "cross and padding",
)  # fmt: skip


def stages(score, normalize, mix):
    config = fr.AttentionConfig(score=score, normalize=normalize, mix=mix)
    return moved(WeightedValues(config, head_size(mix), 0.0))


def head_size(mix):
    return HeadSize(PAIRED.get(mix, H), D, 17, 24)


def heads_for(attend, where, dtype):
    """Heads that the stages read, and their tensors by name."""
    queries, keys = where.shape
    generator = torch.Generator().manual_seed(8)
    count = attend.size.num_heads
    query, key = (2, count, queries, D), (2, count, keys, D)
    shapes = {"query": query, "scored": query, "keys": key, "values": key, "relative": (count, where.distances, D)}
    read = {"values", *attend.score.needs, *attend.mix.needs}
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for name, shape in shapes.items()
        if name in read
    }
    heads = Heads(**{name: tensors.get(name) for name in shapes})
    hidden = torch.randn(2, keys, 17, generator=generator).to(dtype).requires_grad_()
    notes = attend.remember(hidden, heads.scored)
    return replace(heads, notes=notes), tensors if notes[1] is None else {**tensors, "hidden": hidden}


def computed(attend, where, dtype, kernel):
    """Output and gradients by name."""
    heads, tensors = heads_for(attend, where, dtype)
    attend.zero_grad()
    with fr.kernel(kernel):
        out = attend(heads, where)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype))
    gradients = {f"gradient of {name}": x.grad for name, x in (tensors | dict(attend.named_parameters())).items()}
    return {"output": out.detach()} | {n: torch.zeros(()) if x is None else x for n, x in gradients.items()}


@functools.cache
def problem(score, normalize, mix, where):
    """The call as kernels see it; its numbers do not matter."""
    attend = WeightedValues(fr.AttentionConfig(score=score, normalize=normalize, mix=mix), head_size(mix), 0.0)
    heads, _ = heads_for(attend, LAYOUTS[where], torch.float32)
    mixing = attend.mix.compute_matrices(heads, heads.notes[1], LAYOUTS[where])
    return attend.problem(heads, LAYOUTS[where], Matrices(None), mixing)


def computes(row):
    """True if this kernel, or for "auto" one written by hand, computes the call; C++ is not compiled for the answer."""
    if row["mix"] == "dynamic" and row["where"].startswith("cross"):
        return False  # it reads the tokens of one text
    call = problem(row["score"], row["normalize"], row["mix"], row["where"])
    if isinstance(call, str):
        return False
    kernel = KERNELS["native" if row["kernel"] == "auto" else row["kernel"]]
    return kernel.declines(call) is None and (row["kernel"] != "sdpa" or kernel.refuses(call) is None)


SLOTS = {slot: combinations.slots()[slot] for slot in ("score", "normalize", "mix")}
SLOTS["mix"] = [mix for mix in SLOTS["mix"] if stages("dot_product", "softmax", mix).mix.reason is None]
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
CASES = covering(filter(computes, product(**SLOTS, where=NAMES, kernel=["sdpa", "native", "auto"], dtype=DTYPES)))


@pytest.mark.parametrize("row", CASES, ids=lambda row: "-".join(row.values()))
def test_equals_the_definition(row):
    dtype, where = DTYPES[row["dtype"]], LAYOUTS[row["where"]]
    attend = stages(row["score"], row["normalize"], row["mix"]).to(dtype)
    tensors = computed(attend, where, dtype, row["kernel"])
    single = 1e-5 if row["mix"] in PAIRED else 1e-6  # one number, lambda, collects the gradient of every weight
    all_close(tensors, computed(attend, where, dtype, "reference"), single if dtype == torch.float32 else 1e-13)


POSITION_TERM = {**combinations.MULTILINEAR, "score": "relative"}
WAYS = {**combinations.ATTENDS, "position term": POSITION_TERM}


@pytest.mark.parametrize(
    "row",
    covering(product(way=WAYS, where=NAMES, kernel=["multilinear", "auto"], dtype=DTYPES)),
    ids=lambda row: "-".join(row.values()),
)
def test_multilinear_equals_the_definition(row):
    dtype, where = DTYPES[row["dtype"]], LAYOUTS[row["where"]]

    def computed(kernel):
        torch.manual_seed(3)
        attention = fr.Attention(fr.AttentionConfig(**WAYS[row["way"]]), hidden_size=17, max_position_embeddings=24)
        attend = moved(attention.attend.to(dtype))
        queries, keys = where.shape
        generator = torch.Generator().manual_seed(8)
        heads = [torch.randn(2, 1, n, 5, generator=generator).to(dtype).requires_grad_() for n in (queries, keys, keys)]
        with fr.kernel(kernel):
            out = attend(Heads(heads[0], *heads), where)
        out.backward(torch.randn(out.shape, generator=generator).to(dtype))
        tensors = {"output": out.detach()} | {f"input {i}": x.grad for i, x in enumerate(heads)}
        tensors |= {name: parameter.grad for name, parameter in attend.named_parameters()}
        return {name: torch.zeros(()) if tensor is None else tensor for name, tensor in tensors.items()}

    all_close(computed(row["kernel"]), computed("reference"), 2e-6 if dtype == torch.float32 else 1e-13)


PAIRS = list(itertools.product(SLOTS["normalize"], SLOTS["mix"]))
TRITON = [
    (*PAIRS[i % len(PAIRS)], NAMES[i % len(NAMES)])
    for i in range(max(len(PAIRS), len(NAMES)))
    if stages("dot_product", *PAIRS[i % len(PAIRS)]).normalize.engine is not None
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests marked cuda run the compiled kernels")
@pytest.mark.parametrize(
    ("normalize", "mix", "where"),
    [pytest.param(*row, marks=pytest.mark.full if i % 4 else ()) for i, row in enumerate(TRITON)],
)
def test_triton_equals_the_definition(normalize, mix, where, monkeypatch):
    """In Triton's interpreter; the fp32 kernels beside the definition in fp64."""
    pytest.importorskip("triton")
    attend = stages("dot_product", normalize, mix)
    expected = computed(copy.deepcopy(attend).double(), LAYOUTS[where], torch.float64, "reference")
    reasons = []
    monkeypatch.setattr(
        kernels, "_fastest", lambda problem: reasons.append(KERNELS["triton"].reason(problem)) or "triton"
    )
    outcome = computed(attend, LAYOUTS[where], torch.float32, "auto")
    assert reasons == [None]
    tolerance = 1e-5 if mix in PAIRED else 2e-6  # one number, lambda, collects the gradient of every weight
    all_close({name: tensor.double() for name, tensor in outcome.items()}, expected, tolerance)
