"""Block sizes of the Triton kernels: which are tried, and the launch of the fastest. The interpreter has nothing to try.

A program is as large as its registers and shared memory allow, which are estimated here; `make gpu-compile` shows what the
compiler makes of each choice. What is fastest is kept in Triton's cache on the disk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from fullrank.kernels.triton import programs

# The program of each kernel, and its choices. The last four are for mixed scores, and for keys that mix.
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "totals": (programs.totals, {}),
    "outputs": (programs.sum_rows, {"KEYS": False}),
    "mixing_gradient": (programs.mixing_gradient, {"KEYS": False, "TERM": "weights"}),
    "value_gradient": (programs.sum_rows, {"KEYS": True}),
    "query_gradient": (programs.score_gradient, {"KEYS": False}),
    "key_gradient": (programs.score_gradient, {"KEYS": True}),
    "delta": (programs.mixing_gradient, {"KEYS": False, "TERM": "delta"}),
    "key_mixing_gradient": (programs.mixing_gradient, {"KEYS": True, "TERM": "weights"}),
    "scoring_gradient": (programs.mixing_gradient, {"KEYS": False, "TERM": "scores"}),
    "key_scoring_gradient": (programs.mixing_gradient, {"KEYS": True, "TERM": "scores"}),
}
INTERPRETED = {"G": 4, "GJ": 3, "BM": 16, "BN": 32}  # small, so that tests with few numbers have several blocks
_HELD_BY_INTERPRETER = 8  # heads

_MOST_TRIED = 2  # each takes seconds to compile
_PAIRS = ((4, 4), (2, 4), (2, 2), (1, 1))  # groups of sources and heads in `mixing_gradient`
_PAIRS_OF_SCORES = ((8, 4), *_PAIRS)
# major numbers of capabilities that multiply from shared memory where a tile has 64 rows or more
_ASYNCHRONOUS = (9, 10)
_ROWS_ASYNCHRONOUS = 64
# Bounds of `_count_registers`, by the precision of products; the second where operands need no registers.
_REGISTERS = {"ieee": 208, "tf32": 128, "tf32x3": 64}
_REGISTERS_ASYNCHRONOUS = {"ieee": 224, "tf32": 160, "tf32x3": 64}
_REGISTERS_SPILLED = 80  # added where scores are mixed: spills cost less than the products of all heads once more
# Triton 3.9 makes of a grouped program with 128 rows one that computes nothing on sm_100, the fastest of all.
_BLACKWELL = 10
_ROWS_LOST = 128
_MOST_HELD = 16  # heads: the loop over them is unrolled


class Tile(NamedTuple):
    """Positions that a program owns, those that it loads at a time, warps, and stages of loads under way."""

    rows: int
    columns: int
    warps: int
    stages: int = 2


_TILES: dict[Any, tuple[Tile, ...]] = {
    programs.totals: (
        Tile(128, 128, 8),
        Tile(128, 64, 8),
        Tile(64, 64, 4),
        Tile(32, 32, 4),
    ),
    programs.mixing_gradient: (
        Tile(128, 32, 8),
        Tile(64, 32, 4),
        Tile(64, 32, 4, 1),
        Tile(32, 32, 4),
    ),
}
_TILES_OF_GROUPS = (
    Tile(128, 32, 8),
    Tile(64, 32, 4),
    Tile(32, 32, 4),
    Tile(32, 32, 4, 1),
)
_TILES_OF_SCORES = (
    Tile(64, 32, 8),
    Tile(32, 32, 4),
    Tile(32, 32, 8),
    Tile(32, 16, 4),
)


class Call(NamedTuple):
    """A kind of call, by which block sizes are chosen.

    The kernel, heads, their padded size, bytes of a number, the precision of products; the card: the major number of its
    compute capability, and bytes of shared memory of a block; and whether scores are mixed.
    """

    kernel: str
    heads: int
    width: int
    size: int
    precision: str
    capability: int
    shared: int
    is_scored: bool = False

    @property
    def program(self) -> Any:
        """The program of the kernel."""
        return KERNELS[self.kernel][0]


def launch(name: str, shared: dict[str, Any], **tensors: Any) -> None:
    """Run a kernel over its whole grid; on a GPU the first call of a kind tries its block sizes.

    Args:
        name: of the kernel, a key of `KERNELS`.
        shared: arguments by name, of which the kernel takes those that it knows.
        tensors: arguments of this kernel alone.
    """
    program, choices = KERNELS[name]
    heads = shared["H"]
    is_scored = shared["SCORE"] > 0
    arguments = {key: shared[key] for key in program.arg_names if key in shared} | tensors | choices

    def grid(sizes: dict[str, Any]) -> tuple[int, int, int]:
        rows = shared["M" if choices.get("KEYS") else "N"]
        return triton.cdiv(rows, sizes["BM"]), count_groups(heads, sizes), shared["B"]

    if isinstance(program, InterpretedFunction):
        sizes = {key: size for key, size in INTERPRETED.items() if key in program.arg_names}
        sizes |= {key: min(sizes[key], heads) for key in ("G", "GJ") if key in sizes}
        if name == "totals" and not is_scored:
            del sizes["G"]
        if "HELD" in program.arg_names:
            sizes["HELD"] = heads <= _HELD_BY_INTERPRETER and not is_scored
        program[grid](**arguments, **sizes)
    else:
        query: Tensor = arguments["Q"][0]
        number = query.element_size(), shared["PRECISION"]
        tuned = _make_tuned(name, heads, shared["BD"], *number, query.device.index, is_scored)
        tuned[grid](**arguments, enable_fp_fusion=True)


def count_groups(heads: int, sizes: dict[str, Any]) -> int:
    """Count the programs for one tile of a text: groups of heads, or pairs of groups."""
    sources = sizes.get("GJ", heads)
    return triton.cdiv(heads, sizes.get("G", 1)) * triton.cdiv(heads, sources)


@functools.cache
def _make_tuned(name: str, heads: int, width: int, size: int, precision: str, device: int, is_scored: bool) -> Any:
    """Make the kernel with the choices it tries; Triton remembers the best for each kind of call, on the disk too."""
    utilities = triton.runtime.driver.active.utils
    shared = utilities.get_device_properties(device)["max_shared_mem"]
    capability = triton.runtime.driver.active.get_current_target().arch // 10
    tried = list_choices(Call(name, heads, width, size, precision, capability, shared, is_scored))
    program, _ = KERNELS[name]
    named = ("H", "BD", "PRECISION", "KEYS", "TERM", "SCORE", "SIGMOID", "DROP")
    kind = [key for key in named if key in program.arg_names]
    return triton.autotune(tried, key=kind, cache_results=True)(program)


def list_choices(call: Call) -> list[triton.Config]:
    """List the choices that are tried, one for each tile, the two that load least.

    Each tile has the groups of heads that load least. Where neither registers nor memory suffice, the smallest choice is tried.
    """
    tiles = _TILES_OF_SCORES if call.is_scored else _TILES.get(call.program, _TILES_OF_GROUPS)
    if call.capability == _BLACKWELL and call.program not in _TILES:
        tiles = tuple(tile for tile in tiles if tile.rows < _ROWS_LOST)
    count_loads = functools.partial(_count_loads, call)
    tried = []
    for tile in tiles:
        choices = _list_groups(call, tile)
        fitting = [choice for choice in choices if _fits(call, choice)]
        if fitting:
            tried.append(min(fitting, key=count_loads))
    return sorted(tried, key=count_loads)[:_MOST_TRIED] or [choices[-1]]


def _list_groups(call: Call, tile: Tile) -> list[triton.Config]:
    """List the choices with a tile, from the largest groups to the smallest; with rows in shared memory first."""
    groups: list[dict[str, int]] = [{}]
    if call.program is programs.mixing_gradient:
        groups = [
            {"G": _split_evenly(call.heads, heads), "GJ": _split_evenly(call.heads, sources)}
            for sources, heads in (_PAIRS_OF_SCORES if call.is_scored else _PAIRS)
        ]
    elif call.program is not programs.totals or call.is_scored:
        sizes = {_split_evenly(call.heads, group) for group in range(1, call.heads + 1)}
        largest_first = sorted(sizes, reverse=True)
        groups = []
        for in_shared_memory in (call.heads <= _MOST_HELD and not call.is_scored, False):
            groups += [{"G": size, "HELD": in_shared_memory} for size in largest_first]
        if call.program is programs.totals:
            groups = [{"G": size} for size in largest_first]
    of_tile = {"BM": tile.rows, "BN": tile.columns}
    return [triton.Config(of_tile | group, num_warps=tile.warps, num_stages=tile.stages) for group in groups]


def _split_evenly(heads: int, group: int) -> int:
    """Return the size of groups of at most `group` heads, as few as possible and as equal as can be."""
    return triton.cdiv(heads, triton.cdiv(heads, group))


def _count_columns(call: Call, sizes: dict[str, int]) -> int:
    """Count the heads whose rows of the other side a program loads in each round."""
    if "G" not in sizes:
        return 1
    return sizes["G"] + sizes.get("GJ", call.heads)


def _count_loads(call: Call, choice: triton.Config) -> float:
    """Count the rows that are loaded for a position of queries and one of keys, in all programs together."""
    sizes = choice.kwargs
    loads = _count_columns(call, sizes) / sizes["BM"]
    if call.is_scored or not sizes.get("HELD", True):
        loads += call.heads / sizes["BN"]
    return count_groups(call.heads, sizes) * loads


def _fits(call: Call, choice: triton.Config) -> bool:
    bounds = _REGISTERS_ASYNCHRONOUS if _is_asynchronous(call, choice) else _REGISTERS
    most = bounds[call.precision if call.size == 4 else "ieee"] + call.is_scored * _REGISTERS_SPILLED
    return _count_registers(call, choice) <= most and _count_shared_bytes(call, choice) <= call.shared


def _is_asynchronous(call: Call, choice: triton.Config) -> bool:
    return call.capability in _ASYNCHRONOUS and choice.kwargs["BM"] >= _ROWS_ASYNCHRONOUS


def _count_registers(call: Call, choice: triton.Config) -> float:
    """Count the numbers of fp32 that a thread holds: tiles of the group, their sums, and two tiles on the way.

    With mixed scores also tiles of all heads: of scores, and of the gradients that make theirs.
    """
    sizes = choice.kwargs
    group = sizes.get("G", 0)
    if "GJ" in sizes:
        tiles = sizes["GJ"] + (2 * group if KERNELS[call.kernel][1]["TERM"] == "scores" else 0)
        columns_of_sums = group * sizes["GJ"] * 8
    else:
        tiles = group
        columns_of_sums = group * call.width if call.program is not programs.totals else 0
    if call.is_scored and "HELD" in sizes:
        tiles = call.heads + (group if call.program is programs.sum_rows else call.heads)
    numbers = (2 + tiles) * sizes["BM"] * sizes["BN"] + columns_of_sums * sizes["BM"]
    return numbers / (32 * choice.num_warps)


def _count_shared_bytes(call: Call, choice: triton.Config) -> int:
    """Count the bytes of shared memory: rows that stay there during the loop, and loads under way."""
    sizes = choice.kwargs
    columns = _count_columns(call, sizes)
    buffers = choice.num_stages if _is_asynchronous(call, choice) else choice.num_stages - 1
    if call.is_scored or not sizes.get("HELD", True):
        rows = max(buffers, 1) * (sizes["BM"] + sizes["BN"]) + sizes.get("GJ", 0) * sizes["BM"]
    else:
        resident = call.heads if "HELD" in sizes else columns
        rows = resident * sizes["BM"] + max(columns * buffers, 1) * sizes["BN"]
    if call.program is programs.score_gradient and not call.is_scored:
        rows += sizes["G"] * sizes["BM"]
    return rows * call.width * call.size
