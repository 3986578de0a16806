"""The command line in processes of its own that need not import torch: they are forked from one that has."""

import multiprocessing
import os
from pathlib import Path

from fullrank.cli import main

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ["fullrank.cli.app", "fullrank.experiments.run"]
_CONTEXT.set_forkserver_preload(_PRELOADED)


def preload(*modules):
    """Have these modules imported too, before the first process is started."""
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *modules])


def _run(words, log, before):
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, handle in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(handle, stream)
    if before is not None:
        before()
    main(words)


def call(function, *arguments):
    """`function(*arguments)` in a process of its own."""
    process = _CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def start(*words, log=Path(os.devnull), before=None):
    """`fullrank WORDS`, whose output goes to `log`; `before` is called first, in that process."""
    return call(_run, [str(word) for word in words], log, before)
