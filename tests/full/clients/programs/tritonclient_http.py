"""tritonclient.http: health, metadata, configuration, statistics, repository, inference."""

import json
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

BASE, MODEL, _ = sys.argv[1:]
client = triton.InferenceServerClient(BASE.removeprefix("http://"))
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
assert client.get_model_metadata(MODEL)["inputs"][0]["name"] == "text_input"
assert client.get_model_config(MODEL)["model_transaction_policy"]["decoupled"] is True
assert client.get_model_repository_index()[0]["state"] == "READY"
assert client.get_server_metadata()["name"] == "sharp"
sampling = json.dumps({"temperature": 0, "max_tokens": 3})
for binary in (True, False):
    inputs = []
    for name, value, kind in (
        ("text_input", "a", "BYTES"),
        ("sampling_parameters", sampling, "BYTES"),
        ("exclude_input_in_output", True, "BOOL"),
    ):
        inputs.append(triton.InferInput(name, [1], kind))
        array = np.array([value], bool if kind == "BOOL" else object)
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    for outputs in (None, [triton.InferRequestedOutput("text_output", binary_data=binary)]):
        result = client.infer(MODEL, inputs, outputs=outputs, request_id="7")
        text = result.as_numpy("text_output")[0]
        assert (text.decode() if isinstance(text, bytes) else text) == "bcd"
assert client.get_inference_statistics(MODEL)["model_stats"][0]["inference_count"] == 4
try:
    client.infer("other", inputs)
except InferenceServerException as error:
    assert "is not served here" in error.message()
else:
    raise AssertionError("no error")
for refused in (lambda: client.load_model(MODEL), client.get_system_shared_memory_status):
    try:
        refused()
    except InferenceServerException as error:
        assert "there is no" in str(error), error
    else:
        raise AssertionError("no error")
print("HTTP: health, metadata, config, statistics, repository, infer with binary and JSON tensors, errors")
