"""lm-eval, with our model known to it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from unittest.mock import patch

from fullrank.core.errors import InputError

MODEL = "fullrank"
_SUBCOMMANDS = ("run", "ls", "validate")


def register() -> None:
    """Make `--model fullrank` known to lm-eval in this process; a second call does nothing.

    lm-eval after 0.4.13 finds it by itself, as the entry point `lm_eval.models` of this package.
    Raises InputError if lm-eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("lm-eval is not installed; install it: pip install 'fullrank[eval]'")
    import lm_eval.models  # noqa: F401 - registers lm-eval's own, which it does only while nothing is registered
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    from fullrank.experiments.lm_eval_model import FullRankLM

    if MODEL not in MODEL_REGISTRY:
        register_model(MODEL)(FullRankLM)


def run(arguments: Sequence[str]) -> None:
    """The command `lm_eval` with these arguments; `--model fullrank` is added where they name no model.

    Raises InputError if lm-eval is not installed, and whatever lm-eval raises.
    """
    register()
    from lm_eval.__main__ import cli_evaluate

    words = list(arguments)
    evaluates = bool(words) and (words[0] == "run" or words[0] not in _SUBCOMMANDS)
    named = any(word in ("-M", "-C") or word.split("=")[0] in ("--model", "--config") for word in words)
    if evaluates and not named and not {"-h", "--help"} & {*words}:
        words += ["--model", MODEL]
    with patch.object(sys, "argv", ["lm_eval", *words]):  # where lm-eval looks for its arguments
        cli_evaluate()
