"""Training: one loop that is given the model and every policy (`loop`), and the policies themselves."""

from fullrank.core.errors import Interrupted as Interrupted
from fullrank.training.checkpoint import load_weights as load_weights
from fullrank.training.device import choose_device as choose_device
from fullrank.training.device import compile_blocks as compile_blocks
from fullrank.training.device import prepare_machine as prepare_machine
from fullrank.training.device import seed_everything as seed_everything
from fullrank.training.loop import Training as Training
from fullrank.training.observers import make_observers as make_observers
from fullrank.training.optimizer import make_optimizer as make_optimizer
from fullrank.training.optimizer import make_schedule as make_schedule
from fullrank.training.optimizer import parameter_groups as parameter_groups
from fullrank.training.values import Counters as Counters
from fullrank.training.values import EvaluationResult as EvaluationResult
from fullrank.training.values import Loss as Loss
from fullrank.training.values import Observer as Observer
from fullrank.training.values import Plan as Plan
from fullrank.training.values import TrainingPosition as TrainingPosition
from fullrank.training.values import make_plan as make_plan
