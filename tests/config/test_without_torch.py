"""Listing, showing and checking configurations imports no torch; one process for all verbs."""

from __future__ import annotations

import subprocess
import sys

VERBS = [
    ["--help"],
    ["recipes", "list"],
    ["recipes", "show", "mos/table1-ptb"],
    ["config", "show", "mixhead/table1-vanilla", "--row", "b"],
    ["config", "validate", "mixhead/table4"],  # translation
    ["config", "validate", "mixhead/table6"],  # fine-tuning
    ["config", "validate", "skip-cross-head/table1"],  # phases
    ["config", "validate", "tensorized/table1"],
]
PROGRAM = f"""
import sys
from fullrank.cli import main
for verb in {VERBS}:
    try:
        main(verb)
    except SystemExit as stopped:
        assert not stopped.code, verb
    assert not {{"torch", "transformers", "matplotlib"}} & set(sys.modules), verb
"""


def test_verbs_about_configurations_import_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
