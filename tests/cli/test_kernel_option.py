"""The help of --kernel names every kernel that there is."""

from __future__ import annotations

import re

from fullrank.cli import app
from fullrank.kernels import NAMES


def test_every_kernel_is_named() -> None:
    said = app.Kernel.__metadata__[0].help
    assert set(re.findall(r"[a-z]+", said)) >= set(NAMES)
