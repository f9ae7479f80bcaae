"""Building of engines, shared by TensorRT and TensorRT-RTX, whose Python packages have the same interface."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from rich.progress import Progress, TaskID

from sharp.core.engine_manifest import EngineLimits, EngineManifest, ShapeRange, manifest_path
from sharp.core.errors import InputError, SharpError
from sharp.core.manifest import Manifest
from sharp.exporter.tensorrt import quantized_weights


@dataclass(frozen=True)
class TensorRTEngine:
    """A serialized engine and its manifest."""

    content: bytes
    manifest: EngineManifest

    def write(self, path: Path) -> None:
        """Write the engine to `path`, and the manifest to `path` with .json appended to its name; both are replaced."""
        path.write_bytes(self.content)
        manifest_path(path).write_text(self.manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def check_quantization(path: Path, manifest: Manifest, runtime: str) -> None:
    """Check that the runtime can represent the quantized weights of a model.

    `path` (the model's file) and `runtime` (the runtime's name) are for the messages.

    Raises:
        InputError: the blocks of the weights are too small, or the model's opset is too old.
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
) -> TensorRTEngine:
    """Parse `model`, whose weights are in `folder`, and build an engine, with quantized weights in standard form.

    `trt` is the Python package of `runtime`, a name. `configure` is called once with the builder's configuration and
    changes it. There is an optimization profile for each of `limits`; the last are the limits of the engine. Each phase
    of the builder becomes a bar of `progress`. `plugin` and `compute_capability` (89 is 8.9) go into the manifest: the
    file name of the plugin that the engine needs, and the GPUs that it is for, None if neither is said. A model with
    quantized weights is changed in place.

    Raises:
        InputError: the runtime cannot read the model, or `configure` refuses its settings.
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
    return TensorRTEngine(
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
    """Return a context that yields the model in a form that parsers read, and the path of a file beside its weights.

    `path` is the model's file. A model with quantized weights is rewritten in place, and yields a copy in a temporary
    folder, see `with_standard_weights`.
    """
    if manifest.quantization is None:
        return nullcontext((model, path.resolve()))
    return quantized_weights.with_standard_weights(model, path)


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """Return a monitor for `trt`'s builder configuration, which shows the builder's nested phases as bars.

    A bar is in `progress` until its phase ends.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.tasks: dict[str, TaskID] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            """Add a progress bar of `num_steps` steps; TensorRT calls this when a phase begins."""
            indent = "  " if parent_phase else ""
            self.tasks[phase_name] = progress.add_task(f"{indent}{phase_name}", total=num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            """Advance the phase's progress bar; return True, so that the build continues."""
            if (task := self.tasks.get(phase_name)) is not None:
                progress.update(task, completed=step + 1)
            return True  # continue the build

        def phase_finish(self, phase_name: str) -> None:
            """Remove the phase's progress bar."""
            # Two phases may have the same name. An error here would end the process, as the builder calls from C++.
            if (task := self.tasks.pop(phase_name, None)) is not None:
                progress.remove_task(task)

    return Monitor()


def size_ranges(manifest: Manifest, limits: EngineLimits) -> Mapping[str, tuple[int, int, int]]:
    """Return the smallest, usual and largest value of every dynamic size (dim_param), by its name in the graph."""
    block = manifest.cache.block_size
    blocks = -(-limits.context // block)  # blocks of one sequence
    all_blocks = blocks * limits.sequences

    def up_to(most: int, least: int = 1) -> tuple[int, int, int]:
        """Return smallest, usual and largest size of a dimension: `least`, half of `most`, and `most`."""
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
    """Return the smallest, usual and largest shape of every input with dynamic sizes, by the input's name.

    `ranges` has the bounds of every size by its name in the graph, see `size_ranges`.
    """
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
