"""Damage that keeps the form: JSON stays JSON, and a protobuf message stays a message of its type."""

import json
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tests.full.fuzz.mutations import VALUES, change_json, flip_bits, leave_out, repeat

MOST_BYTES = 1 << 18
DEEPEST = 12
TEXTS = ("", "a", "\n", "\0", "é🙂", "<|im_end|>", "<tool_call>", "../x", "NaN", "x" * 300, "-1", "{", "model.onnx")
INTEGERS = (0, 1, 2, -1, 7, 64, 127, 128, 1000, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
Parsed = TypeVar("Parsed", bound=Message)
Mutation = Callable[[bytes, random.Random], bytes]


def of_bytes(content: bytes, rng: random.Random) -> bytes:
    """Damage bytes without regard to their form."""
    return rng.choice((flip_bits, leave_out, repeat))(content, rng)[:MOST_BYTES]


def of_json(*examples: bytes) -> Mutation:
    """Return a mutation of JSON that replaces a value, or adds a member of one of the examples somewhere."""
    members: list[tuple[str, Any]] = []

    def collect(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else ():
            members.append((key, inner))
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(inner)

    for example in examples:
        try:
            collect(json.loads(example))
        except ValueError:
            continue

    def mutate(content: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return of_bytes(content, rng)
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            return of_bytes(content, rng)
        for _ in range(rng.choice((1, 1, 2, 3))):
            places = objects_of(document)
            if members and places and rng.random() < 0.5:
                key, value = rng.choice(members)
                rng.choice(places)[key] = deepcopy(rng.choice((value, rng.choice(members)[1], rng.choice(VALUES))))
            else:
                document = json.loads(change_json(json.dumps(document).encode(), rng))
        return json.dumps(document).encode()[:MOST_BYTES]

    return mutate


def objects_of(document: Any) -> list[dict[str, Any]]:
    """Return every object in a JSON document."""
    found, waiting = [], [document]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            found.append(one)
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
    return found


def parsed(kind: type[Parsed], content: bytes) -> Parsed | None:
    """Return the message in `content`, or None if there is no message of the kind."""
    message = kind()
    try:
        message.ParseFromString(content)
    except DecodeError:
        return None
    return message


def of_message(kind: type[Message]) -> Mutation:
    """Return a mutation of a type's messages that changes fields."""

    def mutate(content: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.15:
            return of_bytes(content, rng)
        message = parsed(kind, content)
        if message is None:
            return of_bytes(content, rng)
        for _ in range(rng.choice((1, 1, 2, 4))):
            change(message, rng)
        return message.SerializeToString()[:MOST_BYTES]

    return mutate


def change(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Change one field of a message, or of a message inside it."""
    field = rng.choice(message.DESCRIPTOR.fields)
    present = [inner for inner, _ in message.ListFields() if inner.message_type is not None]
    if present and rng.random() < 0.6:
        field = rng.choice(present)
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_map(getattr(message, field.name), field, rng)
    elif field.is_repeated:
        of_repeated(getattr(message, field.name), field, rng, depth)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if depth < DEEPEST:
            change(inner, rng, depth + 1)
    else:
        setattr(message, field.name, value_of(field, rng))


def of_map(entries: Any, field: FieldDescriptor, rng: random.Random) -> None:
    """Add an entry of a map, or remove one."""
    key = value_of(field.message_type.fields_by_name["key"], rng)
    inner = field.message_type.fields_by_name["value"]
    if len(entries) and rng.random() < 0.2:
        del entries[rng.choice(list(entries))]
    elif inner.message_type is None:
        entries[key] = value_of(inner, rng)
    else:
        change(entries[key], rng)


def of_repeated(entries: Any, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    """Add an entry of a list, or remove, copy or change one."""
    index = rng.randrange(len(entries)) if len(entries) else None
    kind = rng.random()
    if index is not None and kind < 0.15:
        del entries[index]
    elif field.message_type is None:
        if index is None or kind < 0.5:
            entries.append(value_of(field, rng))
        else:
            entries[index] = value_of(field, rng)
    elif index is None or kind < 0.3:
        added = entries.add()
        if index is not None and rng.random() < 0.7:
            added.CopyFrom(entries[index])
    elif depth < DEEPEST:
        change(entries[index], rng, depth + 1)


def value_of(field: FieldDescriptor, rng: random.Random) -> Any:
    """Return a random value that the field can have."""
    kind = field.cpp_type
    if kind in WHOLE:
        low, high = WHOLE[kind]
        return min(max(rng.choice(INTEGERS), low), high)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    text = rng.choice(TEXTS)
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
