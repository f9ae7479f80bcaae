"""The kernels without a GPU: instructions of their loops over tiles of keys.

python -m bench.gpu.instructions --output bench/results/gpu_instructions.json

Each pass over the keys is one loop; of prompts that over full tiles is counted, and where a kernel has loops with and
without statistics those without. `cycles` is what a tile takes a multiprocessor if nothing overlaps: instructions at
one a cycle of each of its four schedulers, and matrix products at their peak; `memory` is what its keys and values take
from memory. On a GPU all overlap in part, so `ratio` to softmax over keys of bfloat16 is a guide for changes to a
kernel, and no measurement: of prompts that of cycles, of decoding that of the larger of both.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
from triton import knobs

from bench.result_file import header, write
from sharp.plugins.triton import variants
from sharp.plugins.triton.options import Options

# Of sm_90: a multiprocessor multiplies and adds so many pairs of 16 bits a cycle (989 TFLOPS, 132 of them, 1.83 GHz),
# and reads so many bytes (3.35 TB/s).
CAPABILITY, PRODUCTS_PER_CYCLE, SCHEDULERS, BYTES_PER_CYCLE = 90, 2048, 4, 13.9
Phase = Literal["prefill", "decode"]
# In the order of the code; how often a tile of keys is visited by each (entmax at alpha 1.5 in bfloat16).
PASSES = {
    "softmax": {"stream": 1},
    "ssa": {"fixed": 1, "stream": 0},  # the second where weights have left float32's range
    "adaptive_softmax": {"observe": 1, "settled": 1},
    "entmax": {"aim": 1, "count": 1, "settled": 1},
}
DECODE = {"softmax": ("stream",), "ssa": ("stream",)} | dict.fromkeys(
    ("adaptive_softmax", "entmax"), ("observe", "settled")
)
# Of query and, where it is another, cache.
TYPES = ("bfloat16", "bfloat16/int8", "float16/int8", "float32/int8", "bfloat16/fp8", "float16/fp8", "float32/fp8")
BYTES = {"float32": 4, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class Pass:
    """A loop over tiles: what a thread does for a tile of keys."""

    name: str
    visits: int
    instructions: int
    spills: int  # of them loads and stores of registers that there are too few of
    barriers: int  # and waits for other warps
    products: int  # of matrices in 16 bits, or as long as such: queries with keys, and weights with values
    cycles: int
    memory: int


@dataclass(frozen=True)
class Kernel:
    """What a phase does for a normalizer."""

    phase: Phase
    normalizer: str
    dtype: str
    cache_dtype: str
    tile: tuple[int, int]  # query rows, keys
    warps: int
    registers: int
    passes: list[Pass]

    @property
    def cycles(self) -> float:
        """Of a multiprocessor for a row and a key, or of decoding for a key."""
        rows, keys = self.tile
        if self.phase == "prefill":
            return sum(one.visits * one.cycles for one in self.passes) / (rows * keys)
        return sum(one.visits * max(one.cycles, one.memory) for one in self.passes) / keys


def loops(listing: str) -> list[Counter[str]]:
    """The instructions of every innermost loop with matrix products, in the code's order."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z]\S*)\s*(.*?);", listing)
    index = {int(address, 16): number for number, (address, _, _) in enumerate(found)}
    bounds = []
    for number, (_, name, operands) in enumerate(found):
        target = re.search(r"0x([0-9a-f]+)", operands)
        if name.startswith("BRA") and target and (begin := index.get(int(target[1], 16), number)) < number:
            bounds.append((begin, number))
    innermost = [(begin, end) for begin, end in bounds if not any(begin < b and e < end for b, e in bounds)]
    bodies = [Counter(name.split(".")[0] for _, name, _ in found[begin : end + 1]) for begin, end in sorted(innermost)]
    return [body for body in bodies if body["HGMMA"] or body["HMMA"]]


def without_statistics(bodies: list[Counter[str]], expected: int) -> list[Counter[str]]:
    """The loops that run while statistics are off, of a kernel that may have those with statistics too.

    They come before or behind them, and are the shorter ones.
    """
    if len(bodies) > expected:
        bodies = min(bodies[:expected], bodies[-expected:], key=lambda some: sum(body.total() for body in some))
    assert len(bodies) == expected, f"there are {len(bodies)} loops, not {expected}"
    return bodies


def compiled(kernel: variants.Kernel) -> str:
    """The listing of a kernel's machine code, and its registers."""
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "kernel.cubin"
        image.write_bytes(variants.compile_kernel(kernel, CAPABILITY).asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", image]
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    return listing.stdout + listing.stderr


def inspect(normalizer: str, head_dim: int, phase: Phase = "prefill", types: str = "bfloat16") -> Kernel:
    """Compile what a phase launches, as it is shipped, and count."""
    power = "two" if normalizer == "entmax" else ""
    dtype, _, cache = types.partition("/")
    options = Options(normalizer, dtype, cache or dtype, head_dim, head_dim, 16, statistics=True, power=power)
    launched = {one.name: one for one in variants.kernels(options, CAPABILITY)}
    found: list[tuple[str, int, variants.Kernel, Counter[str]]] = []
    listings = []
    if phase == "prefill":
        kernel = launched["prefill"]
        listings.append(compiled(kernel))
        # A pass has two loops: first over tiles that some row does not see whole, with masks, then over full ones.
        full = without_statistics(loops(listings[0]), 2 * len(PASSES[normalizer]))[1::2]
        found = [(name, n, kernel, body) for (name, n), body in zip(PASSES[normalizer].items(), full, strict=True)]
    else:
        for name in DECODE[normalizer]:
            kernel = launched[f"decode_{name}"]
            listings.append(compiled(kernel))
            found.append((name, 1, kernel, without_statistics(loops(listings[-1]), 1)[0]))
    used = found[0][2].constants["OPTIONS"]
    rows, keys, width = used.rows, used.keys, used.head_width
    passes = []
    for name, visits, kernel, body in found:
        of_keys, of_values = name != "settled" or phase == "prefill", name not in ("observe", "aim", "count")
        products = products_of(types, of_keys, of_values)
        issued = body.total() * kernel.warps // SCHEDULERS
        cycles = issued + products * rows * keys * width // PRODUCTS_PER_CYCLE
        read = (of_keys + of_values) * keys * width * BYTES.get(cache or dtype, 2)
        spills, barriers = body["LDL"] + body["STL"], body["BAR"]
        memory = int(read / BYTES_PER_CYCLE)
        passes.append(Pass(name, visits, body.total(), spills, barriers, products, cycles, memory))
    registers = max(int(number) for listing in listings for number in re.findall(r"REG:(\d+)", listing))
    return Kernel(phase, normalizer, dtype, cache or dtype, (rows, keys), found[0][2].warps, registers, passes)


def products_of(types: str, of_keys: bool, of_values: bool) -> int:
    """Matrix products of a pass, as so many in 16 bits."""
    of_query, _, of_cache = types.partition("/")
    queries, weights = {"float32": (3, 2), "float16": (1, 2)}.get(of_query, (1, 1)) if of_cache else (1, 1)
    return of_keys * queries + of_values * weights


def cases(names: tuple[str, ...]) -> list[tuple[str, Phase, str]]:
    """Normalizer, phase and types: softmax also over caches in 8 bits."""
    phases: tuple[Phase, ...] = ("prefill", "decode")
    return [
        (name, phase, types)
        for phase in phases
        for name in names
        for types in (TYPES if name == "softmax" else TYPES[:1])
    ]


@click.command()
@click.option("--head-dim", type=click.IntRange(16, 256), default=128, show_default=True)
@click.option("--normalizer", "names", type=click.Choice(list(PASSES)), multiple=True, default=list(PASSES))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the result as JSON.")
def main(head_dim: int, names: tuple[str, ...], output: Path | None) -> None:
    """Count the instructions of the kernels on sm_90."""
    rows = []
    softmax: dict[str, float] = {}
    for name, phase, types in cases(names):
        if phase not in softmax:
            softmax[phase] = inspect("softmax", head_dim, phase).cycles
        kernel = inspect(name, head_dim, phase, types)
        ratio = kernel.cycles / softmax[phase]
        print(f"{phase} {name} {types}: {ratio:.2f} times softmax, {kernel.registers} registers, tile {kernel.tile}")
        for one in kernel.passes:
            print(
                f"  {one.name:8} {one.instructions:5} instructions, {one.barriers} barriers, {one.products} products, "
                f"{one.cycles} cycles, {one.memory} of memory"
            )
        rows.append(asdict(kernel) | {"cycles_per_logit": kernel.cycles, "ratio": ratio})
    packages = ("sharp-attention", "triton")
    write(output, header("gpu_instructions", packages) | {"head_dim": head_dim, "target": "sm_90a", "rows": rows})


if __name__ == "__main__":
    main()
