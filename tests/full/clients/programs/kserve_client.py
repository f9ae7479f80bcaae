"""kserve's own clients, REST and gRPC: liveness, readiness, inference, errors."""

import asyncio
import json
import sys

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

BASE, MODEL, GRPC = sys.argv[1:]
SAMPLING = json.dumps({"temperature": 0, "max_tokens": 3})


def request(binary, model=MODEL):
    inputs = []
    for name, value, kind in (
        ("text_input", "a", "BYTES"),
        ("sampling_parameters", SAMPLING, "BYTES"),
        ("exclude_input_in_output", True, "BOOL"),
    ):
        inputs.append(InferInput(name, [1], kind))
        array = np.array([value], bool if kind == "BOOL" else object)
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    return InferRequest(model_name=model, infer_inputs=inputs, request_id="7")


def check(response):
    text = {output.name: output.as_numpy()[0] for output in response.outputs}["text_output"]
    assert (text.decode() if isinstance(text, bytes) else text) == "bcd"
    assert (response.id, response.model_name) == ("7", MODEL)


async def main():
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await rest.is_server_live(BASE) and await rest.is_server_ready(BASE)
    assert await rest.is_model_ready(BASE, MODEL)
    for binary in (True, False):
        check(await rest.infer(BASE, request(binary), model_name=MODEL))
    try:
        await rest.infer(BASE, request(False, "other"), model_name="other")
    except httpx.HTTPStatusError as error:
        assert error.response.status_code == 404
        assert "is not served here" in error.response.json()["error"]
    else:
        raise AssertionError("no error")
    assert not await rest.is_model_ready(BASE, "other")
    await rest.close()
    async with InferenceGRPCClient(GRPC) as client:
        assert await client.is_server_live() and await client.is_server_ready() and await client.is_model_ready(MODEL)
        for binary in (True, False):
            check(await client.infer(request(binary)))
        try:
            await client.infer(request(False, "other"))
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND
        else:
            raise AssertionError("no error")


asyncio.run(main())
print("REST and gRPC: health, infer with binary and JSON tensors, errors")
