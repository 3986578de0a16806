"""Whether somebody wants to see attention weights, as transformers says it."""

from __future__ import annotations

from typing import Any

import torch

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # an older transformers passes the argument down
    _active_collector = None


def weights_asked_for(arguments: dict[str, Any]) -> bool:
    """By the argument `output_attentions`, or because a model above is collecting what its layers return."""
    if arguments.get("output_attentions"):
        return True
    if _active_collector is None or torch.compiler.is_compiling():
        return False
    collected = _active_collector.get()
    return bool(collected) and any("attentions" in key for key in collected)
