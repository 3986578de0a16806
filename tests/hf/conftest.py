"""Folders of tests that also build models of everything that is registered."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("properties", "core")]
