"""Number of files of the package of which one call of a model calls a function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fullrank as fr

PACKAGE = Path(fr.__file__).parent


def find_files_walked(call: Callable[[], object]) -> set[str]:
    """Files of which a function is called, after one call that loads what is loaded once."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    call()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return files


def build_model(**options: Any) -> fr.LanguageModel:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    return fr.LanguageModel(fr.ModelConfig(**sizes, intermediate_size=32, **options))


def test_a_loss_of_mixhead_b_walks_ten_files() -> None:
    model = build_model(position="sinusoidal", attention=fr.AttentionConfig(mix="position_wise"))
    ids = torch.arange(18).reshape(2, 9)
    files = find_files_walked(lambda: (model(ids[:, :-1]), model.loss(ids[:, :-1], ids[:, 1:]).backward()))
    assert len(files) <= 10, sorted(files)


def test_a_segment_with_memory_walks_twelve_files() -> None:
    attention = fr.AttentionConfig(score="relative", mix="position_wise")
    model = build_model(position="relative", attention=attention, memory_length=8)
    ids = torch.arange(18).reshape(2, 9)
    memory = model(ids).memory
    files = find_files_walked(lambda: model(ids, memory=memory))
    files |= find_files_walked(lambda: model.loss(ids[:, :-1], ids[:, 1:], memory=memory).backward())
    assert len(files) <= 12, sorted(files)
