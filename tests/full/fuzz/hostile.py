"""The corpus: files that were made to hurt, as the code that makes them, for the readers of `readers.py`."""

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.exporter.conftest import tiny_model

DEEP = b"[" * 200_000  # deeper than Python's recursion limit
HUGE = 2**60


def saved(**changes: Any) -> bytes:
    """Return Sharp's `.pt` checkpoint with a part of its content changed."""
    model = tiny_model("ssa")
    content = {"format": "sharp", "version": 1, "model": "SharpForCausalLM", "config": asdict(model.config)}
    file = io.BytesIO()
    torch.save({**content, "state_dict": model.state_dict(), **changes}, file)
    return file.getvalue()


def expanded_tensors() -> bytes:
    """Return a checkpoint with one stored number that claims to be 2^50 numbers by a stride of 0.

    The configuration claims a model that large, too.
    """
    state: dict[str, torch.Tensor] = dict(tiny_model("ssa").state_dict())
    name = next(name for name in state if "embed" in name)
    vocab = 2**50 // state[name].shape[1]
    state[name] = torch.zeros(1).expand(vocab, state[name].shape[1])
    return saved(state_dict=state, config={**asdict(tiny_model("ssa").config), "vocab_size": vocab})


def deflated() -> bytes:
    """Return a checkpoint whose pickle is 64 MB of zeros, packed to 64 kB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 26))
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


def with_pickle(steps: bytes) -> bytes:
    """Return a checkpoint whose pickle is `steps`."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", steps)
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


def config_of(**changes: Any) -> bytes:
    """Return the `config.json` of Sharp's Hugging Face folder with some fields changed."""
    config = {**asdict(tiny_model("ssa").config), **changes}
    return json.dumps({"model_type": "sharp", "sharp": {"version": 1, "model": "causal-lm", "config": config}}).encode()


class Runs:
    """An object whose pickle runs a command when it is read."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return exec, ("raise SystemExit('a pickle was run')",)


def pickled() -> bytes:
    """Return a checkpoint that runs code when it is unpickled."""
    return saved(state_dict={"weight": Runs()})


def header(content: object, length: int | None = None) -> bytes:
    """Return a safetensors file with a header; `length` replaces the value of its length field."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    """Return the entry of a tensor in a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def gguf(count: int, pairs: int, rest: bytes = b"") -> bytes:
    """Return a GGUF header that claims `count` tensors and `pairs` of metadata."""
    return b"GGUF" + struct.pack("<IQQ", 3, count, pairs) + rest


def gguf_array(length: int, depth: int = 1) -> bytes:
    """Return GGUF metadata with an array of `length` bytes inside `depth - 1` arrays."""
    key = b"general.architecture"
    nested = struct.pack("<IQ", 9, 1) * (depth - 1)
    return gguf(0, 1, struct.pack("<Q", len(key)) + key + struct.pack("<I", 9) + nested + struct.pack("<IQ", 0, length))


# by reader and name, the function that makes the file
HOSTILE: dict[str, dict[str, Callable[[], bytes]]] = {
    "checkpoint.pt": {
        "runs-code": pickled,
        "plain-pickle": lambda: pickle.dumps(Runs()),
        "expanded-tensors": expanded_tensors,
        "deflated": deflated,
        "pickle-takes-what-is-not-there": lambda: with_pickle(b"\x80\x02R."),
        "pickle-calls-with-too-few": lambda: with_pickle(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R."),
        "state-is-a-list": lambda: saved(state_dict=[]),
        "sparse-tensors": lambda: saved(
            state_dict={name: value.to_sparse() for name, value in tiny_model("ssa").state_dict().items()}
        ),
        "integer-tensors": lambda: saved(
            state_dict={name: value.to(torch.int32) for name, value in tiny_model("ssa").state_dict().items()}
        ),
        "no-memory-for-the-model": lambda: saved(
            config={**asdict(tiny_model("ssa").config), "hidden_size": 2**24, "layers": 2**20}
        ),
    },
    "checkpoint.safetensors": {
        "header-longer-than-the-file": lambda: header({}, HUGE),
        "header-nested": lambda: header(DEEP),
        "tensor-past-the-end": lambda: header({"a": tensor("F32", [HUGE], 0, 4 * HUGE)}),
        "sizes-overflow": lambda: header({"a": tensor("F32", [2**33, 2**33], 0, 4)}) + bytes(4),
        "overlap": lambda: header({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}) + bytes(12),
        "metadata-nested": lambda: header({"__metadata__": {"sharp": DEEP.decode()}}),
    },
    "own-folder-config.json": {
        "a-number-of-401-digits": lambda: config_of(positions="rope", rope_theta=10**400),
        "nested": lambda: DEEP,
        "not-utf-8": lambda: b'{"model_type": "\xff"}',
        "code-of-its-own": lambda: json.dumps(
            {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
        ).encode(),
    },
    "own-folder-tokenizer.json": {"nested": lambda: DEEP, "empty": lambda: b""},
    "own-folder-generation_config.json": {"nested": lambda: DEEP, "text": lambda: b'{"temperature": "hot"}'},
    "llama-config.json": {
        "nested": lambda: DEEP,
        "code-of-its-own": lambda: json.dumps(
            {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "vocab_size": HUGE}
        ).encode(),
        "layers": lambda: json.dumps({"model_type": "llama", "num_hidden_layers": 10**9}).encode(),
        "hidden-size": lambda: json.dumps({"model_type": "llama", "hidden_size": 2**40}).encode(),
    },
    "llama-model.safetensors.index.json": {
        "nested": lambda: DEEP,
        "elsewhere": lambda: json.dumps({"weight_map": {"lm_head.weight": "../../etc/passwd"}}).encode(),
    },
    "gguf": {
        "tensors": lambda: gguf(2**63 - 1, 0),
        "pairs": lambda: gguf(0, 2**63 - 1),
        "array": lambda: gguf_array(2**62),
        "nested-arrays": lambda: gguf_array(1, depth=50_000),
        "another-endian": lambda: b"GGUF" + struct.pack(">IQQ", 3, 1, 1),
    },
    "preset": {"nested": lambda: DEEP, "infinite": lambda: b'{"temperature_coefficients": [1e999]}'},
    "model-sharp.json": {"nested": lambda: DEEP, "not-utf-8": lambda: b'{"format_version": "\xff"}'},
    "model-model.onnx": {"nested": lambda: nested_message(), "length": lambda: b"\x3a" + b"\xff" * 9 + b"\x01"},
}


def nested_message() -> bytes:
    """Return a protobuf model whose graph's node has an attribute with a graph, and so on, 2,000 deep."""
    content = b""
    for _ in range(2000):
        for tag in (b"\x32", b"\x2a", b"\x0a"):  # attribute.g, node.attribute, graph.node
            content = tag + varint(len(content)) + content
    return b"\x3a" + varint(len(content)) + content  # model.graph


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def write(reader: str, name: str, path: Path) -> None:
    """Write a hostile file to `path`."""
    path.write_bytes(HOSTILE[reader][name]())
