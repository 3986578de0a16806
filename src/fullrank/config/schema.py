"""The typed configuration of a run: frozen dataclasses, defaults there and nowhere else.

Words follow Hugging Face configurations (`hidden_size`, `num_hidden_layers`, ...). Nothing here imports torch or
pydantic; `load.py` builds these classes from YAML through pydantic and reports every fault at once.
A field left at `None` is resolved from the others on construction, so that a saved configuration states every value.
"""

from fullrank.config.attention import NOT_NEXT_TOKEN as NOT_NEXT_TOKEN
from fullrank.config.attention import AttentionConfig as AttentionConfig
from fullrank.config.checks import Stage as Stage
from fullrank.config.checks import stage_name as stage_name
from fullrank.config.checks import stage_options as stage_options
from fullrank.config.data import DataConfig as DataConfig
from fullrank.config.masking import MASKED_TOKEN as MASKED_TOKEN
from fullrank.config.model import DropoutConfig as DropoutConfig
from fullrank.config.model import ModelConfig as ModelConfig
from fullrank.config.model import with_memory as with_memory
from fullrank.config.running import EvalConfig as EvalConfig
from fullrank.config.running import RunConfig as RunConfig
from fullrank.config.training import PhaseConfig as PhaseConfig
from fullrank.config.training import PlateauConfig as PlateauConfig
from fullrank.config.training import TrainConfig as TrainConfig
from fullrank.config.translation import DecoderConfig as DecoderConfig
from fullrank.config.translation import EncoderConfig as EncoderConfig
from fullrank.config.vocabulary import InputConfig as InputConfig
from fullrank.config.vocabulary import OutputConfig as OutputConfig
