"""A program that uses the server as Triton's users do, and prints the responses as JSON.

It runs in its own process, because `tritonclient` and our server define the same messages, and protobuf allows one copy
per process.
"""

import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import model_config_pb2, service_pb2

MODEL = "counting"


def inputs(text="a", *, stream=None, sampling=None, exclude=None):
    tensors = []
    for name, value, datatype in (
        ("text_input", text, "BYTES"),
        ("stream", stream, "BOOL"),
        ("sampling_parameters", sampling, "BYTES"),
        ("exclude_input_in_output", exclude, "BOOL"),
    ):
        if value is not None:
            tensor = triton.InferInput(name, [1], datatype)
            array = [value] if datatype == "BOOL" else [value.encode()]
            tensor.set_data_from_numpy(np.array(array, bool if datatype == "BOOL" else object))
            tensors.append(tensor)
    return tensors


def text(result):
    return result.as_numpy("text_output")[0].decode()


def returned(client):
    """Return the names of outputs of a whole completion, and of each part of a streamed one."""
    names = ("finish_reason", "cumulative_logprob", "num_input_tokens", "num_output_tokens")
    tensors = inputs("ab", stream=True, sampling=json.dumps({"temperature": 0, "max_tokens": 2}))
    for name in names:
        tensors.append(triton.InferInput(f"return_{name}", [1], "BOOL"))
        tensors[-1].set_data_from_numpy(np.array([True]))
    whole = [tensor for tensor in tensors if tensor.name() != "stream"]
    got = queue.Queue()
    client.start_stream(lambda result, error: got.put(error or result))
    client.async_stream_infer(MODEL, tensors)
    parts = [got.get(timeout=20) for _ in range(3)]
    client.stop_stream()
    listed = client.infer(MODEL, whole, outputs=[triton.InferRequestedOutput("num_output_tokens")])
    results = [client.infer(MODEL, whole), *parts, listed]
    return [
        {output.name: array(result.as_numpy(output.name)) for output in result.get_response().outputs}
        for result in results
    ]


def array(values):
    value = values.item()
    return value.decode() if isinstance(value, bytes) else [str(values.dtype), value]


def numbers():
    """Return the numbers of every message and enumeration of Triton's protocol."""
    files = [service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR]
    found = {name: each for file in files for name, each in file.message_types_by_name.items()}
    numbers = {name: {field.name: field.number for field in each.fields} for name, each in found.items()}
    enums = {name: each for file in files for name, each in file.enum_types_by_name.items()}
    return numbers | {name: {value.name: value.number for value in each.values} for name, each in enums.items()}


def infer(client, *arguments, parameters=None, model=MODEL, **fields):
    return client.infer(model, inputs(*arguments, **fields), parameters=parameters)


def error(call):
    try:
        call()
    except triton.InferenceServerException as raised:
        return [raised.status(), raised.message()]


def stream(client):
    """Return (request id, text, final, error) of each response to three requests of one stream."""
    got = queue.Queue()
    client.start_stream(lambda result, error: got.put((result, error)))
    greedy = json.dumps({"temperature": 0, "max_tokens": 3})
    client.async_stream_infer(MODEL, inputs("a", stream=True, sampling=greedy), request_id="parts")
    client.async_stream_infer(MODEL, inputs("k", sampling=greedy), request_id="whole")
    client.async_stream_infer(MODEL, inputs("", stream=True, sampling=greedy), request_id="bad")
    seen, ended = [], 0
    while ended < 3:
        result, failed = got.get(timeout=20)
        if failed:
            seen.append(["", "", True, failed.message()])
        else:
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            seen.append([response.id, text(result), final, None])
        ended += seen[-1][2]
    client.stop_stream()
    return seen


def main(address):
    client = triton.InferenceServerClient(address)
    greedy = json.dumps({"temperature": 0, "max_tokens": "4"})
    contents = triton.InferInput("text_input", [1], "BYTES")
    contents.set_data_from_numpy(np.array([b"a"], object))
    got = {
        "ready": [client.is_server_live(), client.is_server_ready(), client.is_model_ready(MODEL)],
        "server": client.get_server_metadata(as_json=True)["name"],
        "metadata": client.get_model_metadata(MODEL, as_json=True),
        "config": client.get_model_config(MODEL, as_json=True)["config"],
        "statistics": [client.get_inference_statistics(MODEL, as_json=True)["model_stats"]],
        "whole": text(infer(client, sampling=greedy)),
        "without_input": text(infer(client, sampling=greedy, exclude=True)),
        "parameters": text(infer(client, parameters={"temperature": 0.0, "max_tokens": 2})),
        "guided": text(infer(client, sampling='{"guided": {"regex": "(yes|no)"}}')),
        "timeout": text(client.infer(MODEL, inputs("a", sampling='{"ignore_eos": true}', exclude=True), timeout=1)),
        "stream": stream(client),
        "no_model": error(lambda: infer(client, model="other")),
        "no_version": error(lambda: client.get_model_metadata(MODEL, "7")),
        "bad_value": error(lambda: infer(client, parameters={"top_p": 2})),
        "bad_name": error(lambda: infer(client, parameters={"temprature": 2})),
        "bad_json": error(lambda: infer(client, sampling="x")),
        "bad_stream": error(lambda: infer(client, stream=True)),
        "no_text": error(lambda: infer(client, None)),
        "not_returned": error(
            lambda: client.infer(MODEL, inputs("a"), outputs=[triton.InferRequestedOutput("finish_reason")])
        ),
        "no_output": error(lambda: client.infer(MODEL, inputs("a"), outputs=[triton.InferRequestedOutput("logits")])),
        "returned": returned(client),
        "numbers": numbers(),
    }
    got["statistics"].append(client.get_inference_statistics(MODEL, as_json=True)["model_stats"])
    print(json.dumps(got))


main(sys.argv[1])
