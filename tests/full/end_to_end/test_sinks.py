"""The mass of attention sinks on `/metrics`, on the page and in a request is what PyTorch's weights lack to 1."""

import json
import time
import urllib.request

import numpy as np
import pytest
import torch

from sharp.client import Client, SamplingParams
from tests.exporter.tiny_hugging_face import save, tiny
from tests.full.end_to_end.commands import serve

PROMPT = [5, 17, 30, 44, 8, 61, 72, 19, 3, 88, 12]
SINKS = (-5.0, -1.0, 0.0, 1.0, 3.0, 8.0)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """Return a model like gpt-oss, with sinks of very different sizes, and its checkpoint."""
    model = tiny("gpt_oss")
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.sinks.copy_(torch.tensor(SINKS) - number)
    return model, save(model, tmp_path_factory.mktemp("models") / "gpt_oss")


def masses(model, tokens):
    """Return 1 minus the sum of the weights of every token's keys, [layers, q_heads, tokens]."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([tokens]), output_attentions=True).attentions
    return np.stack([1 - of_layer[0].sum(-1).numpy() for of_layer in weights])


def post(server, body):
    """Return the first choice of an OpenAI completion."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{server.http}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]


def live(server, tokens):
    """Return the page's attention once it counts `tokens` tokens, which it may do up to a second late."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"http://{server.http}/live", timeout=10) as response:
            page = json.load(response)["attention"]
        if page["tokens"] == tokens:
            return page
        time.sleep(0.1)
    raise AssertionError(page["tokens"])


def test_the_mass_equals_that_of_transformers(export, gpt_oss):
    model, checkpoint = gpt_oss
    with serve(export(checkpoint, "softmax"), "--attention-interval", "1") as server:
        with Client(server.grpc) as client:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            completion = client.generate(PROMPT, params, attention=True)
        samples = server.samples()
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "attention_stats": True}
        choice = post(server, body)
        page = live(server, 2 * (len(PROMPT) + 7))
    tokens = [*PROMPT, *completion.token_ids[:-1]]  # the last token is never computed, so it attends to nothing
    expected = masses(model, tokens).mean(-1)
    assert expected.min() < 0.05 and expected.max() > 0.9

    np.testing.assert_allclose(completion.attention.sink_mass, expected, atol=1e-5)
    # The same prompt was sent again. It is too short to fill a block, so the prefix cache has nothing of it.
    of_http = choice["attention_stats"]["layers"]
    np.testing.assert_allclose([layer["sink_mass"] for layer in of_http], expected, atol=1e-5)
    found = {
        (int(sample.labels["layer"]), int(sample.labels["head"])): sample.value
        for sample in samples
        if sample.name == "sharp_attention_sink_mass"
    }
    assert len(found) == expected.size
    for place, value in found.items():
        assert value == pytest.approx(expected[place], abs=1e-5)
    np.testing.assert_allclose(page["sink_mass"], expected, atol=1e-3)


def test_a_model_without_sinks_has_no_such_series(export, tmp_path):
    folder = export(save(tiny("llama"), tmp_path / "llama"), "softmax")
    with serve(folder, "--attention-interval", "1") as server:
        with Client(server.grpc) as client:
            completion = client.generate(PROMPT, SamplingParams(max_tokens=2), attention=True)
        assert completion.attention.sink_mass is None
        assert not [sample for sample in server.samples() if sample.name == "sharp_attention_sink_mass"]
