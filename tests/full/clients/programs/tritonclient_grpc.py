"""tritonclient.grpc: health, metadata, configuration, statistics, repository, inference, streams."""

import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

_, MODEL, GRPC = sys.argv[1:]
client = triton.InferenceServerClient(GRPC)
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
assert client.get_model_metadata(MODEL).inputs[0].name == "text_input"
assert client.get_model_config(MODEL).config.model_transaction_policy.decoupled is True
assert client.get_model_repository_index().models[0].state == "READY"
assert client.get_server_metadata().name == "sharp"


def inputs(stream):
    values = (
        ("text_input", "a", "BYTES"),
        ("sampling_parameters", json.dumps({"temperature": 0, "max_tokens": 3}), "BYTES"),
        ("exclude_input_in_output", True, "BOOL"),
        ("stream", stream, "BOOL"),
    )
    made = []
    for name, value, kind in values:
        made.append(triton.InferInput(name, [1], kind))
        made[-1].set_data_from_numpy(np.array([value], bool if kind == "BOOL" else object))
    return made


before = client.get_inference_statistics(MODEL).model_stats[0].inference_count
result = client.infer(MODEL, inputs(False), request_id="7")
assert result.as_numpy("text_output")[0] == b"bcd" and result.get_response().id == "7"
assert client.get_inference_statistics(MODEL).model_stats[0].inference_count == before + 1

responses: queue.Queue = queue.Queue()
client.start_stream(lambda result, error: responses.put((result, error)))
client.async_stream_infer(MODEL, inputs(True), request_id="8", enable_empty_final_response=True)
text, final = b"", False
while not final:
    result, error = responses.get(timeout=60)
    assert error is None, error
    text += result.as_numpy("text_output")[0]
    final = result.get_response().parameters["triton_final_response"].bool_param
client.stop_stream()
assert text == b"bcd"
try:
    client.infer("other", inputs(False))
except InferenceServerException as error:
    assert "is not served here" in error.message()
else:
    raise AssertionError("no error")
print("gRPC: health, metadata, config, statistics, repository, infer, stream, errors")
