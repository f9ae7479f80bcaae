"""KServe's messages over HTTP: JSON, with binary tensors beside it."""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.errors import InputError
from sharp.serving.frontends.kserve.tensors import raw_string, read_strings

HEADER_LENGTH = "inference-header-content-length"
BINARY = "binary_data"
MOST_TENSORS = 64
MOST_DIGITS = 20  # of a length, because Python refuses to parse numbers of thousands of digits
FORMATS = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "FP32": "f", "FP64": "d"}


def read_message(body: bytes, header_length: str | None, model: str, version: str) -> messages.ModelInferRequest:
    """Return the message of a request: JSON in the first `header_length` bytes (None: in all), then binary tensors.

    Raises:
        InputError: the body is of another form.
    """
    split = len(body)
    if header_length is not None:
        split = int(header_length) if header_length.isdecimal() and len(header_length) <= MOST_DIGITS else -1
        if not 0 <= split <= len(body):
            raise InputError(f"{HEADER_LENGTH} is {header_length!r:.40}; the body has {len(body)} bytes")
    try:
        given = json.loads(body[:split])
        binary = memoryview(body)[split:]
        inputs = _checked(given.get("inputs") or [])
        message = messages.ModelInferRequest(
            model_name=model,
            model_version=version,
            id=str(given.get("id") or ""),
            parameters=_parameters(given.get("parameters")),
        )
        start = 0
        for tensor in inputs:
            size = (tensor.get("parameters") or {}).get("binary_data_size")
            content = None if size is None else bytes(binary[start : start + _size(size, len(binary) - start)])
            start += 0 if content is None else len(content)
            _add_input(message, tensor, content)
        for output in given.get("outputs") or ():
            message.outputs.add(name=output["name"], parameters=_parameters(output.get("parameters")))
        if given.get("outputs") is None and (given.get("parameters") or {}).get("binary_data_output"):
            message.parameters[BINARY].bool_param = True
        message.parameters.pop("binary_data_output", None)
    except InputError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, struct.error) as error:
        raise InputError(f"the request cannot be read as KServe's JSON: {error}"[:300]) from error
    return message


def _checked(tensors: list[Any]) -> list[Any]:
    """Return the input tensors. InputError if there are more than `MOST_TENSORS`."""
    if len(tensors) > MOST_TENSORS:
        raise InputError(f"the request has {len(tensors)} inputs; the limit is {MOST_TENSORS}")
    return tensors


def _size(size: Any, left: int) -> int:
    """Return a binary tensor's size in bytes.

    InputError if it is no number or more than the `left` bytes of the body.
    """
    if not isinstance(size, int) or not 0 <= size <= left:
        raise InputError(f"binary_data_size is {size!r:.40}; {left} bytes are left of the body")
    return size


def _parameters(given: Mapping[str, Any] | None) -> dict[str, messages.InferParameter]:
    """Return JSON parameters as KServe's messages. InputError for a value that is a list or an object."""
    parameters = {}
    for name, value in (given or {}).items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}.get(type(value))
        if kind is None:
            raise InputError(f"parameter {name!r:.40} must be a text, a number, true or false")
        parameters[name] = messages.InferParameter(**{kind: value})
    return parameters


def _add_input(message: messages.ModelInferRequest, tensor: Mapping[str, Any], content: bytes | None) -> None:
    """Add a tensor to `message`: its numbers are in `content` or, if that is None, in the JSON of the `tensor`.

    Raises:
        InputError: the datatype is unknown, or the data is not of the datatype.
    """
    name, datatype = tensor["name"], str(tensor["datatype"])
    if datatype != "BYTES" and datatype not in FORMATS:
        raise InputError(f"input {name!r:.40} has datatype {datatype!r:.40}, which is not read here")
    shape = tensor.get("shape")
    if content is None:
        values: list[Any] = list(_flat(tensor["data"]))
        shape = shape or [len(values)]
        if datatype == "BYTES":
            content = b"".join(raw_string(value.encode()) for value in values)
        elif datatype == "BOOL" and not all(isinstance(value, int) for value in values):
            raise InputError(f"input {name!r:.40} has datatype BOOL, and its data must be true or false")
        else:
            content = struct.pack(f"<{len(values)}{FORMATS[datatype]}", *values)
    message.inputs.add(name=name, datatype=datatype, shape=shape or [])
    message.raw_input_contents.append(content)


def _flat(data: Any) -> Iterator[Any]:
    """Yield the values of nested lists in order."""
    if isinstance(data, list):
        for entry in data:
            yield from _flat(entry)
    else:
        yield data


def write_message(
    request: messages.ModelInferRequest, response: messages.ModelInferResponse
) -> tuple[bytes, dict[str, str]]:
    """Return the body of a response, and its headers; tensors are binary if the request asks for that."""
    binary = {output.name for output in request.outputs if output.parameters[BINARY].bool_param}
    everything = request.parameters[BINARY].bool_param
    outputs, parts = [], []
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if everything or tensor.name in binary:
            entry["parameters"] = {"binary_data_size": len(raw)}
            parts.append(raw)
        else:
            entry["data"] = _values(tensor.datatype, raw)
        outputs.append(entry)
    body = {
        "model_name": response.model_name,
        "model_version": response.model_version,
        **({"id": response.id} if response.id else {}),
        "parameters": {
            name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
            for name, value in response.parameters.items()
        },
        "outputs": outputs,
    }
    header = json.dumps(body).encode()
    if not parts:
        return header, {"content-type": "application/json"}
    return b"".join((header, *parts)), {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(header))}


def _values(datatype: str, raw: bytes) -> list[Any]:
    """Return the elements of a tensor's little-endian bytes; `datatype` is KServe's, as "FP32" or "BYTES"."""
    if datatype == "BYTES":
        return [text.decode(errors="replace") for text in read_strings("output", raw)]
    form = FORMATS[datatype]
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(form)}{form}", raw))
