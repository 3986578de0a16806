"""How every parameter starts, by the definitions in the original code: moments, bounds, zeros."""

import math
import re

import pytest
import torch

import fullrank as fr

E, H, D, F, V = 64, 4, 20, 100, 900
PLAIN = {"position": "learned", "max_position_embeddings": 64}
CLUSTERS = {"kind": "adaptive", "cutoffs": [200, 500], "div_val": 2}
ADAPTIVE = {
    "position": "relative", "attention": {"score": "relative", "bias": False}, "input": CLUSTERS,
    "output": {"kind": "adaptive", "form": "transformer_xl"},
}  # fmt: skip
FAIRSEQ = ADAPTIVE | {"output": {"kind": "adaptive", "form": "fairseq", "tied": True, "tied_projections": False}}
MIXTURE = PLAIN | {"output": {"kind": "mixture_of_softmaxes", "mixtures": 10}}


def normal(std, mean=0.0):
    def check(tensor):
        numbers = (tensor.flatten() - mean) / std
        count = len(numbers)
        assert abs(float(numbers.mean())) < 5 / math.sqrt(count)
        assert abs(float(numbers.std()) - 1) < 5 / math.sqrt(2 * count)
        assert float(numbers.abs().max()) > 1.8  # beyond the sqrt(3) of a uniform distribution of the same deviation

    return check


def uniform(bound):
    def check(tensor):
        numbers = tensor.flatten() / bound
        count = len(numbers)
        assert 1 - 20 / count < float(numbers.abs().max()) <= 1 + 1e-6
        assert abs(float(numbers.mean())) < 5 / math.sqrt(3 * count)
        assert abs(float(numbers.square().mean()) - 1 / 3) < 5 * math.sqrt(4 / 45 / count)

    return check


def equal(number):
    def check(tensor):
        assert torch.equal(tensor, torch.full_like(tensor, number))

    return check


def xavier(tensor):
    uniform(math.sqrt(6 / sum(tensor.shape)))(tensor)


def linear(tensor):
    """Weights and biases start as those of `nn.Linear` do."""
    uniform(tensor.shape[1] ** -0.5)(tensor)


def vectors(tensor):
    normal(tensor.shape[1] ** -0.5)(tensor)


ZERO, ONE, SMALL = equal(0), equal(1), normal(0.02)
PACKED = uniform(math.sqrt(6 / (E + 3 * H * D)))  # query, key and value as one matrix
NORMS = {r".*norm\.weight": ONE, r".*norm\.bias": ZERO}
BIASES = {r".*\.up\.bias": uniform(E**-0.5), r".*\.down\.bias": uniform(F**-0.5)}
TAILS = {f"output.biases.{i}": uniform((E // 2**i) ** -0.5) for i in range(3)} | {"output.class_bias": uniform(1 / 8)}

# initialiser, model, and the start of each parameter by the first pattern that its whole name matches
STARTS = [
    # transformer_lm: embeddings N(0, 1/E), q, k, v Xavier with gain 1/sqrt(2), out_proj Xavier, bias 0, fc as in PyTorch
    ("fairseq", PLAIN, NORMS | BIASES | {
        r"(embedding|position|output)\.weight": normal(E**-0.5), "output.bias": ZERO,
        r".*project\.\w+\.weight": uniform(math.sqrt(6 / (E + H * D)) / math.sqrt(2)),
        r".*project\.\w+\.bias": uniform(E**-0.5), r".*merge\.weight": xavier, r".*merge\.bias": ZERO,
        r".*feed_forward.*": linear,
    }),
    # the head, words and classes, is one matrix
    ("fairseq", ADAPTIVE, {
        r"embedding\.weights.*": vectors, r".*projections.*": xavier, r"output\.(biases.*|class_bias)": ZERO,
        r"output\.(weights\.0|class_weight)": uniform(math.sqrt(6 / (E + 202))), r"output\.weights.*": xavier,
    }),
    ("fairseq", FAIRSEQ, {"output.class_weight": uniform(math.sqrt(6 / (E + 2)))}),
    # weights_init: N(0, 0.02) everywhere, biases 0, norm weights N(1, 0.02)
    ("transformer_xl", PLAIN, {r".*norm\.weight": normal(0.02, mean=1.0), r".*bias": ZERO, ".*": SMALL}),
    ("transformer_xl", ADAPTIVE, {
        r"(embedding|output)\.projections.*": normal(0.01), r"output\.(biases.*|class_bias)": ZERO,
        r"(embedding|output|position)\..*": SMALL,
    }),
    # nn.Embedding N(0, 1); in_proj (3E, E) Xavier as one matrix, its bias 0; out_proj bias 0; the rest as in nn.Linear
    ("pytorch", PLAIN, NORMS | BIASES | {
        r"(embedding|position)\.weight": normal(1.0), "output.bias": uniform(E**-0.5),
        r".*project\.\w+\.weight": PACKED, r".*(project\.\w+|merge)\.bias": ZERO, ".*": linear,
    }),
    ("pytorch", ADAPTIVE, TAILS | {
        r"embedding\.weights.*": normal(1.0), r"output\.projections.*": uniform(1 / 8), r"(embedding|output)\..*": linear,
    }),
    # Transformer-MoS: `xavier_uniform_` on every parameter of more than one dimension, vectors as PyTorch has them
    ("xavier_uniform", MIXTURE, NORMS | BIASES | {
        r"output\.(bias|mixture\.latent\.bias)": uniform(E**-0.5),
        r".*project\.\w+\.weight": PACKED, r".*(project\.\w+|merge)\.bias": ZERO, ".*": xavier,
    }),
    # its code makes `nn.Linear`, `nn.Embedding` and `torch.randn`, and changes nothing of them
    ("skip_cross_head", ADAPTIVE, TAILS | NORMS | BIASES | {
        r"embedding.*|output\.projections.*|position\.biases.*": normal(1.0), ".*": linear,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("initializer", "model", "starts"), STARTS)
def test_every_parameter_starts_as_in_the_original(initializer, model, starts):
    torch.manual_seed(5)
    config = fr.ModelConfig(
        vocab_size=V, hidden_size=E, num_hidden_layers=1, num_attention_heads=H, head_dim=D, intermediate_size=F,
        initializer=initializer, **model,
    )  # fmt: skip
    used = set()
    every = ".*" in starts or model is PLAIN
    for name, parameter in fr.LanguageModel(config).named_parameters():
        pattern = next((pattern for pattern in starts if re.fullmatch(pattern, name)), None)
        assert pattern is not None or not every, name
        if pattern is not None:
            used.add(pattern)
            starts[pattern](parameter.detach().double())
    assert used == starts.keys()
