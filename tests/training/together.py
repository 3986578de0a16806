"""Runs in fp64, trained alone or by several processes: `train_as`, or `python together.py FOLDER SHARDING` under torchrun."""

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import examples.little_data  # noqa: F401 - registers past_decode and input_mask
import torch

from fullrank.config.load import Resolved, build_any
from fullrank.core.errors import FullRankError, InputError
from fullrank.experiments.run import train
from fullrank.training import device as distributed
from fullrank.training import loop
from tiny_encoder import tiny_encoder, write_cola

DROPOUT = {"residual": 0.2, "attention": 0.2, "embedding": 0.1, "activation": 0.1, "output": 0.1}
SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "dropout": DROPOUT}
SHORT = {"steps": 5, "batch_size": 4, "segment_length": 10, "log_every_steps": 1, "learning_rate": 0.01}
CASES = {
    "plain": {
        "model": SMALL | {"output": {"kind": "softmax", "tied": True}},
        "train": SHORT | {"max_grad_norm": 0.5, "averaging": "swa", "swa_start": 0.3, "activation_checkpointing": True},
    },
    # a memory, layers that rest, tails that some rows never read, and two batches an update
    "everything": {
        "model": SMALL | {
            "position": "relative", "memory_length": 8,
            "attention": {"score": "relative", "mix": "position_wise", "cross_head": 0.5},
            "output": {"kind": "adaptive", "cutoffs": [8, 25], "div_val": 2, "tail_dropout": 0.2},
        },
        "train": SHORT | {
            "gradient_accumulation_steps": 2, "orthogonality": 0.1, "overlap": 0.01,
            "phases": [{"name": "first", "skip": "uniform", "p": 0.5}],
        },
    },
    "mixture": {
        "model": SMALL | {
            "output": {"kind": "mixture_of_softmaxes", "mixtures": 3, "latent_dropout": 0.3, "tied": True},
            "attention": {"mix": "position_independent"},
        },
        "train": SHORT | {"order": "shuffled", "batch_size": 7, "label_smoothing": 0.1,
            "parts": {"past_decode": {"coefficient": 0.1}, "input_mask": {"probability": 0.2}}},
    },
    # what the published Penn Treebank recipe draws
    "little": {
        "model": SMALL | {
            "position": "relative", "attention": {"score": {"name": "relative", "shared_projection": True}},
            "dropout": {"words": 0.2, "embedding": 0.3, "projection": 0.2, "residual": 0.2, "output": 0.3, "locked": True},
        },
        "train": SHORT | {
            "context": 4, "partial_shuffle": True, "segment_length": 12, "segment_deviation": 2, "rate_by_length": True,
            "embedding_rate": 2.0, "mixing_rate": 0.5, "activation_regularization": 2.0, "temporal_regularization": 1.0,
        },
    },
    "masked": {
        "model": SMALL | {"output": {"kind": "mixture_of_softmaxes", "mixtures": 2, "latent_dropout": 0.3}},
        "train": SHORT | {"objective": "masked", "batch_size": 6, "mlm_probability": 0.1},
    },
    "translation": {"model": SMALL, "train": SHORT | {"batch_tokens": 60, "label_smoothing": 0.1}},
}  # fmt: skip
# FSDP2 gathers parameters in bfloat16; one process multiplies in it at most, and not even that with parameters in fp64
NARROW = {
    "bf16": {
        "model": SMALL | {"dropout": {}},
        "train": SHORT | {"precision": "bf16", "optimizer": "sgd", "learning_rate": 0.02},
    },
    "muon": {"model": SMALL, "train": SHORT | {"optimizer": "muon", "weight_decay": 0.1, "eps": 0.01}},
}
# a pretrained encoder
TUNING = {"steps": 5, "batch_size": 7, "log_every_steps": 1, "learning_rate": 0.001}
TUNED = {
    "tuned": {"model": {}, "train": TUNING},
    "tuned, mixed": {
        "model": {"attention": {"mix": "position_wise", "cross_head": 0.5}},
        "train": TUNING | {"overlap": 0.01, "activation_checkpointing": True, "gradient_accumulation_steps": 2},
    },
}


def write_texts(folder):
    """A text, pairs of sentences of many lengths, and an encoder with sentences to judge."""
    rng = random.Random(0)
    for split, lines in (("train", 60), ("valid", 13), ("test", 13)):
        for end in ("txt", "de", "en"):
            words = [[f"w{int(rng.paretovariate(0.8)) % 60}" for _ in range(rng.randint(1, 9))] for _ in range(lines)]
            text = "".join(f"{' '.join(line)}\n" for line in words)
            (folder / f"{split}.{end}").write_text(text, encoding="utf-8")
    tiny_encoder(folder / "encoder", dropout=0.0)
    write_cola(folder / "glue")


def run(folder, name, out, **options):
    """The result of a case in the run folder `out`; options: others of its `train` section."""
    return train(Resolved(build_any(document(folder, name, options)), name, None, None, None), out, quiet=True)


def document(folder, name, options):
    if name in TUNED:
        case = TUNED[name]
        return {
            "model": {"pretrained": str(folder / "encoder"), **case["model"]},
            "data": {"name": "glue/cola", "dir": str(folder / "glue"), "max_length": 20},
            "train": {**case["train"], **options},
            "eval": {"every_steps": 2, "checkpoint": "last"},
        }
    files = {
        split: str(folder / (split if name == "translation" else f"{split}.txt"))
        for split in ("train", "valid", "test")
    }
    languages = {"source": "de", "target": "en"} if name == "translation" else {}
    kind = "parallel" if languages else "text"
    data = {"name": kind, "tokens": "word", "cache": str(folder / "cache"), **files, **languages}
    case = (CASES | NARROW)[name]
    return {**case, "train": {**case["train"], **options}, "data": data, "eval": {"batch_size": 3, "every_steps": 2}}


def fail(kind):
    """Let the second process die or fail in its third pass; torchrun asks the first one to end while it notices that."""
    begin, end = loop.begin_draws, loop.end_draws
    passes = itertools.count(1)

    def begin_or_fail(seed, number):
        if distributed.rank() == 1 and next(passes) == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hangs":
                time.sleep(60)
            raise InputError("the second process refuses")
        begin(seed, number)

    def end_and_be_ended():
        if distributed.rank() == 0 and sys.exc_info()[0]:
            os.kill(os.getpid(), signal.SIGTERM)
        end()

    loop.begin_draws, loop.end_draws = begin_or_fail, end_and_be_ended


def train_as(rank, processes, port, folder, sharding, names):
    """Train the cases as one of several processes that meet at `port`; each writes its messages to a file of its own."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()})
    log = os.open(folder / f"process-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    train_cases(folder, sharding, names)


def train_cases(folder, sharding, names, failure=None):
    torch.set_default_dtype(torch.float64)
    try:
        for case in names or CASES | (NARROW if sharding == "fsdp" else TUNED):
            run(folder, case, folder / f"{case}-{failure or sharding}", sharding=sharding)
    except FullRankError as error:
        sys.exit(f"fullrank: {error}")


if __name__ == "__main__":
    failure = os.environ.get("FAILURE")
    if failure:
        fail(failure)
    train_cases(Path(sys.argv[1]), sys.argv[2], sys.argv[3:], failure)
