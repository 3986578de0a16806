"""A model small enough to train in milliseconds, with everything a checkpoint must keep: dropout, a tied matrix,
a buffer, a carry between batches, and a last batch of another size."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fullrank.config.run import EvalConfig, TrainConfig
from fullrank.training.device import choose_device, lock_folder
from fullrank.training.loop import Training
from fullrank.training.optimizer import make_optimizer, parameter_groups
from fullrank.training.values import EvaluationResult, Loss, Observer, TrainingPosition

VOCABULARY, WIDTH, STREAMS, LENGTH = 11, 6, 3, 5
FIRST = TrainingPosition(step=1)


class Mixing(nn.Module):
    """Starts at the identity; weight decay would pull it to zero."""

    no_weight_decay = True

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        return x @ self.matrix


class Toy(nn.Module):
    def __init__(self, dropout=0.3):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mixing = Mixing()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids, memory):
        if self.training:
            self.seen += ids.numel()
        hidden = self.mixing(self.embedding(ids)) + memory[:, None]
        return self.norm(hidden + self.dropout(torch.tanh(self.inner(hidden))))


@dataclass(frozen=True)
class ToyBatches:
    """Random ids, a function of (epoch, index); the last batch of an epoch has fewer tokens."""

    batches_per_epoch: int = 7

    def tokens_of_batches(self, epoch):
        return [self.batch(epoch, index)[:, 1:].numel() for index in range(self.batches_per_epoch)]

    def batch(self, epoch, index):
        generator = torch.Generator().manual_seed(1000 * epoch + index)
        length = LENGTH - 2 if index == self.batches_per_epoch - 1 else LENGTH
        return torch.randint(VOCABULARY, (STREAMS, length + 1), generator=generator)


@dataclass(frozen=True)
class Even(ToyBatches):
    """Batches of one size: the toy's counter of tokens tells the step."""

    def batch(self, epoch, index):
        return super().batch(epoch, index % 6)


@dataclass(frozen=True)
class Objective:
    model: Toy

    def __call__(self, batch, carry, position):
        batch = batch.to(self.model.norm.weight.device)
        memory = carry.get("memory", torch.zeros(len(batch), WIDTH).to(self.model.norm.weight))
        hidden = self.model(batch[:, :-1], memory)
        targets = batch[:, 1:].flatten()
        nll = F.cross_entropy(self.model.output(hidden).flatten(0, 1), targets, reduction="sum")
        return Loss(nll / targets.numel(), nll.detach(), targets.numel(), {"memory": hidden[:, -1].to(memory.dtype)})


def evaluate(model):
    assert not model.training
    batch = ToyBatches().batch(999, 0)
    loss = Objective(model)(batch, {}, FIRST)
    torch.rand(3)  # training must not notice that an evaluation draws
    return EvaluationResult(float(loss.nll), loss.tokens)


def evaluate_scored(model):
    """A toy objective with a score that is unrelated to the loss."""
    result = evaluate(model)
    bleu = 30 + 10 * math.sin(40 * float(model.inner.weight.sum()))
    return EvaluationResult(result.nll, result.tokens, {"bleu": bleu})


def train(folder, *, eval_options=None, **options):
    """Train a fresh toy in `folder`, or resume one; keywords are those of TrainConfig, or of `Training` and `fit`."""
    arguments = {
        name: options.pop(name)
        for name in ("objective", "evaluate", "observers", "batches", "until", "engines")
        if name in options
    }
    config = TrainConfig(
        **{"batch_size": STREAMS, "segment_length": LENGTH, "log_every_steps": 4, "device": "cpu"} | options
    )
    eval_config = EvalConfig(**eval_options or {"every_steps": 5})
    torch.manual_seed(config.seed)
    model = Toy().to(choose_device(config.device))
    with lock_folder(folder):
        training = Training(
            model=model,
            objective=arguments.pop("objective", Objective)(model),
            batches=arguments.pop("batches", ToyBatches()),
            evaluate=arguments.pop("evaluate", evaluate),
            optimizer=make_optimizer(parameter_groups(model, config.weight_decay), config),
            options=config,
            eval_options=eval_config,
            folder=folder,
            observers=arguments.pop("observers", ()),
            engines=arguments.pop("engines", frozenset()),
        )
        result = training.fit(**arguments)
    return model, result


def outcome(folder):
    """Files of a run, times aside."""
    files = {"metrics": folder / "metrics.jsonl"}
    for link in ("last", "best"):
        files |= {
            f"{link}/{name}": folder / "checkpoints" / link / f"{name}.safetensors" for name in ("model", "training")
        }
    paths = (path for path in (folder / "checkpoints" / "kept").glob("*/*"))
    files |= {str(path.relative_to(folder)): path for path in paths}
    return {name: path.read_bytes() for name, path in files.items()}


def at_call(number, act):
    """The toy's objective, which calls `act` before its `number`-th batch."""

    def make(model):
        calls = iter(range(1, 10**6))
        inner = Objective(model)

        def call(batch, carry, position):
            if next(calls) == number:
                act()
            return inner(batch, carry, position)

        return call

    return make


class Death(BaseException):
    """Stands for a SIGKILL: nothing catches it."""


def die():
    raise Death


class Recorder(Observer):
    """An observer that keeps all that it is called with."""

    def __init__(self):
        self.notices = []
        self.lines = []

    def start(self, *, step, total_steps):
        self.began = (step, total_steps)

    def record(self, line):
        self.lines.append(line)

    def notice(self, text):
        self.notices.append(text)
