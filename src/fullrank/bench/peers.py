"""What peers are imported from; nothing is imported before it is asked for."""

from __future__ import annotations

import warnings
from typing import Any


def talking_heads() -> Any:
    """x-transformers' attention, a module class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it scripts functions when imported
        from x_transformers.attend import Attend
    return Attend


def eager_attention() -> Any:
    """The attention function of transformers that is made of products and a softmax, as its Llama has it."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward
