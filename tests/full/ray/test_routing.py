"""The choice of the replica that gets a request, without a cluster."""

import asyncio
from collections import Counter

from ray.exceptions import ActorDiedError, ActorUnavailableError

from sharp.kserve import grpc_service_pb2
from sharp.ray import router
from sharp.ray.request import PREFIX_CHARACTERS, PREFIX_TOKENS, model_of, prefix_key
from sharp.ray.router import SLACK, end_when_dead, home_of
from sharp.v1 import control_pb2, inference_pb2

REPLICAS = ("first", "second", "third", "fourth")
IDLE = dict.fromkeys(REPLICAS, 0)


def key(**fields):
    return prefix_key(inference_pb2.GenerateRequest(**fields))


def ids(*token_ids):
    return inference_pb2.TokenIds(ids=token_ids)


def test_a_key_is_of_the_beginning():
    beginning = "x" * PREFIX_CHARACTERS
    assert key(text=beginning + "a") == key(text=beginning + "b") != key(text=beginning[1:] + "ab")
    tokens = range(PREFIX_TOKENS)
    assert key(token_ids=ids(*tokens, 1)) == key(token_ids=ids(*tokens, 2)) != key(token_ids=ids(*tokens[1:], 1, 2))


def test_what_shares_no_cache_has_another_key():
    keys = {key(text="a"), key(text="b"), key(text="a", model="small"), key(text="a", cache_salt="mine")}
    assert len(keys) == 4
    assert key(text="a", cache_salt="mine") == key(text="a", cache_salt="mine")


def infer(text, model="", **fields):
    tensor = {"name": "text_input", "datatype": "BYTES", "contents": {"bytes_contents": [text.encode()]}, **fields}
    return grpc_service_pb2.ModelInferRequest(model_name=model, inputs=[tensor])


def test_a_prompt_of_kserve_goes_where_the_same_prompt_of_ours_goes():
    assert prefix_key(infer("a", "small")) == key(text="a", model="small")
    assert prefix_key(infer("a", datatype="FP32")) == ""


def test_the_model_is_that_of_the_request():
    requests = (infer("a", "small"), grpc_service_pb2.ModelReadyRequest(name="small"), control_pb2.GetLoadRequest())
    assert [model_of(request) for request in requests] == ["small", "small", None]
    assert model_of(inference_pb2.GenerateRequest()) == ""


def test_other_calls_have_no_key():
    assert prefix_key(control_pb2.GetLoadRequest()) == prefix_key(inference_pb2.TokenizeRequest(text="a")) == ""


def test_keys_spread_over_the_replicas():
    counts = Counter(home_of(f"key {number}", IDLE) for number in range(2000))
    assert set(counts) == set(REPLICAS)
    assert min(counts.values()) > 400


def test_a_replica_that_goes_takes_only_its_own_keys_with_it():
    left = {name: 0 for name in REPLICAS if name != "second"}
    for number in range(200):
        before = home_of(f"key {number}", IDLE)
        assert before == "second" or home_of(f"key {number}", left) == before


def test_a_busy_replica_is_left_alone():
    home = home_of("a", IDLE)
    assert home_of("a", IDLE | {home: SLACK}) == home
    assert home_of("a", IDLE | {home: 2 * SLACK}) is None
    assert home_of("a", dict.fromkeys(REPLICAS, 100)) == home  # all replicas are equally loaded


def test_calls_end_when_their_replica_is_dead_and_no_sooner(monkeypatch):
    """Calls end when their replica is dead, and not while it drains or cannot be reached for a while.

    `test_lost_nodes` shows calls that end.
    """
    monkeypatch.setattr(router, "PING_SECONDS", 0)
    replies = [3, ActorUnavailableError("no response", b"0" * 16), 1, ActorDiedError()]

    class Replica:
        _channel = None

        async def get_queue_len(self, *, deadline_s):
            assert self._channel.closed == 0
            reply = replies.pop(0)
            if isinstance(reply, Exception):
                raise reply

    class Channel:
        closed = 0

        async def close(self):
            self.closed += 1

    replica = Replica()
    replica._channel = Channel()
    asyncio.run(asyncio.wait_for(end_when_dead(replica), 10))
    assert (replies, replica._channel.closed) == ([], 1)
