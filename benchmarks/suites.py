"""The benchmarks by name."""

import generation
import injection
import layers
import memory
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
            comparisons=mixing.compare,
        ),
        Suite(
            "layer",
            "Mixhead A and B with their projections against the same layer around plain SDPA",
            lengths=(512, 1024, 2048, 4096),
            quick=(64, 128, 256),
            comparisons=layers.compare,
        ),
        Suite(
            "growth",
            "Mixhead A and B and plain SDPA from short to long: exponents of time and memory",
            lengths=(256, 512, 1024, 2048, 4096, 8192, 16384),
            quick=(128, 256, 512, 1024),
            comparisons=mixing.compare_growth,
            rounds=3,
        ),
        Suite(
            "mixers",
            "a layer with each mixer of heads against the same layer without one, over plain SDPA, and against peers",
            lengths=(512, 1024, 2048, 4096),
            quick=(64, 128, 256),
            comparisons=layers.compare_mixers,
            rounds=5,
        ),
        Suite(
            "relative",
            "relative attention, without and with mixing, against Transformer-XL's published formula",
            lengths=(150, 512, 1024),
            quick=(64, 128, 256),
            comparisons=relative.compare,
        ),
        Suite(
            "mos",
            "losses of a softmax and of a mixture of ten against PyTorch's cross entropies and the papers' formulas",
            lengths=(256, 700, 2048),
            quick=(32, 64, 128),
            comparisons=output_loss.compare,
            takes=frozenset(),
        ),
        Suite(
            "multilinear",
            "causal multi-linear attention against the masked tensor of all pairs of every query",
            lengths=(32, 64, 128, 256),
            quick=(16, 32, 64),
            comparisons=multilinear.compare,
            takes=frozenset({"batch"}),
        ),
        Suite(
            "injection",
            "one layer of a Hugging Face BERT and Llama: Mixhead A, B and cross-head injected, against its own attention",
            lengths=(512, 1024, 2048),
            quick=(64, 128),
            comparisons=injection.compare,
        ),
        Suite(
            "step",
            "a training step of a language model, plain, A and B, against nn.TransformerEncoder",
            lengths=(128, 256, 512),
            quick=(16, 32, 64),
            comparisons=train_step.compare,
        ),
        Suite(
            "relative-shapes",
            "relative attention in the shapes of Transformer-XL, trained and evaluated, with gaps and windows",
            comparisons=relative.compare_shapes,
        ),
        Suite(
            "mos-sizes",
            "losses of one softmax and of 2 to 15, of 10,000 and 33,000 words",
            comparisons=output_loss.compare_sizes,
        ),
        Suite(
            "step-sizes",
            "a training step of two sizes against nn.TransformerEncoder, without and with dropout",
            comparisons=train_step.compare_sizes,
        ),
        Suite(
            "small-step",
            "a training step of three small models of characters against nanoGPT's form of GPT-2",
            comparisons=train_step.compare_small,
            shortest=0.2,
        ),
        Suite(
            "generation",
            "generation, greedy and with the 50 likeliest tokens, against GPT-2 of transformers",
            comparisons=generation.compare,
        ),
        Suite(
            "evaluation",
            "a model with memory, evaluated, against Transformer-XL's published scheme",
            comparisons=memory.compare_evaluation,
        ),
        Suite(
            "skip",
            "training with layers skipped by Skip-Retain, against all layers kept and all resting",
            comparisons=memory.compare_skipping,
        ),
    )
}


def find_suite(name: str) -> Suite:
    """Find the benchmark called `name`; raises InputError for an unknown one."""
    if name not in SUITES:
        raise InputError(f"bench: '{name}' is not a benchmark; {suggest(name, SUITES)} (fullrank bench --list)")
    return SUITES[name]
