"""Make the modules of `benchmarks/` importable, as `fullrank bench` does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
