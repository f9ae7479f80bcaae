"""The engine's thread handles what comes through its queue, and survives errors or ends as it should."""

import queue
from types import SimpleNamespace

import pytest

from sharp.serving import SamplingParams
from sharp.serving.api.errors import DeviceLostError, QueueFullError
from sharp.serving.api.events import Accepted, Delta, Failed, Finished
from sharp.serving.api.request import GenerateRequest
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.loading import load_model_folder
from sharp.serving.engine.thread import EngineThread


@pytest.fixture(params=["off", "on"])
def start(request, counting):
    threads = []

    def make(**config):
        config = {"attention_interval": 0, "async_scheduling": request.param, **config}
        model, _, engine = load_model_folder(counting, BackendConfig(threads=1, kernels=False), EngineConfig(**config))
        threads.append(EngineThread(engine, lambda report: None))
        return model, engine, threads[-1]

    yield make
    for thread in threads:
        thread.stop()


def events_until(events, kind, request_id):
    seen = []
    while not (seen and isinstance(seen[-1], kind) and seen[-1].request_id == request_id):
        seen.append(events.get(timeout=10))
    return seen


def test_a_full_queue_is_an_event_with_a_time_to_come_back(start):
    model, _, thread = start(max_waiting_requests=2)
    events = queue.Queue()
    for name in "abc":
        thread.submit(model.prepare(GenerateRequest("a", SamplingParams(max_tokens=2), request_id=name)), events.put)
    thread.start()
    seen = events_until(events, Failed, "c")
    assert [event.request_id for event in seen if isinstance(event, Accepted)] == ["a", "b"]
    assert isinstance(seen[-1].error, QueueFullError)
    assert seen[-1].error.retry_after > 0


def test_a_request_that_the_engine_cannot_take_fails_alone(start, monkeypatch):
    model, engine, thread = start()
    events = queue.Queue()
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda request: 1 / 0 if request.request_id == "a" else add(request))
    for name in "ab":
        thread.submit(model.prepare(GenerateRequest("a", SamplingParams(max_tokens=2), request_id=name)), events.put)
    thread.start()
    seen = events_until(events, Finished, "b")
    assert [str(event.error) for event in seen if isinstance(event, Failed)] == ["the request failed: division by zero"]


def test_a_lost_device_ends_the_engine_and_not_only_the_step(start, monkeypatch):
    model, engine, thread = start()
    events = queue.Queue()

    def step(batch):
        raise DeviceLostError("the GPU is lost to this process: an illegal memory access")

    monkeypatch.setattr(engine._backend, "step", step)
    thread.start()
    thread.submit(model.prepare(GenerateRequest("a", SamplingParams(max_tokens=3), request_id="a")), events.put)
    [failed] = [event for event in events_until(events, Failed, "a") if isinstance(event, Failed)]
    thread.ended.result(10)
    thread.submit(model.prepare(GenerateRequest("a", SamplingParams(max_tokens=3), request_id="b")), events.put)
    [refused] = events_until(events, Failed, "b")
    assert str(failed.error) == str(refused.error) == "the engine has stopped"


def test_every_sequence_of_a_request_arrives(start):
    model, _, thread = start()
    events = queue.Queue()
    thread.start()
    thread.submit(
        model.prepare(GenerateRequest("a", SamplingParams(max_tokens=3, n=2, temperature=0), request_id="a")),
        events.put,
    )
    finished = []
    tokens = {0: [], 1: []}
    while not (finished and finished[-1].last):
        event = events.get(timeout=10)
        if isinstance(event, Finished):
            finished.append(event)
        elif isinstance(event, Delta):
            tokens[event.index] += event.token_ids
    assert tokens == {0: list(b"bcd"), 1: list(b"bcd")}
    assert {end.index for end in finished} == {0, 1}


def test_an_abort_whose_caller_gave_up_ends_the_request_and_not_the_engine(start):
    model, _, thread = start()
    events = queue.Queue()
    thread.submit(model.prepare(GenerateRequest("a", SamplingParams(temperature=0), request_id="a")), events.put)
    for name in ("a", "nobody"):
        assert thread.abort(name).cancel()  # as the call's deadline does
    thread.submit(
        model.prepare(GenerateRequest("a", SamplingParams(max_tokens=2, temperature=0), request_id="b")), events.put
    )
    thread.start()
    seen = events_until(events, Finished, "b")
    assert [event.reason for event in seen if isinstance(event, Finished)] == ["cancelled", "length"]


def test_a_panic_ends_the_engine_and_leaves_nobody_waiting(start, monkeypatch):
    class Panic(BaseException):
        """An exception outside `Exception`, as a panic of Rust is in Python."""

    def panic():
        raise Panic

    model, engine, thread = start()
    monkeypatch.setattr(engine, "step", panic)
    events = queue.Queue()
    thread.submit(model.prepare(GenerateRequest("a", SamplingParams(max_tokens=2), request_id="a")), events.put)
    thread.start()
    assert str(events_until(events, Failed, "a")[-1].error) == "the engine has stopped"
    thread.ended.result(timeout=10)


def test_an_engine_that_lost_a_block_ends_instead_of_going_on(start):
    model, engine, thread = start()
    engine.blocks._free.popitem()
    thread.submit(model.prepare(GenerateRequest("a", SamplingParams(max_tokens=2), request_id="a")), queue.Queue().put)
    thread.start()
    thread.ended.result(timeout=10)


def test_how_long_a_step_has_taken_is_known_while_it_runs_and_0_between_steps(start, monkeypatch):
    model, engine, thread = start(async_scheduling="off")
    step, seen, events = engine.step, [], queue.Queue()
    now = [100.0]
    monkeypatch.setattr("sharp.serving.engine.thread.time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow_step():
        now[0] += 0.25
        seen.append(thread.seconds_in_step)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    assert thread.seconds_in_step == 0
    thread.submit(model.prepare(GenerateRequest("a", SamplingParams(max_tokens=2), request_id="a")), events.put)
    thread.start()
    events_until(events, Finished, "a")
    assert set(seen) == {0.25}
    thread.stop()
    assert thread.seconds_in_step == 0
