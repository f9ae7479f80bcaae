"""Call libsharp_cuda.so in a process of its own, in which the loader finds the fake driver.

`python -m tests.full.cuda.process LIBRARY [KERNELS ...]` reads problems as JSON from stdin and prints the result of
each.
"""

import ctypes
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sharp.core.errors import SharpError
from sharp.plugins.cuda.library import TYPES, AttentionProblem, AttributesStruct, Library, Problem
from sharp.plugins.op.attributes import SCALED_CACHES

BUFFERS = (
    *("query", "key", "value", "key_cache", "value_cache", "slot_mapping", "block_table", "query_start"),
    *("context_lens", "head_params", "alibi_slopes", "collect_stats", "output", "stats", "key_scale", "value_scale"),
    *("past_key", "past_value", "past_lens", "total_lens", "present_key", "present_value"),
    *("key_screen", "key_shift"),
)
ABSENT = ("head_params", "alibi_slopes", "collect_stats")
PAGED = ("key_cache", "value_cache", "slot_mapping", "block_table", "query_start", "context_lens")
SCALES = ("key_scale", "value_scale")
SCREENS = ("key_screen", "key_shift")
CONTIGUOUS = ("past_key", "past_value", "past_lens", "total_lens", "present_key", "present_value")


@dataclass
class Call:
    """A problem in plain values. Buffers get the addresses 4096, 8192, ... in the order of BUFFERS."""

    normalizer: str = "softmax"
    dtype: str = "float16"
    cache_dtype: str = ""  # "" for the query's dtype
    scale: float = 0.125
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
    screened: bool = False
    columns: int = 4
    # For op SharpAttention, each of `sequences` has `tokens` queries and a past of `past` slots.
    contiguous: bool = False
    new_keys: int = 5
    past: int = 0
    absent: list[str] = field(default_factory=lambda: list(ABSENT))
    shifted: str = ""  # a buffer whose address is one byte off
    only: str = ""  # "workspace" or "prepare" makes that call instead
    workspace: int = 1 << 30

    def problem(self) -> Problem | AttentionProblem:
        attributes = AttributesStruct.of(
            {
                "normalizer": self.normalizer,
                "scale": self.scale,
                "alpha": self.alpha,
                "temperature_coefficients": self.coefficients,
                "softcap": self.softcap,
                "window": self.window,
                "stats_columns": self.columns,
            }
        )
        unused = PAGED + SCALES if self.contiguous else CONTIGUOUS + SCALES * (self.cache_dtype not in SCALED_CACHES)
        unused += () if self.screened else SCREENS
        given = [name for name in BUFFERS if name not in self.absent and name not in unused]
        common = {
            "attributes": attributes,
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "value_dim": self.head_dim,
            "type": TYPES.index(self.dtype),
            "parameters": self.parameters,
            "alibi": "alibi_slopes" in given,
            **{name: 4096 * (BUFFERS.index(name) + 1) + (name == self.shifted) for name in given},
        }
        if self.contiguous:
            return AttentionProblem(
                batch=self.sequences,
                queries=self.tokens,
                new_keys=self.new_keys,
                capacity=self.past,
                has_past="past_key" in given,
                has_presents={"present_key", "present_value"} <= set(given),
                shared="past_lens" in given,
                **common,
            )
        return Problem(
            tokens=self.tokens,
            blocks=100,
            block_size=16,
            sequences=self.sequences,
            max_blocks=self.max_blocks,
            cache_type=TYPES.index(self.cache_dtype or self.dtype),
            screened=self.screened,
            **common,
        )

    def as_dict(self):
        return asdict(self)


def main() -> None:
    library = Library(Path(sys.argv[1]))
    for folder in sys.argv[2:]:
        library.add_kernels(Path(folder))
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
                result["bytes"] = library.workspace_bytes(problem, or_smaller=call.only == "workspace")
            if not call.only:
                enqueue = library.attention if call.contiguous else library.paged_attention
                enqueue(problem, call.workspace, 77)
        except SharpError as error:
            result["error"] = str(error)
        if fake:
            result["events"] = fake.fake_events().decode().splitlines()
        results.append(result)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
