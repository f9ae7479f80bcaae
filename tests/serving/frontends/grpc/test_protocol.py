"""The numbers of `sharp.v1`, which clients of any age use, may get additions but never change."""

import json
from pathlib import Path

from sharp.v1 import control_pb2, inference_pb2

PINNED = Path(__file__).parent / "protocol_numbers.json"


def numbers():
    found = {}
    for file in (inference_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR):
        for name, message in file.message_types_by_name.items():
            found[name] = {field.name: _field(field) for field in message.fields}
        for name, enum in file.enum_types_by_name.items():
            found[name] = {value.name: str(value.number) for value in enum.values}
        for name, service in file.services_by_name.items():
            found[name] = {method.name: _method(method) for method in service.methods}
    return found


def _field(field):
    kind = field.message_type or field.enum_type
    # Presence is part of the protocol, because a field that can be unset differs from a field that cannot.
    label = "repeated " if field.is_repeated else "optional " if field.has_presence else ""
    return f"{field.number} {label}{kind.name if kind else field.type}"


def _method(method):
    stream = "stream " if method.server_streaming else ""
    return f"{method.input_type.name} -> {stream}{method.output_type.name}"


def test_numbers_types_and_presence_are_those_of_before():
    """All numbers, types and presence are as recorded.

    After an addition, write `numbers()` to the file. A difference that is no addition breaks clients.
    """
    assert numbers() == json.loads(PINNED.read_text())
