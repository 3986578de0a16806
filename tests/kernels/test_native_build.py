"""The compiled library: made once and kept; where that is not possible, others compute the same and a warning is logged.

Compilers here are scripts: the good one copies what was compiled before, and all of them write down that they were called.
"""

import logging
import os
import platform
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from calls import call, equation, needs_compiler

import fullrank as fr
from fullrank import kernels
from fullrank.kernels import build
from fullrank.kernels.build import library

PROBLEM = call(fr.Layout.of(20, 25), "B")


@dataclass
class Workshop:
    """A folder for libraries, and one for compilers and the log of their calls."""

    cache: Path
    tools: Path
    compiled: str
    patch: pytest.MonkeyPatch

    def compiler(self, does):
        """A script as compiler; `$out` is the file that it has to write, `$compiled` a library that is right."""
        path = self.tools / "compiler"
        path.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\necho "$@" >> {self.tools}/calls\n'
            f'for out; do [ "$before" = -o ] && break; before=$out; done\ncompiled={self.compiled}\n{does}\n'
        )  # fmt: skip
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.patch.setenv("CXX", str(path))
        return path

    @property
    def calls(self):
        """Number of compilations."""
        log = self.tools / "calls"
        return len(log.read_text().splitlines()) if log.exists() else 0

    @property
    def cached_files(self):
        """Files in the cache, without locks."""
        return sorted(path.suffix for path in self.cache.rglob("*") if path.suffix != ".lock")


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    needs_compiler()
    loaded = library()
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("FULLRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FULLRANK_NATIVE", raising=False)
    library.cache_clear()
    yield Workshop(tmp_path / "cache", tmp_path / "tools", loaded._name, monkeypatch)
    monkeypatch.undo()
    library.cache_clear()


def computed():
    """The kernels that are chosen for attention, and whether their output is right."""
    with kernels.chosen() as names:
        out = kernels.attend(PROBLEM)
    return names, out is None or torch.allclose(out, equation(PROBLEM), atol=1e-6)


def warnings_of(caplog):
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in messages if not text.startswith("compiling")]


COPIES = 'cp "$compiled" "$out"'
LOADS = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
assert build.library() is not None
"""
FAULTS = {
    "fails": ('echo "mixed.cpp:3:1: error: nothing works" >&2; exit 1', "mixed.cpp:3:1: error: nothing works"),
    "says strange letters": (r"printf 'error: \377\376 of wood\n' >&2; exit 1", "of wood"),
    "is not there": (None, "no C++ compiler"),
}


def test_compiles_once(workshop, caplog):
    workshop.compiler(COPIES)
    for _ in range(3):
        library.cache_clear()
        assert computed() == ({"native"}, True)
    assert workshop.calls == 1
    assert workshop.cached_files == [".so"]
    assert not warnings_of(caplog)


@pytest.mark.parametrize("fault", FAULTS)
def test_compiler_with_a_fault(fault, workshop, caplog):
    does, message = FAULTS[fault]
    if does is None:
        workshop.patch.setenv("CXX", "no-such-compiler")
    else:
        workshop.compiler(does)
    names, right = computed()
    assert "native" not in names
    assert right
    (warning,) = warnings_of(caplog)
    assert "without the C++ kernel" in warning
    assert message in warning
    assert workshop.cached_files == []
    computed()
    assert len(warnings_of(caplog)) == 1


def test_two_processes_at_once(workshop):
    """The second waits for the first, and both get a complete library."""
    workshop.compiler(f"sleep 1\n{COPIES}")
    command = [sys.executable, "-c", LOADS, str(build.__file__)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    reports = sorted(process.communicate(timeout=60)[1] for process in started)
    assert [process.returncode for process in started] == [0, 0]
    assert "compiling" in reports[1]
    assert workshop.calls == 1
    assert workshop.cached_files == [".so"]


@pytest.mark.full
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86")
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx"])
def test_processors_with_shorter_vectors(flag, tmp_path):
    """Tiles differ by instruction set; each of them equals the equation."""
    environment = os.environ | {"CXX": f"g++ {flag}", "FULLRANK_CACHE": str(tmp_path)}
    file = Path(__file__).with_name("test_native.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout
    assert list(tmp_path.glob("*.so")), "it was not compiled"
