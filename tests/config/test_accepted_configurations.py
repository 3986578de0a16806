"""Training accepts all that `config validate` accepts: each is checked without data, then built and run a step."""

import random

import pytest
import torch

from fullrank.config.load import build_any
from fullrank.core.errors import FullRankError, InputError
from fullrank.experiments.language_model import skip_schedule
from fullrank.experiments.run import task_of
from fullrank.experiments.run_folder import absolute
from fullrank.training.optimizer import make_optimizer, make_schedule
from fullrank.training.values import TrainingPosition, make_plan

# values by key, of which a configuration has some; most pairs are allowed, and each value is somewhere
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
BY_DATA = ("streams", "entries; set it to null", "model.vocab_size", "a stream of", "no token of", "whole stream")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    for split, count in (("train", 60), ("valid", 12), ("test", 12)):
        (folder / f"{split}.txt").write_text("the cat sat on the mat and ran .\n" * count)
        (folder / f"{split}.de").write_text("ein hund rennt\n" * count)
        (folder / f"{split}.en").write_text("a dog runs\n" * count)
    return folder


def drawn(draw, place):
    """A configuration of one of three tasks with a few keys of `VALUES`."""
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
    settings["data"] = {**data, "dir": str(place), "cache": str(place / "cache")}
    for key in draw.sample(sorted(VALUES), draw.choice([1, 2, 3, 4, 6])):
        section, _, name = key.partition(".")
        settings[section][name] = draw.choice(VALUES[key])
    return settings


def attempt(settings, place):
    """All that `train` does before and in its first step."""
    config = absolute(build_any(settings))
    task = task_of(config)
    task.check(config)
    data = task.prepare(config, {}, True, lambda _: None)
    torch.manual_seed(0)
    parts = task.parts(data, place, torch.device("cpu"))
    options = parts.options
    make_optimizer(options.optimizer, parts.groups(), options)
    plan = make_plan(options, parts.eval_options, parts.batches)
    make_schedule(options, plan.total_steps).scale_rate(1)
    for phase in options.phases:
        skip_schedule(phase, data.config.model.num_hidden_layers)
    parts.objective(parts.batches.batch(0, 0), {}, TrainingPosition(step=1)).value.backward()


def accepted(place, seed, count):
    draw = random.Random(seed)
    for _ in range(count):
        settings = drawn(draw, place)
        try:
            config = build_any(settings)
            task_of(config).check(config)
        except InputError:
            continue
        yield settings


@pytest.mark.parametrize(("seed", "count"), [(35, 70), pytest.param(36, 300, marks=pytest.mark.full)])
def test_what_is_accepted_can_be_trained(place, seed, count):
    """Only what the text decides may be refused later: its length, and the size of its vocabulary."""
    refused, tried = [], 0
    for settings in accepted(place, seed, count):
        tried += 1
        try:
            attempt(settings, place)
        except FullRankError as error:
            if not any(words in str(error) for words in BY_DATA):
                refused.append((str(error), settings))
    assert tried > count / 5
    assert refused == []
