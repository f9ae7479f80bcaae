"""The manifest of an engine that `sharp build` wrote: where builder and server meet."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sharp.plugins.errors import InputError

ENGINE_FILE = "model.engine"  # of --backend tensorrt, in the model folder

Shape = tuple[int, ...]
ShapeRange = tuple[Shape, Shape, Shape]  # smallest, usual, largest


class EngineLimits(BaseModel):
    """The largest sizes that an engine takes: sequences of a batch, new tokens of a step, tokens of one sequence."""

    model_config = ConfigDict(frozen=True)

    sequences: int
    tokens: int
    context: int


class EngineManifest(BaseModel):
    """What a runtime must know about an engine; written beside it as JSON.

    `version` is of the package that built it, and only that one loads it. `model_sha256` is of the graph's file.
    `profiles` are the shapes of every input that varies, in the order of the engine's optimization profiles.
    """

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    format_version: str = "2.0"
    backend: str
    version: str
    compute_capability: int | None
    sha256: str
    model: str
    model_sha256: str
    limits: EngineLimits
    plugin: str | None
    profiles: tuple[Mapping[str, ShapeRange], ...]


def manifest_path(engine: Path) -> Path:
    """Where the manifest of an engine lies."""
    return engine.with_name(engine.name + ".json")


def read_engine_manifest(engine: Path) -> EngineManifest:
    """The manifest of an engine.

    Raises:
        InputError: there is none, or it is not of this version.
    """
    path = manifest_path(engine)
    try:
        return EngineManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{engine} has no manifest {path.name} beside it; build it again with sharp build") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(
            f"{path} is not a manifest of an engine that this Sharp reads: {field}: {first['msg']}; "
            "build the engine again with sharp build"
        ) from error
