"""Typed configuration of a run: `data`, `run` (train and eval), `load` (YAML in, YAML out), `recipe` (tables of the papers).

The model section is `fullrank.core.config`. Nothing here imports torch.
"""

from fullrank.core.registry import add_slot
from fullrank.core.registry import register as register

# what a run chooses by name besides the parts of its model; imported when a name is looked up
add_slot("optimizer", "fullrank.training.optimizer")
add_slot("schedule", "fullrank.training.optimizer")
add_slot("training_part", "fullrank.experiments.language_model")
