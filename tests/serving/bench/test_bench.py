"""`sharp bench serve` sends the requested load, counts refusals and failures, and prints the figures."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from sharp import AsyncClient, Client, SamplingParams
from sharp.core.cli import main
from sharp.serving.api.errors import InputError
from sharp.serving.bench.load import Load, Sample, run_load
from sharp.serving.bench.summary import summarize
from sharp.serving.config import EngineConfig
from sharp.serving.engine import model_folder
from tests.serving.conftest import wait_for


@pytest.fixture(scope="module")
def address(start_server, counting):
    return start_server(counting).grpc_address


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "serve", *map(str, arguments)])


def test_figures_of_samples_that_are_known():
    samples = [
        Sample(1.0, 10, times=[1.5, 1.6, 2.0], counts=[1, 1, 4], cached_tokens=5),
        Sample(2.0, 10, times=[3.0], counts=[2]),
        Sample(2.5, 10, error="full", refused=True),
        Sample(2.5, 10, error="gone"),
    ]
    found = summarize(samples)
    assert (found.requests, found.completed, found.refused, found.failed) == (4, 2, 1, 1)
    assert (found.seconds, found.tokens_per_second, found.prompt_tokens_per_second) == (2.0, 4.0, 10.0)
    assert found.cached_share == 0.25
    assert found.time_to_first_token.mean == pytest.approx(750)
    assert found.inter_token_latency.p50 == pytest.approx(100)
    assert found.total.p99 == pytest.approx(1000)


def test_lengths_and_arrivals_are_those_of_the_load(address):
    async def drive(load):
        async with AsyncClient(address) as client:
            return await run_load(client, load)

    load = Load(requests=20, rate=200, prompt_tokens=20, completion_tokens=6, spread=0.5, shared_tokens=8, seed=3)
    samples = asyncio.run(drive(load))
    assert all(sample.error is None for sample in samples)
    assert all(18 <= sample.prompt_tokens <= 38 and 3 <= sum(sample.counts) <= 9 for sample in samples)
    arrivals = [sample.arrival for sample in samples]
    assert arrivals == sorted(arrivals)
    assert arrivals == [sample.arrival for sample in asyncio.run(drive(load))]
    assert samples[-1].cached_tokens >= 8


def test_the_command_prints_and_writes_the_figures(address, tmp_path):
    output = tmp_path / "bench.json"
    options = ["--requests", "12", "--prompt-tokens", "8", "--completion-tokens", "4", "--concurrency", "3"]
    result = bench(address, *options, "--output", output)
    assert result.exit_code == 0, result.output
    assert "12 of 12 requests completed" in result.stdout
    assert "time to first token" in result.stdout
    figures = json.loads(output.read_text())["figures"]
    assert (figures["completed"], figures["failed"]) == (12, 0)
    assert figures["tokens_per_second"] * figures["seconds"] == pytest.approx(48)


def test_refused_requests_are_counted(connect, counting, steps):
    address = connect(counting, engine=EngineConfig(max_sequences=1, max_waiting_requests=1)).address
    with Client(address) as client:
        running = client.stream("a", SamplingParams(max_tokens=100, ignore_eos=True))
        next(running)  # the stream occupies the only slot, so one of the six requests can wait
        result = bench(address, "--requests", 6, "--prompt-tokens", 4, "--completion-tokens", 8)
    assert result.exit_code == 0, result.output
    assert "1 of 6 requests completed" in result.stdout
    assert "(5 refused, 0 failed)" in result.stdout


def test_a_completion_that_is_cut_short_does_not_count(connect, counting, steps, monkeypatch):
    address = connect(counting).address
    monkeypatch.setattr(model_folder, "new_request_id", lambda: "known")
    with ThreadPoolExecutor(1) as pool, Client(address) as client:
        load = pool.submit(bench, address, "--requests", 1, "--prompt-tokens", 4, "--completion-tokens", 100)
        wait_for(lambda: len(steps) > 2)
        client.abort("known")
        result = load.result(20)
    assert "0 of 1 requests completed" in result.stdout
    assert "1 x the server ended, or the request was aborted" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", 0], "requests is 0"),
        (["--rate", 0], "rate is 0"),
        (["--spread", 1], "spread is 1"),
        (["--concurrency", 0], "concurrency is 0"),
        (["--prompt-tokens", 500], "may have 564 tokens, but the server's context is 128"),
    ],
)
def test_a_load_that_cannot_be(address, options, message):
    result = bench(address, *options)
    assert (result.exit_code, message in result.output) == (2, True), result.output
    with pytest.raises(InputError):
        Load(**{options[0][2:].replace("-", "_"): options[1]}) if options[1] != 500 else Load(prompt_tokens=0)


def test_where_no_figures_can_be_written_nothing_is_sent(tmp_path):
    result = bench("127.0.0.1:1", "--output", tmp_path / "none" / "figures.json")
    assert (result.exit_code, "figures.json cannot be written; choose a file" in result.output) == (2, True)
