"""A real Prometheus scrapes a server under load, and its query API agrees with PyTorch for the same tokens."""

import json
import math
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
import yaml

from sharp.models.attention import EagerAttention
from sharp.models.checkpoint import load_checkpoint
from sharp.plugins.op.torch_normalizers import entropy
from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.full.end_to_end.commands import CHECKPOINT, Server, run, serve
from tests.prometheus import program

ROOT = Path(__file__).parents[3]
PROMPT_BYTES = 1000
NEW_TOKENS = 24
REQUESTS = 3
NOBODY = "127.0.0.1:1"
CONTEXT_ENTROPY = "sharp:attention_context_normalized_entropy:mean5m"


@dataclass(frozen=True)
class Prometheus:
    address: str

    def get(self, path: str, **arguments):
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            body = json.load(response)
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the present values of an expression, by the values of some labels."""
        result = self.get("query", query=expression)["result"]
        return {tuple(sample["metric"][label] for label in labels): float(sample["value"][1]) for sample in result}

    def wait_for(self, expression: str, value: float, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while (found := self.query(expression)) != {(): value}:
            assert time.monotonic() < deadline, f"{expression} is {found}, not {value}"
            time.sleep(0.2)


@contextmanager
def prometheus(folder: Path, server: Server):
    """Run a Prometheus with our configuration and shorter intervals.

    It scrapes `server` and a server that does not exist.
    """
    command = program("prometheus")
    deployed = ROOT / "deploy" / "prometheus"
    config = yaml.safe_load((deployed / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(deployed / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.http, NOBODY]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                command,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={address}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "prometheus.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield Prometheus(address)
    finally:
        process.terminate()
        process.wait(30)


def generate(server: Server, request_id: str, prompt: str) -> list[int]:
    """Generate, and return all tokens of prompt and completion but the last, which attends to nothing."""
    with grpc.insecure_channel(server.grpc) as channel:
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            text=prompt,
            sampling={"temperature": 0},
            stopping={"max_tokens": NEW_TOKENS, "ignore_eos": True},
        )
        messages = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=120))
    return list(prompt.encode()) + [token for message in messages for token in message.delta.token_ids][:-1]


def offline(checkpoint: Path, texts: list[list[int]]):
    """Return PyTorch's means of H / ln n by (layer, context), and of H by (layer, head)."""
    model = load_checkpoint(checkpoint).eval()
    by_context, by_head = defaultdict(list), defaultdict(list)
    for tokens in texts:
        attention = EagerAttention(model.config, record=True)
        with torch.no_grad():
            model.hidden_states(torch.tensor([tokens]), attention=attention)
        visible = torch.arange(1, len(tokens) + 1)
        for layer, weights in enumerate(attention.weights):
            found = entropy(weights)[0].double()  # [heads, tokens]
            for head, values in enumerate(found):
                by_head[str(layer), str(head)] += values.tolist()
            context = 32
            while context < 2 * len(tokens):
                chosen = (visible <= context) & (visible > (context // 2 if context > 32 else 1))
                normalized = found[:, chosen] / visible[chosen].log()
                by_context[str(layer), str(context)] += normalized.flatten().tolist()
                context *= 2

    def means(lists):
        return {key: math.fsum(values) / len(values) for key, values in lists.items() if values}

    return means(by_context), means(by_head)


@pytest.fixture(scope="module")
def measured(export, tmp_path_factory):
    """Yield Prometheus, and PyTorch's statistics, after a few requests that ran together."""
    folder = export(CHECKPOINT, "ssa")
    text = (ROOT / "LICENSE").read_text()
    prompts = [text[start : start + PROMPT_BYTES] for start in range(0, REQUESTS * PROMPT_BYTES, PROMPT_BYTES)]
    baseline = folder.parent / f"{folder.name}-baseline.json"
    result = run("sharp", "baseline", folder, ROOT / "LICENSE", "-o", baseline, "--threads", "1", "--tokens", "4096")
    assert result.returncode == 0, result.stderr
    options = ("--attention-interval", "1", "--dispersion-tokens", "256", "--attention-baseline", str(baseline))
    with (
        serve(folder, "--threads", "1", *options) as server,
        prometheus(tmp_path_factory.mktemp("prometheus"), server) as found,
    ):
        # A rate needs the zeros from before the load.
        found.wait_for(
            f'min(count_over_time(sharp_generated_tokens_total{{instance="{server.http}"}}[1m])) >= bool 2', 1
        )
        with ThreadPoolExecutor(REQUESTS) as pool:
            ids = [f"request {number}" for number in range(REQUESTS)]
            texts = list(pool.map(lambda pair: generate(server, *pair), zip(ids, prompts, strict=True)))
        tokens = sum(map(len, texts))
        # The recording rules must be evaluated once more after the last sample.
        found.wait_for('sum(sharp_attention_entropy_nats_count{layer="0",head="0"})', tokens)
        time.sleep(1.5)
        yield found, offline(CHECKPOINT, texts)


def test_entropy_moves_with_context_as_pytorch_says(measured):
    found, (by_context, _) = measured
    served = found.query(CONTEXT_ENTROPY, "layer", "context")
    assert set(served) == set(by_context)
    assert {context for _, context in served} == {"32", "64", "128", "256", "512", "1024"}
    for key, value in by_context.items():
        assert served[key] == pytest.approx(value, abs=1e-3), key
    # The change from short to long contexts is what a dashboard shows.
    for layer in {layer for layer, _ in served}:
        moved = served[layer, "1024"] - served[layer, "64"]
        expected = by_context[layer, "1024"] - by_context[layer, "64"]
        assert moved == pytest.approx(expected, abs=2e-3)


def test_entropy_of_every_head_is_pytorchs(measured):
    found, (_, by_head) = measured
    served = found.query("sharp:attention_entropy_nats:mean1h", "layer", "head")
    assert served == pytest.approx(by_head, abs=1e-3)


def test_counts_are_those_of_the_requests(measured):
    found, _ = measured
    assert found.query("sum(sharp_generated_tokens_total)") == {(): REQUESTS * NEW_TOKENS}
    assert found.query('sharp_requests_total{finish_reason="length"}', "finish_reason") == {("length",): REQUESTS}
    assert found.query("sum(sharp_prompt_tokens_total)") == {(): REQUESTS * PROMPT_BYTES}
    assert found.query("sum(sharp_attention_left_out_tokens_total)") == {(): 0}
    shares = found.query("sharp:attention_dispersed_heads:share", "model", "version")
    assert [version for _, version in shares] == [version for (version,) in found.query("sharp_model_info", "version")]
    per_layer = found.query("sharp_attention_dispersed_heads", "layer")
    above = found.query("count(sharp_attention_smoothed_normalized_entropy >= 0.9) or vector(0)")
    assert 0 <= sum(per_layer.values()) <= above[()]


def test_the_text_of_the_baseline_has_not_drifted(measured):
    found, (_, by_head) = measured
    drift = found.query("sharp_attention_drift_psi", "layer", "head")
    assert set(drift) == set(by_head)
    assert sum(drift.values()) / len(drift) < 0.1


def test_exemplars_lead_to_the_requests(measured):
    found, _ = measured
    now = time.time()
    series = found.get(
        "query_exemplars", query="sharp_time_to_first_token_seconds_bucket", start=now - 300, end=now + 10
    )
    ids = {exemplar["labels"]["request_id"] for entry in series for exemplar in entry["exemplars"]}
    assert ids
    assert ids <= {f"request {number}" for number in range(REQUESTS)}


def test_rules_are_evaluated(measured):
    found, _ = measured
    groups = found.get("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert {rule["health"] for rule in rules.values()} == {"ok"}
    (down,) = [alert for alert in found.get("alerts")["alerts"] if alert["labels"]["alertname"] == "SharpDownForLong"]
    assert (down["labels"]["instance"], down["state"]) == (NOBODY, "pending")


def test_dashboards_show_something(measured):
    """Prometheus accepts every panel's query, and each gives numbers after some load."""
    found, _ = measured
    silent = set()
    for path in sorted((ROOT / "deploy" / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            queries = [target["expr"].replace("$__rate_interval", "1m") for target in panel["targets"]]
            queries = [query.replace("$model", ".*").replace("$instance", ".*") for query in queries]
            # Some lines of a panel appear only when something is wrong: refusals, or a step that does not end.
            numbers = [found.query(query) for query in queries]
            if not any(numbers):
                silent.add(panel["title"])
    # A model may have no dispersed head.
    assert silent <= {"Context at which a head disperses, layer x head", "The model: dispersed heads"}
