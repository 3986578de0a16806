"""What the scripts of this folder share: options, JSON, memory in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fullrank.bench.harness import PROTOCOL, rounded
from fullrank.bench.machine import environment


def options(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark takes: --rounds, --threads, --json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser


def memory_mib(script: str, *arguments: object) -> float:
    """The number that `script --memory ARGUMENTS` prints, in a process of its own with as many threads as this one."""
    words = [sys.executable, script, "--memory", *map(str, arguments), "--threads", str(torch.get_num_threads())]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def save(path: Path | None, content: dict[str, Any]) -> None:
    """Keep `content`, the protocol and the environment as JSON in `path`, if given."""
    if path is None:
        return
    whole = {**content, "protocol": PROTOCOL, "environment": environment()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(whole), indent=2) + "\n", encoding="utf-8")
