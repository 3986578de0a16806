"""Training: one loop that is handed the model and every policy (`loop`), and the policies themselves."""

from fullrank.training.checkpoint import load_weights
from fullrank.training.device import autocast, choose_device, compile_blocks, prepare_machine
from fullrank.training.loop import fit
from fullrank.training.observers import make_observers
from fullrank.training.optimizer import make_optimizer, parameter_groups
from fullrank.training.plan import Plan, make_plan
from fullrank.training.randomness import seed_everything
from fullrank.training.schedule import Schedule, make_schedule
from fullrank.training.values import FitResult, Interrupted, Judged, Loss, Observer, Place

__all__ = [
    "FitResult",
    "Interrupted",
    "Judged",
    "Loss",
    "Observer",
    "Place",
    "Plan",
    "Schedule",
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
