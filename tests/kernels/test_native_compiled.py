"""The C++ kernel as an operator of PyTorch: in a compiler's graph, on tensors without numbers, and under PyTorch's own checks.

The backend runs the traced graph, and the traced gradients, by eager kernels.
"""

import pytest
import torch
from calls import call, needs_compiler

import fullrank as fr
from fullrank import kernels
from fullrank.kernels import native
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


@pytest.mark.parametrize(
    "problem",
    [
        call(fr.Layout.of(5, 7)),
        call(fr.Layout.of(25, key_mask=HOLES), "none, convolution"),
        call(fr.Layout.of(20, 25, key_mask=HOLES), "A, B scores, keys", p=0.3),
        call(fr.Layout.of(5, 7), "B, A scores", relative=True, normalize="sigsoftmax"),
    ],
    ids=["plain", "convolution", "mixed", "relative"],
)
def test_operator_is_what_pytorch_expects(problem, monkeypatch):
    calls = []
    monkeypatch.setattr(native, "_mix_attention", lambda arguments: calls.append(arguments) or torch.zeros(1))
    attend(problem)
    torch.library.opcheck(OPERATOR, tuple(calls[0]))
