"""The command line in tests: a small text, a small model, and how to call the command."""

import contextlib
import io
import json
import os
import random
import subprocess
import sys

from fullrank.cli import main

SMALL = [
    "model.hidden_size=16",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.dropout.residual=0.1",
    "model.attention.mix=position_wise",
    "train.batch_size=4",
    "train.segment_length=8",
    "train.threads=1",
    "train.device=cpu",
    "train.learning_rate=0.02",
    "train.log_every_steps=5",
]


def write_text(folder, sentences=400, seed=0):
    """A text of made-up sentences with something to learn: a noun decides its verb."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    pairs = [("cats", "sleep"), ("dogs", "bark"), ("birds", "sing"), ("fish", "swim"), ("mice", "hide")]
    for split, count in (("train", sentences), ("valid", sentences // 8), ("test", sentences // 8)):
        chosen = [rng.choice(pairs) for _ in range(count)]
        lines = [f"the {noun} {verb} in the {rng.choice(['morning', 'evening'])}" for noun, verb in chosen]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_config(path, text, cache, **train):
    """A YAML configuration over the made-up text."""
    ends = "\n".join(f"  {key}: {value}" for key, value in train.items())
    path.write_text(
        f"data:\n  name: text\n  train: {text}/train.txt\n  valid: {text}/valid.txt\n  test: {text}/test.txt\n"
        f"  cache: {cache}\ntrain:\n{ends}\n",
        encoding="utf-8",
    )
    return path


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1"}


def command(*words):
    return [sys.executable, "-m", "fullrank", *map(str, words)]


def call_process(*words, timeout=120):
    """Run the command in a process of its own, as a user does."""
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=timeout, env=environment())


def call(*words):
    """Run the command in this process: its exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    return subprocess.CompletedProcess(list(words), status, out.getvalue(), err.getvalue())


def called(*words):
    """Exit status, stdout and stderr of the command in this process."""
    completed = call(*words)
    return completed.returncode, completed.stdout, completed.stderr


def succeeds(*words):
    """Run a command that has to succeed; return what it prints."""
    code, out, stderr = called(*words)
    assert code == 0, stderr
    return out


def document(*words):
    """The JSON document of a command that ends well."""
    return json.loads(succeeds(*words, "--json"))
