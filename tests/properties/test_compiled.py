"""Compiled blocks equal eager ones, without a graph break.

The traced graph, and its gradients, run by eager kernels: code for it would take a C++ compiler and half a minute.
"""

import random
import sys

import pytest
import torch

import combinations
import fullrank as fr
from closeness import all_close
from combinations import LENGTH, WIDTH
from fullrank.core.attention import Block
from fullrank.training.device import find_blocks
from moving import moved, seed
from pairs import covering

# Dynamo asks every tensor for its gradient and hides the warnings of those that have none, but not from a filter that raises.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def everyday():
    """Few combinations that hold every choice of what a graph depends on, and every score of every way to attend."""
    slots = ("attend", "score", "normalize", "mix", "position", "norm", "activation", "gate")

    def choices(row):
        return {(slot, getattr(row, slot)) for slot in slots} | {(row.attend, row.score)}

    return covering(combinations.pairwise(), choices)


COMBINATIONS = everyday()


def find_mixed(score):
    """A combination with this score and position-wise mixing; without multi-token attention, which takes no memory."""
    mixed = (c for c in combinations.pairwise() if (c.mix, c.score) == ("position_wise", score))
    return next(mixed).but("mix_scores", "none")


def outputs(block, function, layout):
    seed(4)
    x = torch.randn(2, layout.shape[0], WIDTH).requires_grad_()
    out = function(x, layout)
    block.zero_grad()
    out.backward(torch.randn_like(out))
    return {"output": out.detach(), "x": x.grad} | {n: p.grad for n, p in block.named_parameters()}


def padded():
    mask = torch.arange(6) >= torch.tensor([[0], [2]])
    return fr.Layout.of(6, key_mask=mask)


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(row, id=str(row), marks=() if i < 1 else pytest.mark.full)
        for i, row in enumerate(COMBINATIONS)
        if row.position not in ("alibi", "t5")
    ],
)
def test_whole_graph_equals_eager(combination):
    """With padding. Weights without it, and positions that a model places in its layouts, are compiled in the models below."""
    torch._dynamo.reset()
    block = moved(Block(combination.config())).train()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for layout in [padded()] if combination.weighted else [fr.Layout.of(7), padded()]:
        all_close(outputs(block, compiled, layout), outputs(block, block, layout), 1e-6)


def test_the_whole_graph_of_a_model_of_documents():
    """A whole model is one graph, also where a token begins another document."""
    torch._dynamo.reset()
    model = find_mixed("dot_product").moved(position="rotary", document_token_id=3).eval()
    ids = combinations.tokens()
    ids[:, 2] = 3
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(ids).logits, model(ids).logits, atol=1e-6)


def test_an_exported_model_reads_texts_of_other_lengths():
    plain = combinations.Combination(**vars(find_mixed("dot_product")) | combinations.PLAIN)
    changes = {"output": "mixture_of_softmaxes", "mix": "none", "score": "relative", "attend": "multilinear"}
    for slot, choice in changes.items():
        model = plain.but("mix", "position_wise").but(slot, choice).moved(max_position_embeddings=99).eval()
        short, long = combinations.tokens(), combinations.tokens(length=60)
        exported = torch.export.export(model, (short,), dynamic_shapes=({1: torch.export.Dim.AUTO},)).module()
        torch.testing.assert_close(exported(long).logits, model(long).logits)


@pytest.mark.parametrize(
    "score", [pytest.param(s, marks=() if s == "relative" else pytest.mark.full) for s in combinations.slots()["score"]]
)
def test_the_losses_of_a_compiled_model_are_those_of_the_eager_one(score):
    """Blocks are compiled one by one and in place, as the training loop does; names of parameters stay."""
    torch._dynamo.reset()
    combination = find_mixed(score)
    eager, compiled = combination.moved(), combination.moved()
    for block in find_blocks(compiled):
        block.compile(backend="aot_eager")
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    losses = [model.loss(combinations.tokens(), combinations.tokens(seed=6)) for model in (eager, compiled)]
    sum(losses).backward()
    assert abs(float(losses[0].detach() - losses[1].detach())) < 1e-6
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-5), name


TEXTS = 11  # segments of a text, the last one short


@pytest.mark.full
@pytest.mark.parametrize(
    ("attend", "score", "most"),
    [("weighted", "dot_product", 4), ("weighted", "relative", 5), ("multilinear_decayed", "dot_product", 4)],
)
def test_how_many_graphs_a_training_has(attend, score, most):
    """Two texts with a growing memory and a short last segment, the second one with layers that rest at random.

    The first segment has a graph, all later ones share a graph, and so do all short ones. Keys in two pieces are one graph
    more; where their distances count, one for each way in which pieces touch. All layers share them.
    PyTorch compiles no more than 8 (`recompile_limit`) and then goes on without compiling.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    matching = (c for c in combinations.pairwise() if (c.attend, c.score) == (attend, score))
    combination = find_mixed(score) if attend == "weighted" else next(matching)
    model = combination.moved(memory_length=5, max_position_embeddings=128)
    for block in find_blocks(model):
        block.compile(fullgraph=True, backend="eager")  # graphs are counted, not differentiated
    draw = random.Random(0)
    graphs = []
    for resting in (0.0, 0.3):
        memory = None
        for segment in range(TEXTS):
            tokens = LENGTH if segment < TEXTS - 1 else 3
            skip = [layer for layer in range(len(model.blocks)) if draw.random() < resting]
            ids, targets = (combinations.tokens(seed=segment + seed)[:, :tokens] for seed in (0, 50))
            part = model.loss_parts(ids, targets, memory=memory, skip=skip)
            part.loss.backward()
            memory = part.memory
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] <= 3, graphs
    assert graphs[1] <= most, graphs


BESIDE = {
    "window": fr.Layout.of(7, 12, window=4),
    "gap": fr.Layout.from_runs(7, ((0, 3), (20, 9))),
    "gap and window": fr.Layout.from_runs(7, ((0, 3), (5, 9)), window=8),
}
EVERYDAY = {("relative", "gap and window")}


def test_a_model_that_never_ran_is_one_graph(monkeypatch):
    monkeypatch.delitem(sys.modules, "fullrank.kernels")  # they are imported while it is traced
    monkeypatch.setattr(fr._engine, "load", fr._load_kernels)
    model = fr.LanguageModel(fr.ModelConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
    ids = torch.arange(10).view(2, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("score", "layout"),
    [
        pytest.param(
            score, BESIDE[where], marks=() if (score, where) in EVERYDAY else pytest.mark.full, id=f"{score}-{where}"
        )
        for score in ("dot_product", "relative")
        for where in BESIDE
    ],
)
def test_whole_graph_with_memory_and_cross_head(score, layout):
    """One graph for keys in pieces and a window, while heads are permuted; the numbers are those of eager code."""
    combination = find_mixed(score)
    memory = torch.randn(2, layout.shape[1] - layout.shape[0], WIDTH, generator=torch.Generator().manual_seed(9))
    torch._dynamo.reset()
    block = moved(Block(combination.config(attention={"cross_head": 1.0}))).train()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    expected, traced = (
        outputs(block, lambda x, where, run=run: run(x, where, memory=memory), layout) for run in (block, compiled)
    )
    all_close(traced, expected, 5e-6)
