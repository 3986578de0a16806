"""The engine of vocabulary layers against the formulas that PyTorch has: values, gradients, memory, and wasted work.

Layers of every kind meet it in tests/core/test_output.py; here are chunks, large vocabularies and lower precision.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fullrank as fr
from closeness import agree
from fullrank.core.engine import Cluster, Components
from fullrank.kernels.vocabulary import vocabulary_loss, vocabulary_nll

DOUBLE = torch.float64
TOLERANCES = {torch.float32: 1e-5, DOUBLE: 1e-11}


def softmaxes(tokens, width, vocabulary, mixtures=None, dtype=DOUBLE, bias=True, normalize="softmax"):
    """One softmax, or a mixture of them; the leaves of its graph by name; targets."""
    torch.manual_seed(tokens + vocabulary)
    shapes = {"states": (tokens, mixtures or 1, width), "weight": (vocabulary, width)}
    shapes |= {"bias": (vocabulary,)} if bias else {}
    shapes |= {"log_prior": (tokens, mixtures)} if mixtures is not None else {}
    leaves = {name: torch.randn(shape, dtype=DOUBLE) for name, shape in shapes.items()}
    leaves["weight"] /= width**0.5
    if mixtures is not None:
        leaves["log_prior"] = leaves["log_prior"].log_softmax(1)
    leaves = {name: leaf.to(dtype).requires_grad_() for name, leaf in leaves.items()}
    cluster = Cluster(leaves["weight"], leaves.get("bias"))
    components = Components(leaves["states"], leaves.get("log_prior"), (cluster,), normalize)
    return components, leaves, torch.randint(vocabulary, (tokens,))


def log_prob(components):
    """log sum_k pi_k softmax_k, from PyTorch's own functions."""
    z = F.linear(components.states, components.clusters[0].weight, components.clusters[0].bias)
    z = z + F.logsigmoid(z) if components.normalize == "sigsoftmax" else z
    each = z.log_softmax(-1)
    if components.log_prior is None:
        return each[:, 0]
    return (components.log_prior[:, :, None] + each).logsumexp(1)


def cross_entropy(logs, ids, smoothing=0.0):
    """(T,); `F.nll_loss` has no label smoothing of its own."""
    return -(1 - smoothing) * logs.gather(1, ids[:, None])[:, 0] - smoothing * logs.mean(1)


SHAPES = [  # tokens, width, vocabulary, mixtures: both sides of the boundaries of chunks and of blocks
    (1, 3, 2, None), (7, 5, 11, None), (63, 4, 40_000, None), (131, 67, 33_333, None), (4095, 3, 2, None),
    (4097, 3, 7, None), (17, 2, 33_001, None), (9_001, 3, 500, None), (129, 7, 32_769, None),
    (1, 5, 11, 3), (3, 4, 13, 10), (3, 2, 7, 70), (91, 6, 97, 5), (2111, 3, 37, 3), (9, 3, 40_000, 2),
    (53, 2, 40_000, 2), (23, 2, 39_999, 5),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(SHAPES)), ids=[str(shape) for shape in SHAPES])
def test_chunks_of_any_size(index):
    """Odd sizes in turns with and without bias, in fp32 and fp64; weights with zeros, and any cotangent."""
    tokens, width, vocabulary, mixtures = SHAPES[index]
    dtype = (DOUBLE, torch.float32)[index % 2]
    normalize = ("softmax", "sigsoftmax", "softmax")[index % 3]
    components, leaves, ids = softmaxes(tokens, width, vocabulary, mixtures, dtype, tokens % 4 == 1, normalize)
    logs = log_prob(components)
    tolerance = TOLERANCES[dtype]
    cotangent = torch.randn(tokens, dtype=DOUBLE).to(dtype)
    nll = vocabulary_nll(components, ids)
    assert nll.shape == (tokens,)
    agree(nll, cross_entropy(logs, ids), leaves, tolerance, cotangent)
    scale = torch.rand(tokens, dtype=DOUBLE).to(dtype) / tokens
    scale[:: 3 if tokens > 1 else 2] = 0
    for smoothing in (0.0, 0.1) if mixtures is None else (0.0,):
        loss, plain = vocabulary_loss(components, ids, scale, smoothing)
        expected = (scale * cross_entropy(logs, ids, smoothing)).sum()
        agree(loss, expected, leaves, tolerance, torch.tensor(-1.7))
        unsmoothed = float((scale * cross_entropy(logs, ids)).sum().detach())
        assert abs(float(plain) - unsmoothed) <= tolerance * max(1, unsmoothed)
        assert not plain.requires_grad


class Watch(TorchDispatchMode):
    """Notes the most bytes held at a time, the largest tensor, and the shape of every matrix product."""

    def __init__(self):
        super().__init__()
        self.peak = self.largest = 0  # bytes, numbers
        self.products = []
        self._storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.multiprocessing.reductions import StorageWeakRef

        out = func(*args, **(kwargs or {}))
        read = {x.untyped_storage()._cdata for x in _tensors(args)}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
            if storage._cdata not in read:
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.count_held())
        if "mm" in str(func):
            self.products.append(tuple(out.shape))
        return out

    def count_held(self):
        """Bytes that are held now."""
        self._storages = {key: (ref, size) for key, (ref, size) in self._storages.items() if not ref.expired()}
        return sum(size for _, size in self._storages.values())


def _tensors(nested):
    if isinstance(nested, Tensor):
        return [nested]
    return [t for item in nested for t in _tensors(item)] if isinstance(nested, tuple | list) else []


def watched(run):
    with Watch() as watch:
        run()
    return watch


TOKENS, VOCABULARY, MIXTURES = 130, 10_007, 10
ALL = TOKENS * MIXTURES * VOCABULARY  # numbers in (T, K, V)
CHUNK = 20 << 20  # bytes: 16 MiB of logits, and some of their rows once more


def test_the_loss_takes_a_fifth_of_the_naive_memory():
    """No tensor (T, K, V), only chunks of it; between forward and backward only gradients are held."""
    components, _, ids = softmaxes(TOKENS, 4, VOCABULARY, MIXTURES, torch.float32)
    scale = torch.full((TOKENS,), 1 / TOKENS)
    naive = watched(lambda: (scale * cross_entropy(log_prob(components), ids)).sum().backward())
    assert naive.largest >= ALL  # `Watch` sees the tensor that has to be avoided
    with Watch() as watch:
        loss, _ = vocabulary_loss(components, ids, scale, 0.0)
        assert watch.count_held() < 4 * ALL // 50
        loss.backward()
    assert watch.largest < ALL // 2
    assert watch.peak < min(naive.peak / 5, CHUNK), f"{watch.peak / 2**20:.0f} MiB"
    assert watched(lambda: vocabulary_loss(components, ids, scale, 0.0)[0].backward()).largest * 4 <= 16.1 * 2**20


@pytest.mark.parametrize("mixtures", [None, 3])
def test_backward_twice_and_accumulation(mixtures):
    """Gradients formed in the forward pass are not spoiled by a backward, another cotangent or an optimiser."""
    components, leaves, ids = softmaxes(5, 3, 7, mixtures)
    scale = torch.full((5,), 0.2, dtype=DOUBLE)
    right = torch.autograd.grad(cross_entropy(log_prob(components), ids).mean(), [*leaves.values()])
    loss, _ = vocabulary_loss(components, ids, scale, 0.0)
    loss.backward(retain_graph=True)
    # a view of what was formed: autograd refuses to change it in place
    leaves["states"].grad = 2 * leaves["states"].grad
    for name in leaves.keys() - {"states"}:
        leaves[name].grad.mul_(2)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    for leaf, gradient in zip(leaves.values(), right, strict=True):
        assert torch.allclose(leaf.grad, 6 * gradient, atol=1e-12)
    first, second = (vocabulary_loss(components, ids, scale, 0.0)[0] for _ in range(2))
    for actual, gradient in zip(torch.autograd.grad(first + 2 * second, [*leaves.values()]), right, strict=True):
        assert torch.allclose(actual, 3 * gradient, atol=1e-12)


def adaptive(tokens, sizes, dtype=torch.float32):
    """An adaptive softmax of width 4 with a projection to 2 in each tail."""

    def leaf(*shape):
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    tails = tuple(Cluster(leaf(size, 2), None, leaf(4, 2)) for size in sizes[1:])
    return Components(leaf(tokens, 1, 4), None, (Cluster(leaf(sizes[0] + len(tails), 4), None), *tails))


def test_tails_are_computed_for_their_own_tokens_in_chunks():
    """No tensor is as large as those of a full softmax."""
    components = adaptive(300, (50, 50, 30_000))
    ids = torch.randint(100, (300,))
    ids[:25] += 20_000
    scale = torch.full((300,), 1 / 300)
    all_logits = 300 * 30_100
    for run in (lambda: vocabulary_loss(components, ids, scale, 0.0)[0], lambda: vocabulary_nll(components, ids)):
        watch = watched(lambda run=run: run().sum().backward())
        assert watch.largest < all_logits / 2
        assert watch.peak < 4 * all_logits + CHUNK
        assert sum(shape[0] for shape in watch.products if shape[1:] == (30_000,)) in (25, 50)  # nll: twice


@pytest.mark.parametrize(
    ("smoothing", "mixtures", "normalize"),
    [(0.0, None, "softmax"), (0.1, None, "softmax"), (0.0, 5, "softmax"), (0.0, 5, "sigsoftmax")],
)
def test_autocast_to_bfloat16(smoothing, mixtures, normalize):
    """Products in bf16; softmax, nll and sums in fp32: close to fp32, and gradients in the dtype of the leaves."""
    components, leaves, ids = softmaxes(300, 16, 1000, mixtures, torch.float32, normalize=normalize)
    scale = torch.full((300,), 1 / 300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = vocabulary_loss(components, ids, scale, smoothing)
        nll = vocabulary_nll(components, ids)
    exact = log_prob(components)
    exact_loss = (scale * cross_entropy(exact, ids, smoothing)).sum()
    exact_nll = cross_entropy(exact, ids)
    assert loss.dtype == nll.dtype == torch.float32
    assert abs(float((loss - exact_loss).detach())) < 2e-3 * float(exact_loss.detach())
    assert (nll - exact_nll).abs().max() < 0.1
    for value, expected, cotangent in ((loss, exact_loss, torch.ones(())), (nll, exact_nll, torch.randn(300))):
        gradients = torch.autograd.grad(value, [*leaves.values()], cotangent, retain_graph=True)
        references = torch.autograd.grad(expected, [*leaves.values()], cotangent, retain_graph=True)
        for name, gradient, reference in zip(leaves, gradients, references, strict=True):
            assert gradient.dtype == torch.float32
            assert float((gradient - reference).norm() / reference.norm()) < 0.03, name


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_losses_of_a_compiled_model():
    """The compiler meets the engine, and leaves it as it is."""
    model = fr.LanguageModel(fr.ModelConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    ids = torch.randint(50, (2, 12))
    for run in (model.loss, lambda ids, targets: model.nll(ids, targets).per_token.mean()):
        value = torch.compile(run, backend="eager")(ids, ids)
        gradients = torch.autograd.grad(value, model.parameters())
        torch.testing.assert_close(gradients, torch.autograd.grad(run(ids, ids), model.parameters()))
