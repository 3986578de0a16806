"""Hugging Face: our attention inside anybody's model, and our models inside Hugging Face's tools.

Importing this package tells the auto classes of transformers about our models.
"""

from __future__ import annotations

import importlib.util

from fullrank.core.errors import InputError

if importlib.util.find_spec("transformers") is None:
    raise InputError(
        "transformers is not installed, and Hugging Face models need it; install it: pip install 'fullrank[hf]'"
    )

from fullrank.hf.auto import FullRankConfig as FullRankConfig
from fullrank.hf.auto import FullRankForCausalLM as FullRankForCausalLM
from fullrank.hf.auto import FullRankForMaskedLM as FullRankForMaskedLM
from fullrank.hf.auto import FullRankForSeq2SeqLM as FullRankForSeq2SeqLM
from fullrank.hf.auto import FullRankForSequenceClassification as FullRankForSequenceClassification
from fullrank.hf.cache import FullRankCache as FullRankCache
