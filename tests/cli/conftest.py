"""One small text and one trained run, shared by all tests of the command line."""

import pytest

from cli_runs import SMALL, call, write_config, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"), sentences=200)


@pytest.fixture(scope="session")
def config(text):
    return write_config(text / "run.yaml", text, text / "cache", steps=30)


@pytest.fixture(scope="session")
def run(config):
    """A finished run, made by the command."""
    folder = config.parent / "run"
    process = call("train", config, *SMALL, "--out", folder)
    assert process.returncode == 0, process.stderr
    assert "test perplexity" in process.stdout
    return folder
