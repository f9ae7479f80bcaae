"""A GGUF file: its metadata and tensors, and a record of those that the export has used."""

import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType
from numpy.typing import NDArray

from sharp.core.errors import InputError

ARRAY_HEADER, LENGTH = struct.Struct("<IQ"), struct.Struct("<Q")  # type and number of elements; length of a text
HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata entries
MOST_TENSORS, MOST_ENTRIES = 20_000, 10_000


class GgufFile:
    """The metadata and tensors of a GGUF file. Every key and tensor that is read is recorded as used.

    `integer` and `number` take keys of the architecture (`llama.context_length`) without their prefix; all other
    methods take full names. The tensors are mapped from the file, so the file must stay where it is.

    Raises:
        InputError: the header is damaged, the file does not name its architecture, or it is a part of a model.
        Exception: the rest of the file is damaged; the library `gguf` raises errors of several classes.
    """

    def __init__(self, path: Path) -> None:
        check_gguf_header(path)
        self.path = path
        self._reader = _Reader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.used_keys: set[str] = set()
        self.used_tensors: set[str] = set()
        self.architecture = self.text("general.architecture")
        parts = self.value("split.count", 1)
        if parts != 1:
            raise InputError(
                f"{path} is one of {parts} parts of a model; join them with llama-gguf-split --merge first"
            )

    @property
    def keys(self) -> list[str]:
        """The full names of all metadata keys."""
        return [name for name in self._reader.fields if not name.startswith("GGUF.")]

    def unused_keys(self) -> dict[str, Any]:
        """Return the values of the metadata keys that were not read, by their full names."""
        return {name: self._reader.fields[name].contents() for name in self.keys if name not in self.used_keys}

    @property
    def tensors(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    @cached_property
    def tokens(self) -> list[str]:
        """The texts of the vocabulary by token id; empty if the file has none.

        Empty texts are renamed as in llama.cpp.

        Raises:
            InputError: the vocabulary is no list of texts.
        """
        texts = self.value("tokenizer.ggml.tokens", [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{self.path}: tokenizer.ggml.tokens is no list of texts; copy the file again")
        return [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]

    def elements(self) -> int:
        """Return the number of weights of all tensors."""
        return sum(int(tensor.n_elements) for tensor in self._tensors.values())

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor of this name."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in PyTorch's order; the file must have the tensor."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return the dequantized weights of a tensor, float32 in PyTorch's order; the file must have the tensor."""
        self.used_tensors.add(name)
        stored = self._tensors[name]
        weights = gguf.dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
        return weights.reshape(self.shape(name))

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a key by its full name, as Python's own type; `default` if the file lacks the key."""
        field = self._reader.fields.get(name)
        if field is None:
            return default
        self.used_keys.add(name)
        return field.contents()

    def own_key(self, name: str) -> str:
        """Return the full name of a key of the architecture."""
        return f"{self.architecture}.{name}"

    def text(self, name: str, default: str | None = None) -> str:
        """Return the text of a key by its full name, or `default` if the file lacks the key.

        Raises:
            InputError: the value is no text, or missing without a default.
        """
        found = self.value(name, default)
        if not isinstance(found, str):
            raise self.bad(name, "a text", found)
        return found

    def integer(self, name: str, default: int | None = None) -> int:
        """Return the integer of a key of the architecture, or `default` if the file lacks the key.

        A list with one value per layer must have equal values, of which one is returned.

        Raises:
            InputError: the value is no integer, varies from layer to layer, or is missing without a default.
        """
        key = self.own_key(name)
        found = self.value(key, default)
        if isinstance(found, list) and found and len(set(found)) == 1:
            found = found[0]
        if not isinstance(found, int) or isinstance(found, bool):
            raise self.bad(key, "an integer", found)
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """Return the finite number of a key of the architecture, or `default` if the file lacks the key.

        Raises:
            InputError: the value is no finite number, or missing without a default.
        """
        key = self.own_key(name)
        found = self.value(key, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not np.isfinite(found):
            raise self.bad(key, "a finite number", found)
        return float(found)

    def bad(self, key: str, expected: str, found: object) -> InputError:
        """Return, to be raised, the error for a key whose value `found` is not of the `expected` kind.

        `key` is the full name; None for `found` says that the key is missing.
        """
        if found is None:
            return InputError(f"{self.path} has no {key}, which Sharp needs; convert the model again")
        said = "a list of values that differ" if isinstance(found, list) else repr(found)
        return InputError(f"{self.path}: {key} is {said}, and Sharp reads {expected}; it cannot export this model")


def check_gguf_header(path: Path) -> None:
    """Refuse a file whose header has far more tensors or metadata than any model, because each takes memory to read.

    Raises:
        InputError: the file has more than `MOST_TENSORS` or `MOST_ENTRIES`, or is no GGUF file.
    """
    with path.open("rb") as file:
        start = file.read(HEADER.size)
    if len(start) < HEADER.size or not start.startswith(b"GGUF"):
        raise InputError(f"{path} cannot be read as a GGUF file: its header is damaged; copy it again")
    _, _, tensors, entries = HEADER.unpack(start)
    for name, count, most in (("tensors", tensors, MOST_TENSORS), ("entries of metadata", entries, MOST_ENTRIES)):
        if count > most:
            raise InputError(f"{path} has {count} {name} by its header; the limit is {most}, so it is damaged")


class _Reader(gguf.GGUFReader):
    """A `GGUFReader` that says where a file is cut off, and makes no NumPy array for each element of a list.

    Vocabularies have 100,000s of elements.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    @property  # type: ignore[override]
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the file, still mapped."""
        return self._data

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        """Keep the mapped file as a plain array."""
        self._data = np.asarray(mapped)  # slicing a memmap runs Python code each time, slicing an array does not

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        """Return `count` numbers of `dtype` at byte `offset`. InputError if the file ends before."""
        try:
            found = super()._get(offset, dtype, count, override_order)
        except ValueError:  # the last bytes are fewer than an element
            found = np.empty(0, dtype)
        if len(found) < count:
            raise InputError(
                f"{self._path} is cut off: it ends after {len(self._data):,} bytes, and its header describes more; "
                "download or copy it again"
            )
        return found

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Return an array field's size in bytes, arrays of its elements, the indices of these, and their types.

        `orig_offs` is the byte at which the field begins. Unlike the base class, this method reads an array of numbers
        at once.
        """
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":  # "I" is the byte order of this machine
            return super()._get_field_parts(orig_offs, raw_type)
        file = memoryview(self._data)  # type: ignore[arg-type]
        item, count = ARRAY_HEADER.unpack_from(file, orig_offs)
        start = end = orig_offs + ARRAY_HEADER.size
        parts: list[Any] = []
        if (scalar := self.gguf_scalar_to_np.get(GGUFValueType(item))) is not None:
            parts = [self._get(start, scalar, count)]
            end += int(parts[0].nbytes)
        elif item == GGUFValueType.STRING:
            for _ in range(count):
                (length,) = LENGTH.unpack_from(file, end)
                end += LENGTH.size + length
                parts.append(file[end - length : end])
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        if end > len(file) or (scalar is not None and len(parts[0]) < count):
            raise ValueError("a list ends after the end of the file")
        types = [GGUFValueType.ARRAY, GGUFValueType(item)] if count else [GGUFValueType.ARRAY]
        return end - orig_offs, parts, list(range(len(parts))), types
