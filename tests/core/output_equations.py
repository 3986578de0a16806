"""Output layers as their equations read, in probabilities, for tests that compare every number and every gradient."""

import itertools
import random
from dataclasses import dataclass, replace

import torch

import fullrank as fr
from fullrank.core.embedding import TokenEmbedding
from fullrank.core.output import SoftmaxOutput
from pairs import covering

DOUBLE = torch.float64


@dataclass(frozen=True)
class Case:
    """An output layer, and the shape (B, N) of the tokens that it reads.

    cutoffs: of an adaptive softmax, () for one matrix. mixtures: K, None without a mixture.
    """

    mixtures: int | None = None
    cutoffs: tuple[int, ...] = ()
    div_val: int = 2
    form: str = "fairseq"
    tied: bool = False
    tied_projections: bool = False
    bias: bool = True
    normalize: str = "softmax"
    latent: bool | str = True
    vocabulary: int = 23
    width: int = 9
    tokens: tuple[int, int] = (2, 7)

    def __str__(self):
        plain = Case()
        changed = (f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name))
        return "-".join(changed).replace(" ", "") or "softmax"

    def layer(self, dtype=DOUBLE, **changes):
        """The layer with every parameter N(0, 0.7^2); what it is tied to is `layer._tied`."""
        sizes = {"vocab_size": self.vocabulary, "hidden_size": self.width}
        clusters = {"cutoffs": list(self.cutoffs), "div_val": self.div_val}
        options = {"tied": self.tied, "bias": self.bias, "normalize": self.normalize}
        options |= {"kind": "softmax" if not self.cutoffs else "adaptive"}
        if self.mixtures is not None:
            options |= {"kind": "mixture_of_softmaxes", "mixtures": self.mixtures, "latent": self.latent}
        if self.cutoffs:
            options |= clusters | {"form": self.form, "tied_projections": self.tied_projections}
        config = fr.OutputConfig(**options | changes)
        if self.cutoffs:
            embedding = fr.AdaptiveInput(fr.InputConfig(kind="adaptive", **clusters), **sizes)
            kind = fr.AdaptiveSoftmax
        else:
            embedding = TokenEmbedding(fr.ModelConfig(**sizes, num_attention_heads=1))
            kind = SoftmaxOutput if self.mixtures is None else fr.MixtureOfSoftmaxes
        layer = kind(config, embedding if self.tied else None, **sizes)
        torch.manual_seed(11)
        for parameter in (*layer.parameters(), *embedding.parameters()):
            parameter.data.copy_(torch.randn(parameter.shape, dtype=DOUBLE) * 0.7)
        embedding.to(dtype)
        return layer.to(dtype)

    def tensors(self, layer):
        """The tensors that the layer reads, by name; `input.` begins the names of those that it shares with its input."""
        tensors = dict(layer.named_parameters())
        if not self.tied:
            return tensors
        embedding = layer._tied
        used = [f"weights.{i}" for i in range(len(self.cutoffs) + 1)] if self.cutoffs else ["weight"]
        if self.cutoffs and self.div_val > 1 and self.tied_projections:
            used += [f"projections.{i}" for i in range(1, len(self.cutoffs) + 1)]
        return tensors | {f"input.{name}": embedding.get_parameter(name) for name in used}

    def batch(self, dtype=DOUBLE):
        """Hidden states that require a gradient, and targets, among them the first and the last word."""
        hidden = torch.randn(*self.tokens, self.width, dtype=DOUBLE).to(dtype).requires_grad_()
        targets = torch.randint(self.vocabulary, self.tokens)
        targets[0, 0], targets[-1, -1] = 0, self.vocabulary - 1
        return hidden, targets

    def log_prob(self, tensors, hidden):
        """log(sum_k pi_k p(v | h_k)), (B, N, V)."""
        rows = hidden.flatten(0, -2)
        words = self._words_of_clusters if self.cutoffs else self._words_of_one_matrix
        total = sum((share * words(tensors, h) for share, h in self._components(tensors, rows)), torch.zeros(()))
        return total.log().view(*hidden.shape[:-1], -1)

    def _components(self, tensors, rows):
        """pi_k (T, 1) and h_k (T, E) of hidden states g (T, E): h_k = tanh(W_k g + b_k) (+ g), pi = softmax(P g)."""
        if self.mixtures is None:
            return [(torch.ones(len(rows), 1, dtype=DOUBLE), rows)]
        prior = (rows @ tensors["mixture.prior.weight"].T).exp()
        prior = prior / prior.sum(1, keepdim=True)
        squares = tensors["mixture.latent.weight"].split(self.width)
        shifts = tensors["mixture.latent.bias"].split(self.width)
        assert prior.shape[1] == len(squares) == len(shifts) == self.mixtures
        skipped = rows if self.latent == "residual" else torch.zeros_like(rows)
        return [
            (prior[:, k, None], skipped + torch.tanh(torch.einsum("ij,tj->ti", squares[k], rows) + shifts[k]))
            for k in range(self.mixtures)
        ]

    def _words_of_one_matrix(self, tensors, h):
        scores = h @ tensors["input.weight" if self.tied else "weight"].T
        return one_softmax(scores + tensors["bias"] if self.bias else scores, self.normalize)

    def _words_of_clusters(self, tensors, h):
        """p(v | h) (T, V): that of a word in the head, or that of its class times its own in the tail."""
        bounds = [0, *self.cutoffs, self.vocabulary]

        def read(i):
            if self.div_val == 1 or (i == 0 and self.form == "fairseq"):
                return h
            shared = i > 0 and self.tied_projections
            return h @ tensors[f"{'input.' if shared else ''}projections.{i}"]

        def scores(i):
            products = read(i) @ tensors[f"{'input.' if self.tied else ''}weights.{i}"].T
            return products + tensors[f"biases.{i}"] if self.bias else products

        classes = read(0) @ tensors["class_weight"].T
        classes = classes + tensors["class_bias"] if self.bias else classes
        head = one_softmax(torch.cat((scores(0), classes), 1), self.normalize)
        tails = [one_softmax(scores(i), self.normalize) for i in range(1, len(bounds) - 1)]
        columns = []
        for word in range(self.vocabulary):
            i = next(i for i, end in enumerate(bounds[1:]) if word < end)
            inside = head[:, self.cutoffs[0] + i - 1] * tails[i - 1][:, word - bounds[i]] if i else head[:, word]
            columns.append(inside)
        return torch.stack(columns, 1)


def one_softmax(scores, normalize):
    """softmax: e^z / sum e^z.  sigsoftmax (Kanai et al. 2018): e^z sigmoid(z) / sum e^z sigmoid(z)."""
    raised = (scores - scores.amax(1, keepdim=True)).exp()
    raised = raised * torch.sigmoid(scores) if normalize == "sigsoftmax" else raised
    return raised / raised.sum(1, keepdim=True)


def mean_loss(log_prob, targets, weights, smoothing):
    """Cross entropy with (1 - e) [v = x] + e / V, sum(w loss) / sum(w)."""
    labels = torch.nn.functional.one_hot(targets, log_prob.shape[-1]).double() * (1 - smoothing)
    each = -((labels + smoothing / log_prob.shape[-1]) * log_prob).sum(-1)
    share = torch.ones_like(each) if weights is None else weights.double()
    return (each * share).sum() / share.sum()


def compare(value, expected, leaves, copies, cotangent):
    """A value and its gradients with respect to `leaves` against the equation's with respect to `copies`.

    In double precision to 1e-9 of the largest number, in fp32 to 1e-5 of it, or of 1 if that is more. A tensor that the
    equation does not read has a gradient of zero, so that what an optimiser does never depends on which words a batch holds.
    """
    assert leaves.keys() == copies.keys()
    dtype = next(iter(leaves.values())).dtype
    assert value.dtype == dtype
    tolerance, least = (1e-9, 1e-4) if dtype == DOUBLE else (1e-5, 1.0)
    close("value", value.detach(), expected.detach(), tolerance, least)
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    gradients = torch.autograd.grad(value, [leaves[name] for name in names], cotangent.to(dtype), retain_graph=True)
    references = torch.autograd.grad(
        expected, [copies[name] for name in names], cotangent.double(), retain_graph=True, materialize_grads=True
    )
    for name, gradient, right in zip(names, gradients, references, strict=True):
        assert gradient.dtype == dtype, f"gradient of {name} is {gradient.dtype}"
        close(f"gradient of {name}", gradient, right, tolerance, least)


def close(name, actual, expected, tolerance, least=1.0):
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)}, not {tuple(expected.shape)}"
    off = float((actual.double() - expected).abs().max())
    size = float(expected.abs().max())
    assert off <= tolerance * max(least, size), f"{name} is off by {off:.1e}, its largest number is {size:.1e}"


def pairwise_cases():
    """Few cases in which every allowed pair of choices of two options occurs."""
    choices = {
        "cutoffs": [(), (4, 9, 15), (22,), (1, 2)], "mixtures": [None, 1, 3], "div_val": [1, 2],
        "form": ["fairseq", "transformer_xl"], "tied": [False, True], "tied_projections": [False, True],
        "bias": [False, True], "normalize": ["softmax", "sigsoftmax"],
        "latent": [True, "residual"],
    }  # fmt: skip

    def possible(case):
        if not case.cutoffs and (case.div_val, case.form, case.tied_projections) != (2, "fairseq", False):
            return False
        if case.mixtures is not None and case.cutoffs:
            return False
        return (case.tied or not case.tied_projections) and (case.latent is True or case.mixtures is not None)

    draws = random.Random(4)
    pairs = {}
    for _ in range(3000):
        case = Case(**{name: draws.choice(values) for name, values in choices.items()})
        if possible(case):
            pairs[case] = {(a, getattr(case, a), b, getattr(case, b)) for a, b in itertools.combinations(choices, 2)}
    return [replace(case, vocabulary=3 if case.cutoffs == (1, 2) else 23) for case in covering(pairs, pairs.get)]
