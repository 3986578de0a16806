"""The command line in processes of its own that need not import torch: they are forked from one that has."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.process import BaseProcess

from fullrank.cli import main

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fullrank.cli.app", "fullrank.experiments.run"])


def _quiet(words: list[str]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    main(words)


def start(*words: object) -> BaseProcess:
    """`fullrank WORDS`, whose output nobody reads."""
    process = _CONTEXT.Process(target=_quiet, args=([str(word) for word in words],), daemon=True)
    process.start()
    return process
