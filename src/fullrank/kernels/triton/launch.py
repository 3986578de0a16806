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

# The program of each kernel, and whether it goes over tiles of keys: None where it never does.
KERNELS: dict[str, tuple[Any, bool | None]] = {
    "totals": (programs.totals, None),
    "outputs": (programs.sum_rows, False),
    "mixing_gradient": (programs.mixing_gradient, None),
    "value_gradient": (programs.sum_rows, True),
    "query_gradient": (programs.score_gradient, False),
    "key_gradient": (programs.score_gradient, True),
}
INTERPRETED = {"G": 4, "GJ": 3, "BM": 16, "BN": 32}  # small, so that tests with few numbers have several blocks
_HELD_BY_INTERPRETER = 8  # heads

_MOST_TRIED = 2  # each takes seconds to compile
_PAIRS = ((4, 4), (2, 4), (2, 2), (1, 1))  # groups of sources and heads in `mixing_gradient`
# major numbers of capabilities that multiply from shared memory where a tile has 64 rows or more
_ASYNCHRONOUS = (9, 10)
_ROWS_ASYNCHRONOUS = 64
# Bounds of `_count_registers`, by the precision of products; the second where operands need no registers.
_REGISTERS = {"ieee": 208, "tf32": 128, "tf32x3": 64}
_REGISTERS_ASYNCHRONOUS = {"ieee": 224, "tf32": 160, "tf32x3": 64}
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


_TILES = {
    "totals": (
        Tile(128, 128, 8),
        Tile(128, 64, 8),
        Tile(64, 64, 4),
        Tile(32, 32, 4),
    ),
    "mixing_gradient": (
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


class Call(NamedTuple):
    """A kind of call, by which block sizes are chosen.

    The kernel, heads, their padded size, bytes of a number, the precision of products; and the card: the major number of its
    compute capability, and bytes of shared memory of a block.
    """

    kernel: str
    heads: int
    width: int
    size: int
    precision: str
    capability: int
    shared: int


def launch(name: str, shared: dict[str, Any], **tensors: Any) -> None:
    """Run a kernel over its whole grid; on a GPU the first call of a kind tries its block sizes.

    Args:
        name: of the kernel, a key of `KERNELS`.
        shared: arguments by name, of which the kernel takes those that it knows.
        tensors: arguments of this kernel alone.
    """
    program, over_keys = KERNELS[name]
    heads = shared["H"]
    arguments = {key: shared[key] for key in program.arg_names if key in shared} | tensors
    if over_keys is not None:
        arguments["KEYS"] = over_keys

    def grid(sizes: dict[str, Any]) -> tuple[int, int, int]:
        rows = shared["M" if over_keys else "N"]
        return triton.cdiv(rows, sizes["BM"]), count_groups(heads, sizes), shared["B"]

    if isinstance(program, InterpretedFunction):
        sizes = {key: size for key, size in INTERPRETED.items() if key in program.arg_names}
        sizes |= {key: min(sizes[key], heads) for key in ("G", "GJ") if key in sizes}
        if over_keys is not None:
            sizes["HELD"] = heads <= _HELD_BY_INTERPRETER
        program[grid](**arguments, **sizes)
    else:
        query: Tensor = arguments["Q"][0]
        tuned = _make_tuned(name, heads, shared["BD"], query.element_size(), shared["PRECISION"], query.device.index)
        tuned[grid](**arguments, enable_fp_fusion=True)


def count_groups(heads: int, sizes: dict[str, Any]) -> int:
    """Count the programs for one tile of a text: groups of heads, or pairs of groups."""
    sources = sizes.get("GJ", heads)
    return triton.cdiv(heads, sizes.get("G", 1)) * triton.cdiv(heads, sources)


@functools.cache
def _make_tuned(name: str, heads: int, width: int, size: int, precision: str, device: int) -> Any:
    """Make the kernel with the choices it tries; Triton remembers the best for each kind of call, on the disk too."""
    utilities = triton.runtime.driver.active.utils
    shared = utilities.get_device_properties(device)["max_shared_mem"]
    capability = triton.runtime.driver.active.get_current_target().arch // 10
    tried = list_choices(Call(name, heads, width, size, precision, capability, shared))
    program, _ = KERNELS[name]
    kind = [key for key in ("H", "BD", "PRECISION", "KEYS", "SIGMOID", "DROP") if key in program.arg_names]
    return triton.autotune(tried, key=kind, cache_results=True)(program)


def list_choices(call: Call) -> list[triton.Config]:
    """List the choices that are tried, one for each tile, the two that load least.

    Each tile has the groups of heads that load least. Where neither registers nor memory suffice, the smallest choice is tried.
    """
    tiles: tuple[Tile, ...] = _TILES.get(call.kernel, _TILES_OF_GROUPS)
    if call.capability == _BLACKWELL and call.kernel not in _TILES:
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
    if call.kernel == "mixing_gradient":
        groups = [
            {"G": _split_evenly(call.heads, heads), "GJ": _split_evenly(call.heads, sources)}
            for sources, heads in _PAIRS
        ]
    elif call.kernel != "totals":
        sizes = {_split_evenly(call.heads, group) for group in range(1, call.heads + 1)}
        largest_first = sorted(sizes, reverse=True)
        groups = []
        for in_shared_memory in (call.heads <= _MOST_HELD, False):
            groups += [{"G": size, "HELD": in_shared_memory} for size in largest_first]
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
    if not sizes.get("HELD", True):
        loads += call.heads / sizes["BN"]
    return count_groups(call.heads, sizes) * loads


def _fits(call: Call, choice: triton.Config) -> bool:
    bounds = _REGISTERS_ASYNCHRONOUS if _is_asynchronous(call, choice) else _REGISTERS
    most = bounds[call.precision if call.size == 4 else "ieee"]
    return _count_registers(call, choice) <= most and _count_shared_bytes(call, choice) <= call.shared


def _is_asynchronous(call: Call, choice: triton.Config) -> bool:
    return call.capability in _ASYNCHRONOUS and choice.kwargs["BM"] >= _ROWS_ASYNCHRONOUS


def _count_registers(call: Call, choice: triton.Config) -> float:
    """Count the numbers of fp32 that a thread holds: tiles of the group, their sums, and two tiles on the way."""
    sizes = choice.kwargs
    group = sizes.get("G", 0)
    if "GJ" in sizes:
        tiles = sizes["GJ"]
        columns_of_sums = group * sizes["GJ"] * 8
    else:
        tiles = group
        columns_of_sums = group * call.width
    numbers = (2 + tiles) * sizes["BM"] * sizes["BN"] + columns_of_sums * sizes["BM"]
    return numbers / (32 * choice.num_warps)


def _count_shared_bytes(call: Call, choice: triton.Config) -> int:
    """Count the bytes of shared memory: rows that stay there during the loop, and loads under way."""
    sizes = choice.kwargs
    columns = _count_columns(call, sizes)
    buffers = choice.num_stages if _is_asynchronous(call, choice) else choice.num_stages - 1
    if not sizes.get("HELD", True):
        rows = max(buffers, 1) * (sizes["BM"] + sizes["BN"])
    else:
        resident = call.heads if "HELD" in sizes else columns
        rows = resident * sizes["BM"] + max(columns * buffers, 1) * sizes["BN"]
    if call.kernel in ("query_gradient", "key_gradient"):
        rows += sizes["G"] * sizes["BM"]
    return rows * call.width * call.size
