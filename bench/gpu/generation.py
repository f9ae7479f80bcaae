"""A whole model end to end: ONNX Runtime's CUDA provider with our kernels beside torch, in tokens a second.

python -m bench.gpu.generation FOLDER build/gpu-model

copies an exported folder without its weights, so that it is small enough to transfer. Randomly generated weights take
their place; they cost as much time. `python -m bench.gpu.run --only end-to-end --model build/gpu-model` then measures.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.cases import Cases

BATCHES = (1, 8, 64)
CONTEXTS = (1024, 8192)
PROMPT = 2048
STEPS, WARM_UP = 48, 4
SIZE_FILE = "weights.size"
PROVIDER = "CUDAExecutionProvider"
HIDDEN_OF_HEADS = 3  # a layer's intermediate size, in hidden sizes: 1536 / 576 of SmolLM2, rounded up


class SkippedError(Exception):
    """An error that leaves a runtime out of the comparison, because something is missing; its text says what."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model with Llama's architecture: layers, heads, channels of a head, vocabulary."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, folder: Path) -> "Sizes":
        """Return the sizes in a folder's manifest."""
        manifest = json.loads((folder / "sharp.json").read_text(encoding="utf-8"))
        names = ("layers", "q_heads", "kv_heads", "head_dim", "vocab_size")
        return cls(*(manifest[name] for name in names))


def strip(folder: Path, out: Path) -> None:
    """Copy model.onnx and sharp.json of a model folder to `out`, and write the size of the weights, not the weights."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("model.onnx", "sharp.json"):
        shutil.copy(folder / name, out)
    (out / SIZE_FILE).write_text(str((folder / "model.onnx.data").stat().st_size), encoding="utf-8")


def fill(folder: Path) -> None:
    """Write random float16 weights where `strip` has left them out; do nothing if there are weights."""
    path = folder / "model.onnx.data"
    if path.exists() or not (folder / SIZE_FILE).is_file():
        return
    left = int((folder / SIZE_FILE).read_text(encoding="utf-8")) // 2
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(1 << 22) * 0.02).astype(np.float16)
    with path.open("wb") as stream:
        while left > 0:
            stream.write(weights[:left].tobytes())
            left -= len(weights)


def missing(folder: Path, libraries: Path) -> str | None:
    """Return what the comparison lacks here, as a sentence; None if nothing.

    It needs ONNX Runtime's build for GPUs, the model in `folder`, and libsharp_ops.so in `libraries`.
    """
    if find_spec("onnxruntime") is None:
        return "onnxruntime is not installed; its GPU build is the package onnxruntime-gpu"
    import onnxruntime

    if PROVIDER not in onnxruntime.get_available_providers():
        return f"onnxruntime {onnxruntime.__version__} has no {PROVIDER}; install onnxruntime-gpu in its place"
    for path in (folder / "model.onnx", libraries / "libsharp_ops.so"):
        if not path.is_file():
            return f"{path} is not there; bench/README.md says how it is made"
    return None


class OnnxModel:
    """An exported folder in ONNX Runtime: sequences of one length, with the caches on the device."""

    def __init__(self, folder: Path, library: Path, batch: int, longest: int, *, device: str, graphs: bool) -> None:
        """Make room for `batch` sequences of at most `longest` tokens on `device`, "cuda" or "cpu".

        `library` is the path of libsharp_ops.so. With `graphs`, steps of one token are CUDA graphs.

        Raises:
            SkippedError: ONNX Runtime, its provider, Sharp's libraries or the model are not there.
        """
        try:
            import onnxruntime
        except ImportError as error:
            raise SkippedError("onnxruntime is not installed; its GPU build is the package onnxruntime-gpu") from error
        if not (folder / "model.onnx").is_file():
            raise SkippedError(f"{folder} has no model.onnx; make it with python -m bench.gpu.generation")
        if not library.is_file():
            raise SkippedError(f"{library} is not there; build it with cmake -DSHARP_CUDA=ON")
        fill(folder)
        self.ort, self.device, self.batch = onnxruntime, device, batch
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.register_custom_ops_library(str(library))
        provider = (PROVIDER, {"enable_cuda_graph": str(int(graphs)), "use_tf32": "0"})  # as the server does
        providers = [provider] if device == "cuda" else ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=providers)
        if device == "cuda" and PROVIDER not in self.session.get_providers():
            raise SkippedError(f"ONNX Runtime could not start its {PROVIDER}: a library of CUDA or cuDNN is missing")
        inputs = {value.name: value for value in self.session.get_inputs()}
        caches = {name: value for name, value in inputs.items() if name.startswith(("key_cache.", "value_cache."))}
        block_size = caches["key_cache.0"].shape[3]
        self.pages = -(-longest // block_size)
        self.table = np.arange(batch * self.pages, dtype=np.int32).reshape(batch, self.pages)
        self.block_size = block_size
        dtypes = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        self.caches = {
            name: self.put(np.zeros((batch * self.pages, *value.shape[1:]), dtypes[value.type]))
            for name, value in caches.items()
        }
        self.sizes = {value.name: value.shape for value in self.session.get_outputs()}
        self.graphs = graphs
        self.steps: dict[tuple[int, int], tuple[dict[str, Any], Any, Any, Any]] = {}

    def put(self, array: np.ndarray) -> Any:
        """Return a copy of the array on the device, as an OrtValue."""
        return self.ort.OrtValue.ortvalue_from_numpy(array, self.device, 0)

    def run(self, ids: np.ndarray, context: int) -> np.ndarray:
        """Return greedy next tokens [batch] after `ids` [batch, new tokens] behind `context` others per sequence.

        Keys and values of the new tokens are stored in the caches.
        """
        new = ids.shape[1]
        positions = np.tile(np.arange(context, context + new), self.batch)
        rows = np.repeat(np.arange(self.batch), new)
        slots = self.table[rows, positions // self.block_size] * self.block_size + positions % self.block_size
        arrays = {
            "input_ids": ids.reshape(-1).astype(np.int64),
            "positions": positions.astype(np.int64),
            "slot_mapping": slots.astype(np.int32),
            "block_table": self.table,
            "query_start": np.arange(0, self.batch * new + 1, new, dtype=np.int32),
            "context_lens": np.full(self.batch, context, np.int32),
            "logits_indices": np.arange(new - 1, self.batch * new, new),
            "collect_stats": np.array(False),
        }
        inputs, logits, binding, options = self.step(arrays, new)
        for name, array in arrays.items():
            inputs[name].update_inplace(array)
        self.session.run_with_iobinding(binding, options)
        tokens: np.ndarray = logits.numpy().argmax(1)
        return tokens

    def step(self, arrays: dict[str, np.ndarray], new: int) -> tuple[dict[str, Any], Any, Any, Any]:
        """Return inputs by name, logits, binding and run options of a step of `new` tokens per sequence.

        They are made in the first call for such a step, with the shapes of `arrays`, and used again later. With graphs,
        a step of one token is a CUDA graph.
        """
        key = (self.batch, new)
        if key not in self.steps:
            inputs = {name: self.put(array.copy()) for name, array in arrays.items()}
            tokens = self.batch * new
            logits = self.put(np.zeros((self.batch, self.sizes["logits"][1]), np.float32))
            stats = self.put(np.zeros((self.sizes["stats"][0], tokens, *self.sizes["stats"][2:]), np.float32))
            binding = self.session.io_binding()
            for name, value in {**inputs, **self.caches}.items():
                binding.bind_ortvalue_input(name, value)
            updated = {name.replace("_cache.", "_cache_out."): value for name, value in self.caches.items()}
            for name, value in {"logits": logits, "stats": stats, **updated}.items():
                binding.bind_ortvalue_output(name, value)
            options = self.ort.RunOptions()
            if self.graphs:
                options.add_run_config_entry("gpu_graph_id", "1" if new == 1 else "-1")
            self.steps[key] = inputs, logits, binding, options
        return self.steps[key]


class TorchPeer:
    """A model of the same shapes in plain torch, with random weights and a fixed cache.

    The cache has room for `batch` sequences of `longest` tokens. With `graph`, steps of one token are a CUDA graph.
    """

    def __init__(self, sizes: Sizes, batch: int, longest: int, *, device: str, dtype: torch.dtype, graph: bool) -> None:
        self.sizes, self.batch, self.graph = sizes, batch, graph
        hidden = sizes.q_heads * sizes.head_dim
        intermediate = hidden * HIDDEN_OF_HEADS // 64 * 64
        kv = sizes.kv_heads * sizes.head_dim
        generator = torch.Generator(device).manual_seed(0)

        def gaussian(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype, generator=generator) * 0.02

        self.embedding = gaussian(sizes.vocab, hidden)
        self.layers = [
            {
                "query_key_value": gaussian(hidden + 2 * kv, hidden),
                "out": gaussian(hidden, hidden),
                "gate_up": gaussian(2 * intermediate, hidden),
                "down": gaussian(hidden, intermediate),
                "norms": torch.ones(2, hidden, device=device, dtype=dtype),
            }
            for _ in range(sizes.layers)
        ]
        shape = (sizes.layers, 2, batch, sizes.kv_heads, longest, sizes.head_dim)
        self.cache = torch.zeros(shape, device=device, dtype=dtype)
        half = torch.arange(0, sizes.head_dim, 2, device=device) / sizes.head_dim
        self.angles = torch.arange(longest, device=device)[:, None] * 10_000.0**-half  # [longest, head_dim / 2]
        self.places = torch.arange(longest, device=device)
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.captured: Any = None
        self.tokens: Tensor = self.ids

    @torch.no_grad()
    def run(self, ids: np.ndarray, context: int) -> np.ndarray:
        """Return greedy next tokens [batch] after `ids` [batch, new tokens] behind `context` others per sequence."""
        new = torch.from_numpy(ids).to(self.ids.device)
        if ids.shape[1] > 1 or not self.graph:
            positions = torch.arange(context, context + ids.shape[1], device=self.ids.device)
            visible = context + ids.shape[1]
            return self.forward(new, positions, visible).cpu().numpy()
        self.ids.copy_(new)
        self.position.fill_(context)
        if self.captured is None:
            for _ in range(2):
                self.forward(self.ids, self.position, None)
            self.captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.captured):
                self.tokens = self.forward(self.ids, self.position, None)
        self.captured.replay()
        return self.tokens.cpu().numpy()

    def forward(self, ids: Tensor, positions: Tensor, visible: int | None) -> Tensor:
        """Return the next tokens [batch] after ids [batch, new] at `positions` [new], and store their keys and values.

        `visible` is the number of keys in the cache, the new ones included; None reads the whole cache under a mask, as
        a CUDA graph needs.
        """
        s = self.sizes
        x = functional.embedding(ids, self.embedding)  # [batch, new, hidden]
        for number, layer in enumerate(self.layers):
            mixed = functional.linear(functional.rms_norm(x, x.shape[-1:], layer["norms"][0]), layer["query_key_value"])
            query, key, value = (
                part.unflatten(-1, (-1, s.head_dim)).transpose(1, 2)  # [batch, heads, new, head_dim]
                for part in mixed.split([s.q_heads * s.head_dim, *[s.kv_heads * s.head_dim] * 2], -1)
            )
            keys, values = self.cache[number]
            keys.index_copy_(2, positions, self.rotate(key, positions))
            values.index_copy_(2, positions, value)
            query, mask = self.rotate(query, positions), None
            if visible is None:
                mask = (self.places <= positions[:, None])[None, None]
            elif ids.shape[1] > 1:
                mask = self.places[:visible] <= positions[:, None]
            seen = slice(visible)
            attended = functional.scaled_dot_product_attention(
                query, keys[:, :, seen], values[:, :, seen], attn_mask=mask, enable_gqa=True
            )
            x = x + functional.linear(attended.transpose(1, 2).flatten(2), layer["out"])
            gate, up = functional.linear(
                functional.rms_norm(x, x.shape[-1:], layer["norms"][1]), layer["gate_up"]
            ).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        logits = functional.linear(functional.rms_norm(x[:, -1], x.shape[-1:]), self.embedding)
        return logits.argmax(-1)

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Return the rotary position embedding of [batch, heads, new, head_dim]."""
        angles = self.angles[positions]
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


Model = OnnxModel | TorchPeer


def generate(model: Model, ids: np.ndarray, context: int, steps: int) -> np.ndarray:
    """Return greedy tokens [batch, steps] after `ids` [batch, tokens] behind `context` others."""
    tokens = [model.run(ids, context)]
    for step in range(steps - 1):
        tokens.append(model.run(tokens[-1][:, None], context + ids.shape[1] + step))
    return np.stack(tokens, 1)


def end_to_end(quick: bool, cases: Cases, folder: Path, libraries: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each runtime, batch and context, and for prompts, with tokens_per_second, or skipped (why).

    `folder` is a model of `strip`, `libraries` the folder of libsharp_ops.so.
    """
    makers: dict[str, Callable[[int, int], Model]] = {}
    for graph in (False, True):
        suffix = ", CUDA graph" if graph else ""
        makers[f"ONNX Runtime, our kernels{suffix}"] = lambda batch, longest, graph=graph: OnnxModel(
            folder, libraries / "libsharp_ops.so", batch, longest, device="cuda", graphs=graph
        )
        makers[f"torch{suffix}"] = lambda batch, longest, graph=graph: TorchPeer(
            Sizes.of(folder), batch, longest, device="cuda", dtype=torch.float16, graph=graph
        )
    for subject, make in makers.items():
        for context in CONTEXTS[:1] if quick else CONTEXTS:
            for batch in BATCHES[::2] if quick else BATCHES:
                named = {"subject": subject, "batch": batch, "context": context}
                yield from cases.run(named, partial(_decode_row, make, batch, context))
        if "graph" not in subject:
            yield from cases.run({"subject": subject, "prompt": PROMPT}, partial(_prompt_row, make))


def _decode_row(make: Callable[[int, int], Model], batch: int, context: int) -> Iterator[dict[str, Any]]:
    """Yield one row: generated tokens per second at `batch` sequences of `context` tokens, or why it was skipped.

    `make(batch, tokens)` makes the model with room for them.
    """
    try:
        seconds = _decode_seconds(make(batch, context + WARM_UP + STEPS + 1), batch, context)
    except (SkippedError, FileNotFoundError) as error:
        yield {"skipped": str(error)}
    else:
        yield {"tokens_per_second": batch * STEPS / seconds}


def _prompt_row(make: Callable[[int, int], Model]) -> Iterator[dict[str, Any]]:
    """Yield one row: prompt tokens per second, or why it was skipped. `make(batch, tokens)` makes the model."""
    try:
        yield {"tokens_per_second": PROMPT / _prompt_seconds(make(1, PROMPT + 1))}
    except (SkippedError, FileNotFoundError) as error:
        yield {"skipped": str(error)}


def _decode_seconds(model: Model, batch: int, context: int) -> float:
    """Return the seconds of STEPS steps, each fed with the tokens of the step before, as in a server."""
    tokens = generate(model, np.ones((batch, 1), np.int64), context, WARM_UP)
    began = time.perf_counter()
    generate(model, tokens[:, -1:], context + WARM_UP, STEPS)
    return time.perf_counter() - began


def _prompt_seconds(model: Model) -> float:
    """Return the median time in seconds of five runs of a random prompt."""
    ids = np.random.default_rng(0).integers(0, 1000, (1, PROMPT))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        model.run(ids, 0)
        times.append(time.perf_counter() - began)
    return sorted(times)[2]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    strip(Path(sys.argv[1]), Path(sys.argv[2]))
