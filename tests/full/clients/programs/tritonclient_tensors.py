"""tritonclient on a model of sets: the model's own tensors over HTTP and gRPC, and errors."""

import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

BASE, MODEL, GRPC = sys.argv[1:]
generator = np.random.default_rng(0)
rows, count = 2, 20
classes = np.eye(10)[generator.integers(10, size=(rows, count))]
ITEMS = np.concatenate([generator.random((rows, count, 1)), classes], axis=-1).astype(np.float32)


def ask(package, address, items, **options):
    client = package.InferenceServerClient(address)
    assert client.is_model_ready(MODEL)
    tensors = []
    for name, array in (("items", items), ("query", np.zeros((rows, 1), np.float32))):
        tensors.append(package.InferInput(name, array.shape, "FP32"))
        tensors[-1].set_data_from_numpy(array)
    return client.infer(MODEL, tensors, outputs=[package.InferRequestedOutput("logits", **options)]).as_numpy("logits")


http, grpc = BASE.removeprefix("http://"), GRPC
found = [
    ask(tritonclient.http, http, ITEMS, binary_data=True),
    ask(tritonclient.http, http, ITEMS, binary_data=False),
    ask(tritonclient.grpc, grpc, ITEMS),
]
assert found[0].shape == (rows, 10) and all(np.allclose(found[0], logits, atol=1e-6) for logits in found)
metadata = tritonclient.http.InferenceServerClient(http).get_model_metadata(MODEL)
assert [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in metadata["inputs"]] == [
    ("items", "FP32", [-1, -1, 11]),
    ("query", "FP32", [-1, 1]),
]
for package, address in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
    try:
        ask(package, address, ITEMS[..., :9])
    except InferenceServerException as error:
        assert "it must be [batch, items, 11]" in error.message()
    else:
        raise AssertionError(package)
print("a model of sets, HTTP and gRPC: metadata, infer with binary and JSON tensors, errors")
