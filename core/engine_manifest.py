"""The manifest of an engine, which `sharp build` writes and the server reads."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sharp.core.errors import InputError
from sharp.core.manifest import MOST_MANIFEST_BYTES
from sharp.core.regular_file import read_regular_file

ENGINE_FILE = "model.engine"  # the engine of --backend tensorrt, in the model folder

Shape = tuple[int, ...]
ShapeRange = tuple[Shape, Shape, Shape]  # smallest, usual, largest


class EngineLimits(BaseModel):
    """The largest sizes that an engine takes: sequences of a batch, new tokens of a step, tokens of one sequence."""

    model_config = ConfigDict(frozen=True)

    sequences: int
    tokens: int
    context: int


class EngineManifest(BaseModel):
    """The facts that a runtime needs to load an engine; written as JSON beside the engine.

    `version` is the version of the package that built the engine; no other version loads it. `model_sha256` is the
    hash of the graph's file. `profiles` are the shapes of every input that varies, in the order of the engine's
    optimization profiles.
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
    """Return the path of the manifest of an engine: the engine's path with `.json` appended."""
    return engine.with_name(engine.name + ".json")


def read_engine_manifest(engine: Path) -> EngineManifest:
    """Read the manifest beside the engine file at `engine`. The engine itself is not read.

    Raises:
        InputError: the manifest does not exist, or is not one that this Sharp reads.
    """
    path = manifest_path(engine)
    try:
        return EngineManifest.model_validate_json(read_regular_file(path, MOST_MANIFEST_BYTES))
    except FileNotFoundError as error:
        raise InputError(f"{engine} has no manifest {path.name} beside it; build it again with sharp build") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(
            f"{path} is not a manifest of an engine that this Sharp reads: {field}: {first['msg']}; "
            "build the engine again with sharp build"
        ) from error
