"""Training: one loop that is given the model and every policy (`loop`), and the policies themselves."""

from fullrank.core.errors import Interrupted
from fullrank.training.checkpoint import load_weights
from fullrank.training.device import autocast, choose_device, compile_blocks, prepare_machine, seed_everything
from fullrank.training.loop import fit
from fullrank.training.observers import make_observers
from fullrank.training.optimizer import Schedule, make_optimizer, make_schedule, parameter_groups
from fullrank.training.phases import Plan, make_plan
from fullrank.training.values import EvaluationResult, FitResult, Loss, Observer, TrainingPosition

__all__ = [
    "EvaluationResult",
    "FitResult",
    "Interrupted",
    "Loss",
    "Observer",
    "Plan",
    "Schedule",
    "TrainingPosition",
    "autocast",
    "choose_device",
    "compile_blocks",
    "fit",
    "load_weights",
    "make_observers",
    "make_optimizer",
    "make_plan",
    "make_schedule",
    "parameter_groups",
    "prepare_machine",
    "seed_everything",
]
