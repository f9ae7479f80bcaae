"""The prefill kernels without a GPU: instructions of their loops over full tiles of keys.

python -m bench.gpu.instructions --output bench/results/gpu_instructions.json

Each pass over the keys is one loop. `cycles` is what a tile takes a multiprocessor if nothing overlaps: instructions at
one a cycle of each of its four schedulers, and matrix products at their peak. On a GPU both overlap in part, so `ratio`
to softmax is a guide for changes to a kernel, and no measurement.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from triton import knobs

from bench.result_file import header, write
from sharp.plugins.triton.options import Options
from sharp.plugins.triton.variants import compile_kernel, kernels

# Of sm_90: a multiprocessor multiplies and adds so many pairs of 16 bits a cycle (989 TFLOPS, 132 of them, 1.83 GHz).
CAPABILITY, PRODUCTS_PER_CYCLE, SCHEDULERS = 90, 2048, 4
# In the order of the code; how often a tile of keys is visited by each (entmax at alpha 1.5 in bfloat16).
PASSES = {
    "softmax": {"stream": 1},
    "ssa": {"fixed": 1, "stream": 0},  # the second where weights have left float32's range
    "adaptive_softmax": {"observe": 1, "settled": 1},
    "entmax": {"aim": 1, "count": 1, "settled": 1},
}


@dataclass(frozen=True)
class Pass:
    """A loop over full tiles: what a thread does for a tile of keys."""

    name: str
    visits: int
    instructions: int
    spills: int  # of them loads and stores of registers that there are too few of
    products: int  # matrix products: queries with keys, and weights with values
    cycles: int


@dataclass(frozen=True)
class Kernel:
    """The kernel of a normalizer."""

    normalizer: str
    tile: tuple[int, int]  # query rows, keys
    warps: int
    registers: int
    passes: list[Pass]

    @property
    def cycles(self) -> float:
        """Of a multiprocessor for a row and a key."""
        rows, keys = self.tile
        return sum(one.visits * one.cycles for one in self.passes) / (rows * keys)


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
    return [body for body in bodies if body["HGMMA"]]


def inspect(normalizer: str, head_dim: int) -> Kernel:
    """Compile the kernel, without statistics, and count."""
    power = "two" if normalizer == "entmax" else ""
    options = Options(normalizer, "bfloat16", "bfloat16", head_dim, head_dim, 16, power=power)
    kernel = next(one for one in kernels(options, CAPABILITY) if one.name == "prefill")
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "prefill.cubin"
        image.write_bytes(compile_kernel(kernel, CAPABILITY).asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", image]
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    # A pass has two loops: first over tiles that some row does not see whole, with masks, then over full ones.
    full = loops(listing.stdout)[1::2]
    names = PASSES[normalizer]
    assert len(full) == len(names), f"{normalizer} has {len(full)} loops, not {len(names)}"
    used = kernel.constants["OPTIONS"]
    rows, keys, width = used.rows, used.keys, used.head_width
    found = []
    for (name, visits), body in zip(names.items(), full, strict=True):
        products = 1 if name in ("observe", "aim", "count") else 2
        issued = body.total() * kernel.warps // SCHEDULERS
        cycles = issued + products * rows * keys * width // PRODUCTS_PER_CYCLE
        found.append(Pass(name, visits, body.total(), body["LDL"] + body["STL"], products, cycles))
    registers = re.findall(r"REG:(\d+)", listing.stdout + listing.stderr)
    return Kernel(normalizer, (rows, keys), kernel.warps, int(registers[0]), found)


@click.command()
@click.option("--head-dim", type=click.IntRange(16, 256), default=128, show_default=True)
@click.option("--normalizer", "names", type=click.Choice(list(PASSES)), multiple=True, default=list(PASSES))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the result as JSON.")
def main(head_dim: int, names: tuple[str, ...], output: Path | None) -> None:
    """Count the instructions of the kernels for prompts on sm_90, in bfloat16."""
    softmax = inspect("softmax", head_dim)
    rows = []
    for name in names:
        kernel = softmax if name == "softmax" else inspect(name, head_dim)
        ratio = kernel.cycles / softmax.cycles
        print(f"{name}: {ratio:.2f} times softmax, {kernel.registers} registers, tiles of {kernel.tile}")
        for one in kernel.passes:
            print(f"  {one.name:8} {one.instructions:5} instructions, {one.products} products, {one.cycles} cycles")
        rows.append(asdict(kernel) | {"cycles_per_logit": kernel.cycles, "ratio": ratio})
    packages = ("sharp-attention", "triton")
    write(output, header("gpu_instructions", packages) | {"head_dim": head_dim, "target": "sm_90a", "rows": rows})


if __name__ == "__main__":
    main()
