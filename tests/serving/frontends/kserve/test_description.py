"""Responses of `/v2` are valid by the public description of KServe's protocol, which `KSERVE_DESCRIPTION` names.

The description is specification/protocol/open_inference_rest.yaml of github.com/kserve/open-inference-protocol.
"""

import json
import os
from pathlib import Path

import pytest
import requests
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.serving.processes import server_process

DESCRIPTION = os.environ.get("KSERVE_DESCRIPTION", "")
pytestmark = pytest.mark.skipif(not DESCRIPTION, reason="KSERVE_DESCRIPTION does not say where KServe's description is")


@pytest.fixture(scope="module")
def valid():
    """Return a function that fails where a response is not valid by the schema of its operation and status."""
    description = yaml.safe_load(Path(DESCRIPTION).read_text())
    schemas = {"components": description["components"]}

    def check(response, path, method="get"):
        responses = description["paths"][path][method]["responses"]
        assert str(response.status_code) in responses, (response.status_code, response.text)
        content = responses[str(response.status_code)].get("content")
        if content is not None:
            Draft202012Validator({**schemas, **content["application/json"]["schema"]}).validate(response.json())

    return check


@pytest.fixture(scope="module")
def base(counting):
    with server_process(counting, "--no-kernels") as server:
        yield f"http://{server.http}"


MODEL = "/v2/models/${MODEL_NAME}/versions/${MODEL_VERSION}"


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("/v2/health/live", "/v2/health/live"),
        ("/v2/health/ready", "/v2/health/ready"),
        ("/v2/", "/v2"),
        (f"{MODEL}/ready", "/v2/models/counting/versions/1/ready"),
        (MODEL, "/v2/models/counting/versions/1"),
    ],
)
def test_a_response_is_valid(base, valid, path, url):
    response = requests.get(f"{base}{url}", timeout=60)
    assert response.status_code == 200
    valid(response, path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["text_input", "stream", "max_tokens"]) | st.text(max_size=8),
        "shape": st.just([1]) | st.lists(st.integers(-1, 4), max_size=3),
        "datatype": st.sampled_from(["BYTES", "INT32", "BOOL", "FP32", "X"]),
        "data": st.just(["a"]) | st.lists(JSON, max_size=3),
        "parameters": st.dictionaries(st.text(max_size=8), JSON, max_size=2),
    },
)
BODY = st.fixed_dictionaries(
    {"inputs": st.just([{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}])},
    optional={"id": st.text(max_size=8), "outputs": st.lists(st.fixed_dictionaries({"name": st.text(max_size=8)}))},
) | st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "parameters": JSON,
        "inputs": st.lists(TENSOR, max_size=3) | JSON,
        "outputs": st.lists(TENSOR, max_size=2) | JSON,
    },
)


def test_every_body_has_a_valid_response(base, valid):
    statuses = set()

    @given(BODY)
    def send(body):
        response = requests.post(f"{base}/v2/models/counting/versions/1/infer", data=json.dumps(body), timeout=60)
        statuses.add(response.status_code)
        valid(response, f"{MODEL}/infer", "post")

    send()
    assert statuses == {200, 400}
