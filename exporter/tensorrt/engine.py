"""Engines of TensorRT and of TensorRT-RTX: what both are built with. Their Python packages have the same interface."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from rich.progress import Progress, TaskID

from sharp.exporter.tensorrt import quantized_weights
from sharp.plugins.engine_manifest import EngineLimits, EngineManifest, ShapeRange, manifest_path
from sharp.plugins.errors import InputError, SharpError
from sharp.plugins.manifest import Manifest


@dataclass(frozen=True)
class Engine:
    """A serialized engine and its manifest."""

    content: bytes
    manifest: EngineManifest

    def write(self, path: Path) -> None:
        """Write the engine to `path` and the manifest to `path` with .json behind its name."""
        path.write_bytes(self.content)
        manifest_path(path).write_text(self.manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def check_quantization(path: Path, manifest: Manifest, runtime: str) -> None:
    """Refuse a model whose quantized weights the runtime has no form for.

    Raises:
        InputError: its blocks are too small, or its opset is.
    """
    if manifest.quantization == "int4":
        raise InputError(
            f"{path} has weights of 4 bits in blocks of 32, and {runtime} takes blocks of 64 and 128; export the model "
            "again with --quantize int4-128"
        )
    if manifest.quantization is not None and manifest.opset < quantized_weights.OPSET:
        raise InputError(
            f"{path} is quantized and of opset {manifest.opset}, and {runtime} reads weights of 4 bits from opset "
            f"{quantized_weights.OPSET} on; export the model again without --opset"
        )


def build_engine(
    trt: Any,
    runtime: str,
    model: onnx.ModelProto,
    folder: Path,
    manifest: Manifest,
    limits: Sequence[EngineLimits],
    configure: Callable[[Any], None],
    progress: Progress,
    plugin: str | None = None,
    compute_capability: int | None = None,
) -> Engine:
    """Parse `model`, whose weights lie in `folder`, and build; quantized weights are given their standard form.

    `trt` is the Python package of `runtime`; `configure`
    is given the builder's configuration. There is an optimization profile for each of `limits`, the last of which are
    the engine's. Each phase of the builder becomes a bar of `progress`.

    Raises:
        InputError: the runtime cannot read the model.
        SharpError: the engine could not be built.
    """
    path = folder / manifest.model_file
    builder_logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(builder_logger)
    if builder is None:
        raise SharpError(f"{runtime} could not be started; its messages are above")
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, builder_logger)
    config = builder.create_builder_config()
    configure(config)
    config.progress_monitor = progress_monitor(trt, progress)
    profiles = tuple(shape_ranges(model, size_ranges(manifest, each)) for each in limits)
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, bounds in shapes.items():
            profile.set_shape(name, *bounds)
        config.add_optimization_profile(profile)
    with readable(model, path, manifest) as (parsed, place):
        if not parser.parse(parsed.SerializeToString(), str(place)):
            raise InputError(f"{path} cannot be read by {runtime}: {parser.get_error(0).desc()}")
        engine = builder.build_serialized_network(network, config)
    if engine is None:
        otherwise = "; exported with --target portable, the model needs no plugin" if plugin else ""
        raise SharpError(f"{runtime} could not build an engine from {path}; its messages are above{otherwise}")
    content = bytes(engine)
    return Engine(
        content,
        EngineManifest(
            backend=runtime,
            version=trt.__version__,
            compute_capability=compute_capability,
            sha256=hashlib.sha256(content).hexdigest(),
            model=manifest.name,
            model_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            limits=limits[-1],
            plugin=plugin,
            profiles=profiles,
        ),
    )


def readable(
    model: onnx.ModelProto, path: Path, manifest: Manifest
) -> AbstractContextManager[tuple[onnx.ModelProto, Path]]:
    """The model as parsers read it, and the file that its weights lie beside."""
    if manifest.quantization is None:
        return nullcontext((model, path.resolve()))
    return quantized_weights.with_standard_weights(model, path)


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """Shows the builder's phases, which nest, as bars; a phase's bar goes when it ends."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.tasks: dict[str, TaskID] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            indent = "  " if parent_phase else ""
            self.tasks[phase_name] = progress.add_task(f"{indent}{phase_name}", total=num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if (task := self.tasks.get(phase_name)) is not None:
                progress.update(task, completed=step + 1)
            return True  # go on

        def phase_finish(self, phase_name: str) -> None:
            # Two phases may have one name; an exception would end the process, as the builder calls from C++.
            if (task := self.tasks.pop(phase_name, None)) is not None:
                progress.remove_task(task)

    return Monitor()


def size_ranges(manifest: Manifest, limits: EngineLimits) -> Mapping[str, tuple[int, int, int]]:
    """The smallest, usual and largest value of every dynamic size, by its name in the graph."""
    block = manifest.cache.block_size
    blocks = -(-limits.context // block)  # of one sequence
    all_blocks = blocks * limits.sequences

    def up_to(most: int, least: int = 1) -> tuple[int, int, int]:
        return least, max(least, most // 2), max(least, most)

    per_sequence = up_to(min(limits.tokens, limits.context))
    return {
        "batch": up_to(limits.sequences),
        "sequences": up_to(limits.sequences),
        "sequences_plus_1": (2, 1 + max(1, limits.sequences // 2), 1 + limits.sequences),
        "tokens": up_to(limits.tokens) if manifest.cache.form == "paged" else per_sequence,
        "outputs": up_to(limits.tokens),
        "blocks": up_to(all_blocks),
        "screen_blocks": up_to(all_blocks),
        "max_blocks": up_to(blocks),
        "past": up_to(limits.context, least=0),
        "length": per_sequence,
        "items": per_sequence,
    }


def shape_ranges(model: onnx.ModelProto, ranges: Mapping[str, tuple[int, int, int]]) -> dict[str, ShapeRange]:
    """The smallest, usual and largest shape of every input that varies."""
    constants = {tensor.name for tensor in model.graph.initializer}
    shapes = {}
    for value in model.graph.input:
        sizes = value.type.tensor_type.shape.dim
        if value.name in constants or not any(size.dim_param for size in sizes):
            continue
        bounds = [ranges[size.dim_param] if size.dim_param else (size.dim_value,) * 3 for size in sizes]
        smallest, usual, largest = zip(*bounds, strict=True)
        shapes[value.name] = (smallest, usual, largest)
    return shapes
