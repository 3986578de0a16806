"""Imports the peers' packages that are there: once, in the process from which those that measure memory are forked."""

from __future__ import annotations

import contextlib

from fullrank.bench import peers

for _load in (peers.talking_heads, peers.eager_attention):
    with contextlib.suppress(Exception):  # it is skipped by name where it would run
        _load()
