"""Random numbers: seeded, saved, restored, and left alone while others draw.

A model draws from torch's generator (dropout); Python's and numpy's are kept too, since an objective may use them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Set every generator to a state that depends on `seed` alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every generator, as tensors and plain values."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    plain = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }
    return tensors, plain


def restore_random_state(device: torch.device, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Set every generator to a saved state; a GPU's is left alone if the state was saved without one."""
    torch.set_rng_state(tensors["torch"])
    random.setstate((plain["python"]["version"], tuple(tensors["python"].tolist()), plain["python"]["gauss"]))
    key = tensors["numpy"].numpy().astype(np.uint32)
    saved = plain["numpy"]
    np.random.set_state(("MT19937", key, saved["pos"], saved["has_gauss"], saved["gauss"]))
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside the block, the generators go on after it as if nothing had been."""
    state = random_state(device)
    try:
        yield
    finally:
        restore_random_state(device, *state)
