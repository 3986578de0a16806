"""Block sizes of the Triton kernels: which are tried, and the launch of the fastest. The interpreter has nothing to try.

A program is as large as its registers allow. What must stay in them is estimated as fp32 numbers for each thread
(`_count_registers`). The bounds come from compiling the kernels for an H200: they are where the compiler begins to use memory
instead.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from fullrank.kernels.triton import programs

_NAMES = ("totals", "outputs", "mixing_gradient", "value_gradient", "query_gradient", "key_gradient")
KERNELS: dict[str, Any] = {name: getattr(programs, name) for name in _NAMES}
INTERPRETED = {"G": 4, "GJ": 3, "BM": 16, "BN": 32}  # small, so that tests with few numbers have several blocks

# BM queries, BN keys, warps, stages of loads under way
_TILES = ((64, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2))
_MOST_TRIED = 4  # each takes seconds to compile
_REGISTERS = {"ieee": 192, "tf32": 128, "tf32x3": 64}  # bounds of the estimate, by the precision of products
_REGISTERS_OF_MIXING = {"ieee": 150, "tf32": 110, "tf32x3": 64}
_PAIRS = ((4, 4), (2, 8), (2, 4), (2, 2), (1, 1))  # groups of sources and heads in `mixing_gradient`


def launch(name: str, common: dict[str, Any], **tensors: Tensor) -> None:
    """Run a kernel over its whole grid; on a GPU the first call of a kind tries its block sizes."""
    kernel, heads = KERNELS[name], common["H"]
    shared = {key: common[key] for key in kernel.arg_names if key in common}

    def grid(sizes: dict[str, Any]) -> tuple[int, int, int]:
        over_keys = name in ("value_gradient", "key_gradient")
        tiles = triton.cdiv(common["M"], sizes["BN"]) if over_keys else triton.cdiv(common["N"], sizes["BM"])
        groups = triton.cdiv(heads, sizes.get("G", 1)) * triton.cdiv(heads, sizes.get("GJ", heads))
        return tiles, groups, common["B"]

    if isinstance(kernel, InterpretedFunction):
        sizes = {key: size for key, size in INTERPRETED.items() if key in kernel.arg_names}
        sizes |= {key: min(sizes[key], heads) for key in ("G", "GJ") if key in sizes}
        kernel[grid](**tensors, **shared, **sizes)
    else:
        query = tensors["Q"]
        tuned = _make_tuned(name, heads, common["BD"], query.element_size(), common["PRECISION"], query.device.index)
        tuned[grid](**tensors, **shared, enable_fp_fusion=True)


@functools.cache
def _make_tuned(name: str, heads: int, width: int, size: int, precision: str, device: int) -> Any:
    """The kernel with what it tries, of which Triton remembers the best for each kind of call."""
    shared = triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]
    configs = [
        triton.Config(dict(sizes), num_warps=warps, num_stages=stages)
        for sizes, warps, stages in choices(name, heads, width, size, precision, shared)
    ]
    kind = ("LONG", "MIX", "SIGMOID", "PADDED", "PACKED", "DROP")
    kernel = KERNELS[name]
    return triton.autotune(configs, key=[key for key in kind if key in kernel.arg_names])(kernel)


def choices(
    name: str, heads: int, width: int, size: int, precision: str, shared: int
) -> list[tuple[dict[str, int], int, int]]:
    """Configurations to try: sizes, warps and stages. width: of a head, padded; size: bytes of a number; shared: bytes at hand.

    At least one, the smallest, even where it is beyond the bounds.
    """
    most = (_REGISTERS_OF_MIXING if name == "mixing_gradient" else _REGISTERS)[precision if size == 4 else "ieee"]
    configs: list[tuple[dict[str, int], int, int]] = []
    for rows, columns, warps, stages in _TILES:
        pairs = _PAIRS if name == "mixing_gradient" else tuple((1, most_heads) for most_heads in range(heads, 0, -1))
        for sources, group in pairs:
            sources, group = _split_evenly(heads, sources), _split_evenly(heads, group)
            sizes = {"BM": rows, "BN": columns}
            if name != "totals":
                sizes["G"] = group
            if name == "mixing_gradient":
                sizes["GJ"] = sources
            config = (sizes, warps, stages)
            is_last = (rows, columns, warps, stages) == _TILES[-1] and (sources, group) == (1, 1)
            has_registers = _count_registers(name, sizes, warps, width) <= most
            has_memory = _count_shared_bytes(name, sizes, stages, width, size) <= shared
            if (has_registers and has_memory) or (is_last and not configs):
                if config not in configs:
                    configs.append(config)
                break  # the largest group of this tile
    return configs[:_MOST_TRIED]


def _split_evenly(heads: int, group: int) -> int:
    """The size of as many groups as that takes, made as equal as can be."""
    return triton.cdiv(heads, triton.cdiv(heads, group))


def _count_registers(name: str, sizes: dict[str, int], warps: int, width: int) -> float:
    """Numbers of fp32 that a thread holds: tiles of the group, their sums, and two tiles on the way."""
    group, sources, rows, columns = sizes.get("G", 0), sizes.get("GJ", 0), sizes["BM"], sizes["BN"]
    tiles = (2 + (sources or group)) * rows * columns
    if name == "mixing_gradient":
        return tiles / (32 * warps) + 2 * sources * group
    own = columns if name in ("value_gradient", "key_gradient") else rows
    return (tiles + group * own * width) / (32 * warps)


def _count_shared_bytes(name: str, sizes: dict[str, int], stages: int, width: int, size: int) -> float:
    """Bytes of shared memory: what stays there during the loop, and loads under way."""
    group, sources, rows, columns = sizes.get("G", 0), sizes.get("GJ", 0), sizes["BM"], sizes["BN"]
    if name == "mixing_gradient":
        return (sources + group) * (rows + stages * columns) * width * size
    held = {"totals": rows, "query_gradient": group * rows, "key_gradient": group * columns}.get(name, 0)
    return (held + stages * (rows + columns)) * width * size + 2 * rows * columns * size
