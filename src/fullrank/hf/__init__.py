"""Hugging Face: our attention inside anybody's model, and our models inside Hugging Face's tools."""

from __future__ import annotations

import importlib.util

from fullrank.errors import InputError

if importlib.util.find_spec("transformers") is None:
    raise InputError(
        "transformers is not installed, and Hugging Face models need it; install it: pip install 'fullrank[hf]'"
    )
