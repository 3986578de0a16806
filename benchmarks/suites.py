"""The benchmarks by name."""

import injection
import layer
import mixers
import mixing
import multilinear
import output_loss
import relative
import train_step
from candidates import Suite
from fullrank.core.errors import InputError, suggest

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "mixing",
            "Mixhead A and B against plain SDPA, the formula (eager and compiled), x-transformers, transformers",
            lengths=(512, 1024, 2048, 4096),
            quick=(128, 256, 512),
            comparisons=mixing.comparisons,
        ),
        Suite(
            "layer",
            "Mixhead A and B with their projections against the same layer around plain SDPA",
            lengths=(512, 1024, 2048, 4096),
            quick=(64, 128, 256),
            comparisons=layer.comparisons,
        ),
        Suite(
            "growth",
            "Mixhead A and B and plain SDPA from short to long: time per n^2, memory per n, exponents",
            lengths=(256, 512, 1024, 2048, 4096, 8192, 16384),
            quick=(128, 256, 512, 1024),
            comparisons=mixing.growth,
            rounds=3,
            each_length=True,
        ),
        Suite(
            "mixers",
            "a layer with each mixer of heads against the same layer without one, over plain SDPA, and against peers",
            lengths=(512, 1024, 2048, 4096),
            quick=(64, 128, 256),
            comparisons=mixers.comparisons,
            rounds=5,
        ),
        Suite(
            "relative",
            "relative attention, without and with mixing, against Transformer-XL's published formula",
            lengths=(150, 512, 1024),
            quick=(64, 128, 256),
            comparisons=relative.comparisons,
        ),
        Suite(
            "mos",
            "losses of a softmax and of a mixture of ten against PyTorch's cross entropies and the papers' formulas",
            lengths=(256, 700, 2048),
            quick=(32, 64, 128),
            comparisons=output_loss.comparisons,
            takes=frozenset(),
        ),
        Suite(
            "multilinear",
            "causal multi-linear attention against the masked tensor of all pairs of every query",
            lengths=(32, 64, 128, 256),
            quick=(16, 32, 64),
            comparisons=multilinear.comparisons,
            tiny=8,
            takes=frozenset({"batch"}),
        ),
        Suite(
            "injection",
            "one layer of a Hugging Face BERT and Llama: Mixhead A, B and cross-head injected, against its own attention",
            lengths=(512, 1024, 2048),
            quick=(64, 128),
            comparisons=injection.comparisons,
        ),
        Suite(
            "step",
            "a training step of a language model, plain, A and B, against nn.TransformerEncoder",
            lengths=(128, 256, 512),
            quick=(16, 32, 64),
            comparisons=train_step.comparisons,
        ),
    )
}


def suite_of(name: str) -> Suite:
    """The benchmark called `name`; InputError for an unknown one."""
    if name not in SUITES:
        raise InputError(f"bench: '{name}' is not a benchmark; {suggest(name, SUITES)} (fullrank bench --list)")
    return SUITES[name]
