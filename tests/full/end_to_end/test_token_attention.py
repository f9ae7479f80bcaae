"""The attention weights of single tokens agree with transformers, with PyTorch, and with the server's statistics."""

import json
import math
import os
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner

from sharp.core.cli import main
from sharp.core.manifest import read_manifest
from sharp.exporter.inspection.attention_nodes import attention_nodes as nodes_of_onnx
from sharp.models.attention import EagerAttention
from sharp.models.checkpoint import save_checkpoint
from sharp.plugins.op.graph_attention import attention_nodes
from sharp.plugins.op.schema import PAGED_ATTENTION
from sharp.serving.api.errors import EngineError
from sharp.serving.backends import attention_rows
from sharp.serving.backends.attention_rows import AttentionReader
from sharp.serving.config import BackendConfig
from sharp.serving.engine.attention_process import AttentionProcess, TokenWeights
from sharp.serving.frontends.token_attention import MOST_WAITING
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import save, tiny
from tests.full.end_to_end.commands import serve

TOKENS = [5, 17, 30, 44, 8, 61, 72, 19, 3, 88, 12, 45, 45, 6, 81, 27, 33, 9, 70, 14, 52, 38, 2, 77]
NORMS = ("ssa", "adaptive-temperature", "entmax", "asentmax", "ssmax", "softpick", "sigmoid", "relu2")
SPARSE = ("entmax", "asentmax", "softpick", "relu2")


def reader_of(folder: Path) -> AttentionReader:
    return AttentionReader(folder, read_manifest(folder), threads=1)


def matrices(reader: AttentionReader, layers: int, heads: int, tokens: list[int]):
    """Yield each layer's and head's weights [queries, keys], sink's shares [queries], and entropies [queries]."""
    for layer in range(layers):
        for head in range(heads):
            weights, sinks, entropies = np.zeros((len(tokens), len(tokens))), [], []
            for position in range(len(tokens)):
                row = reader.row(tokens, layer, head, position)
                weights[position, row.first : position + 1] = row.weights
                sinks.append(row.sink_mass)
                entropies.append(row.entropy)
            yield layer, head, weights, np.array(sinks), np.array(entropies)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_weights_are_those_of_transformers(export, tmp_path, monkeypatch, architecture):
    """Weights agree with transformers' for grouped heads, windows, soft caps and sinks, over several chunks."""
    monkeypatch.setattr(attention_rows, "CHUNK", 16)
    model = tiny(architecture)
    folder = export(save(model, tmp_path / architecture), "softmax")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS]), output_attentions=True).attentions
    manifest = read_manifest(folder)
    seen = 0
    for layer, head, weights, sinks, _ in matrices(reader_of(folder), manifest.layers, manifest.q_heads, TOKENS):
        own = expected[layer][0, head].numpy()
        np.testing.assert_allclose(weights, own, atol=2e-6)
        np.testing.assert_allclose(weights.sum(-1) + sinks, 1, atol=1e-12)
        if architecture == "gpt_oss":
            np.testing.assert_allclose(sinks, 1 - own.sum(-1), atol=2e-6)
            assert sinks.min() > 0.001
        seen += 1
    assert seen == len(expected) * expected[0].shape[1]
    if architecture == "gemma2":  # a window of 7 keys
        assert reader_of(folder).row(TOKENS, 0, 0, len(TOKENS) - 1).first == len(TOKENS) - 7


@pytest.fixture(scope="module")
def tiny_folders(tmp_path_factory):
    """Return a function that makes a tiny model with a norm, and returns its model folder and the model."""

    def make(norm: str, *options: str, positions: str = "rope"):
        folder = tmp_path_factory.mktemp(norm)
        model = tiny_model(norm, positions, layers=2)
        save_checkpoint(folder / "tiny.safetensors", model, dtype=torch.float32)
        arguments = ["export", str(folder / "tiny.safetensors"), "--norm", norm, "-o", str(folder / "out"), *options]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        return folder / "out", model

    return make


@pytest.mark.parametrize(("norm", "positions"), [*((norm, "rope") for norm in NORMS), ("softmax", "alibi")])
def test_weights_of_every_kind_of_norm_are_those_of_pytorch(tiny_folders, norm, positions):
    folder, model = tiny_folders(norm, positions=positions)
    attention = EagerAttention(model.config, record=True)
    with torch.no_grad():
        model.hidden_states(torch.tensor([TOKENS]), attention=attention)
    zeros = 0
    for layer, head, weights, _, entropies in matrices(reader_of(folder), 2, 6, TOKENS):
        expected = attention.weights[layer][0, head].double().numpy()
        np.testing.assert_allclose(weights, expected, atol=5e-6)
        shares = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
        logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
        np.testing.assert_allclose(entropies, -(shares * logs).sum(-1), atol=1e-9)
        if norm not in ("softpick", "sigmoid", "relu2"):
            np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-12)
        zeros += int((weights[np.tril_indices(len(TOKENS))] == 0).sum())
    assert (zeros > 0) == (norm in SPARSE)


def test_the_graph_is_read_as_onnx_reads_it(tiny_folders):
    for norm in ("ssa", "adaptive-temperature"):
        file = tiny_folders(norm)[0] / "model.onnx"
        expected = list(nodes_of_onnx(onnx.load(file, load_external_data=False), PAGED_ATTENTION))
        found = attention_nodes(file.read_bytes())
        assert [node.layer for node in found] == [0, 1]
        for own, other in zip(found, expected, strict=True):
            shown = {name: value for name, value in other.inputs.items() if name in ("query", "head_params")}
            assert own.inputs == shown
            assert own.normalizer.name == other.normalizer.name
            assert tuple(own.normalizer.temperature_coefficients) == tuple(other.normalizer.temperature_coefficients)
            assert (own.normalizer.alpha, own.normalizer.entropy_threshold) == (
                other.normalizer.alpha,
                other.normalizer.entropy_threshold,
            )
            assert (own.scale, own.softcap, own.window) == tuple(
                other.attributes[name] for name in ("scale", "softcap", "window")
            )


def test_a_longer_and_a_changed_sequence_are_read_from_where_they_differ(tiny_folders, monkeypatch):
    monkeypatch.setattr(attention_rows, "CHUNK", 16)
    folder, _ = tiny_folders("ssa", "--kv-dtype", "int8")
    reader = reader_of(folder)
    computed = []
    compute = reader._compute
    monkeypatch.setattr(reader, "_compute", lambda chunk, start: (computed.append(start), compute(chunk, start)))
    long = TOKENS * 3
    for tokens in (long[:30], long, [*long[:40], 9, 8, 7], long[:50]):
        row = reader.row(tokens, 1, 3, len(tokens) - 1)
        np.testing.assert_allclose(row.weights, reader_of(folder).row(tokens, 1, 3, len(tokens) - 1).weights, atol=0)
    assert computed == [0, 16, 16, 32, 48, 64, 32, 32, 48]


def test_weights_that_changed_after_the_export_are_never_computed_with(tiny_folders, tmp_path):
    """Once an overwritten file gave other weights, and a truncated one ended the process."""
    source, _ = tiny_folders("ssa")
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    data = folder / "model.onnx.data"
    expected = reader_of(folder).row(TOKENS, 1, 3, 20).weights
    reader = AttentionReader(folder, read_manifest(folder), threads=1, copy=True)
    with data.open("r+b") as file:
        file.write(bytes(data.stat().st_size))
    np.testing.assert_array_equal(reader.row(TOKENS, 1, 3, 20).weights, expected)
    for length, message in ((data.stat().st_size, "the model/model.onnx.data has changed"), (10, "has 10 bytes")):
        os.truncate(data, length)
        process = AttentionProcess(folder, threads=1)
        with pytest.raises(EngineError, match=message):
            process.row(TOKENS, 1, 3, 20)
        process.close()


def post(server, path, body, token=None):
    headers = {"Content-Type": "application/json", **({} if token is None else {"Authorization": f"Bearer {token}"})}
    request = urllib.request.Request(f"http://{server.http}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=90) as response:
        return response.read().decode()


# tolerances, because only three digits are sent, and because quantized caches are rounded in another order when the
# prompt is computed in one step
FORMS = {
    "--kv-dtype float32": 6e-4,
    "--kv-dtype bfloat16": 1e-3,
    "--kv-dtype int8": 2e-3,
    "--kv-dtype fp8": 2e-3,
    "--dtype float16": 2e-3,
    "--quantize int4": 6e-4,
    "--quantize int8": 6e-4,
    "--target tensorrt": 6e-4,
}


@pytest.mark.parametrize(("options", "tolerance"), FORMS.items())
def test_the_entropy_of_the_shown_weights_is_the_one_that_the_server_counts(tiny_folders, options, tolerance):
    folder, _ = tiny_folders("asentmax", *options.split())
    with serve(folder, "--attention-interval", "1") as server:
        body = {"prompt": "Sharp heads keep their eyes on few tokens", "max_tokens": 12, "temperature": 0}
        body |= {"stream": True, "attention_stats": "tokens", "return_token_ids": True, "ignore_eos": True}
        lines = post(server, "/v1/completions", body).splitlines()
        chunks = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
        choices = [choice for of_chunk in chunks for choice in of_chunk]
        tokens = [
            token for choice in choices for name in ("prompt_token_ids", "token_ids") for token in choice.get(name, [])
        ]
        compared = 0
        for choice in choices:
            stats = choice.get("attention_stats", {})
            for position, entropy in zip(stats.get("positions", []), stats.get("normalized_entropy", []), strict=True):
                for layer, head in ((0, 0), (0, 5), (1, 2)):
                    requested = {"tokens": tokens, "layer": layer, "head": head, "position": position}
                    shown = json.loads(post(server, "/attention", requested))
                    assert sum(shown["weights"]) == pytest.approx(1, abs=1e-9)
                    assert len(shown["weights"]) == position + 1
                    assert shown["normalized_entropy"] == pytest.approx(entropy[layer][head], abs=tolerance)
                    of_nats = shown["entropy_nats"] / math.log(position + 1)
                    assert shown["normalized_entropy"] == pytest.approx(of_nats)
                    compared += 1
        assert compared == 3 * 12
        assert "".join(shown["tokens"]).startswith("Sharp heads keep their eyes on few tokens")
        for wrong, sentence in (
            ({"tokens": []}, "tokens has 0 entries"),
            ({"tokens": [1] * 10_000}, "tokens has 10000 entries"),
            ({"tokens": [1, 999]}, "tokens has token id 999"),
            ({"tokens": tokens, "layer": 2}, "layer is 2; it must be 0 to 1"),
            ({"tokens": tokens, "head": -1}, "head is -1; it must be 0 to 5"),
            ({"tokens": tokens, "position": len(tokens)}, f"position is {len(tokens)}"),
            ({"tokens": "abc"}, "tokens cannot be used"),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(server, "/attention", wrong)
            assert refused.value.code == 400
            assert sentence in json.loads(refused.value.read())["error"]["message"]


def test_it_needs_the_token_of_the_server_and_goes_with_the_page(tiny_folders, tmp_path):
    folder, _ = tiny_folders("ssa")
    secrets = tmp_path / "tokens"
    secrets.write_text("a-secret-of-twenty-characters\n")
    with serve(folder, "--token-file", str(secrets)) as server:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(server, "/attention", {"tokens": TOKENS})
        shown = json.loads(post(server, "/attention", {"tokens": TOKENS}, "a-secret-of-twenty-characters"))
        assert len(shown["weights"]) == len(TOKENS)
    with serve(folder, "--no-page") as server, pytest.raises(urllib.error.HTTPError, match="404"):
        post(server, "/attention", {"tokens": TOKENS})


def test_who_hangs_up_waits_no_longer(tiny_folders, start_server, monkeypatch):
    folder, _ = tiny_folders("ssa")
    begun, free = threading.Event(), threading.Event()

    def row(_self, *_arguments):
        begun.set()
        free.wait(60)
        return TokenWeights(0, [1.0], 0.0, 0.0)

    monkeypatch.setattr(AttentionProcess, "row", row)
    started = start_server(folder, backend=BackendConfig(threads=1, device="cpu"))
    host, port = started.http_address.split(":")
    body = json.dumps({"tokens": [5]}).encode()
    request = b"POST /attention HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def outcome(seconds):
        """Return the first line of a response, or b"" if the client hangs up before the response begins."""
        with socket.create_connection((host, int(port)), timeout=seconds) as connection:
            connection.sendall(request)
            try:
                return connection.recv(100).partition(b"\r\n")[0]
            except TimeoutError:
                return b""

    waiting = [socket.create_connection((host, int(port)), timeout=20) for _ in range(1 + MOST_WAITING)]
    for connection in waiting:
        connection.sendall(request)
        assert begun.wait(20)
    deadline = time.monotonic() + 20
    while b"429" not in outcome(0.5):
        assert time.monotonic() < deadline
    for connection in waiting:
        connection.close()
    while b"429" in outcome(0.5):
        assert time.monotonic() < deadline + 20
    free.set()
    assert b"200" in outcome(20)
