"""Number of files of the package of which a function is called: by one call of a model, and by a training."""

import random
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fullrank as fr
from fullrank.cli import main
from fullrank.training import checkpoint

PACKAGE = Path(fr.__file__).parent


@contextmanager
def record_files():
    """Files of which a function is called. What a module does while it is imported does not count."""
    files = set()
    importing = []

    def note(frame, event, argument):
        is_module = frame.f_code.co_name == "<module>"
        if event == "call" and is_module:
            importing.append(frame)
        elif event == "return" and is_module:
            importing.remove(frame)
        elif event == "call" and not importing and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)


def find_files_walked(call):
    """Files of which a function is called, after one call that loads what is loaded once."""
    call()
    with record_files() as files:
        call()
    return files


def build_model(**options):
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    return fr.LanguageModel(fr.ModelConfig(**sizes, intermediate_size=32, **options))


def test_a_loss_of_mixhead_b_walks_ten_files():
    model = build_model(position="sinusoidal", attention=fr.AttentionConfig(mix="position_wise"))
    ids = torch.arange(18).reshape(2, 9)
    files = find_files_walked(lambda: (model(ids[:, :-1]), model.loss(ids[:, :-1], ids[:, 1:]).backward()))
    assert len(files) <= 10, sorted(files)


def test_a_segment_with_memory_walks_twelve_files():
    attention = fr.AttentionConfig(score="relative", mix="position_wise")
    model = build_model(position="relative", attention=attention, memory_length=8)
    ids = torch.arange(18).reshape(2, 9)
    memory = model(ids).memory
    files = find_files_walked(lambda: model(ids, memory=memory))
    files |= find_files_walked(lambda: model.loss(ids[:, :-1], ids[:, 1:], memory=memory).backward())
    assert len(files) <= 12, sorted(files)


class FirstCheckpoint(BaseException):
    """The first checkpoint is written."""


@pytest.mark.usefixtures("own_cache")
def test_a_training_of_a_text_walks_40_files_to_its_first_checkpoint(tmp_path, monkeypatch, capsys):
    text = tmp_path / "my.txt"
    draw = random.Random(1)
    lines = (
        " ".join(draw.choices(["alpha", "beta", "gamma", "delta", "of", "the", "and", "to"], k=9)) for _ in range(1200)
    )
    text.write_text("\n".join(lines))
    write_checkpoint = checkpoint._write_checkpoint

    def write_and_stop(*arguments):
        write_checkpoint(*arguments)
        raise FirstCheckpoint

    monkeypatch.setattr(checkpoint, "_write_checkpoint", write_and_stop)
    monkeypatch.chdir(tmp_path)
    tiny = ["model.num_hidden_layers=1", "model.hidden_size=16", "model.intermediate_size=32", "train.steps=2"]
    with record_files() as files, pytest.raises(FirstCheckpoint):
        main(["train", "my.txt", *tiny, "train.device=cpu", "--out", "run"])
    assert (tmp_path / "run" / "checkpoints" / "last").exists()
    assert 30 < len(files) <= 40, sorted(files)
