"""Tensors of KServe's protocol: reading a request's inputs, and writing a response's outputs."""

import struct
from collections.abc import Mapping, Sequence

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.errors import FieldError

TEXT_INPUT = "text_input"
STREAM = "stream"
SAMPLING_PARAMETERS = "sampling_parameters"
EXCLUDE_INPUT = "exclude_input_in_output"
INPUT_TYPES = {
    TEXT_INPUT: "BYTES",
    STREAM: "BOOL",
    SAMPLING_PARAMETERS: "BYTES",
    EXCLUDE_INPUT: "BOOL",
    # Each `return_*` input asks for the output that it names.
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
TEXT_OUTPUT = "text_output"
FINISH_REASON = "finish_reason"
CUMULATIVE_LOGPROB = "cumulative_logprob"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
OUTPUT_TYPES = {
    TEXT_OUTPUT: "BYTES",
    FINISH_REASON: "BYTES",
    CUMULATIVE_LOGPROB: "FP32",
    NUM_INPUT_TOKENS: "UINT32",
    NUM_OUTPUT_TOKENS: "UINT32",
}


def read_inputs(request: messages.ModelInferRequest) -> Mapping[str, str | bool]:
    """Return the value of every input; each is a tensor of one element.

    Raises:
        FieldError: an input is unknown, there twice, of another type, or has not one element.
    """
    raw = iter(request.raw_input_contents)
    values: dict[str, str | bool] = {}
    for tensor in request.inputs:
        if tensor.name not in INPUT_TYPES:
            raise FieldError(
                tensor.name, f"input {tensor.name!r} is not known; the inputs are {', '.join(INPUT_TYPES)}"
            )
        if tensor.name in values:
            raise FieldError(tensor.name, f"input {tensor.name!r} is there twice; send it once")
        if tensor.datatype != INPUT_TYPES[tensor.name]:
            message = f"input {tensor.name!r} has datatype {tensor.datatype!r}; it must be {INPUT_TYPES[tensor.name]}"
            raise FieldError(tensor.name, message)
        if any(size != 1 for size in tensor.shape):
            raise FieldError(tensor.name, f"input {tensor.name!r} has shape {list(tensor.shape)}; it must be [1]")
        text = tensor.datatype == "BYTES"
        elements: Sequence[bytes | bool]
        if request.raw_input_contents:
            content = next(raw, b"")
            elements = read_strings(tensor.name, content) if text else [bool(byte) for byte in content]
        else:
            elements = list(tensor.contents.bytes_contents if text else tensor.contents.bool_contents)
        if len(elements) != 1:
            raise FieldError(tensor.name, f"input {tensor.name!r} has {len(elements)} elements; it must have 1")
        values[tensor.name] = _text(tensor.name, elements[0]) if isinstance(elements[0], bytes) else elements[0]
    return values


def read_strings(name: str, content: bytes) -> list[bytes]:
    """Return the strings of a BYTES tensor. The length of a string stands before it in 4 bytes, little-endian.

    Raises:
        FieldError: the content ends inside a string or its length; the message names the input `name`.
    """
    strings = []
    start = 0
    while start < len(content):
        if start + 4 > len(content):
            raise FieldError(name, f"input {name!r} ends inside the length of a string")
        (length,) = struct.unpack_from("<I", content, start)
        start += 4 + length
        if start > len(content):
            raise FieldError(name, f"input {name!r} ends inside a string of {length} bytes")
        strings.append(content[start - length : start])
    return strings


def raw_string(content: bytes) -> bytes:
    """Return one string as an element of a BYTES tensor: its length in 4 bytes, little-endian, then its bytes."""
    return struct.pack("<I", len(content)) + content


def _text(name: str, content: bytes) -> str:
    """Return UTF-8 bytes as text. FieldError for the input `name` if they are not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise FieldError(name, f"input {name!r} is not valid UTF-8: {error}") from error


def read_outputs(request: messages.ModelInferRequest, inputs: Mapping[str, str | bool]) -> frozenset[str]:
    """Return the outputs that a request lists, or, if it lists none, the text and what its inputs `return_*` ask for.

    Raises:
        FieldError: the request lists an output that is unknown or that no input asks for.
    """
    returned = {name for name in OUTPUT_TYPES if name == TEXT_OUTPUT or inputs.get(f"return_{name}")}
    listed = {output.name for output in request.outputs}
    for name in listed:
        if name not in OUTPUT_TYPES:
            raise FieldError(name, f"output {name!r} is not known; the outputs are {', '.join(OUTPUT_TYPES)}")
        if name not in returned:
            raise FieldError(name, f"output {name!r} is requested; it needs input 'return_{name}' to be true")
    return frozenset(listed or returned)


def response(model: str, request_id: str, outputs: Mapping[str, str | float]) -> messages.ModelInferResponse:
    """Return a response with these output tensors, each of one element."""
    tensor = messages.ModelInferResponse.InferOutputTensor
    return messages.ModelInferResponse(
        model_name=model,
        model_version="1",
        id=request_id,
        outputs=[tensor(name=name, datatype=OUTPUT_TYPES[name], shape=[1]) for name in outputs],
        raw_output_contents=[_raw(OUTPUT_TYPES[name], value) for name, value in outputs.items()],
    )


def _raw(datatype: str, value: str | float) -> bytes:
    """Return the bytes of one element: a text with its length before it, or a little-endian number."""
    if isinstance(value, str):
        return raw_string(value.encode())
    return struct.pack("<f" if datatype == "FP32" else "<I", value)
