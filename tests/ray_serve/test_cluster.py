"""The engine on a cluster of Ray: the same client, and what it sees when replicas and nodes are lost."""

import os
import signal
import threading
import time

import pytest

from sharp import Client, SamplingParams
from sharp.serving.errors import UnavailableError
from tests.ray_serve.conftest import REPLICAS, wait_for

STREAMS = 50
TOKENS = 60


def counted(prompt, count):
    return "".join(chr(ord(prompt[-1]) + 1 + step) for step in range(count))


@pytest.fixture(scope="module")
def client(sharp):
    with Client(sharp.address) as connected:
        yield connected


def test_it_answers_as_a_server_does(client):
    params = SamplingParams(temperature=0, max_tokens=8)
    events = [*client.stream("a", params)]
    assert "".join(event.text for event in events[:-1]) == "bcdefghi"
    assert len(events) == 9
    assert events[-1].usage.completion_tokens == 8


def test_streams_of_a_lost_replica_and_a_lost_node_fail_and_can_be_sent_again(sharp, client):
    failed, answers = {}, {}
    params = SamplingParams(temperature=0, max_tokens=TOKENS)

    def ask(number):
        prompt = f"{number} !"
        try:
            answers[number] = "".join(event.text for event in client.stream(prompt, params) if hasattr(event, "text"))
        except UnavailableError as error:
            failed[number] = error
            time.sleep(error.retry_after)
            answers[number] = client.generate(prompt, params).text

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(replica.running() for replica in sharp.replicas()) == STREAMS)
    large, small = (node.node_id for node in sharp.nodes)
    (on_small,) = (replica for replica in sharp.replicas() if replica.node == small)
    killed = next(replica for replica in sharp.replicas() if replica.node == large)
    lost = on_small.running() + killed.running()
    os.kill(killed.pid, signal.SIGKILL)
    sharp.cluster.remove_node(sharp.nodes[1], allow_graceful=False)
    for thread in threads:
        thread.join(60)
    assert answers == dict.fromkeys(range(STREAMS), counted("!", TOKENS))
    assert len(failed) == lost > 2
    assert {error.retry_after for error in failed.values()} == {1.0}
    assert "send it again" in str(next(iter(failed.values())))
    wait_for(lambda: sharp.statuses() == {"RUNNING": REPLICAS})
    assert len([replica for replica in sharp.replicas() if replica.node == large]) == REPLICAS
