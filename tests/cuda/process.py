"""Calls libsharp_cuda.so in a process of its own, where the fake driver is what the loader finds.

python -m tests.cuda.process LIBRARY: problems as JSON on stdin, what came of each as JSON on stdout.
"""

import ctypes
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sharp.plugins.cuda.library import TYPES, Attributes, Library, Problem, normalizer_number
from sharp.plugins.errors import SharpError

BUFFERS = (
    *("query", "key", "value", "key_cache", "value_cache", "slot_mapping", "block_table", "query_start"),
    *("context_lens", "head_params", "alibi_slopes", "collect_stats", "output", "stats"),
)


@dataclass
class Call:
    """A problem in plain values. Buffers get the addresses 4096, 8192, ... in the order of BUFFERS."""

    normalizer: str = "softmax"
    dtype: str = "float16"
    alpha: float = 1.5
    softcap: float = 0.0
    window: int = -1
    coefficients: tuple[float, ...] = (0.5, 0.25)
    tokens: int = 5
    sequences: int = 2
    max_blocks: int = 20
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    parameters: int = 0
    absent: list[str] = field(default_factory=lambda: ["head_params", "alibi_slopes", "collect_stats"])
    shifted: str = ""  # a buffer whose address is one byte off
    only: str = ""  # "workspace" or "prepare" instead of the call
    workspace: int = 1 << 30

    def problem(self) -> Problem:
        attributes = Attributes(
            normalizer=normalizer_number(self.normalizer),
            scale=0.125,
            alpha=self.alpha,
            temperature_coefficients=tuple(self.coefficients),
            temperature_terms=len(self.coefficients),
            entropy_threshold=0.5,
            softcap=self.softcap,
            window=self.window,
            causal=1,
        )
        buffers = {name: 4096 * (index + 1) + (name == self.shifted) for index, name in enumerate(BUFFERS)}
        return Problem(
            attributes=attributes,
            tokens=self.tokens,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            blocks=100,
            block_size=16,
            sequences=self.sequences,
            max_blocks=self.max_blocks,
            type=TYPES.index(self.dtype),
            cache_type=TYPES.index(self.dtype),
            head_params_width=self.parameters,
            alibi="alibi_slopes" not in self.absent,
            **{name: address for name, address in buffers.items() if name not in self.absent},
        )

    def as_dict(self):
        return asdict(self)


def main() -> None:
    library = Library(Path(sys.argv[1]))
    try:
        fake = ctypes.CDLL("libcuda.so.1")
        fake.fake_events.restype = ctypes.c_char_p
    except OSError:
        fake = None
    results = []
    for values in json.load(sys.stdin):
        call = Call(**values)
        problem = call.problem()
        result = {"bytes": None, "error": None, "events": []}
        try:
            if call.only == "prepare":
                library.prepare(problem)
            else:
                result["bytes"] = library.workspace_bytes(problem)
            if not call.only:
                library.paged_attention(problem, call.workspace, 77)
        except SharpError as error:
            result["error"] = str(error)
        if fake:
            result["events"] = fake.fake_events().decode().splitlines()
        results.append(result)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
