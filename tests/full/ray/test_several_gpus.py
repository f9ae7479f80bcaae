"""A replica on each GPU of one machine, as in `deploy/ray/gpus.yaml`. The GPUs are emulated."""

import os
import signal
import time

import pytest
import yaml

from sharp import Client
from sharp.serving.api.errors import SharpError
from tests.full.ray.conftest import DRAIN_SECONDS, ROOT, empty_cluster, free_port, wait_for
from tests.full.ray.gpu_server import STEP_SECONDS, GpuServer, lost_file
from tests.full.ray.streams import Streams, greedy, prompt

GPUS = ("0", "1")
STREAMS = 16
TOKENS = 40
RESTART_SECONDS = 150  # Serve's health checks, a drain, and a new process on a busy machine
(APPLICATION,) = yaml.safe_load((ROOT / "deploy" / "ray" / "gpus.yaml").read_text())["applications"]
(OPTIONS,) = APPLICATION["deployments"]


@pytest.fixture(scope="module")
def sharp(tmp_path_factory):
    with empty_cluster(tmp_path_factory.mktemp("gpus"), **APPLICATION["args"]["settings"]) as found:
        found.add_head("127.0.0.2", num_cpus=4, num_gpus=len(GPUS))
        found.options = {name: value for name, value in OPTIONS.items() if name != "name"}
        found.options |= {"server": GpuServer, "metrics_port": free_port()}
        found.start(**found.options)
        yield found


@pytest.fixture(scope="module")
def client(sharp):
    with Client(sharp.address) as connected:
        yield connected


class Runs(Streams):
    """Streams of which only the lengths are known, because each device writes its own text.

    The error that ends a stream is kept.
    """

    def _ask(self, number):
        try:
            stream = self._client.stream(prompt(number), greedy(self.lengths[number]))
            next(stream)
            self.begun.add(number)
            *_, last = stream
            self.completions[number] = last.usage.completion_tokens
        except SharpError as error:
            self.failed[number] = error

    def join(self, seconds=90):
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        assert self.completions.keys() | self.failed.keys() == self.lengths.keys()
        assert self.completions == {number: self.lengths[number] for number in self.completions}


def by_gpu(sharp):
    return {replica.gpu: replica for replica in sharp.replicas()}


def tokens(sharp):
    return {gpu: replica.total("sharp_generated_tokens_total") for gpu, replica in by_gpu(sharp).items()}


def is_whole(sharp):
    return sharp.statuses() == {"RUNNING": len(GPUS)} and by_gpu(sharp).keys() == {*GPUS}


def test_each_replica_has_a_gpu_and_its_metrics_a_port_of_its_number(sharp, client):
    wait_for(lambda: is_whole(sharp))
    first = sharp.options["metrics_port"]
    for gpu, replica in by_gpu(sharp).items():
        assert replica.metrics == f"http://127.0.0.1:{first + int(gpu)}/metrics"
    assert client.server_info().backend == "onnxruntime (cuda)"


def test_requests_are_spread_over_the_gpus(sharp, client):
    before = tokens(sharp)
    began = time.monotonic()
    streams = Runs(client, dict.fromkeys(range(STREAMS), TOKENS))
    wait_for(lambda: all(replica.running() > 0 for replica in sharp.replicas()))
    streams.join()
    assert streams.failed == {}
    gained = {gpu: count - before[gpu] for gpu, count in tokens(sharp).items()}
    assert gained.keys() == {*GPUS}
    assert min(gained.values()) >= STREAMS / 4 * TOKENS  # a quarter of the streams at least
    assert time.monotonic() - began > (TOKENS - 1) * STEP_SECONDS


@pytest.mark.parametrize("loss", ["process", "device"])
def test_a_lost_gpu_costs_its_own_streams_and_is_taken_again(sharp, client, loss):
    before = by_gpu(sharp)
    streams = Runs(client, dict.fromkeys(range(STREAMS), TOKENS))
    wait_for(lambda: len(streams.begun) == STREAMS)
    running = before["1"].running()
    assert 0 < running < STREAMS
    if loss == "process":
        os.kill(before["1"].pid, signal.SIGKILL)
    else:
        lost_file("1").touch()
    streams.join()
    assert len(streams.failed) == running
    said = {str(error) for error in streams.failed.values()}
    assert all(("send it again" if loss == "process" else "the engine has") in text for text in said)
    wait_for(lambda: is_whole(sharp) and by_gpu(sharp)["1"].pid != before["1"].pid, RESTART_SECONDS)
    assert by_gpu(sharp)["0"].pid == before["0"].pid
    again = Runs(client, dict.fromkeys(streams.failed, TOKENS))
    again.join()
    assert again.failed == {}


def test_a_drained_gpu_ends_what_runs_and_the_other_goes_on(sharp, client):
    streams = Runs(client, dict.fromkeys(range(STREAMS), TOKENS // 2))
    wait_for(lambda: len(streams.begun) == STREAMS)
    sharp.deploy(**sharp.options | {"num_replicas": 1})
    wait_for(lambda: len(sharp.replicas()) == 1)
    streams.join()
    assert streams.failed == {}
    assert DRAIN_SECONDS > TOKENS // 2 * STEP_SECONDS
    assert len(client.generate("a", greedy(3)).token_ids) == 3
