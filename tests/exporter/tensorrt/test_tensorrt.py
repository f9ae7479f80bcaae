"""`sharp build --backend tensorrt`, with TensorRT-RTX or a fake in place of TensorRT, which tests cannot install."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import onnx
import pytest
from click.testing import CliRunner
from rich.progress import Progress

from sharp.core.manifest import read_manifest
from sharp.exporter.build import build
from sharp.exporter.cli import export
from sharp.exporter.tensorrt.engine import progress_monitor
from sharp.models.checkpoint import save_checkpoint
from tests.exporter.conftest import give_the_old_name, tiny_model
from tests.marks import full

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="the TensorRT-RTX bindings are not installed")


def run(*arguments):
    return CliRunner().invoke(build, [str(argument) for argument in arguments], prog_name="sharp build")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that exports a model with a norm and options, once for each choice."""
    made: dict[tuple[str, ...], Path] = {}

    def make(norm: str, *options: str) -> Path:
        key = (norm, *options)
        if key not in made:
            folder = tmp_path_factory.mktemp("made")
            save_checkpoint(folder / "tiny.safetensors", tiny_model(norm))
            arguments = [str(folder / "tiny.safetensors"), "--norm", norm, *options, "-o", str(folder / "out")]
            result = CliRunner().invoke(export, arguments)
            assert result.exit_code == 0, result.output
            made[key] = folder / "out"
        return made[key]

    return make


@pytest.fixture
def paged(folders, tmp_path):
    return shutil.copytree(folders("ssa"), tmp_path / "paged")


class Recorder:
    """A fake of the TensorRT functions that are used. It records its arguments and builds `b"engine"`."""

    def __init__(self):
        self.loaded, self.model, self.features, self.profiles, self.timing = [], None, [], [], []
        self.built = b"engine"
        self.with_kernels = []  # model folders with kernels

    def module(self):
        module = ModuleType("tensorrt")
        module.__version__ = "10.14.1"
        module.Logger = type("Logger", (), {"ERROR": 0, "__init__": lambda self, level: None})
        module.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=0)
        module.PreviewFeature = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliasing")
        module.IProgressMonitor = object
        module.OnnxParser = lambda network, logger: self
        module.Builder = lambda logger: self
        module.get_plugin_registry = lambda: self
        return module

    def load_library(self, path):
        self.loaded.append(path)
        return "handle"

    def parse(self, content, path):
        self.model = content
        return True

    def create_network(self, flags):
        assert flags == 1
        return "network"

    def create_builder_config(self):
        return self

    def create_optimization_profile(self):
        self.profiles.append({})
        return self

    def set_preview_feature(self, feature, on):
        self.features.append((feature, on))

    def create_timing_cache(self, content):
        self.timing.append(content)
        return None if content == b"damaged" else SimpleNamespace(serialize=lambda: content + b"+measured")

    def set_timing_cache(self, cache, ignore_mismatch):
        assert not ignore_mismatch
        self.cache = cache
        return True

    def get_timing_cache(self):
        return self.cache

    def set_shape(self, name, smallest, usual, largest):
        self.profiles[-1][name] = [smallest, usual, largest]

    def add_optimization_profile(self, profile):
        assert profile is self

    def build_serialized_network(self, network, config):
        return self.built

    def install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorrt", self.module())
        for user in ("plugins.tensorrt.package", "exporter.tensorrt.tensorrt"):
            monkeypatch.setattr(f"sharp.{user}.library_path", lambda runtime: f"/lib/{runtime}.so")
        monkeypatch.setattr("sharp.exporter.tensorrt.tensorrt.add_kernels_for_gpu", self.with_kernels.append)


def test_without_tensorrt_it_says_what_to_install(paged):
    result = run(paged, "--backend", "tensorrt")
    assert (result.exit_code, "the Python package tensorrt is not installed" in result.output) == (2, True)
    assert "Traceback" not in result.output and not list(paged.glob("*.engine*"))


def test_without_the_plugin_it_says_how_to_build_it(paged, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", Recorder().module())
    monkeypatch.setattr("sharp.plugins.LIBRARIES", {"tensorrt": "libmissing.so"})
    result = run(paged, "--backend", "tensorrt")
    assert (result.exit_code, "run `make kernels`" in result.output) == (2, True)


def test_a_paged_model_keeps_its_nodes_for_the_plugin(paged, monkeypatch, tmp_path):
    recorder = Recorder()
    recorder.install(monkeypatch)
    cache = tmp_path / "measured"
    options = ("--backend", "tensorrt", "--max-sequences", 4, "--max-tokens", 32, "--max-context", 64)
    result = run(paged, *options, "--timing-cache", cache)
    assert result.exit_code == 0, result.output
    model = onnx.load_from_string(recorder.model)
    attention = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    assert attention and not model.functions
    # TensorRT does not support inputs of type bool for plugins.
    assert {node.input[11] for node in attention} == {"collect_stats.int32"}
    casts = [node for node in model.graph.node if "collect_stats" in node.input]
    assert [(cast.op_type, list(cast.output), cast.attribute[0].i) for cast in casts] == [
        ("Cast", ["collect_stats.int32"], onnx.TensorProto.INT32)
    ]
    assert recorder.loaded == ["/lib/tensorrt.so"] and recorder.with_kernels == [paged]
    assert recorder.features == [("aliasing", True)]
    decode, every = recorder.profiles
    assert every["block_table"] == decode["block_table"] == [(1, 1), (2, 2), (4, 4)]
    assert every["key_cache.0"][2][0] == decode["key_cache.0"][2][0] == 4 * 4
    assert (decode["input_ids"], every["input_ids"]) == ([(1,), (2,), (4,)], [(1,), (16,), (32,)])
    assert (paged / "model.engine").read_bytes() == b"engine"
    written = json.loads((paged / "model.engine.json").read_text())
    assert written["backend"] == "TensorRT" and written["version"] == "10.14.1" and written["plugin"] == "tensorrt.so"
    assert written["sha256"] == hashlib.sha256(b"engine").hexdigest()
    assert written["limits"] == {"sequences": 4, "tokens": 32, "context": 64}
    assert [profile["input_ids"][2] for profile in written["profiles"]] == [[4], [32]]
    assert written["profiles"][1]["block_table"] == [[1, 1], [2, 2], [4, 4]]
    # The next build starts from the measurements of this build.
    assert cache.read_bytes() == b"+measured"
    assert run(paged, *options, "--timing-cache", cache).exit_code == 0
    assert recorder.timing == [b"", b"+measured"]
    cache.write_bytes(b"damaged")
    result = run(paged, *options, "--timing-cache", cache)
    assert (result.exit_code, "is not a timing cache of TensorRT 10.14.1" in result.output) == (2, True)


def first_plugin(path):
    """Return the fields that TensorRT-RTX's parser gives to the first plugin creator that it calls."""
    command = [sys.executable, "-m", "tests.full.cuda.read_fields", path]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    [given] = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"op"')]
    return given


def device(capability):
    return SimpleNamespace(name="a GPU", compute_capability=capability)


@pytest.mark.parametrize(
    ("dtype", "target"),
    [("int8", "onnxruntime"), ("fp8", "tensorrt"), full("int8", "tensorrt"), full("fp8", "onnxruntime")],
)
def test_a_cache_of_8_bits_goes_to_the_plugin_with_its_scales(folders, monkeypatch, tmp_path, dtype, target):
    out = shutil.copytree(folders("softmax", "--kv-dtype", dtype, "--target", target), tmp_path / "out")
    recorder = Recorder()
    recorder.install(monkeypatch)
    monkeypatch.setattr("sharp.exporter.tensorrt.tensorrt.find_device", lambda: device(89))
    result = run(out, "--backend", "tensorrt", "-o", tmp_path / "engine", "--max-context", 64)
    assert result.exit_code == 0, result.output
    model = onnx.load_from_string(recorder.model)
    nodes = [node for node in model.graph.node if node.domain == "ai.sharp"]
    assert nodes and not model.functions
    for number, node in enumerate(nodes):
        # Every input and output must have a name.
        assert all(node.input) and list(node.input[9:]) == [
            "ai.sharp.absent",
            "ai.sharp.absent",
            "collect_stats.int32",
            f"key_scale.{number}",
            f"value_scale.{number}",
        ]
        updated = ("key_cache_out", "value_cache_out", "key_scale_out", "value_scale_out")
        assert len(node.output) == 6 and [node.output[at] for at in (1, 2, 4, 5)] == [
            f"{name}.{number}" for name in updated
        ]
        versions = [attribute.s for attribute in node.attribute if attribute.name == "plugin_version"]
        assert versions == [b"2"]
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    kind = {"int8": onnx.TensorProto.INT8, "fp8": onnx.TensorProto.FLOAT8E4M3FN}[dtype]
    assert kinds["key_cache.0"] == kinds["key_cache_out.0"] == kind
    assert recorder.profiles[0]["key_scale.0"][2][0] == recorder.profiles[0]["key_cache.0"][2][0]
    (out / "model.onnx").write_bytes(recorder.model)
    given = first_plugin(out / "model.onnx")
    assert (given["op"], given["version"]) == ("PagedAttention", "2")


def test_a_key_screen_goes_to_the_plugin(folders, monkeypatch, tmp_path):
    out = shutil.copytree(folders("entmax", "--key-screen", "int8"), tmp_path / "out")
    recorder = Recorder()
    recorder.install(monkeypatch)
    result = run(out, "--backend", "tensorrt", "-o", tmp_path / "engine", "--max-context", 64)
    assert result.exit_code == 0, result.output
    model = onnx.load_from_string(recorder.model)
    [node] = [node for node in model.graph.node if node.domain == "ai.sharp"]
    absent = ["ai.sharp.absent"] * 2
    assert list(node.input[9:]) == [*absent, "collect_stats.int32", *absent, "key_screen.0", "key_shift.0"]
    assert len(node.output) == 5 and all(node.output) and node.output[4] == "key_screen_out.0"
    assert [attribute.s for attribute in node.attribute if attribute.name == "plugin_version"] == [b"3"]
    assert recorder.profiles[0]["key_screen.0"][2][0] == recorder.profiles[0]["key_cache.0"][2][0]
    (out / "model.onnx").write_bytes(recorder.model)
    assert first_plugin(out / "model.onnx")["version"] == "3"


def test_an_fp8_cache_needs_a_gpu_that_has_fp8(folders, monkeypatch, tmp_path):
    out = folders("softmax", "--kv-dtype", "fp8", "--target", "tensorrt")
    Recorder().install(monkeypatch)
    monkeypatch.setattr("sharp.exporter.tensorrt.tensorrt.find_device", lambda: device(86))
    result = run(out, "--backend", "tensorrt", "-o", tmp_path / "engine", "--max-context", 64)
    said = "an fp8 cache, which TensorRT takes from compute capability 8.9 on; a GPU has 8.6" in result.output
    assert (result.exit_code, said) == (2, True), result.output


def test_quantized_weights_go_to_the_parser_as_standard_ops(folders, monkeypatch, tmp_path):
    out = folders("ssa", "--quantize", "int8")
    recorder = Recorder()
    recorder.install(monkeypatch)
    read = []

    def parse(content, path):
        (Path(path).parent / "read.onnx").write_bytes(content)
        read.append(onnx.load(Path(path).parent / "read.onnx"))  # with the weights, which lie beside `path`
        return True

    monkeypatch.setattr(recorder, "parse", parse)
    result = run(out, "--backend", "tensorrt", "-o", tmp_path / "engine", "--max-context", 64)
    assert result.exit_code == 0, result.output
    [model] = read
    kinds = {(node.domain, node.op_type) for node in model.graph.node}
    assert {("", "DequantizeLinear"), ("ai.sharp", "PagedAttention")} <= kinds
    assert {domain for domain, _ in kinds} == {"", "ai.sharp"}
    hashed = json.loads((tmp_path / "engine.json").read_text())["model_sha256"]
    assert hashed == hashlib.sha256((out / "model.onnx").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization": "int4"}, "takes blocks of 64 and 128; export the model again with --quantize int4-128"),
        ({"quantization": "int8", "opset": 20}, "is quantized and of opset 20, and TensorRT reads weights of 4 bits"),
    ],
)
def test_quantized_weights_that_tensorrt_has_no_form_for(paged, monkeypatch, changes, words):
    read_manifest(paged).model_copy(update=changes).write(paged)
    Recorder().install(monkeypatch)
    result = run(paged, "--backend", "tensorrt", "--max-context", 64)
    assert (result.exit_code, words in result.output) == (2, True), result.output


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("cache", ["none", full("contiguous")])
def test_other_forms_keep_their_nodes_for_the_plugin(folders, monkeypatch, tmp_path, cache, target):
    out = folders("ssa", "--cache", cache, "--target", target)
    recorder = Recorder()
    recorder.install(monkeypatch)
    result = run(out, "--backend", "tensorrt", "-o", tmp_path / "engine", "--max-context", 64)
    assert result.exit_code == 0, result.output
    assert "standard ops" not in result.output
    model = onnx.load_from_string(recorder.model)
    nodes = [node for node in model.graph.node if node.domain == "ai.sharp"]
    assert nodes and {node.op_type for node in nodes} == {"SharpAttention"} and not model.functions
    for node in nodes:
        # The parser refuses a node with fewer names than its plugin has outputs.
        assert len(node.output) == 4 and all(node.output)
        assert node.input[9] == "collect_stats.int32"
        assert list(node.input[3:6]) == (
            ["ai.sharp.absent", "ai.sharp.absent", "ai.sharp.absent.int32"]
            if cache == "none"
            else [*node.input[3:5], "ai.sharp.absent.int32"]
        )
    assert recorder.loaded == ["/lib/tensorrt.so"]
    assert recorder.features == [("aliasing", True)]
    [profile] = recorder.profiles
    if cache == "contiguous":
        assert [shape[2] for shape in profile["past_key_values.0.key"]] == [0, 32, 64]
    assert json.loads((tmp_path / "engine.json").read_text())["plugin"] == "tensorrt.so"


@pytest.mark.full
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("cache", ["contiguous", "none"])
def test_the_real_parser_takes_what_it_is_given_for_the_plugin(folders, monkeypatch, tmp_path, cache, old):
    out = shutil.copytree(folders("ssa", "--cache", cache), tmp_path / "out")
    if old:
        give_the_old_name(out)
    recorder = Recorder()
    recorder.install(monkeypatch)
    assert run(out, "--backend", "tensorrt", "--max-context", 64).exit_code == 0
    (out / "model.onnx").write_bytes(recorder.model)
    given = first_plugin(out / "model.onnx")
    assert (given["op"], given["values"]["normalizer"]) == ("SharpAttention", "ssa\0")


def test_without_the_plugin_attention_becomes_standard_ops(folders, monkeypatch, tmp_path):
    out = folders("ssa", "--cache", "contiguous")
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "tensorrt", recorder.module())
    monkeypatch.setattr("sharp.plugins.LIBRARIES", {"tensorrt": "libmissing.so"})
    result = run(out, "--backend", "tensorrt", "-o", tmp_path / "engine", "--max-context", 64)
    said = "attention becomes standard ops:" in result.output and "run `make kernels`" in result.output
    assert (result.exit_code, said) == (0, True), result.output
    model = onnx.load_from_string(recorder.model)
    assert {node.domain for node in model.graph.node} == {""} and not model.functions
    assert (recorder.loaded, recorder.features) == ([], [])
    assert json.loads((tmp_path / "engine.json").read_text())["plugin"] is None


def test_a_model_without_its_body_needs_the_plugin(folders, monkeypatch, tmp_path):
    out = folders("ssa", "--cache", "none", "--target", "tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", Recorder().module())
    monkeypatch.setattr("sharp.plugins.LIBRARIES", {"tensorrt": "libmissing.so"})
    result = run(out, "--backend", "tensorrt", "-o", tmp_path / "engine", "--max-context", 64)
    assert result.exit_code == 2
    assert "needs the plugin, but libmissing.so is not built" in result.output
    assert "export the model again with --target portable" in result.output


def test_a_build_that_fails_says_what_needs_no_plugin(folders, monkeypatch, tmp_path):
    recorder = Recorder()
    recorder.install(monkeypatch)
    recorder.built = None
    out = folders("ssa", "--cache", "none")
    result = run(out, "--backend", "tensorrt", "-o", tmp_path / "engine", "--max-context", 64)
    assert (result.exit_code, "with --target portable, the model needs no plugin" in result.output) == (2, True)


@pytest.mark.full
def test_the_standard_ops_become_an_engine(folders, tmp_path, monkeypatch):
    class Builder(trt.Builder):
        """A builder that is told the GPU's capability, so that TensorRT-RTX builds without a GPU."""

        def create_builder_config(self):
            config = super().create_builder_config()
            config.num_compute_capabilities = 1
            config.set_compute_capability(trt.ComputeCapability.SM89, 0)
            return config

    module = ModuleType("tensorrt")
    module.__dict__.update({**vars(trt), "Builder": Builder})
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    out = folders("softmax", "--cache", "contiguous")
    monkeypatch.setattr("sharp.plugins.LIBRARIES", {"tensorrt": "libmissing.so"})  # TensorRT-RTX takes no plugins
    result = run(out, "--backend", "tensorrt", "-o", tmp_path / "engine", "--max-context", 64)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "engine").stat().st_size > 1000
    assert json.loads((tmp_path / "engine.json").read_text())["plugin"] is None
    assert (out / "model.timing-cache").is_file()


def test_the_builders_phases_are_bars():
    with Progress(disable=True) as progress:
        monitor = progress_monitor(trt, progress)
        monitor.phase_start("Building", None, 4)
        monitor.phase_start("Measuring", "Building", 10)
        assert monitor.step_complete("Measuring", 2)
        assert [(task.description, task.completed, task.total) for task in progress.tasks] == [
            ("Building", 0, 4),
            ("  Measuring", 3, 10),
        ]
        monitor.phase_finish("Measuring")
        monitor.phase_finish("Building")
        monitor.phase_finish("Building")
        assert monitor.step_complete("Building", 3)
        assert not progress.tasks


@pytest.mark.parametrize(
    "options",
    [
        ("--backend", "tensorrt-rtx"),
        ("--backend", "tensorrt-rtx", "--compute-capability", 89, "--timing-cache", "cache"),
        ("--backend", "tensorrt", "--compute-capability", 89),
    ],
)
def test_options_of_the_other_backend_are_refused(tmp_path, options):
    result = run(tmp_path, *options)
    assert (result.exit_code, "--compute-capability" in result.output) == (2, True)
