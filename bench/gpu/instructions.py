"""Instruction counts of the kernels' loops over tiles of keys, without a GPU.

python -m bench.gpu.instructions --output bench/results/gpu_instructions.json

Each pass over the keys is one loop over full tiles, which need no masks; where a kernel has loops with and without
statistics, those without are counted. Of a tile and a multiprocessor
    issue     cycles of its instructions, one a cycle of each of its four schedulers
    special   cycles of those that go to the special-function units (MUFU: exponentials, logarithms, reciprocals), 16 a
              cycle
    matrix    cycles of its matrix products at their peak
    memory    cycles that its keys and values take from memory
    cycles    if nothing overlaps: issue + matrix
    bound     if all overlaps: the largest of issue, special and matrix
On a GPU all overlap in part, so `ratio` to softmax over keys of bfloat16 is a guide for changes to a kernel, and no
measurement: of prompts that of cycles, of decoding that of the larger of cycles and memory. What `sampling` and
`survivors` visit depends on the logits: they count no time.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
from triton import knobs

from bench.result_file import header, write
from sharp.plugins.triton import sampling, variants
from sharp.plugins.triton.options import Options

# Rates of a multiprocessor of sm_90 per cycle: PRODUCTS_PER_CYCLE pairs of 16 bits are multiplied and added (989 TFLOPS
# of 132 multiprocessors at 1.83 GHz), and BYTES_PER_CYCLE are read (4.8 TB/s, the H200's; a B200 reads 29).
CAPABILITY, PRODUCTS_PER_CYCLE, SCHEDULERS, SPECIAL_PER_CYCLE, BYTES_PER_CYCLE = 90, 2048, 4, 16, 19.9
Phase = Literal["prefill", "split", "decode", "screen"]
# The kernels of a phase that have loops with matrix products, and their passes in the order of the code, each with the
# number of times that it visits a tile of keys (entmax at alpha 1.5 in bfloat16).
KERNELS: dict[Phase, dict[str, dict[str, dict[str, int]]]] = {
    "prefill": {
        "softmax": {"prefill": {"stream": 1}},
        "ssa": {"prefill": {"fixed": 1, "stream": 0}},  # stream runs only if weights have left float32's range
        "adaptive_softmax": {"prefill": {"observe": 1, "settled": 1}},
        "entmax": {"prefill": {"aim": 1, "count": 1, "settled": 1}},
    },
    "split": {
        "adaptive_softmax": {"prefill_observe": {"observe": 1}, "prefill_settled": {"settled": 1}},
        "entmax": {"prefill_observe": {"aim": 1}, "prefill_count": {"count": 1}, "prefill_settled": {"settled": 1}},
    },
    "decode": {
        "softmax": {"decode_stream": {"stream": 1}},
        "ssa": {"decode_stream": {"stream": 1}},
        "adaptive_softmax": {"decode_observe": {"observe": 1}, "decode_settled": {"settled": 1}},
        "entmax": {"decode_observe": {"observe": 1}, "decode_settled": {"settled": 1}},
    },
    "screen": {
        "entmax": {
            "decode_screen": {"screen": 1},
            "decode_survivors": {"survivors": 0},
            "decode_settled": {"settled": 1},
        }
    },
}
PROMPTS = ("prefill", "split")
WITH_MASKED_LOOPS = (
    *("prefill", "prefill_observe", "prefill_count", "prefill_settled"),
    *("decode_stream", "decode_observe"),
)
WITHOUT_VALUES = ("observe", "aim", "count", "screen", "survivors")
NAMES = [*KERNELS["decode"]]
# The type of the query and, if it is another, that of the cache.
TYPES = ("bfloat16", "bfloat16/int8", "float16/int8", "float32/int8", "bfloat16/fp8", "float16/fp8", "float32/fp8")
BYTES = {"float32": 4, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class Pass:
    """A loop of a kernel over tiles of keys: a thread's instructions and a multiprocessor's cycles for one tile.

    `issue`, `special`, `matrix` and `memory` are cycles by kind of unit. `visits` is how often a kernel goes through
    all keys in this loop.
    """

    name: str
    visits: int
    instructions: int
    spills: int  # among the instructions, loads and stores for want of registers
    barriers: int  # among the instructions, waits for other warps
    products: int  # matrix products in terms of 16 bits: of queries with keys, and of weights with values
    issue: int
    special: int
    matrix: int
    memory: int

    @property
    def cycles(self) -> int:
        """The cycles per tile if issuing instructions and matrix products do not overlap."""
        return self.issue + self.matrix

    @property
    def bound(self) -> int:
        """The cycles per tile if all units work at the same time: the largest of issue, special and matrix."""
        return max(self.issue, self.special, self.matrix)


@dataclass(frozen=True)
class PhaseWork:
    """The instruction counts of the kernels of decoding or prefill for one normalizer and types, by pass."""

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
        """The cycles of a multiprocessor for a row and a key, or in decoding for a key."""
        rows, keys = self.tile
        if self.phase in PROMPTS:
            return sum(part.visits * part.cycles for part in self.passes) / (rows * keys)
        return sum(part.visits * max(part.cycles, part.memory) for part in self.passes) / keys

    @property
    def bound(self) -> float:
        """The cycles for a row and a key if all overlaps, for prompts."""
        rows, keys = self.tile
        return sum(part.visits * part.bound for part in self.passes) / (rows * keys)


def loops(listing: str, products: bool = True) -> list[Counter[str]]:
    """Return the number of each instruction in every innermost loop with matrix products, in code order.

    `listing` is that of cuobjdump. Without `products`, the loops are those that load from global memory.
    """
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z]\S*)\s*(.*?);", listing)
    index = {int(address, 16): number for number, (address, _, _) in enumerate(found)}
    bounds = []
    for number, (_, name, operands) in enumerate(found):
        target = re.search(r"0x([0-9a-f]+)", operands)
        if name.startswith("BRA") and target and (begin := index.get(int(target[1], 16), number)) < number:
            bounds.append((begin, number))
    bodies = {
        (begin, end): Counter(name.split(".")[0] for _, name, _ in found[begin : end + 1]) for begin, end in bounds
    }
    # In a kernel whose warps wait for each other such loops contain loops that wait.
    opcodes = ("HGMMA", "HMMA") if products else ("LDG",)
    of_tiles = [span for span, body in bodies.items() if any(body[name] for name in opcodes)]
    innermost = [
        (begin, end)
        for begin, end in of_tiles
        if not any((begin, end) != span and begin <= span[0] and span[1] <= end for span in of_tiles)
    ]
    return [bodies[span] for span in sorted(innermost)]


def without_statistics(bodies: list[Counter[str]], expected: int) -> list[Counter[str]]:
    """Return the `expected` loops that run while statistics are off, of a kernel that may have others with statistics.

    The loops without statistics come before or behind those with statistics, and are the shorter ones.
    """
    if len(bodies) > expected:
        bodies = min(bodies[:expected], bodies[-expected:], key=lambda some: sum(body.total() for body in some))
    assert len(bodies) == expected, f"there are {len(bodies)} loops, not {expected}"
    return bodies


def compiled(kernel: variants.Kernel) -> str:
    """Compile a kernel for sm_90, and return the listing of its machine code, followed by its use of registers."""
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "kernel.cubin"
        image.write_bytes(variants.compile_kernel(kernel, CAPABILITY).asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", image]
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    return listing.stdout + listing.stderr


def inspect(normalizer: str, head_dim: int, phase: Phase = "prefill", types: str = "bfloat16") -> PhaseWork:
    """Compile a phase's kernels as they are shipped, and count the instructions of their loops.

    `types` is the data type, or "data type/cache type".
    """
    power = "two" if normalizer == "entmax" else ""
    dtype, _, cache = types.partition("/")
    options = Options(normalizer, dtype, cache or dtype, head_dim, head_dim, 16, True, power=power)
    options = replace(options, screened=phase == "screen")
    launched = {kernel.name: kernel for kernel in variants.kernels(options, CAPABILITY)}
    passes, registers = [], []
    for function, names in KERNELS[phase][normalizer].items():
        kernel = launched[function]
        used = kernel.constants["OPTIONS"]
        listing = compiled(kernel)
        registers += [int(number) for number in re.findall(r"REG:(\d+)", listing)]
        for name, body in zip(names, full_loops(listing, function, len(names)), strict=True):
            passes.append(counted(name, names[name], body, kernel.warps, phase, types, used))
    tile = (used.rows, used.keys)
    return PhaseWork(phase, normalizer, dtype, cache or dtype, tile, kernel.warps, max(registers), passes)


def full_loops(listing: str, function: str, passes: int) -> list[Counter[str]]:
    """Return the instruction counts of the loops over full tiles of kernel `function`, one per pass over the keys.

    `listing` is the kernel's disassembly, and `passes` how many passes it makes.
    """
    bodies = loops(listing)
    if function not in WITH_MASKED_LOOPS:
        return without_statistics(bodies, passes)
    # A pass has two loops: first over tiles that some row does not see whole, with masks, then over full tiles.
    # The first kernel of entmax over parts of the keys has one more loop, which comes first.
    seeded = function == "prefill_observe" and len(bodies) % 3 == 0
    return without_statistics(bodies, 3 if seeded else 2 * passes)[2 if seeded else 1 :: 2]


def counted(name: str, visits: int, body: Counter[str], warps: int, phase: Phase, types: str, used: Options) -> Pass:
    """Return a pass with the counts of its loop's instructions, and the cycles that they take of a multiprocessor.

    `body` has the number of each instruction in the loop, which a kernel of `warps` warps runs `visits` times over all
    keys.
    """
    of_keys, of_values = name != "settled" or phase in PROMPTS, name not in WITHOUT_VALUES
    products = products_of(types, of_keys, of_values)
    read = (of_keys + of_values) * used.keys * used.head_width * BYTES.get(used.cache_dtype, 2)
    if name == "screen":
        read = used.keys * (4 * used.quads + 8)
    return Pass(
        name,
        visits,
        instructions=body.total(),
        spills=body["LDL"] + body["STL"],
        barriers=body["BAR"],
        products=products,
        issue=body.total() * warps // SCHEDULERS,
        special=body["MUFU"] * warps * 32 // SPECIAL_PER_CYCLE,
        matrix=products * used.rows * used.keys * used.head_width // PRODUCTS_PER_CYCLE,
        memory=int(read / BYTES_PER_CYCLE),
    )


def sampling_loops() -> tuple[int, list[Counter[str]]]:
    """Return how many tokens of a tile a thread of the sampling kernel has, and the kernel's loops over them."""
    signature = {**sampling.ARGUMENTS} | dict.fromkeys(sampling.CONSTANTS, "constexpr")
    kernel = variants.Kernel(sampling.sample_rows, signature, sampling.CONSTANTS, sampling.WARPS, stages=2)
    return sampling.CONSTANTS["TILE"] // (32 * sampling.WARPS), loops(compiled(kernel), products=False)


def products_of(types: str, of_keys: bool, of_values: bool) -> int:
    """Return the number of matrix products of a pass, in terms of products in 16 bits.

    `types` is one of `TYPES`. `of_keys` and `of_values` say whether the pass multiplies with keys and with values.
    """
    of_query, _, of_cache = types.partition("/")
    queries, weights = {"float32": (3, 2), "float16": (1, 2)}.get(of_query, (1, 1)) if of_cache else (1, 1)
    return of_keys * queries + of_values * weights


def cases(names: tuple[str, ...], phases: tuple[Phase, ...]) -> list[tuple[str, Phase, str]]:
    """Return normalizer, phase and types of every case; softmax also has caches in 8 bits.

    `names` are the normalizers.
    """
    return [
        (name, phase, types)
        for phase in phases
        for name in names
        if name in KERNELS[phase]
        for types in (TYPES if name == "softmax" and phase in ("prefill", "decode") else TYPES[:1])
    ]


@click.command()
@click.option("--head-dim", type=click.IntRange(16, 256), default=128, show_default=True)
@click.option("--normalizer", "names", type=click.Choice(NAMES), multiple=True, default=NAMES)
@click.option("--phase", "phases", type=click.Choice([*KERNELS]), multiple=True, default=[*KERNELS])
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the result as JSON.")
def main(head_dim: int, names: tuple[str, ...], phases: tuple[Phase, ...], output: Path | None) -> None:
    """Count the instructions of the kernels on sm_90."""
    rows: list[dict[str, Any]] = []
    softmax: dict[str, float] = {}
    for name, phase, types in cases(names, phases):
        kernel = inspect(name, head_dim, phase, types)
        yardstick: Phase = "decode" if phase == "screen" else "prefill" if phase == "split" else phase
        if yardstick not in softmax:
            softmax[yardstick] = inspect("softmax", head_dim, yardstick).cycles
        ratio = kernel.cycles / softmax[yardstick]
        print(f"{phase} {name} {types}: {ratio:.2f} times softmax, {kernel.registers} registers, tile {kernel.tile}")
        for part in kernel.passes:
            print(
                f"  {part.name:9} {part.instructions:5} instructions, {part.barriers} barriers, "
                f"{part.products} products; cycles: issue {part.issue}, special {part.special}, "
                f"matrix {part.matrix}, memory {part.memory}"
            )
        passes = [asdict(part) | {"cycles": part.cycles, "bound": part.bound} for part in kernel.passes]
        rows.append(asdict(kernel) | {"passes": passes, "cycles_per_logit": kernel.cycles, "ratio": ratio})
    tokens, bodies = sampling_loops()
    for number, body in enumerate(bodies):
        each, special = body.total() / tokens, body["MUFU"] / tokens
        print(f"sampling, loop {number}: {each:.1f} instructions a token, {special:g} special")
    of_sampling = [{"instructions": body.total() / tokens, "special": body["MUFU"] / tokens} for body in bodies]
    packages = ("sharp-attention", "triton")
    about = {"head_dim": head_dim, "target": "sm_90a", "sampling_per_token": of_sampling}
    write(output, header("gpu_instructions", packages) | about | {"rows": rows})


if __name__ == "__main__":
    main()
