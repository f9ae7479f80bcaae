"""A reader and writer of protobuf's wire format, for files whose own package is not installed."""

from collections.abc import Iterator


class DamagedError(ValueError):
    """An error for bytes that are not protobuf."""


def fields(message: memoryview) -> Iterator[tuple[int, "int | memoryview"]]:
    """Yield the number and the value of every field; a value is an integer, or the bytes of any other type.

    Bytes are views of `message` and not copies. Integers are unsigned; numbers of fixed size (fixed32, float, double)
    are bytes, too.

    Raises:
        DamagedError, IndexError: the bytes are not protobuf.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(message, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise DamagedError
        if number == 0 or at + length > len(message):
            raise DamagedError
        yield number, message[at : at + length]
        at += length


def integers(value: "int | memoryview") -> list[int]:
    """Decode a value of `fields` that belongs to a repeated int64 field, packed (several integers) or not (one).

    Raises:
        DamagedError, IndexError: the bytes are no integers.
    """
    numbers: list[int] = []
    if isinstance(value, int):
        numbers.append(value)
    else:
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(number)
    return [number - 2**64 if number >= 2**63 else number for number in numbers]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Decode the varint of `message` that begins at byte `at`. Return its value and the index of the byte after it.

    Raises:
        DamagedError: the varint is longer than 10 bytes.
    """
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise DamagedError


def field(number: int, content: bytes) -> bytes:
    """Encode a field of bytes, text or a message. Appended to an encoded message, the field becomes part of it.

    `number` is the field's number in the message's definition.
    """
    return _number(number << 3 | 2) + _number(len(content)) + content


def _number(value: int) -> bytes:
    """Encode a number >= 0 as a varint, 7 bits per byte, the lowest first."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])
