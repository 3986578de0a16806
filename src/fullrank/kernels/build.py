"""The C++ kernels, compiled on the machine that runs them and kept for the next time.

    FULLRANK_NATIVE=0        never: everything runs without them, slower
    FULLRANK_CACHE=FOLDER    where compiled libraries are kept; by default $XDG_CACHE_HOME/fullrank or ~/.cache/fullrank
    CXX="clang++ -pipe"    the compiler; by default the first of g++, clang++, c++

A library is named after its source, its flags, the compiler and the processor, so that none is ever used where it does not
belong. It appears whole or not at all. No compiler, or one that fails, is no error: attention is computed by other kernels, and
a warning is logged.
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

_SOURCES = Path(__file__).parent / "native" / "cpp"
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-fPIC", "-shared")
_THREADS = (("-fopenmp",), ())  # Apple's compiler has no OpenMP: one thread then
_LONGEST = 300  # seconds
_log = logging.getLogger("fullrank")


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the kernels, and compile them now if need be (about ten seconds); None where that is not possible or not wanted."""
    if os.environ.get("FULLRANK_NATIVE", "1").lower() in ("0", "off", "false", "no"):
        return None
    try:
        loaded = ctypes.CDLL(str(_find_or_compile()))
        loaded.fullrank_mixed.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        loaded.fullrank_mixed.restype = ctypes.c_int
        loaded.fullrank_linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4 + [ctypes.c_int]
        loaded.fullrank_linear.restype = None
        loaded.fullrank_one_query.argtypes = [*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 8, ctypes.c_double]
        loaded.fullrank_one_query.restype = ctypes.c_int
        sizes = [ctypes.c_int64] * 3
        loaded.fullrank_transpose.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, *sizes]
        loaded.fullrank_transpose.restype = None
    except (OSError, RuntimeError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _log.warning("attention runs without the C++ kernel, which could not be built: %s", why)
        return None
    return loaded


def _find_or_compile() -> Path:
    compiler = _find_compiler()
    path = _find_cache() / f"mixed-{_make_key(compiler)}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if not path.exists():  # another process may have been faster
                _log.warning("compiling the attention kernel for this machine, once: about ten seconds")
                _compile(compiler, path)
    return path


def _find_compiler() -> list[str]:
    words = shlex.split(os.environ.get("CXX", ""))
    names = words[:1] or ["g++", "clang++", "c++"]
    for name in names:
        if path := shutil.which(name):
            return [path, *words[1:]]
    raise RuntimeError(f"no C++ compiler (looked for {', '.join(names)})")


def _find_cache() -> Path:
    if folder := os.environ.get("FULLRANK_CACHE"):
        return Path(folder).expanduser().absolute()  # a library that is named without a folder is looked for elsewhere
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fullrank"


def _make_key(compiler: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    flags = " ".join((*compiler[1:], *_FLAGS))
    parts = [version, flags.encode(), platform.machine().encode(), _describe_processor()]
    for path in sorted(_SOURCES.iterdir()):
        if path.is_file():
            parts.append(path.name.encode() + path.read_bytes())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _describe_processor() -> bytes:
    """Describe the model and the instructions of the processor: what is compiled for one need not run on another."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return platform.processor().encode()
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in text.splitlines() if line.startswith(fields)).encode()


def _compile(compiler: list[str], path: Path) -> None:
    prefix = f".building-{path.stem}-"
    errors = ""
    for leftover in path.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder:
        target = Path(folder) / path.name
        for threads in _THREADS:
            command = [*compiler, *_FLAGS, *threads, str(_SOURCES / "mixed.cpp"), "-o", str(target)]
            done = subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
                timeout=_LONGEST,
            )
            if done.returncode == 0:
                os.replace(target, path)
                return
            errors += done.stderr
    ended = f"{compiler[0]} ended with status {done.returncode}"
    raise RuntimeError(next((line for line in errors.splitlines() if "error" in line), ended))


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Run the block in one process at a time, so that several do not compile the same.

    Where there are no locks, each process compiles for itself.
    """
    import fcntl  # absent on Windows

    with path.open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
