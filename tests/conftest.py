"""Common setting of all tests: one thread, fixed seeds, deterministic kernels, and the folder of real corpora."""

import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from moving import seed

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton looks when it is imported; its kernels then run on the CPU

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("fullrank", derandomize=True, deadline=None, database=None, max_examples=20)
settings.load_profile("fullrank")


def pytest_configure(config):
    torch.set_num_threads(1)  # several workers share the machine, and sums add up in one order
    torch.use_deterministic_algorithms(True)  # also fills memory that nobody wrote with NaN
    gc.disable()  # while tests are collected: nothing is garbage, and there are millions of objects to look at


def pytest_collection_finish():
    gc.freeze()  # modules and collected tests stay: later collections look at other objects only
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seeds():
    random.seed(0)
    np.random.seed(0)
    seed(0)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Prepared texts go into the folder of the test where no `data.cache` is given."""
    monkeypatch.setattr("fullrank.data.preparation.cache_root", lambda cache: tmp_path / "cache")


@pytest.fixture(scope="session")
def corpora():
    """The folder of real corpora (ptb, wikitext-2, ...): $FULLRANK_TEST_CORPORA, or `../shared/data` beside the repository."""
    folder = Path(os.environ.get("FULLRANK_TEST_CORPORA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(
            f"no real corpora: {folder} is not there; set FULLRANK_TEST_CORPORA to a folder that holds ptb, ..."
        )
    return folder
