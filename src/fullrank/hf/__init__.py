"""Hugging Face: our attention inside other models, and our models inside Hugging Face's tools.

Importing this package registers our models with the auto classes of transformers, so that
`AutoModelForCausalLM.from_pretrained(folder)` and the like read them.
"""

from __future__ import annotations

import importlib.util

from fullrank.core.errors import InputError, pip_install

if importlib.util.find_spec("transformers") is None:
    raise InputError(f"transformers is not installed, and Hugging Face models need it; install it: {pip_install('hf')}")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from fullrank.hf.classes import FullRankCache as FullRankCache
from fullrank.hf.classes import FullRankForCausalLM as FullRankForCausalLM
from fullrank.hf.classes import FullRankForMaskedLM as FullRankForMaskedLM
from fullrank.hf.configuration import FullRankConfig as FullRankConfig

AutoConfig.register("fullrank", FullRankConfig, exist_ok=True)
AutoModelForCausalLM.register(FullRankConfig, FullRankForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(FullRankConfig, FullRankForMaskedLM, exist_ok=True)
