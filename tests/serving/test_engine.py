from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharp.plugins.manifest import read_manifest
from sharp.serving import SamplingParams
from sharp.serving.backends import load_backend
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.engine import Engine
from sharp.serving.engine.events import Delta, Failed, Finished
from sharp.serving.errors import AlreadyExistsError, EngineError
from sharp.serving.request import Request

BLOCKS = 10  # of 4 tokens
LIMITS = EngineConfig(max_batch_tokens=7, max_sequences=4, attention_interval=1)


class Harness:
    """An engine that is checked after every step, and the tokens that came out of it."""

    def __init__(self, backend, manifest, blocks=BLOCKS, config=LIMITS):
        self.engine = Engine(backend, manifest, None, blocks, config)
        self.tokens, self.finished, self.failed, self.reports = {}, {}, {}, []

    def add(self, name, prompt, max_new_tokens, params=None, attention=False):
        self.engine.add(
            Request(name, tuple(prompt), params or SamplingParams(temperature=0), max_new_tokens, attention)
        )
        self.tokens[name] = []

    def take(self, events):
        for event in events:
            if isinstance(event, Delta):
                self.tokens[event.request_id].extend(event.token_ids)
            elif isinstance(event, Finished):
                self.finished[event.request_id] = event
            elif isinstance(event, Failed):
                self.failed[event.request_id] = event.error
        self.engine.blocks.check_integrity()
        self.reports.append(self.engine.report())

    def run(self, steps=10_000):
        while self.engine.has_work and steps:
            self.take(self.engine.step())
            steps -= 1
        assert steps, "the engine makes no progress"
        assert self.engine.blocks.free == self.engine.blocks.blocks
        return self.tokens


@pytest.fixture(scope="module")
def harness(hashing):
    manifest = read_manifest(hashing)
    manifest = manifest.model_copy(update={"tokenizer": manifest.tokenizer.model_copy(update={"eos_token_ids": ()})})
    backend = load_backend(hashing, manifest, BackendConfig(threads=1, kernels=False))
    return lambda **settings: Harness(backend, manifest, **settings)


REQUEST = st.tuples(
    st.integers(0, 12),  # the step before which it arrives
    st.lists(st.integers(0, 255), min_size=1, max_size=20),
    st.integers(0, 20),  # most new tokens: 40 tokens with the prompt fill the cache exactly
    st.sampled_from([0, 0.7, 1.5]),
    st.one_of(st.none(), st.integers(0, 25)),  # the step before which it is aborted
)


@settings(max_examples=150, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=8))
def test_tokens_are_the_same_alone_and_under_any_schedule(harness, requests):
    together = harness()
    for step in range(30):
        for number, (arrival, prompt, count, temperature, abort) in enumerate(requests):
            if arrival == step:
                together.add(str(number), prompt, count, SamplingParams(temperature=temperature, seed=number))
            if abort == step:
                together.take(together.engine.abort(str(number)))
        if together.engine.has_work:
            together.take(together.engine.step())
    together.run()
    rows = 0
    for number, (_, prompt, count, temperature, abort) in enumerate(requests):
        alone = harness()
        alone.add("alone", prompt, count, SamplingParams(temperature=temperature, seed=number))
        expected = alone.run()["alone"]
        answer = together.tokens[str(number)]
        reason = together.finished[str(number)].reason
        assert reason == "length" or (reason == "cancelled" and abort is not None)
        assert answer == expected[: len(answer)]
        if reason == "length":
            assert answer == expected
            rows += len(prompt) + max(count - 1, 0)
    observed = sum(len(rows.positions) for report in together.reports for rows in report.attention)
    cancelled = any(finished.reason == "cancelled" for finished in together.finished.values())
    # Every token is observed once, also when a preempted request computes it again.
    assert observed >= rows if cancelled else observed == rows


def test_answers_follow_the_formula(harness, expected_hashing):
    one = harness()
    one.add("a", [5, 6, 7, 8, 9, 10, 11, 12, 13], 12)
    assert one.run()["a"] == expected_hashing([5, 6, 7, 8, 9, 10, 11, 12, 13], 12)


def test_requests_join_a_running_batch(harness):
    both = harness()
    both.add("first", [1] * 3, 10)
    both.take(both.engine.step())
    both.add("second", [2] * 3, 2)
    both.take(both.engine.step())
    assert (len(both.tokens["first"]), len(both.tokens["second"])) == (2, 1)


def test_a_long_prompt_is_computed_in_chunks_while_others_decode(harness):
    both = harness()
    both.add("decoding", [1], 12)
    both.take(both.engine.step())
    both.add("long", range(20), 1)
    for _ in range(3):
        both.take(both.engine.step())
    # A budget of 7: one token of the first and six of the second in every step, so 20 take four steps.
    assert (len(both.tokens["decoding"]), len(both.tokens["long"])) == (4, 0)
    both.take(both.engine.step())
    assert (len(both.tokens["decoding"]), len(both.tokens["long"])) == (5, 1)


def test_the_youngest_is_preempted_and_finishes_later(harness):
    both = harness()
    both.add("old", [1] * 15, 25)
    both.add("young", [2] * 15, 25)
    both.run()
    assert sum(report.preemptions for report in both.reports) >= 1
    assert list(both.finished) == ["old", "young"]
    assert {len(tokens) for tokens in both.tokens.values()} == {25}


def test_first_come_first_served(harness):
    several = harness()
    for number in range(6):
        several.add(str(number), [number] * 6, 3)
    several.run()
    assert list(several.finished) == sorted(several.finished)


def test_abort_frees_the_blocks_at_once(harness):
    one = harness()
    one.add("a", [1] * 6, 30)
    one.take(one.engine.step())
    assert one.engine.blocks.free < BLOCKS
    one.take(one.engine.abort("a"))
    assert one.engine.blocks.free == BLOCKS
    assert (one.finished["a"].reason, one.engine.abort("a")) == ("cancelled", [])


def test_an_id_is_unique_while_its_request_runs(harness):
    one = harness()
    one.add("a", [1], 1)
    with pytest.raises(AlreadyExistsError, match="'a' belongs to a request"):
        one.add("a", [1], 1)
    one.run()
    one.add("a", [1], 1)
    one.run()


def test_a_failed_step_loses_its_requests_and_nothing_else(harness, monkeypatch):
    some = harness()
    some.add("running", [1] * 6, 3)
    for number in range(4):
        some.add(f"waiting {number}", [number] * 6, 3)
    with monkeypatch.context() as patch:
        patch.setattr(some.engine._backend, "step", lambda batch: 1 / 0)
        some.take(some.engine.step())
    assert list(some.failed) == ["running", "waiting 0"]  # what the budget of 7 let in
    assert all(isinstance(error, EngineError) for error in some.failed.values())
    assert some.engine.blocks.free == BLOCKS
    some.run()
    assert sorted(some.finished) == ["waiting 1", "waiting 2", "waiting 3"]
    reasons = [reason for report in some.reports for reason, _ in report.finished]
    assert sorted(reasons) == ["error"] * 2 + ["length"] * 3


def test_a_request_whose_logits_are_no_numbers_fails_alone(harness, monkeypatch):
    some = harness()
    some.add("good", [1] * 3, 3)
    some.add("bad", [2] * 3, 3)
    step = some.engine._backend.step

    def spoil_the_last_row(batch):
        output = step(batch)
        logits = output.logits.copy()
        logits[-1] = np.nan
        return replace(output, logits=logits)

    with monkeypatch.context() as patch:
        patch.setattr(some.engine._backend, "step", spoil_the_last_row)
        some.take(some.engine.step())
    assert list(some.failed) == ["bad"]
    assert "not finite" in str(some.failed["bad"])
    some.run()
    assert list(some.finished) == ["good"]
    assert some.engine.blocks.free == BLOCKS


def test_blocks_that_are_lost_or_handed_out_twice_are_found():
    blocks = BlockManager(4, 16)
    blocks.grow("a", 33)
    blocks.check_integrity()
    assert (blocks.table("a").tolist(), blocks.free, blocks.usage) == ([0, 1, 2], 1, 0.75)
    blocks._free.append(0)
    with pytest.raises(RuntimeError, match="block accounting"):
        blocks.check_integrity()
