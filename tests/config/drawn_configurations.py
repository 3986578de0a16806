"""Configurations drawn at random from values that most keys may have."""

import random

from fullrank.config.load import build_any
from fullrank.core.errors import InputError
from fullrank.experiments.run import task_of

# values by key; a configuration has some of them. Most pairs are allowed, and each value is in some accepted one
VALUES = {
    "model.position": ["sinusoidal", "learned", "relative", "rotary", "none"],
    "model.max_position_embeddings": [4, 8, 64],
    "model.memory_length": [0, 4],
    "model.attention": [
        {"score": "relative"}, {"score": "random_synthesizer"}, {"score": "dense_synthesizer"}, {"mix": "position_wise"},
        {"pattern": "strided", "stride": 2}, {"kind": "multilinear", "rank": 4},
        {"kind": "multilinear", "rank": 4, "output_map": "decayed"},
        {"kind": "multilinear", "rank": 4, "causal": "as_published", "not_next_token_perplexity": True},
    ],
    "model.input": [
        {"kind": "adaptive", "cutoffs": [4, 9]}, {"kind": "adaptive", "cutoffs": [4, 300], "div_val": 2},
        {"kind": "tensor_train", "rank": 2}, {"kind": "tensor_train", "shape": [[4, 4], [4, 4]]},
    ],
    "model.output": [
        {"tied": True}, {"kind": "adaptive", "cutoffs": [4, 9]}, {"kind": "adaptive", "tied": True, "cutoffs": [4, 9]},
        {"kind": "mixture_of_softmaxes", "mixtures": 2, "tied": True}, {"normalize": "sigsoftmax"},
        {"kind": "mixture_of_softmaxes", "mixtures": 2, "normalize": "sigsoftmax"},
    ],
    "model.vocab_size": [20, 300],
    "train.optimizer": ["sgd", "nag", "adam", "adamw", "muon"],
    "train.momentum": [0.0, 0.9],
    "train.schedule": ["constant", "cosine", "cosine_restarts", "cosine_wave", "linear", "inverse_sqrt", "plateau"],
    "train.segment_length": [4, 8, 12],
    "train.context": [0, 4],
    "train.device": ["cpu", "auto", "train.txt", "cuda::1"],
    "train.phases": [
        [{"name": "a", "skip": "linear"}], [{"name": "a", "steps": 3}, {"name": "b"}],
        [{"name": "a", "steps": 1}, {"name": "b"}],
    ],
    "eval.segment_length": [4, 12],
    "eval.context": [2, 6],
    "eval.stride": [2, 6],
    "eval.memory_length": [0, 4],
    "eval.temperature": [0.5],
    "eval.test": [{"temperature": 2.0}, {"segment_length": 6}],
    "eval.valid": [{"stride": 3}, {"context": 1}],
    "data.tokens": ["byte", "word", "character", "bpe"],
    "data.min_count": [1, 2],
    "data.max_vocabulary": [1, 3, 260],
}  # fmt: skip
# values that do not change the first step of a training
OTHERS = {
    "model.attention": [
        {"mix": {"name": "position_wise", "start": "random"}, "cross_head": 0.25}, {"gate": "head", "bias": False},
        {"score": {"name": "dense_synthesizer", "keep_key_projection": True}},
        {"score": {"name": "relative", "clamp_length": 7, "as_published": True}},
    ],
    "model.dropout": [{"residual": 0.1, "locked": True}],
    "model.layer_norm_eps": [1e-9, 3],
    "model.output": [{"kind": "mixture_of_softmaxes", "latent": "residual", "latent_dropout": 0.5, "bias": False}],
    "model.initializer": ["fairseq", "pytorch"],
    "data.lowercase": [True],
    "data.max_tokens": [None, 10**9],
    "data.dir": ["日本: #", "yes", "12", "~", "1e3"],
    "train.learning_rate": [1e-9, 1e9, 1],
    "train.betas": [[0.5, 0.75]],
    "train.max_grad_norm": [None, 0.5],
    "train.seed": [2**40],
    "train.track": [["tensorboard"]],
}  # fmt: skip


def drawn(draw, folder, values):
    """A configuration of one of three tasks with a few of these values."""
    task = draw.choice(["plain", "plain", "masked", "translation"])
    data = {"name": "text", "tokens": "byte", "train": "train.txt", "valid": "valid.txt", "test": "test.txt"}
    train = {"steps": 3, "batch_size": 4, "segment_length": 8}
    if task == "masked":
        train |= {"objective": "masked", "mlm_probability": 0.5}
    if task == "translation":
        data = {"name": "parallel", "train": "train", "valid": "valid", "test": "test", "source": "de", "target": "en",
                "tokens": "word"}  # fmt: skip
        train = {"steps": 3, "batch_tokens": 64}
    model = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    settings = {"model": model, "train": train, "eval": {}}
    settings["data"] = {**data, "dir": str(folder), "cache": str(folder / "cache")}
    for key in draw.sample(sorted(values), draw.choice([1, 2, 3, 4, 6])):
        section, _, name = key.partition(".")
        settings[section][name] = draw.choice(values[key])
    return settings


def accepted(folder, seed, count, values=VALUES):
    """Draw `count` configurations and yield the accepted ones."""
    draw = random.Random(seed)
    for _ in range(count):
        settings = drawn(draw, folder, values)
        try:
            config = build_any(settings)
            task_of(config).check()
        except InputError:
            continue
        yield settings
