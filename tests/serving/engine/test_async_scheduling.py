"""Asynchronous scheduling leaves outputs unchanged, and the backend works while steps are committed."""

import gc
import itertools
import queue
import threading
import weakref
from collections import defaultdict
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.core.manifest import read_manifest
from sharp.plugins.cpu.sampling import sample
from sharp.serving import SamplingParams
from sharp.serving.api.errors import DeviceLostError
from sharp.serving.api.events import Accepted, Delta, Failed, Finished
from sharp.serving.api.guided import Guided
from sharp.serving.backends import SamplingBackend, StepOutput, load_backend
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.engine import Engine
from sharp.serving.engine.guide import GuideCompiler
from sharp.serving.engine.thread import EngineThread
from sharp.serving.text.stop_condition import StopCondition
from sharp.serving.text.tokenizer import Tokenizer
from tests.serving.running_engine import GREEDY, prepared

BLOCKS = 10  # blocks of 4 tokens
ON = EngineConfig(
    max_batch_tokens=7, max_sequences=4, attention_interval=1, speculative_tokens=0, async_scheduling="on"
)
WAIT = 30  # seconds to wait for events that come at once


class SamplingModel:
    """The tiny model as a backend that samples tokens itself."""

    kernels, screened, device, limits = False, False, "cpu", None

    def __init__(self, backend):
        self._backend = backend
        self.load, self.free_memory = backend.load, backend.free_memory
        self.allocate_cache = backend.allocate_cache
        self.steps = []  # for each step, whether the backend sampled

    def step(self, batch):
        self.steps.append(False)
        return self._backend.step(batch)

    def step_and_sample(self, batch, samplings, changes):
        self.steps.append(True)
        output = self._backend.step(batch)
        if changes is not None:
            changes.apply(output.logits)
        return StepOutput(np.empty((0, 257), np.float32), output.stats, sample(output.logits, samplings))


@pytest.fixture(scope="module")
def model(hashing):
    return load_backend(hashing, read_manifest(hashing), BackendConfig(threads=1, kernels=False))


@pytest.fixture(scope="module")
def tokenizer(hashing):
    return Tokenizer(hashing / "tokenizer.json")


@pytest.fixture(scope="module")
def guide(hashing, tokenizer):
    compiler = GuideCompiler(read_manifest(hashing), tokenizer)
    return {regex: compiler.compile(Guided(regex=regex)) for regex in ("[a-f]*", "[0-9]{3}")}


@pytest.fixture(scope="module")
def make(hashing, model, tokenizer):
    def engine(config=ON, backend=None, blocks=BLOCKS):
        return Engine(backend or model, read_manifest(hashing), tokenizer, blocks, config)

    return engine


def run(engine, requests, steps=2000):
    """Return the events of each sequence, with requests that arrive and are aborted before given steps.

    Events PromptComputed have the index -1. Each look at the clock takes 0.2 ms.
    """
    looks = itertools.count()
    with mock.patch("time.perf_counter", lambda: next(looks) / 5000):
        try:
            return run_on_the_clock(engine, requests, steps)
        finally:
            engine.close()  # other tests use the backend


def run_on_the_clock(engine, requests, steps):
    events = defaultdict(list)

    def take(new):
        for event in new:
            index = event.index if isinstance(event, Delta | Finished) else -1
            events[event.request_id, index].append(event)
        engine.check_integrity()

    for step in range(steps):
        for number, (request, arrival, abort) in enumerate(requests):
            if step == arrival:
                engine.add(replace(request, request_id=str(number)))
            if step == abort:
                take(engine.abort(str(number)))
        if engine.has_work:
            take(engine.step())
            engine.report()
        elif all(step > max(arrival, abort or 0) for _, arrival, abort in requests):
            assert engine.blocks.free == engine.blocks.blocks
            return events
    raise AssertionError("the engine makes no progress")


def completion(events):
    """Return the tokens, text, logprobs and end of one sequence's events, the last of which is its end."""
    assert all(isinstance(event, Delta) for event in events[:-1])
    end = events[-1]
    assert isinstance(end, Finished)
    tokens = [token for event in events[:-1] for token in event.token_ids]
    text = "".join(event.text for event in events[:-1])
    logprobs = [entry for event in events[:-1] for entry in event.logprobs or ()]
    return tokens, text, logprobs, (end.reason, end.matched, end.usage.completion_tokens)


def completions(engine, requests):
    """Return the completion of every sequence."""
    return {key: completion(events) for key, events in run(engine, requests).items() if key[1] >= 0}


STARTS = [np.random.default_rng(seed).integers(0, 256, 20).tolist() for seed in range(2)]
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.7, 1.5]),
        "n": st.sampled_from([1, 1, 1, 3]),
        "prompt_logprobs": st.sampled_from([None, None, 2]),
        "logprobs": st.sampled_from([None, None, 1]),
        "repetition_penalty": st.sampled_from([1, 1, 1.3]),
        "stop_token_ids": st.sampled_from([(), (), tuple(range(0, 257, 8))]),
        "stop": st.sampled_from([(), (), tuple("abcdefghijklmnop")]),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "ignore_eos": st.booleans(),
        "time_limit_ms": st.sampled_from([None, None, None, 5]),
    }
)
REQUEST = st.tuples(
    st.builds(
        lambda start, cut, end: [*STARTS[start][:cut], *end][:20] or [7],
        st.integers(0, 1),
        st.integers(0, 20),
        st.lists(st.integers(0, 255), max_size=6),
    ),
    PARAMS,
    st.integers(0, 20),  # the limit of new tokens
    st.fixed_dictionaries(
        {
            "priority": st.sampled_from([0, 0, -1, 1]),
            "cache_salt": st.sampled_from(["", "", "other"]),
            "attention": st.booleans(),
        }
    ),
    st.sampled_from([None, None, None, "[a-f]*", "[0-9]{3}"]),  # the guide
    st.integers(0, 12),  # the step of arrival
    st.one_of(st.none(), st.none(), st.integers(0, 25)),  # the step of the abort
)
CONFIG = st.builds(
    replace,
    st.just(ON),
    prefill_chunk_tokens=st.sampled_from([None, 2]),
    prefix_cache=st.booleans(),
    speculative_tokens=st.sampled_from([0, 0, 3]),
)


@given(st.lists(REQUEST, min_size=1, max_size=8), CONFIG, st.booleans())
def test_outputs_are_those_of_the_synchronous_engine(make, model, guide, requests, config, samples):
    made = [
        (
            prepared(
                str(number), prompt, SamplingParams(seed=number, **params), count, guide=guide.get(regex), **others
            ),
            arrival,
            abort,
        )
        for number, (prompt, params, count, others, regex, arrival, abort) in enumerate(requests)
    ]
    expected = run(make(replace(config, async_scheduling="off")), made)
    found = run(make(config, SamplingModel(model) if samples else model), made)
    for number, (request, _, abort) in enumerate(made):
        early = abort is not None or request.params.time_limit_ms is not None
        whole, alike = found[str(number), -1], expected[str(number), -1]
        assert early or [type(event) for event in whole] == [type(event) for event in alike]
        if any(isinstance(event, Failed) for event in [*whole, *alike]):
            assert early or str(whole[-1].error) == str(alike[-1].error)
            continue
        if not early:
            assert whole[0].logprobs == alike[0].logprobs
        for index in range(request.params.n):
            one, other = completion(found[str(number), index]), completion(expected[str(number), index])
            if early:
                length = min(len(one[0]), len(other[0]))
                assert one[0][:length] == other[0][:length]
            else:
                assert one == other


@given(st.lists(REQUEST, min_size=2, max_size=8), st.integers(1, 20))
def test_a_failed_step_loses_its_requests_and_no_token_of_others(make, model, requests, call):
    made = [
        (
            prepared(str(number), prompt, SamplingParams(**params | {"seed": number, "time_limit_ms": None}), count),
            at,
            None,
        )
        for number, (prompt, params, count, _, _, at, _) in enumerate(requests)
    ]
    expected = run(make(replace(ON, async_scheduling="off")), made)
    step, calls = model.step, [0]

    def failing(batch):
        calls[0] += 1
        return 1 / 0 if calls[0] == call else step(batch)

    with mock.patch.object(model, "step", failing):
        found = run(make(), made)
    failed = {name for (name, _), events in found.items() if isinstance(events[-1], Failed)}
    assert len(failed) <= ON.max_sequences
    for (name, index), events in expected.items():
        if name not in failed and index >= 0:
            assert completion(found[name, index]) == completion(events)


def test_a_lost_device_ends_the_engine(make, model, monkeypatch):
    engine, step, calls = make(), model.step, []

    def lost(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise DeviceLostError("the GPU is lost")
        return step(batch)

    monkeypatch.setattr(model, "step", lost)
    engine.add(prepared("a", [5, 6, 7], GREEDY, 9))
    engine.step()
    engine.step()
    with pytest.raises(DeviceLostError):
        engine.step()
    engine.close()


class Gate:
    """A gate that lets a backend compute one step for each `open`."""

    def __init__(self, model, monkeypatch):
        self._step, self._may = model.step, threading.Semaphore(0)
        self.batches = []
        self._began = threading.Semaphore(0)
        monkeypatch.setattr(model, "step", self.step)

    def step(self, batch):
        self.batches.append(batch)
        self._began.release()
        assert self._may.acquire(timeout=WAIT)
        return self._step(batch)

    def open(self, steps=1):
        self._may.release(steps)

    def wait_for_step(self):
        assert self._began.acquire(timeout=WAIT)


@pytest.fixture
def gate(model, monkeypatch):
    return Gate(model, monkeypatch)


def test_a_step_is_computed_while_the_one_before_is_committed(make, gate, expected_hashing):
    engine = make()
    engine.add(prepared("a", [5, 6, 7], GREEDY, 3))
    gate.open()
    events = engine.step()
    gate.wait_for_step()
    gate.wait_for_step()  # the second step runs, and its input is the token of the first
    [token] = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    assert [token] == expected_hashing([5, 6, 7], 1) == gate.batches[1].input_ids.tolist()
    gate.open(9)
    while engine.has_work:
        engine.step()
    assert len(gate.batches) == 3


def test_a_request_that_comes_while_a_step_runs_joins_the_next(make, gate):
    engine = make()
    engine.add(prepared("a", [5, 6, 7], GREEDY, 4))
    waiting = threading.Thread(target=engine.step)
    waiting.start()
    gate.wait_for_step()
    engine.interrupt()
    waiting.join(WAIT)
    assert engine.interrupted
    engine.add(prepared("b", [8], GREEDY, 4))
    gate.open()
    engine.step()
    assert not engine.interrupted
    gate.wait_for_step()
    assert len(gate.batches[1].context_lens) == 2
    gate.open(9)
    while engine.has_work:
        engine.step()


def test_no_step_starts_behind_a_stop_token_or_the_last_token(make, gate, expected_hashing):
    engine = make()
    [_, second] = expected_hashing([5, 6, 7], 2)
    engine.add(prepared("a", [5, 6, 7], SamplingParams(temperature=0, stop_token_ids=(second,)), 9))
    gate.open(9)
    while engine.has_work:
        engine.step()
    engine.add(prepared("a", [5, 6, 7], GREEDY, 2))
    while engine.has_work:
        engine.step()
    engine.close()
    assert len(gate.batches) == 4


def test_a_step_of_an_ended_request_is_thrown_away(make, gate, expected_hashing):
    engine = make()
    engine.add(prepared("a", [5, 6, 7], GREEDY, 9))
    gate.open()
    engine.step()
    engine.abort("a")
    assert not engine.has_work
    assert engine.blocks.free == BLOCKS
    engine.check_integrity()
    engine.add(prepared("a", [5, 6, 7], GREEDY, 9))
    gate.open(20)
    tokens = []
    while engine.has_work:
        tokens += [token for event in engine.step() if isinstance(event, Delta) for token in event.token_ids]
    assert tokens == expected_hashing([5, 6, 7], 9)


def test_a_failed_commit_throws_away_what_is_computed_of_its_request(make, gate, monkeypatch, expected_hashing):
    engine = make()
    engine.add(prepared("bad", [1, 2, 3], GREEDY, 9))
    engine.add(prepared("good", [5, 6, 7], GREEDY, 9))
    gate.open(30)
    push = StopCondition.push
    bad = []

    def failing(stop, token, **named):
        bad.append(stop)
        return 1 / 0 if stop is bad[0] else push(stop, token, **named)

    monkeypatch.setattr(StopCondition, "push", failing)
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    assert [event.request_id for event in events if isinstance(event, Failed)] == ["bad"]
    tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    assert tokens == expected_hashing([5, 6, 7], 9)


def test_a_backend_that_samples_returns_tokens_alone_where_they_are_enough(make, model, expected_hashing):
    backend = SamplingModel(model)
    assert isinstance(backend, SamplingBackend)
    engine = make(backend=backend)
    for params, sampled in ((GREEDY, True), (SamplingParams(temperature=0, logprobs=1), False)):
        backend.steps.clear()
        engine.add(prepared("a", [5, 6, 7], params, 4))
        tokens = []
        while engine.has_work:
            tokens += [token for event in engine.step() if isinstance(event, Delta) for token in event.token_ids]
        assert tokens == expected_hashing([5, 6, 7], 4)
        assert backend.steps == [sampled] * 4


CHANGED = {
    "repetition_penalty": {"repetition_penalty": 1.3, "temperature": 1},
    "presence_penalty": {"presence_penalty": 1.5, "temperature": 1},
    "frequency_penalty": {"frequency_penalty": 0.7, "temperature": 1},
    "logit_bias": {"logit_bias": {3: 4.5, 9: -100}, "temperature": 1},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": range(0, 257, 4), "temperature": 1},
    "all": {"min_tokens": 3, "stop_token_ids": [8], "logit_bias": {8: 5, 3: 9}, "frequency_penalty": 1.1},
}


PLAIN = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": (),
    "min_tokens": 0,
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("config", [ON, replace(ON, async_scheduling="off", speculative_tokens=3)])
def test_a_backend_that_samples_is_told_of_penalties_and_biases(make, model, name, config):
    params = SamplingParams(**{"seed": 5, "n": 2, **CHANGED[name]})
    requests = [(prepared("", prompt, params, 12), at, None) for at, prompt in enumerate(([5, 6, 5], [7], [9, 9]))]
    requests += [(prepared("", [5, 6, 7, 5, 6], GREEDY, 9), 1, None)]  # a prompt that speculation can draft tokens for
    backend = SamplingModel(model)
    expected = completions(make(replace(ON, async_scheduling="off")), requests)
    assert completions(make(config, backend), requests) == expected
    assert backend.steps and all(backend.steps)
    unchanged = [(replace(request, params=replace(params, **PLAIN)), *rest) for request, *rest in requests[:3]]
    assert completions(make(), unchanged) != {key: one for key, one in expected.items() if key[0] != "3"}


def test_bad_words_are_masked_where_the_backend_samples(make, model):
    params = replace(GREEDY, ignore_eos=True)
    plain = prepared("a", [4, 5], params, 8)
    [(tokens, *_)] = completions(make(), [(plain, 0, None)]).values()
    bad_words = tuple(tokens[:2]), (tokens[3],)
    bad = replace(plain, params=replace(params, bad_words=("some", "words")), bad_word_ids=bad_words)
    [(expected, *_)] = completions(make(replace(ON, async_scheduling="off")), [(bad, 0, None)]).values()
    backend = SamplingModel(model)
    [(found, *_)] = completions(make(backend=backend), [(bad, 0, None)]).values()
    assert found == expected and all(backend.steps)
    assert found[0] == tokens[0] and found[1] != tokens[1] and tokens[3] not in found


def test_more_changes_than_a_backend_takes_are_made_on_the_host(make, model, monkeypatch):
    requests = [(prepared("", [5, 6, 7], SamplingParams(seed=1, repetition_penalty=1.2), 6), 0, None)]
    expected = completions(make(), requests)
    monkeypatch.setattr("sharp.serving.engine.step.MOST_CHANGES", 5)
    backend = SamplingModel(model)
    assert completions(make(backend=backend), requests) == expected
    assert backend.steps[0] and not backend.steps[-1]


@pytest.mark.parametrize(("setting", "device", "ahead"), [("auto", "cpu", 0), ("auto", "cuda", 1), ("off", "cuda", 0)])
def test_auto_is_for_gpus(make, model, gate, monkeypatch, setting, device, ahead):
    monkeypatch.setattr(type(model), "device", device)
    engine = make(replace(ON, async_scheduling=setting))
    engine.add(prepared("a", [5, 6, 7], GREEDY, 4))
    gate.open(9)
    engine.step()
    engine.close()
    assert len(gate.batches) == 1 + ahead


def submit(thread, name, prompt, count):
    """Submit a request, and return a queue that gets its events."""
    events = queue.Queue()
    thread.submit(prepared(name, prompt, GREEDY, count), events.put)
    return events


def tokens_of(events):
    """Return the tokens of a request once it has ended."""
    tokens = []
    while not isinstance(event := events.get(timeout=WAIT), Finished | Failed):
        tokens += event.token_ids if isinstance(event, Delta) else ()
    return tokens


@pytest.fixture
def start(make):
    threads = []

    def started(engine):
        threads.append(EngineThread(engine, lambda report: None))
        threads[-1].start()
        return threads[-1]

    yield started
    for thread in threads:
        thread.stop()


def test_requests_that_come_do_not_hide_a_step_that_does_not_end(make, gate, start):
    thread = start(make())
    first = submit(thread, "a", [5, 6, 7], 4)
    gate.wait_for_step()
    began = thread._step_began
    second = submit(thread, "b", [8], 4)
    assert isinstance(second.get(timeout=WAIT), Accepted)
    thread.ping().result(WAIT)
    assert thread._step_began == began
    assert thread.seconds_in_step > 0
    gate.open(20)
    assert len(tokens_of(first)) == len(tokens_of(second)) == 4


def test_requests_of_many_threads_that_come_and_go(make, start, expected_hashing):
    engine = make()
    thread = start(engine)
    found = {}

    def client(number):
        for turn in range(6):
            name = f"{number}/{turn}"
            events = submit(thread, name, [number, turn, 9], 8)
            if (number + turn) % 3 == 0:
                thread.abort(name)
            found[number, turn] = tokens_of(events)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for worker in clients:
        worker.start()
    for worker in clients:
        worker.join(WAIT)
    assert len(found) == 36
    for (number, turn), tokens in found.items():
        expected = expected_hashing([number, turn, 9], 8)
        assert tokens == (expected if (number + turn) % 3 else expected[: len(tokens)])
    thread.stop()
    assert engine.blocks.free == BLOCKS


def test_an_engine_that_nobody_has_any_more_takes_its_thread_with_it(make, model):
    engine = make()
    engine.add(prepared("a", [5, 6, 7], GREEDY, 3))
    while engine.has_work:
        engine.step()
    engine.close()
    thread, gone = engine._runner._thread, weakref.ref(engine)
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(WAIT)
    assert gone() is None
    assert not thread.is_alive()
