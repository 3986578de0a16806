"""Those who look on, as one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fullrank.training.values import Observer

logger = logging.getLogger("fullrank")


class Notify:
    """Tells the observers; a notice nobody would see goes to the log."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def advance(self, step: int, tokens: int) -> None:
        for observer in self.observers:
            observer.advance(step, tokens)

    def record(self, line: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.record(line)

    def notice(self, text: str) -> None:
        if not self.observers:
            logger.warning(text)
        for observer in self.observers:
            observer.notice(text)
