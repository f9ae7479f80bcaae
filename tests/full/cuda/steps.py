"""Calls of the CUDA ops in plain values, and their results from the process of run_op.py."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from sharp.plugins.op.attributes import SCALED_CACHES, WITHOUT_SINK
from sharp.plugins.op.schema import ATTENTION, PAGED_ATTENTION, OpDefinition
from tests.full.cuda.native import ROOT

HEADS, KV_HEADS, DIM = 4, 2, 64
BLOCKS, BLOCK = 9, 16
OPTIONAL = ("head_params", "alibi_slopes", "collect_stats")

Described = dict[str, tuple[str, list[int]]]  # (type, shape) by name


@dataclass
class Call:
    """A call of an op in plain values.

    `absent` names inputs and outputs that the node leaves out. `shapes` and `dtypes` override those of inputs.
    `in_place` binds outputs to the memory of their inputs; with `between_nodes` these are values between nodes instead.
    One session makes the call `runs` times; `graph` is the CUDA provider's option to replay the first one.
    """

    normalizer: str = "softmax"
    dtype: str = "float16"
    attributes: dict[str, Any] = field(default_factory=lambda: {"scale": 0.125})
    in_place: bool = True
    between_nodes: bool = False
    absent: list[str] = field(default_factory=lambda: list(OPTIONAL))
    shapes: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    provider: str = "cpu"
    graph: bool = False
    runs: int = 1

    definition: ClassVar[OpDefinition]

    def inputs(self) -> Described:
        """Return the type and shape of every input that the node has."""
        usual = self.usual_inputs() | {
            "head_params": ("float32", [HEADS, 2 if self.normalizer == "ssa" else 1]),  # b and n, or a sink
            "alibi_slopes": ("float32", [HEADS]),
            "collect_stats": ("bool", []),
        }
        absent = [*self.absent, *(["head_params"] if self.normalizer in WITHOUT_SINK else [])]
        given = {name: described for name, described in usual.items() if name not in absent}
        return {n: (self.dtypes.get(n, dtype), self.shapes.get(n, shape)) for n, (dtype, shape) in given.items()}

    def outputs(self) -> Described:
        """Return the type and shape of every output that the node has."""
        return {name: described for name, described in self.usual_outputs().items() if name not in self.absent}

    def usual_inputs(self) -> Described:
        raise NotImplementedError

    def usual_outputs(self) -> Described:
        raise NotImplementedError

    def updated(self) -> dict[str, str]:
        """Return the names of inputs by the name of the output that may share their memory."""
        raise NotImplementedError

    def input_names(self) -> list[str]:
        """Return the node's inputs in order, with empty names for inputs that it leaves out."""
        return _trimmed(self.definition.all_input_names, self.inputs())

    def output_names(self) -> list[str]:
        """Return the node's outputs in order, with empty names for outputs that it leaves out."""
        names = (*self.definition.output_names, *(f"{beside.name}_out" for beside in self.definition.beside))
        return _trimmed(names, self.outputs())


@dataclass
class Step(Call):
    """A call of PagedAttention in plain values."""

    cache_dtype: str = "float16"
    tokens: int = 20
    sequences: int = 2
    screened: bool = False

    definition = PAGED_ATTENTION

    def usual_inputs(self) -> Described:
        tokens, sequences = self.tokens, self.sequences
        found = {
            "query": (self.dtype, [tokens, HEADS, DIM]),
            "key": (self.dtype, [tokens, KV_HEADS, DIM]),
            "value": (self.dtype, [tokens, KV_HEADS, DIM]),
            "key_cache": (self.cache_dtype, [BLOCKS, KV_HEADS, DIM, BLOCK]),
            "value_cache": (self.cache_dtype, [BLOCKS, KV_HEADS, BLOCK, DIM]),
            "slot_mapping": ("int32", [tokens]),
            "block_table": ("int32", [sequences, 20]),
            "query_start": ("int32", [sequences + 1]),
            "context_lens": ("int32", [sequences]),
        }
        scales = {name: ("float32", [BLOCKS, KV_HEADS]) for name in ("key_scale", "value_scale")}
        if self.screened:
            found |= {
                "key_screen": ("int8", [BLOCKS, KV_HEADS, BLOCK * (DIM + 8)]),
                "key_shift": ("float32", [KV_HEADS, DIM]),
            }
        # Scales may also be given to a cache without scales, to see that they are refused.
        return found | {
            name: scale for name, scale in scales.items() if self.cache_dtype in SCALED_CACHES or name in self.shapes
        }

    def usual_outputs(self) -> Described:
        inputs = self.usual_inputs()
        return {
            "output": (self.dtype, [self.tokens, HEADS, DIM]),
            **{output: inputs[name] for output, name in self.updated().items()},
            "stats": ("float32", [self.tokens, HEADS, self.attributes.get("stats_columns", 4)]),
        }

    def updated(self) -> dict[str, str]:
        names = (
            "key_cache",
            "value_cache",
            *(("key_scale", "value_scale") if self.cache_dtype in SCALED_CACHES else ()),
        )
        names += ("key_screen",) if self.screened else ()
        return {f"{name}_out": name for name in names}


@dataclass
class AttentionStep(Call):
    """A call of SharpAttention in form "none", "concatenating" or "shared"; `past` is a shared buffer's capacity."""

    form: str = "none"
    batch: int = 2
    queries: int = 3
    new_keys: int = 3
    past: int = 40
    counted: bool = False  # whether total_lens is given

    definition = ATTENTION

    def usual_inputs(self) -> Described:
        found = {
            "query": (self.dtype, [self.batch, HEADS, self.queries, DIM]),
            "key": (self.dtype, [self.batch, KV_HEADS, self.new_keys, DIM]),
            "value": (self.dtype, [self.batch, KV_HEADS, self.new_keys, DIM]),
            "past_key": (self.dtype, [self.batch, KV_HEADS, self.past, DIM]),
            "past_value": (self.dtype, [self.batch, KV_HEADS, self.past, DIM]),
            "past_lens": ("int32", [self.batch]),
            "total_lens": ("int32", [self.batch]),
        }
        left_out = {"none": ("past_key", "past_value", "past_lens"), "concatenating": ("past_lens",), "shared": ()}
        names = {*left_out[self.form], *(() if self.counted else ("total_lens",))}
        # An input that the form leaves out may be given with an empty shape, which counts as absent.
        return {name: described for name, described in found.items() if name not in names or name in self.shapes}

    def usual_outputs(self) -> Described:
        slots = {"none": self.new_keys, "concatenating": self.past + self.new_keys, "shared": self.past}[self.form]
        present = self.dtype, [self.batch, KV_HEADS, slots, DIM]
        return {
            "output": (self.dtype, [self.batch, HEADS, self.queries, DIM]),
            "present_key": present,
            "present_value": present,
            "stats": ("float32", [self.batch, HEADS, self.queries, self.attributes.get("stats_columns", 4)]),
        }

    def updated(self) -> dict[str, str]:
        return {"present_key": "past_key", "present_value": "past_value"} if self.form == "shared" else {}


CALLS = {call.definition.name: call for call in (Step, AttentionStep)}


def make_steps(libraries, expected, fails=False, environment=None):
    """Make calls in one process, and return their results."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.full.cuda.run_op", libraries],
        input=json.dumps([[call.definition.name, asdict(call)] for call in expected]),
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries / "driver"), **(environment or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(finished.stdout)
    assert fails or [result["error"] for result in results] == [None] * len(expected)
    return results


def launches(result):
    """Return the name without the target, and the values, of every launch."""
    lines = [event.split() for event in result["events"] if event.startswith("launch ")]
    return [(line[1].split("@")[0], dict(word.split("=") for word in line[2:])) for line in lines]


def _trimmed(names, given) -> list[str]:
    found = [name if name in given else "" for name in names]
    while not found[-1]:
        found.pop()
    return found
