"""The C++ kernels, compiled on the machine that runs them and kept for the next time.

    FULLRANK_NATIVE=0        never: everything runs without them, slower
    FULLRANK_CACHE=FOLDER    where compiled libraries are kept; by default $XDG_CACHE_HOME/fullrank or ~/.cache/fullrank
    CXX="clang++ -pipe"    the compiler; by default the first of g++, clang++, c++

A library is named after its source, its flags, the compiler and the processor, so that none is ever used where it does not
belong. Its sha256 lies beside it and is compared before every loading, for a damaged library kills the process; such a one is
compiled again. No compiler, or one that fails, is no error: attention is computed by other kernels, and a warning is logged.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SOURCES = Path(__file__).parent / "cpp"
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-fPIC", "-shared")
_THREADS = (("-fopenmp",), ())  # Apple's compiler has no OpenMP: one thread then
_LONGEST = 300  # seconds
_log = logging.getLogger("fullrank")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, compiled now if need be (about ten seconds); None where that is not possible or not wanted."""
    if os.environ.get("FULLRANK_NATIVE", "1").lower() in ("0", "off", "false", "no"):
        return None
    try:
        loaded = ctypes.CDLL(str(_built()))
        loaded.fullrank_mixed.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        loaded.fullrank_mixed.restype = ctypes.c_int
    except (OSError, RuntimeError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _log.warning("attention runs without the C++ kernel, which could not be built: %s", why)
        return None
    return loaded


def _built() -> Path:
    compiler = _compiler()
    path = _folder() / f"mixed-{_key(compiler)}.so"
    if not _whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if not _whole(path):  # another process may have been faster
                again = "again, as its file is damaged" if path.with_suffix(".sha256").exists() else "once"
                _log.warning("compiling the attention kernel for this machine, %s: about ten seconds", again)
                _compile(compiler, path)
    return path


def _whole(path: Path) -> bool:
    """True if the library has the checksum that lies beside it."""
    try:
        return path.with_suffix(".sha256").read_text(encoding="ascii") == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _compiler() -> list[str]:
    words = shlex.split(os.environ.get("CXX", ""))
    names = words[:1] or ["g++", "clang++", "c++"]
    for name in names:
        if path := shutil.which(name):
            return [path, *words[1:]]
    raise RuntimeError(f"no C++ compiler (looked for {', '.join(names)})")


def _folder() -> Path:
    if folder := os.environ.get("FULLRANK_CACHE"):
        return Path(folder).expanduser().absolute()  # a library that is named without a folder is looked for elsewhere
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fullrank"


def _key(compiler: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    parts = [version, " ".join((*compiler[1:], *_FLAGS)).encode(), platform.machine().encode(), _processor()]
    parts += [path.name.encode() + path.read_bytes() for path in sorted(_SOURCES.iterdir()) if path.is_file()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    """Model and instructions of the processor: what is compiled for one need not run on another."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return platform.processor().encode()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in text.splitlines() if line.startswith(kept)).encode()


def _compile(compiler: list[str], path: Path) -> None:
    source, failed, english = str(_SOURCES / "mixed.cpp"), "", {**os.environ, "LC_ALL": "C"}
    prefix = f".building-{path.stem}-"
    for leftover in path.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    for threads in _THREADS:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder:
            made = Path(folder) / path.name
            command = [*compiler, *_FLAGS, *threads, source, "-o", str(made)]
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", env=english, timeout=_LONGEST
            )
            if done.returncode == 0:
                checksum = made.with_suffix(".sha256")
                checksum.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="ascii")
                for file in (made, checksum):  # each whole or not at all; a kill in between is a wrong checksum
                    os.replace(file, path.with_suffix(file.suffix))
                return
        ended = f"{compiler[0]} ended with status {done.returncode}"
        failed = failed or next((line for line in done.stderr.splitlines() if "error" in line), ended)
    raise RuntimeError(failed)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time, so that several do not compile the same; without locks each compiles for itself."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems have none
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.warning("another process compiles the attention kernel; waiting until it gives up %s", path)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
