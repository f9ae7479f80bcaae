"""`sharp.client` gives what `sharp.LLM` gives, from a server, and repeats calls when the server says so."""

import asyncio
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Queue

import grpc
import numpy as np
import pytest

from sharp import LLM, AsyncClient, Client, Guided, SamplingParams
from sharp.serving.api.errors import (
    AlreadyExistsError,
    FieldError,
    InputError,
    NotFoundError,
    QueueFullError,
    SharpError,
    UnavailableError,
)
from sharp.serving.client.channel import channel_options
from sharp.serving.config import EngineConfig
from sharp.serving.engine.engine import Engine
from tests.serving.conftest import SETTINGS, wait_for

EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias={98: 1.5},
    seed=7,
    n=2,
    max_tokens=6,
    min_tokens=2,
    stop=("zz",),
    stop_token_ids=(5,),
    include_stop_str_in_output=True,
    allowed_token_ids=(*range(90, 120),),
    bad_words=("zzz",),
    skip_special_tokens=False,
    logprobs=2,
    prompt_logprobs=1,
    time_limit_ms=60_000,
)


@pytest.fixture(scope="module")
def address(start_server, counting):
    return start_server(counting).grpc_address


@pytest.fixture(scope="module")
def client(address):
    with Client(address) as client:
        yield client


def same(one, other):
    """Assert that two completions are equal apart from times and hits of the prefix cache."""
    assert (one.text, one.token_ids, one.finish_reason, one.matched) == (
        other.text,
        other.token_ids,
        other.finish_reason,
        other.matched,
    )
    assert one.logprobs == other.logprobs
    assert one.prompt_logprobs == other.prompt_logprobs
    assert one.usage.completion_tokens == other.usage.completion_tokens
    for name in ("entropy", "support_ratio", "logit_spread"):
        np.testing.assert_allclose(getattr(one.attention, name), getattr(other.attention, name))
    assert len(one.others) == len(other.others)


def test_a_server_generates_what_the_model_does_in_this_process(client, counting):
    expected = LLM(counting).generate("abcd", EVERYTHING, attention=True)[0]
    completion = client.generate("abcd", EVERYTHING, attention=True, cache_salt="fresh")
    same(completion, expected)
    assert [other.token_ids for other in completion.others] == [other.token_ids for other in expected.others]


def test_a_prompt_of_one_token_has_no_logprobs_and_not_none(client, counting):
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    assert client.generate("a", params).prompt_logprobs == LLM(counting).generate("a", params)[0].prompt_logprobs == ()
    assert client.generate("a", SamplingParams(max_tokens=0)).prompt_logprobs is None


def test_the_example_of_the_page_runs(address, capsys):
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    (example,) = (code for code in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "client.stream" in code)
    greedy = example.replace("max_tokens=48", "max_tokens=48, temperature=0")  # a sampled completion may be empty
    exec(greedy.replace("localhost:50051", address), {})
    assert capsys.readouterr().out


def test_guided_and_token_ids(client):
    guided = SamplingParams(max_tokens=4, guided=Guided(regex="[x-z]{4}"), seed=1)
    completion = client.generate([97, 98], guided)
    assert (len(completion.text), set(completion.text) <= set("xyz")) == (4, True)


def test_the_asynchronous_client_gives_the_same(client, address):
    async def ask():
        async with AsyncClient(address) as other:
            parts = [
                part.text
                async for part in other.stream("a", SamplingParams(temperature=0, max_tokens=5))
                if hasattr(part, "text")
            ]
            whole = await other.generate("abcd", EVERYTHING, attention=True, cache_salt="other")
            facts = await other.model_info(), await other.server_info(), await other.load(), await other.tokenize("ab")
            with pytest.raises(NotFoundError):
                await other.abort("nobody")
            return "".join(parts), whole, facts

    text, whole, (model, server, load, tokens) = asyncio.run(ask())
    assert text == "bcdef"
    same(whole, client.generate("abcd", EVERYTHING, attention=True, cache_salt="third"))
    assert (model, server, tokens) == (client.model_info(), client.server_info(), client.tokenize("ab"))
    assert load.draining is False


def test_leaving_the_loop_ends_the_request(connect, counting, steps):
    address = connect(counting).address
    with Client(address) as client:
        for _ in client.stream("a", SamplingParams(max_tokens=100)):
            break
        deadline = time.monotonic() + 10
        while client.load().requests_running:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda client: client.generate("a", model="other"), NotFoundError, "model 'other' is not served here"),
        (lambda client: client.generate(""), FieldError, "prompt has 0 tokens"),
        (lambda client: client.generate([300]), FieldError, "300"),
        (lambda client: client.generate("\ud800"), InputError, "cannot be written"),
        (lambda client: client.generate([-1]), InputError, "cannot be written"),
        (lambda client: client.abort(""), FieldError, "request_id is not set"),
    ],
)
def test_errors_are_those_of_the_server(client, ask, kind, message):
    with pytest.raises(kind, match=message):
        ask(client)


@pytest.mark.parametrize("prompt", [["a"], ["a", "b"], [[97], [98]], [97, "b"]])
def test_several_prompts_are_refused_before_anything_is_sent(prompt):
    sentence = "prompt must be one text or a list of token ids; call generate once for each of several prompts"
    with Client("localhost:1") as client, pytest.raises(InputError, match=f"^{sentence}$"):
        client.generate(prompt)

    async def ask():
        async with AsyncClient("localhost:1") as client:
            await client.generate(prompt)

    with pytest.raises(InputError, match=f"^{sentence}$"):
        asyncio.run(ask())


def test_a_message_that_is_too_large_is_the_callers_affair(address, monkeypatch):
    monkeypatch.setattr("sharp.serving.client.channel.MESSAGE_BYTES", 1000)
    with Client(address) as client, pytest.raises(InputError, match="larger than max"):
        client.generate("a" * 2000)


def test_attempts_out_of_range(address):
    for attempts in (0, 6):
        with pytest.raises(InputError, match="attempts is"):
            Client(address, attempts=attempts)


def test_a_request_id_that_runs_already(connect, counting, steps):
    with Client(connect(counting).address) as client:
        running = client.stream("a", SamplingParams(max_tokens=100, ignore_eos=True), request_id="mine")
        next(running)
        with pytest.raises(AlreadyExistsError):
            client.generate("a", request_id="mine")
        client.abort("mine")
        assert list(running)[-1].reason == "cancelled"


def test_a_full_queue_is_waited_for(connect, counting, steps):
    """Clients whose requests a full queue refuses try again when the server says, and all succeed."""
    address = connect(counting, engine=EngineConfig(max_sequences=1, max_waiting_requests=1)).address
    refused, first = [], SamplingParams(temperature=0, max_tokens=3)

    def ask(number):
        with Client(address, attempts=5) as client:
            try:
                return client.generate("a", first).text
            except QueueFullError as error:
                refused.append(error.retry_after)
                return None

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(ask, range(4)))
    assert texts == ["bcd"] * 4
    assert refused == []


def test_without_attempts_a_full_queue_is_an_error_that_says_when_to_come_back(connect, counting, monkeypatch):
    step = Engine.step

    def slow(engine):
        time.sleep(0.2)  # the first request takes 20 seconds
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)
    address = connect(counting, engine=EngineConfig(max_sequences=1, max_waiting_requests=1)).address
    with Client(address, attempts=1) as client:
        running = client.stream("a", SamplingParams(max_tokens=100, ignore_eos=True))
        next(running)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.generate, "a", request_id="waiting")
            wait_for(lambda: client.load().requests_waiting)
            with pytest.raises(QueueFullError) as refused:
                client.generate("a")
            assert refused.value.retry_after > 0
            client.abort("waiting")
            assert waiting.result(20).finish_reason == "cancelled"


def test_a_call_that_meets_a_closing_server_is_made_again(address):
    """A call that a closing server has received but not handled is repeated at another server.

    gRPC cancels such a call. Without retries, the caller gets CANCELLED.
    """
    with closing_server() as closing:
        both = f"ipv4:{closing},{address}"

        def ask(attempts):
            with Client(both, attempts=attempts) as client:
                return [client.generate("a", SamplingParams(temperature=0, max_tokens=2)).text for _ in range(20)]

        with ThreadPoolExecutor(2) as pool:
            once, again = pool.submit(ask, 1), pool.submit(ask, 5)
            assert again.result(20) == ["bc"] * 20
            with pytest.raises(SharpError, match="CANCELLED"):
                once.result(20)


def test_a_stream_whose_server_is_lost_says_when_to_ask_again(address, steps):
    """A stream whose connection breaks ends with an error that says when to retry.

    No server is left to send RetryInfo.
    """
    ends = []

    def relay():
        host, _, port = address.rpartition(":")
        ends.extend((listening.accept()[0], socket.create_connection((host, int(port)))))
        for one, other in (ends, ends[::-1]):
            threading.Thread(target=forward, args=(one, other), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=relay, daemon=True).start()
        with (
            Client(f"127.0.0.1:{listening.getsockname()[1]}", attempts=1) as client,
            pytest.raises(UnavailableError, match="went away before the response was complete") as lost,
        ):
            for number, _ in enumerate(client.stream("a", SamplingParams(temperature=0, max_tokens=100))):
                if number == 2:
                    for end in ends:
                        end.shutdown(socket.SHUT_RDWR)
    assert lost.value.retry_after == 1


def forward(one, other):
    with suppress(OSError):  # the test breaks the connection
        while received := one.recv(65536):
            other.sendall(received)


def test_a_large_request_is_made_again():
    """gRPC repeats a request of more than 256 KiB, the size up to which it keeps requests by default."""
    codes = iter([grpc.StatusCode.UNAVAILABLE, None])

    def handle(_request, context):
        if code := next(codes):
            context.abort(code, "not yet")
        return b"done"

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        methods = {"Ask": grpc.unary_unary_rpc_method_handler(handle)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}", channel_options(2)) as channel:
            assert channel.unary_unary("/test/Ask")(bytes(2**21), timeout=20) == b"done"
        server.stop(0).wait()


@contextmanager
def closing_server():
    """Yield the address of a gRPC server that receives calls for a second, handles none, and closes."""
    ready = Queue()

    async def close():
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.put(port)
        time.sleep(1)  # the blocked event loop hands over no call
        await server.stop(0)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(asyncio.run, close())
        yield f"127.0.0.1:{ready.get()}"
        ended.result(20)


def test_a_deadline(connect, counting, steps):
    with Client(connect(counting).address, timeout=0.3) as client, pytest.raises(SharpError, match="Deadline"):
        client.generate("a", SamplingParams(max_tokens=100, ignore_eos=True))


def test_a_stuck_step_shows_in_health_and_to_those_who_ask(connect, counting, monkeypatch):
    release, stuck, step = threading.Event(), threading.Event(), Engine.step

    def blocked(engine):
        if not release.is_set():
            stuck.set()
            release.wait(20)
        return step(engine)

    monkeypatch.setattr(Engine, "step", blocked)
    address = connect(counting, server=replace(SETTINGS.server, stall_seconds=0.05)).address
    with Client(address, attempts=1) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.generate, "a", SamplingParams(temperature=0, max_tokens=2))
        stuck.wait(20)
        time.sleep(0.1)
        with pytest.raises(SharpError, match="in one step for over"):
            client.generate("a")
        wait_for_health(address, serving=False)
        release.set()
        assert first.result(20).text == "bc"
        wait_for_health(address, serving=True)


def wait_for_health(address, *, serving):
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    expected = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    with grpc.insecure_channel(address) as channel:
        for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20):
            if response.status == expected:
                return
