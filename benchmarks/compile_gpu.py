"""The Triton kernels as the compiler leaves them, for GPUs that need not be there: `make gpu-compile`.

    python benchmarks/compile_gpu.py [--capabilities 80 90] [--kernels outputs] [--json FILE]

Each kernel is compiled with the block sizes that the first call on such a card would try. Of these the table shows the one with
the smallest estimate, `--json` keeps all. From the machine code:

    registers, spilled bytes    of a thread; more than 255 registers are spilled to memory
    blocks                      programs that one multiprocessor (SM) holds at a time
    tensor                      instructions for tensor cores in the loop over keys (or queries)
    instructions, bytes         of a thread in that loop, and loaded from L2, for one score of one head

The estimate is arithmetic, not a measurement. A score takes at least the longest of three times: to issue its instructions and
to multiply, which hardly overlap here; to take its exponentials; and to load its bytes from L2. For an H100 the sums over
kernels are divided by what flash attention 2 is assumed to take for a score (causal, heads of 64: 300 TFLOP/s forward, 260
backward).
Real kernels stay above such bounds: those of flash attention's forward pass are about two thirds of its time.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fullrank.kernels.triton import launch
from fullrank.kernels.triton.launch import KERNELS, list_choices
from machine import round_numbers, write_json
from tables import print_table

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
POINTERS = {
    **dict.fromkeys(("TOTAL", "DELTA", "D_MIXING"), "*fp32"),
    **dict.fromkeys(("MIXING", "SCORING"), ("*fp32",) * 2),
    "VISIBLE": ("*i32",) * 5,
    "TOKENS": "*u8",
    "SEED": "*i64",
}
NUMBERS = {
    **dict.fromkeys(("N", "M", "EACH", "least"), "i32"),
    **dict.fromkeys(("scale", "unit", "kept"), "fp32"),
}


@dataclass(frozen=True)
class Card:
    """Bytes of shared memory of a block and of a multiprocessor, and the most threads of one."""

    name: str
    block_bytes: int
    bytes: int
    threads: int


CARDS = {
    80: Card("A100", 166_912, 167_936, 2048),
    89: Card("RTX 4090", 101_376, 102_400, 1536),
    90: Card("H100", 232_448, 233_472, 2048),
    100: Card("B200", 232_448, 233_472, 2048),
    120: Card("RTX 5090", 101_376, 102_400, 1536),
}

# An H100: cycles of all multiprocessors in a picosecond, and per cycle of one; bytes of L2 in a picosecond
CYCLES = 132 * 1.755e9 / 1e12
THREADS = 128
EXPONENTIALS = 16
FLOPS = 4096
L2_BYTES = 5.5
FLASH = {"forward": 2 * 2 * 64 / 300, "backward": 5 * 2 * 64 / 260}  # picoseconds of a score
PASSES = {
    "forward": ("totals", "outputs"),
    "backward": ("mixing_gradient", "value_gradient", "query_gradient", "key_gradient"),
}
# Those that some calls take in addition.
ADDED = {"backward": ("delta", "key_mixing_gradient", "scoring_gradient", "key_scoring_gradient")}


@dataclass(frozen=True)
class Call:
    """Heads, their size (a power of two) and dtype; extras: sigsoftmax, padding and dropout.

    mixing, scoring: 1 for A, 2 for B, 3 and 4 where keys add to them; 0 where no scores are mixed.
    """

    heads: int = 8
    size: int = 64
    dtype: str = "bf16"
    mixing: int = 1
    extras: bool = False
    scoring: int = 0

    def __str__(self) -> str:
        kinds = ("", "A", "B", "A and keys", "B and keys")
        scores = f", scores {kinds[self.scoring]}" if self.scoring else ""
        extras = ", sigsoftmax, padding and dropout" if self.extras else ""
        return f"{self.heads} heads of {self.size}, {self.dtype}, {kinds[self.mixing]}{scores}{extras}"

    def takes(self, kernel: str) -> bool:
        """Return whether the call takes the kernel."""
        takes = {
            **dict.fromkeys(("delta", "key_mixing_gradient"), self.mixing > 2),
            "scoring_gradient": self.scoring > 0,
            "key_scoring_gradient": self.scoring > 2,
        }
        return takes.get(kernel, True)


PRECISIONS = {"bf16": "ieee", "fp32": "tf32x3"}
CALLS = (
    Call(),
    Call(heads=16),
    Call(mixing=2),
    Call(size=128),
    Call(extras=True),
    Call(dtype="fp32"),
    Call(mixing=1, scoring=1),
    Call(mixing=4, scoring=4),
)


def compile_kernel(name: str, call: Call, capability: int, choice: triton.Config) -> Any:
    """Compile one kernel with these block sizes."""
    program, choices = KERNELS[name]
    constants = {
        "H": call.heads, "D": call.size, "BD": call.size, "MIX": call.mixing, "SCORE": call.scoring, "SIGMOID": call.extras,
        "PADDED": call.extras, "PACKED": False, "DROP": call.extras, "PRECISION": PRECISIONS[call.dtype],
        "G": 1, **choices, **choice.kwargs,
    }  # fmt: skip
    rows = (f"*{call.dtype}", "i64", "i64", "i64")
    types = dict.fromkeys(("Q", "K", "V", "X", "OUT", "D_OUT"), rows) | POINTERS | NUMBERS
    signature = {}
    values = {}
    aligned = {}
    for at, argument in enumerate(program.arg_names):
        kind = signature[argument] = types.get(argument, "constexpr")
        if kind == "constexpr":
            values[(at,)] = constants[argument]
        elif isinstance(kind, tuple):
            aligned |= {(at, part): [["tt.divisibility", 16]] for part in range(len(kind))}
        elif kind.startswith("*"):
            aligned[(at,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(program, signature, values, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": choice.num_warps, "num_stages": choice.num_stages, "enable_fp_fusion": True},
    )


# -- machine code ------------------------------------------------------------------------------------------------------


def read_machine_code(cubin: bytes) -> tuple[list[str], list[tuple[int, int]], int, int]:
    """Read the instructions in order, first and last of each loop, and the registers and spilled bytes of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        code = _run("nvdisasm", "-c", path)
        used = _run("cuobjdump", "-res-usage", path)
    instructions = []
    labels = {}
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif code_line := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;", line):
            instructions.append(code_line[1])
    ends = {}
    for at, instruction in enumerate(instructions):
        target = re.search(r"\bBRA.*`\((\.L_x_\d+)\)", instruction)
        if target and labels[target[1]] < at:  # a branch backwards; to itself: the end of the program
            ends[labels[target[1]]] = at
    registers, stack = (int(re.search(rf"{word}:(\d+)", used)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    return instructions, sorted(ends.items()), registers, stack


def _run(tool: str, *words: object) -> str:
    return subprocess.run([TOOLS / tool, *map(str, words)], capture_output=True, text=True, check=True).stdout


def list_rounds(instructions: list[str], loops: list[tuple[int, int]], trips: int) -> Iterator[tuple[str, int]]:
    """Yield each instruction of the outer loop that multiplies most, and how often one round of it runs the instruction.

    A loop inside it that multiplies runs `trips` times.
    """

    def count_products(loop: tuple[int, int]) -> int:
        return sum(map(is_product, instructions[slice(*loop)]))

    whole = (0, len(instructions) - 1)  # without a loop: unrolled, or a form of branch that is not known
    outer = loops[0] if loops else whole
    inside = {outer: []}  # loops in each outer one
    for loop in loops[1:]:
        if loop[1] <= outer[1]:
            inside[outer].append(loop)
        else:
            outer = loop
            inside[outer] = []
    main = max(inside, key=count_products)
    inner = [loop for loop in inside[main] if count_products(loop)]
    for at in range(main[0], main[1] + 1):
        is_repeated = any(first <= at <= last for first, last in inner)
        yield instructions[at], trips if is_repeated else 1


def is_product(instruction: str) -> bool:
    """Return whether an instruction is for tensor cores."""
    return re.search(r"\b(HMMA|HGMMA|UTC\w*MMA)\b", instruction) is not None


def count_loaded_bytes(instruction: str) -> int:
    """Count the bytes that a thread loads from L2: whole rows of heads, not the single numbers of a query or key."""
    bits = re.search(r"\b(?:LDGSTS|LDG)[.A-Z]*\.(128|64)\b", instruction)
    return int(bits[1]) // 8 if bits else 0


# -- the table ---------------------------------------------------------------------------------------------------------


def describe(name: str, call: Call, capability: int, choice: triton.Config) -> dict[str, Any]:
    """Compile a kernel and describe it: a row of the table."""
    sizes = choice.kwargs
    card = CARDS[capability]
    compiled = compile_kernel(name, call, capability, choice)
    instructions, loops, registers, spilled = read_machine_code(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    threads = 32 * choice.num_warps
    by_registers = 65_536 // (8 * triton.cdiv(registers, 8) * threads)
    blocks = min(by_registers, card.bytes // (shared + 1024), card.threads // threads)
    groups = launch.count_groups(call.heads, sizes)
    # of a thread in one round, as if nothing were done twice
    scores = call.heads * sizes["BM"] * sizes["BN"] / threads / groups
    ran = list(list_rounds(instructions, loops, call.heads))

    def sum_over_score(cost: Callable[[str], float]) -> float:
        return sum(count * cost(instruction) for instruction, count in ran) / scores

    row = {
        "card": card.name,
        "call": str(call),
        "kernel": name,
        "sizes": " ".join(f"{key} {size}" for key, size in sizes.items()) + f", {choice.num_warps} warps",
        "registers": registers,
        "spilled": spilled,
        "shared": shared,
        "fits": shared <= card.block_bytes,
        "blocks": blocks,
        "tensor": sum(is_product(instruction) for instruction in instructions),
        "instructions": sum_over_score(lambda instruction: 1),
        "exponentials": sum_over_score(lambda instruction: "MUFU" in instruction),
        "bytes": sum_over_score(count_loaded_bytes),
        "products": sum_over_score(count_multiplications) / call.size,
    }
    waits = sum_over_score(lambda instruction: count_multiplications(instruction) * slow_down(instruction))
    return row | {"picoseconds": estimate(row, waits)}


def count_multiplications(instruction: str) -> float:
    """Count the multiplications that a tensor-core instruction does for each of its threads; 0 where its name does not say."""
    of_warp = re.search(r"\bHMMA\.(16)(8)(\d+)", instruction)
    shape = of_warp or re.search(r"\bHGMMA\.(\d+)x(\d+)x(\d+)", instruction)
    if shape is None:
        return 0
    threads = 32 if of_warp else 128
    return math.prod(map(int, shape.groups())) / threads


def slow_down(instruction: str) -> float:
    """Return how much longer an H100 multiplies than at its best: HMMA is older, a narrow HGMMA waits for shared memory."""
    return 1.6 if "HMMA." in instruction else 1.5 if re.search(r"HGMMA\.64x(8|16|24|32)x", instruction) else 1.0


def estimate(row: dict[str, Any], multiplications: float) -> float:
    """Estimate the picoseconds that an H100 takes at least for one score of one head."""
    issue = row["instructions"] / THREADS + 2 * multiplications / FLOPS
    return max(issue / CYCLES, row["exponentials"] / EXPONENTIALS / CYCLES, row["bytes"] / L2_BYTES)


def list_rows(call: Call, capability: int, kernels: list[str], most: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel and each of its first `most` choices of block sizes."""
    for name in filter(call.takes, kernels):
        numbers = (2 if call.dtype == "bf16" else 4, PRECISIONS[call.dtype])
        card = (capability // 10, CARDS[capability].block_bytes)
        for choice in list_choices(launch.Call(name, call.heads, call.size, *numbers, *card, call.scoring > 0))[:most]:
            yield describe(name, call, capability, choice)


TEXTS = ("kernel", "sizes")
COUNTS = ("registers", "spilled", "shared", "blocks", "tensor")
MEANS = ("instructions", "exponentials", "products", "bytes", "picoseconds")  # of a score


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    lines = []
    for row in rows:
        words = [str(row[name]) for name in TEXTS + COUNTS]
        lines.append(words + [f"{row[name]:.2f}" for name in MEANS])
    print_table(TEXTS, COUNTS + MEANS, lines)


def take_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose the row of each kernel with the smallest estimate, of those that fit into shared memory."""
    best = {}
    for row in rows:
        if row["fits"]:
            fastest = best.setdefault(row["kernel"], row)
            best[row["kernel"]] = min(fastest, row, key=lambda row: row["picoseconds"])
    return list(best.values())


def compare_with_flash(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Divide the sums of a forward and of a backward pass by what flash attention 2 takes."""
    picoseconds = {row["kernel"]: row["picoseconds"] for row in rows}
    over = {}
    for name, kernels in PASSES.items():
        if set(kernels) <= set(picoseconds):
            over[name] = sum(picoseconds.get(kernel, 0) for kernel in (*kernels, *ADDED.get(name, ()))) / FLASH[name]
    return over


def main() -> None:
    """Compile the kernels that the command line asks for, and print what the compiler makes of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", type=int, nargs="*", default=list(CARDS), choices=CARDS)
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--calls", type=int, nargs="*", help="numbers of the calls: all on an H100, else the first")
    parser.add_argument("--most", type=int, default=9, help="how many block sizes of a kernel are compiled")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for capability in options.capabilities:
        numbers = range(len(CALLS)) if capability == 90 else [0]
        for number in numbers if options.calls is None else options.calls:
            call = CALLS[number]
            rows = list(list_rows(call, capability, options.kernels, options.most))
            best = take_best(rows)
            title = f"{CARDS[capability].name}, {call}"
            print(f"\n{title}")
            print_rows(best)
            over = compare_with_flash(best) if capability == 90 else {}
            for name, ratio in over.items():
                print(f"{name}: {ratio:.2f} times flash attention 2", flush=True)
            results[title] = {"kernels": best, "tried": rows, "over_flash": over}
    content = {
        "what": "Triton kernels compiled ahead of time",
        "timing": "arithmetic, not measured on a GPU",
        "results": round_numbers(results),
    }
    write_json(options.json, content)


if __name__ == "__main__":
    sys.exit(main())
