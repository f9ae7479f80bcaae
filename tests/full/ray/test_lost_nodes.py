"""Lost nodes: a node that is killed with the proxy of a request, and a node behind a cut link.

The second node is in its own network namespace, because a cut link sends no notice.
"""

import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import pytest
from ray import serve
from ray.serve.schema import ProxyStatus

from sharp import Client
from sharp.ray.request import prefix_key
from sharp.ray.router import home_of
from sharp.v1 import inference_pb2
from tests.full.ray.conftest import ROOT, WATCH, add_node, empty_cluster, free_port, wait_for
from tests.full.ray.streams import Streams, greedy, prompt
from tests.missing_tools import missing

HEAD, NEAR, FAR = "10.232.0.1", "10.232.0.2", "10.232.0.3"
# The command `ray` with the patience of the other nodes.
START = """
import sys
from ray._private import services
from ray.scripts.scripts import main
from tests.full.ray.patience import patient_get_node
services.get_node = patient_get_node
sys.argv = ["ray", *sys.argv[1:]]
main()
"""
PER_REPLICA = 4
LOST = "the replica that had the request was lost; send it again"
TOKENS = 25
# Ray asks four times, and waits half a second and then one second for a response. Serve alone would take 420 s.
LOST_SECONDS = 15


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20, text=True).stdout


@pytest.fixture(scope="module")
def network():
    """Yield the name of a network namespace and of both ends of the cable to it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        missing("network namespaces need root and the command ip")
    name = f"sharp-{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", name, "netns", name)
        for address, *place in ((HEAD,), (NEAR,), (FAR, "-n", name)):
            ip(*place, "address", "add", f"{address}/24", "dev", name)
            ip(*place, "link", "set", name, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        # The namespace lives as long as a process in it, and so does the cable, whose addresses the next test needs.
        subprocess.run(["ip", "link", "delete", name], capture_output=True, timeout=20, check=False)
        for pid in ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):  # the process ended by itself
                os.kill(int(pid), signal.SIGKILL)
        ip("netns", "delete", name)


@pytest.fixture(scope="module")
def sharp(network, tmp_path_factory):
    """Yield a cluster with a replica and a proxy on each of three nodes."""
    with empty_cluster(tmp_path_factory.mktemp("cluster")) as found:
        found.add_head(HEAD, WATCH | {"health_check_timeout_ms": 1000}, num_cpus=1)
        found.near_address = f"127.0.0.1:{free_port()}"
        with pytest.MonkeyPatch.context() as patch:  # proxies in one network need different ports
            patch.setenv("RAY_SERVE_WORKER_PROXY_GRPC_PORT", found.near_address.rpartition(":")[2])
            patch.setenv("RAY_SERVE_WORKER_PROXY_HTTP_PORT", str(free_port()))
            found.near = add_node(found.cluster, num_cpus=1, node_ip_address=NEAR)
        start_far_node(found.cluster, network)
        found.start(proxies="EveryNode", num_replicas=3, max_replicas_per_node=1)
        wait_for(lambda: [*serve.status().proxies.values()] == [ProxyStatus.HEALTHY] * 3)
        yield found


def start_far_node(cluster, network):
    options = ["--address", cluster.address, "--node-ip-address", FAR, "--num-cpus", "1"]
    started = ["start", *options, "--object-store-memory", str(80 * 2**20)]
    command = ["ip", "netns", "exec", network, sys.executable, "-c", START, *started]
    # The node's processes keep its output open.
    with tempfile.TemporaryFile() as log:
        ended = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=300, check=False).returncode
        log.seek(0)
        assert ended == 0, log.read().decode()


def by_home(sharp):
    """Return, by the address of each node, numbers of streams that its replica gets."""
    found = {replica.address: [] for replica in sharp.replicas()}
    addresses, number = {replica.name: replica.address for replica in sharp.replicas()}, itertools.count()
    while any(len(numbers) < PER_REPLICA for numbers in found.values()):
        key = prefix_key(inference_pb2.GenerateRequest(text=prompt(one := next(number))))
        numbers = found[addresses[home_of(key, dict.fromkeys(addresses, 0))]]
        numbers.extend([one] if len(numbers) < PER_REPLICA else [])
    return found


def of_length(tokens, *groups):
    return dict.fromkeys(itertools.chain(*groups), tokens)


def test_requests_of_a_lost_proxy_go_through_another(sharp):
    homes = by_home(sharp)
    here, there = sharp.address, sharp.near_address
    with Client(here) as one, Client(there) as other, Client(f"ipv4:{here},{there}") as both:
        for _ in range(4):
            both.generate("a", greedy(1))  # until the client is connected to both proxies
        untouched = Streams(one, of_length(TOKENS, homes[HEAD], homes[FAR]))
        of_replica = Streams(one, of_length(TOKENS, homes[NEAR]), again=both)
        of_proxy = Streams(other, of_length(TOKENS, homes[HEAD], homes[FAR]), again=both)
        begun = (untouched, of_replica, of_proxy)
        wait_for(lambda: all(len(streams.begun) == len(streams.lengths) for streams in begun))
        with sharp.held():
            # The requests alternate between the proxies.
            pending = Streams(both, of_length(2, *homes.values()))
            wait_for(lambda: sharp.ongoing() == sum(len(streams.lengths) for streams in (*begun, pending)))
            sharp.cluster.remove_node(sharp.near, allow_graceful=False)
            wait_for(lambda: all(lost.failed.keys() == lost.lengths.keys() for lost in (of_replica, of_proxy)))
        for streams in (*begun, pending):
            streams.join()
    assert untouched.failed == pending.failed == {}
    assert {str(error) for error in of_replica.failed.values()} == {LOST}
    assert all("went away before the response was complete" in str(error) for error in of_proxy.failed.values())
    assert {error.retry_after for error in (*of_replica.failed.values(), *of_proxy.failed.values())} == {1.0}


def http_stream(sharp, number):
    """Start a stream over HTTP from the replica that gets the stream `number`."""
    body = {"model": "counting", "prompt": "!", "max_tokens": TOKENS, "temperature": 0, "stream": True}
    key = prefix_key(inference_pb2.GenerateRequest(text=prompt(number)))
    connection = http.client.HTTPConnection("127.0.0.1", sharp.http_port, timeout=LOST_SECONDS)
    headers = {"content-type": "application/json", "x-session-id": key}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def test_streams_behind_a_cut_link_end(sharp, network):
    """Streams from a node behind a cut link end with an error.

    Requests that are sent to the node before its loss is known fail, too, but gRPC sends them again, because they had
    no response.
    """
    homes = by_home(sharp)
    with Client(sharp.address) as client:
        kept = Streams(client, of_length(2 * TOKENS, homes[HEAD]))
        lost = Streams(client, of_length(TOKENS, homes[FAR]), again=client)
        over_http = http_stream(sharp, homes[FAR][0])
        assert over_http.readline().startswith(b"data: ")
        wait_for(lambda: len(kept.begun) + len(lost.begun) == 2 * PER_REPLICA)
        ip("-n", network, "link", "set", network, "down")
        pending = Streams(client, of_length(2, homes[FAR]))
        wait_for(lambda: lost.failed.keys() == lost.lengths.keys(), LOST_SECONDS)
        with pytest.raises(http.client.IncompleteRead):
            over_http.read()
        pending.join(LOST_SECONDS)
        lost.join()
        kept.join()
    assert kept.failed == pending.failed == {}
    assert {(str(error), error.retry_after) for error in lost.failed.values()} == {(LOST, 1.0)}
