"""The C++ kernel as an operator of PyTorch: in a compiler's graph, without numbers, and as its own checks want it.

The backend runs the traced graph, and the traced gradients, by eager kernels.
"""

import pytest
import torch
from calls import call, needs_compiler

import fullrank as fr
from fullrank import kernels
from fullrank.kernels.native import attend, differentiable

# Dynamo asks every tensor for its gradient and hides the warnings of those that have none, but not from a filter that raises.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
OPERATOR = torch.ops.fullrank.mixed_attention.default


@pytest.fixture(autouse=True)
def _compiled():
    needs_compiler()
    torch._dynamo.reset()


HOLES = torch.rand(2, 25, generator=torch.Generator().manual_seed(3)) > 0.3


@pytest.mark.parametrize(
    "problem",
    [
        call(fr.Layout.from_runs(20, ((0, 2), (6, 23))), "B", relative=True, normalize="sigsoftmax"),
        call(fr.Layout.of(20, 25, key_mask=HOLES), "A", size=16),
    ],
    ids=["relative", "padded"],
)
def test_one_graph_with_the_operator_and_its_gradients(problem):
    graphs = []

    def backend(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes})
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(lambda problem: kernels.attend(problem), fullgraph=True, backend=backend)
    ours, expected = compiled(problem), attend(problem)
    assert any(OPERATOR in nodes for nodes in graphs)
    assert torch.equal(ours, expected)
    cotangent = torch.randn_like(ours)
    both = (torch.autograd.grad(out, differentiable(problem), cotangent) for out in (ours, expected))
    assert all(torch.allclose(*pair, rtol=1e-13, atol=1e-13) for pair in zip(*both, strict=True))


def test_compiled_dropout_is_drawn_anew():
    problem = call(fr.Layout.of(20, 25), "B", p=0.5)
    compiled = torch.compile(lambda problem: kernels.attend(problem), fullgraph=True, backend="aot_eager")
    assert not torch.allclose(compiled(problem), compiled(problem))
    torch.manual_seed(8)
    ours = compiled(problem)
    torch.manual_seed(8)
    expected = attend(problem)
    assert torch.allclose(ours, expected, rtol=1e-13, atol=1e-13)
    both = (torch.autograd.grad(out.square().sum(), problem.values) for out in (ours, expected))
    assert all(torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(*both, strict=True))


def _arguments(mixed, convolved):
    """Arguments that `native` makes, with all that may be there but a convolution, or with nothing else of it."""

    def heads(*shape):
        return torch.randn(*shape, 8, dtype=torch.float64, requires_grad=True)

    own_key = torch.arange(2, 7, dtype=torch.int32)
    operands = [heads(2, 3, 5), heads(2, 3, 7), heads(2, 3, 7), *[None] * 7]
    if convolved:
        operands[7] = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    if mixed:
        shapes = ((2, 5), (), (2, 7), (2, 7))
        matrices = (torch.randn(*shape, 3, 3, dtype=torch.float64, requires_grad=True) for shape in shapes)
        operands[3:] = *matrices, None, heads(2, 3, 5), heads(3, 7)
    base = torch.arange(2, -5, -1, dtype=torch.int32) if mixed else None
    seed = torch.tensor((12345, 2)) if mixed else None
    geometry = (torch.zeros_like(own_key), own_key + 1, own_key, base, torch.ones(2, 7, dtype=torch.uint8), seed)
    return (*operands, *geometry, 0.4, mixed, 0.3 if mixed else 0.0)


@pytest.mark.parametrize(("mixed", "convolved"), [(False, False), (True, False), (False, True)])
def test_operator_is_what_pytorch_expects(mixed, convolved):
    torch.library.opcheck(OPERATOR, _arguments(mixed, convolved))
