"""A fake of TensorRT and cuda-python over host memory.

An engine is an ONNX model, which ONNX Runtime computes with our kernels. Like the real packages, the fakes work on
addresses, check shapes against the profile in use, and copy on a stream.
"""

import ctypes
import hashlib
import sys
import threading
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import onnxruntime

from sharp.core.engine_manifest import ENGINE_FILE, EngineLimits, EngineManifest, manifest_path
from sharp.core.manifest import read_manifest
from sharp.plugins import library_path
from sharp.serving.backends.cache_size import tensors_of

DTYPES = {
    "tensor(int64)": "INT64",
    "tensor(int32)": "INT32",
    "tensor(bool)": "BOOL",
    "tensor(float)": "FLOAT",
    "tensor(float16)": "HALF",
    "tensor(int8)": "INT8",
    "tensor(float8e4m3fn)": "FP8",
}
NUMPY = {
    "INT64": np.int64,
    "INT32": np.int32,
    "BOOL": np.bool_,
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "FP8": np.uint8,
}
E4M3 = 17  # the number of FLOAT8E4M3FN in ONNX
VERSION = "10.14.1"


class FakeMachine:
    """The two fake modules, and a record of the calls to them."""

    def __init__(self) -> None:
        self.loaded: list[str] = []  # paths of plugin libraries
        # pairs of a model folder whose kernels were added and the number of the GPU
        self.added: list[tuple[Path, int]] = []
        self.used: list[int] = []  # the profile of every step
        self.memory: dict[int, ctypes.Array] = {}  # memory of the device, by address
        self.page_locked: dict[int, ctypes.Array] = {}  # memory of the host, by address
        self.addresses: dict[str, set[int]] = {}  # the addresses of every tensor in all steps
        self.features: list[tuple[str, bool]] = []  # requested of the builder
        self.copied: list[tuple[bool, int]] = []  # copies to the host: (whether into page-locked memory, bytes)
        self.refuse = ""  # the name of the call that fails
        self.profiles: list[dict] = []
        self.devices: list[tuple[int, int]] = []  # pairs of a thread and the GPU that it chose

    def install(self, monkeypatch) -> None:
        """Install the fakes, so that `import tensorrt` and `from cuda.bindings import runtime` find them."""
        monkeypatch.setitem(sys.modules, "tensorrt", self.tensorrt())
        for name, module in self.cuda().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("sharp.plugins.tensorrt.package.library_path", lambda runtime: f"/lib/{runtime}.so")
        monkeypatch.setattr(
            "sharp.serving.backends.tensorrt.add_kernels_for_gpu", lambda *given: self.added.append(given)
        )

    def tensorrt(self) -> ModuleType:
        module = ModuleType("tensorrt")
        module.__version__ = VERSION
        module.Logger = type("Logger", (), {"ERROR": 0, "__init__": lambda self, level: None})
        module.get_plugin_registry = lambda: SimpleNamespace(load_library=self.load_library)
        module.Builder = lambda logger: FakeBuilder(self)
        module.OnnxParser = lambda network, logger: FakeParser(network)
        module.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=0)
        module.PreviewFeature = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliasing")
        module.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=self.deserialize)
        return module

    def cuda(self) -> dict[str, ModuleType]:
        runtime = ModuleType("cuda.bindings.runtime")
        runtime.cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
        runtime.cudaSetDevice = lambda number: (Status(0), self.devices.append((threading.get_ident(), number)))[:1]
        runtime.cudaStreamCreate = lambda: (Status(0), 55)
        runtime.cudaDeviceSynchronize = lambda: (Status(700 if self.refuse == "device" else 0),)
        runtime.cudaStreamSynchronize = lambda stream: (Status(0),)
        runtime.cudaMemGetInfo = lambda: (Status(0), 1 << 30, 2 << 30)
        runtime.cudaMalloc = self.allocate
        runtime.cudaHostAlloc = self.allocate_of_host
        runtime.cudaFreeHost = lambda address: (Status(0), self.page_locked.pop(address))[:1]
        runtime.cudaMemset = lambda address, value, size: (Status(0), ctypes.memset(address, value, size))[:1]
        runtime.cudaMemcpyAsync = self.copy
        runtime.cudaFree = lambda address: (Status(0), self.memory.pop(address))[:1]
        bindings = ModuleType("cuda.bindings")
        bindings.runtime = runtime
        return {"cuda": ModuleType("cuda"), "cuda.bindings": bindings, "cuda.bindings.runtime": runtime}

    def load_library(self, path):
        self.loaded.append(path)
        return None if self.refuse == "plugin" else "handle"

    def deserialize(self, content):
        return None if self.refuse == "engine" else FakeEngine(self, content)

    def allocate(self, size):
        if self.refuse == "memory":
            return Status(2), 0
        memory = (ctypes.c_ubyte * size)(*b"\xff" * min(size, 64))  # a float of these bits is NaN
        self.memory[ctypes.addressof(memory)] = memory
        return Status(0), ctypes.addressof(memory)

    def allocate_of_host(self, size, flags):
        assert flags == 1
        memory = (ctypes.c_ubyte * size)()
        self.page_locked[ctypes.addressof(memory)] = memory
        return Status(0), ctypes.addressof(memory)

    def copy(self, to, source, size, kind, stream):
        assert stream == 55 and kind in (1, 2)
        if kind == 2:
            self.copied.append((to in self.page_locked, size))
        device = to if kind == 1 else source
        assert size <= len(self.memory[device])
        ctypes.memmove(to, source, size)
        return (Status(0),)


class FakeBuilder:
    """A builder whose network is the model that the parser has read, and whose engine is that network in bytes."""

    def __init__(self, machine):
        self.machine = machine

    def create_network(self, flags):
        assert flags == 1
        return SimpleNamespace(model=None)

    def create_builder_config(self):
        return SimpleNamespace(set_preview_feature=lambda feature, on: self.machine.features.append((feature, on)))

    def build_serialized_network(self, network, config):
        return None if self.machine.refuse == "build" else network.model


class FakeParser:
    def __init__(self, network):
        self.network = network

    def parse(self, content):
        """Read a model, and change `collect_stats` to int32 as our plugin takes it, with a cast to bool."""
        model = onnx.load_from_string(content)
        [node] = model.graph.node
        place = list(node.input).index("collect_stats")
        node.input[place] = "flag"
        model.graph.node.insert(0, onnx.helper.make_node("Cast", ["collect_stats"], ["flag"], to=onnx.TensorProto.BOOL))
        self.network.model = model.SerializeToString()
        return True


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorIllegalAddress = 700


class FakeEngine:
    def __init__(self, machine, content):
        self.machine = machine
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(library_path("onnxruntime"))
        self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.tensors = self.inputs | self.outputs
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(machine.profiles)

    def get_tensor_name(self, number):
        return list(self.tensors)[number]

    def get_tensor_dtype(self, name):
        return SimpleNamespace(name=DTYPES[self.tensors[name].type])

    def get_tensor_profile_shape(self, name, profile):
        return list(self.machine.profiles[profile][name])

    def create_execution_context(self):
        return FakeContext(self)


class FakeContext:
    def __init__(self, engine):
        self.engine, self.machine = engine, engine.machine
        # only shapes of inputs without dynamic dimensions are final
        self.shapes = {name: value.shape for name, value in engine.inputs.items()}
        self.addresses, self.profile = {}, None

    def set_optimization_profile_async(self, profile, stream):
        self.profile = profile
        return stream == 55

    def set_input_shape(self, name, shape):
        if name in (profile := self.machine.profiles[self.profile]):
            smallest, _, largest = profile[name]
            if not all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)):
                return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, address):
        assert address in self.machine.memory
        self.addresses[name] = address
        self.machine.addresses.setdefault(name, set()).add(address)
        return True

    def execute_async_v3(self, stream):
        if self.machine.refuse in ("step", "device"):
            return False
        self.machine.used.append(self.profile)
        feeds = {name: self.value(name) for name in self.engine.inputs}
        results = self.engine.session.run_with_ort_values(list(self.engine.outputs), feeds)
        for name, result in zip(self.engine.outputs, results, strict=True):
            dtype = np.dtype(NUMPY[self.engine.get_tensor_dtype(name).name])
            size = int(np.prod(result.shape(), dtype=int)) * dtype.itemsize
            assert size <= len(self.machine.memory[self.addresses[name]])
            ctypes.memmove(self.addresses[name], result.data_ptr(), size)
        return stream == 55

    def value(self, name):
        array = self.read(name).copy()
        if array.dtype == np.uint8:
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, E4M3)
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)

    def read(self, name):
        shape, dtype = self.shapes[name], NUMPY[self.engine.get_tensor_dtype(name).name]
        memory = self.machine.memory[self.addresses[name]]
        count = int(np.prod(shape, dtype=int))
        assert count * np.dtype(dtype).itemsize <= len(memory)
        return np.frombuffer(memory, dtype, count).reshape(shape)


def write_engine(folder: Path, machine: FakeMachine, *, block: int, plugin: bool = True, **changes) -> None:
    """Write the folder's model as an engine for 4 sequences, 16 tokens per step and a context of 64 tokens."""
    content = (folder / "model.onnx").read_bytes()
    pages = 64 // block

    def profile(tokens: int) -> dict:
        rows = dict.fromkeys(("input_ids", "positions", "slot_mapping"), ((1,), (tokens,), (tokens,)))
        rows |= {"logits_indices": ((1,), (tokens,), (tokens,)), "context_lens": ((1,), (4,), (4,))}
        rows |= {"query_start": ((2,), (5,), (5,)), "block_table": ((1, 1), (4, pages), (4, pages))}
        for tensor in tensors_of(read_manifest(folder)):
            rows[tensor.name] = tuple((count, *tensor.block_shape) for count in (1, pages, 4 * pages))
        return rows

    machine.profiles = [profile(4), profile(16)]
    written = EngineManifest(
        backend="TensorRT",
        version=VERSION,
        compute_capability=None,
        sha256=hashlib.sha256(content).hexdigest(),
        model=folder.name,
        model_sha256=hashlib.sha256(content).hexdigest(),
        limits=EngineLimits(sequences=4, tokens=16, context=64),
        plugin="libsharp_trt.so" if plugin else None,
        profiles=tuple(machine.profiles),
    )
    (folder / ENGINE_FILE).write_bytes(content)
    path = manifest_path(folder / ENGINE_FILE)
    path.write_text(written.model_copy(update=changes).model_dump_json(), encoding="utf-8")
