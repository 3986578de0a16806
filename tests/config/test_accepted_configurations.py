"""Training accepts all that `config validate` accepts: each is checked without data, then built and run a step."""

import pytest
import torch
from drawn_configurations import accepted

from fullrank.config.load import build_any
from fullrank.core.errors import FullRankError
from fullrank.experiments.language_model import skip_schedule
from fullrank.experiments.run import make_task_optimizer, task_of
from fullrank.experiments.run_folder import absolute
from fullrank.training.optimizer import make_schedule
from fullrank.training.values import TrainingPosition, make_plan

BY_DATA = ("streams", "entries; set it to null", "model.vocab_size", "a stream of", "no token of", "whole stream")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    for split, count in (("train", 60), ("valid", 12), ("test", 12)):
        (folder / f"{split}.txt").write_text("the cat sat on the mat and ran .\n" * count)
        (folder / f"{split}.de").write_text("ein hund rennt\n" * count)
        (folder / f"{split}.en").write_text("a dog runs\n" * count)
    return folder


def attempt(settings, out):
    """All that `train` does before and in its first step."""
    task = task_of(absolute(build_any(settings)))
    task.check()
    task.prepare(lambda _: None)
    torch.manual_seed(0)
    task.build(out, torch.device("cpu"))
    options = task.options
    make_task_optimizer(task)
    plan = make_plan(options, task.eval_options, task.batches)
    make_schedule(options, plan.total_steps).scale_rate(1)
    for phase in options.phases:
        skip_schedule(phase, task.config.model.num_hidden_layers)
    task.objective(task.batches.batch(0, 0), {}, TrainingPosition(step=1)).value.backward()


@pytest.mark.parametrize(("seed", "count"), [(35, 70), pytest.param(36, 300, marks=pytest.mark.full)])
def test_what_is_accepted_can_be_trained(texts, seed, count):
    """Only what the text decides may be refused later: its length, and the size of its vocabulary."""
    refused = []
    tried = 0
    for settings in accepted(texts, seed, count):
        tried += 1
        try:
            attempt(settings, texts)
        except FullRankError as error:
            if not any(words in str(error) for words in BY_DATA):
                refused.append((str(error), settings))
    assert tried > count / 5
    assert refused == []
