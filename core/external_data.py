"""The check of an ONNX model's references to external weights, before anything opens or allocates them.

A model folder may come from anyone, and a runtime opens whatever files the model names. The server has no onnx package,
so this module reads the few relevant fields itself (`wire_format.py`), without ever copying a tensor.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from sharp.core.errors import InputError
from sharp.core.wire_format import DamagedError, fields, integers

# Message -> field number -> type of the message in that field, for the paths from a model to its tensors (onnx.proto3).
CHILDREN: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
}
DIMS, DATA_TYPE, NAME, EXTERNAL_DATA = 1, 2, 8, 13  # fields of a Tensor
DEEPEST = 64  # most levels of graphs inside graphs
LARGEST = 2**63  # elements; more than any file has
# TensorProto.DataType -> bits of an element; strings have no fixed size and are never external.
BITS = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    15: 128,
    **dict.fromkeys((21, 22, 23), 4),
}


def check_external_data(folder: Path, model_file: str) -> None:
    """Check that all external data of `folder/model_file` is in files of `folder`, as large as the tensors need.

    The model file must exist.

    Raises:
        InputError: a file is outside the folder, missing or too short, a tensor states a wrong size, or the model is
            empty or no ONNX file.
    """
    external_files(folder, model_file)


def external_files(folder: Path, model_file: str) -> tuple[str, ...]:
    """Return the names of a model's external data files, after the checks of `check_external_data`.

    Raises:
        InputError: a file is outside the folder, missing or too short, or the model is no ONNX file.
    """
    path = folder / model_file
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty; export the model again")
    sizes: dict[str, int] = {}
    with path.open("rb") as stream:
        # The map is not closed, because views in the frames of an exception may outlive this function.
        content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        for tensor in _tensors(content, "Model", 0):
            _check_tensor(path, tensor, sizes)
    except (DamagedError, IndexError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not an ONNX model, or damaged; export the model again") from error
    return tuple(sizes)


def lies_inside(folder: Path, name: str) -> bool:
    """Whether the path `name`, relative to `folder`, is inside `folder` after links are followed.

    The file need not exist. A name that cannot be resolved (such as circular links) is not inside.

    A folder `snapshots/<revision>` of Hugging Face's cache has its files in `blobs` beside `snapshots`. Links from
    `snapshots` into `blobs` count as inside.
    """
    try:
        target, home = (folder / name).resolve(), folder.resolve()
        if target.is_relative_to(home):
            return True
        cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
        return cached and ".." not in PurePosixPath(name).parts and not PurePosixPath(name).is_absolute()
    except (ValueError, RuntimeError, OSError):  # a zero byte, circular links, or too long a name
        return False


def is_there(path: Path) -> bool:
    """Whether `path` is an existing file; False, and no OSError, for a name too long for any file."""
    try:
        return path.is_file()
    except OSError:
        return False


def _check_tensor(path: Path, tensor: bytes, sizes: dict[str, int]) -> None:
    """Check that the external data of an encoded TensorProto lies within its file and has the tensor's size.

    `sizes` caches the sizes in bytes of data files by their location; a location that is not there yet is added.

    Raises:
        DamagedError: the offset or the length is no number.
        InputError: the message names the weights; `path` is the model's file.
    """
    entries: dict[str, str] = {}
    dimensions: list[int] = []
    data_type, name = 0, ""
    for number, value in fields(memoryview(tensor)):
        if number == EXTERNAL_DATA and isinstance(value, memoryview):
            pair = {key: bytes(text).decode() for key, text in fields(value) if isinstance(text, memoryview)}
            entries[pair.get(1, "")] = pair.get(2, "")
        elif number == DIMS:
            dimensions += integers(value)
        elif number == DATA_TYPE and isinstance(value, int):
            data_type = value
        elif number == NAME and isinstance(value, memoryview):
            name = bytes(value).decode()
    location = entries.get("location", "")
    if location not in sizes:
        sizes[location] = _size(path, location)
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", "-1"))
    except ValueError as error:
        raise DamagedError from error
    elements = 1
    for dimension in dimensions:  # there may be any number of dimensions, so the product is limited
        elements = min(elements * max(dimension, 0), LARGEST)
    needed = -(-elements * BITS.get(data_type, 0) // 8)
    if data_type not in BITS or min(dimensions, default=0) < 0 or ("length" in entries and length != needed):
        raise InputError(f"{path} says a wrong size for the weights {name!r}; export the model again")
    if offset < 0 or offset + needed > sizes[location]:
        raise InputError(
            f"{path.parent / location} has {sizes[location]} bytes, but the weights {name!r} need {needed} from byte "
            f"{offset}; copy or export the model again"
        )


def _size(path: Path, location: str) -> int:
    """Return the size in bytes of the file of external data that the model at `path` names.

    Raises:
        InputError: the file is outside the model's folder, or missing.
    """
    folder = path.parent.resolve()
    inside = (
        location
        and not PurePosixPath(location).is_absolute()
        and not PureWindowsPath(location).anchor
        and ".." not in (*PurePosixPath(location).parts, *PureWindowsPath(location).parts)
        and lies_inside(folder, location)
    )
    if not inside:
        raise InputError(f"{path} keeps weights in {location!r:.300}, which is outside the model folder; do not use it")
    if not is_there(folder / location):
        raise InputError(f"{path.parent} is incomplete: {location!r:.300} is missing; copy or export the model again")
    return (folder / location).stat().st_size


def _tensors(message: memoryview, kind: str, depth: int) -> Iterator[bytes]:
    """Yield the tensors (serialized TensorProtos) with external data inside a message of type `kind`.

    Other tensors are not copied. `depth` is the number of messages around this one, 0 for the model.

    Raises:
        DamagedError, IndexError: the message is damaged, or has more than `DEEPEST` levels.
    """
    if depth > DEEPEST:
        raise DamagedError
    children = CHILDREN[kind]
    for number, value in fields(message):
        child = children.get(number)
        if child is None or not isinstance(value, memoryview):
            continue
        if child != "Tensor":
            yield from _tensors(value, child, depth + 1)
        elif any(field == EXTERNAL_DATA for field, _ in fields(value)):
            yield bytes(value)
