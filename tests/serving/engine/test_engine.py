from dataclasses import replace
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.core.manifest import read_manifest
from sharp.serving import SamplingParams
from sharp.serving.api.errors import AlreadyExistsError, EngineError
from sharp.serving.api.events import Delta, Failed, Finished, PromptComputed
from sharp.serving.backends import load_backend
from sharp.serving.backends.cache_size import bytes_per_block, cache_blocks
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.engine import Engine
from sharp.serving.engine.sequence import Sequence
from sharp.serving.engine.speculation import PromptLookup
from tests.serving.running_engine import prepared

BLOCKS = 10  # blocks of 4 tokens
LIMITS = EngineConfig(max_batch_tokens=7, max_sequences=4, attention_interval=1)


class Harness:
    """An engine that is checked after every step, and a record of its events."""

    def __init__(self, backend, manifest, tokenizer=None, blocks=BLOCKS, config=LIMITS):
        self.engine = Engine(backend, manifest, tokenizer, blocks, config)
        self.tokens, self.finished, self.failed, self.prompts, self.reports = {}, {}, {}, {}, []

    def add(self, name, prompt, max_new_tokens, params=None, **fields):
        params = params or SamplingParams(temperature=0)
        self.engine.add(prepared(name, prompt, params, max_new_tokens, **fields))
        self.prompts.pop(name, None)
        self.tokens |= {key(name, index): [] for index in range(params.n)}

    def take(self, events):
        for event in events:
            if isinstance(event, Delta):
                self.tokens[key(event.request_id, event.index)].extend(event.token_ids)
            elif isinstance(event, PromptComputed):
                assert event.request_id not in self.prompts
                self.prompts[event.request_id] = event
            elif isinstance(event, Finished):
                self.finished[key(event.request_id, event.index)] = event
            elif isinstance(event, Failed):
                self.failed[event.request_id] = event.error
        self.engine.check_integrity()
        self.reports.append(self.engine.report())

    def step(self, steps=1):
        for _ in range(steps):
            self.take(self.engine.step())

    def run(self, steps=10_000):
        while self.engine.has_work and steps:
            self.step()
            steps -= 1
        assert steps, "the engine makes no progress"
        assert self.engine.blocks.free == self.engine.blocks.blocks
        return self.tokens

    def total(self, field):
        return sum(getattr(report, field) for report in self.reports)


def key(name, index):
    """Return a key for a sequence of a request; the first sequence has the name of its request."""
    return f"{name}/{index}" if index else name


@pytest.fixture(scope="module")
def harness(hashing):
    manifest = read_manifest(hashing)
    manifest = manifest.model_copy(update={"tokenizer": manifest.tokenizer.model_copy(update={"eos_token_ids": ()})})
    backend = load_backend(hashing, manifest, BackendConfig(threads=1, kernels=False))
    return lambda **settings: Harness(backend, manifest, **settings)


# Prompts share their beginnings, so that the prefix cache has hits.
STARTS = [np.random.default_rng(seed).integers(0, 256, 20).tolist() for seed in range(2)]
PROMPT = st.builds(
    lambda start, cut, end: [*STARTS[start][:cut], *end][:20] or [7],
    st.integers(0, 1),
    st.integers(0, 20),
    st.lists(st.integers(0, 255), max_size=6),
)
REQUEST = st.fixed_dictionaries(
    {
        "arrival": st.integers(0, 12),  # the step before which the request arrives
        "prompt": PROMPT,
        "count": st.integers(0, 20),  # the limit of new tokens; with the prompt, 40 tokens fill the cache exactly
        "temperature": st.sampled_from([0, 0.7, 1.5]),
        "abort": st.one_of(st.none(), st.none(), st.integers(0, 25)),  # the step before which the request is aborted
        "priority": st.sampled_from([0, 0, -1, 1]),
        "cache_salt": st.sampled_from(["", "", "other"]),
        "n": st.sampled_from([1, 1, 1, 3]),
        "prompt_logprobs": st.sampled_from([None, None, 2]),
        "repetition_penalty": st.sampled_from([1, 1, 1.3]),
        "stop_token_ids": st.sampled_from([(), (), tuple(range(0, 257, 8))]),
        "min_tokens": st.sampled_from([0, 0, 3]),
    }
)


def params_of(request, number):
    others = ("arrival", "prompt", "count", "abort", "priority", "cache_salt")
    return SamplingParams(seed=number, **{name: value for name, value in request.items() if name not in others})


@given(
    st.lists(REQUEST, min_size=1, max_size=8),
    st.sampled_from([LIMITS, replace(LIMITS, prefill_chunk_tokens=2), replace(LIMITS, prefix_cache=False)]),
    st.integers(0, 6),
)
def test_tokens_are_the_same_alone_and_under_any_schedule(harness, requests, config, wrong):
    """Tokens are the same for a request alone and under any schedule.

    Draft tokens are right up to index `wrong`. They come from an oracle, because real drafts would hardly ever be
    right.
    """
    apart = [harness(config=replace(config, speculative_tokens=0)) for _ in requests]
    for number, (one, request) in enumerate(zip(apart, requests, strict=True)):
        one.add("alone", request["prompt"], request["count"], params_of(request, number))
        one.run()
    texts = [
        [*request["prompt"], *tokens]
        for one, request in zip(apart, requests, strict=True)
        for tokens in one.tokens.values()
    ]

    def draft(history, most):
        said = history._tokens[: history._count].tolist()
        following = next((text[len(said) :] for text in texts if text[: len(said)] == said), [])[:most]
        following[wrong:] = [0] * (len(following) - wrong)
        return following

    with mock.patch.object(PromptLookup, "draft", draft):
        check_schedule(harness, requests, config, apart)


def check_schedule(harness, requests, config, apart):
    """Assert that requests under a schedule get the tokens and statistics of `apart`, engines with one request each."""
    together = harness(config=config)
    for step in range(30):
        for number, request in enumerate(requests):
            if request["arrival"] == step:
                fields = {name: request[name] for name in ("priority", "cache_salt")}
                together.add(str(number), request["prompt"], request["count"], params_of(request, number), **fields)
            if request["abort"] == step:
                together.take(together.engine.abort(str(number)))
        if together.engine.has_work:
            together.step()
    together.run()
    assert not together.failed
    rows = 0
    for number, request in enumerate(requests):
        alone = apart[number]
        rows += len(request["prompt"])
        for index in range(request["n"]):
            finished, alike = together.finished[key(str(number), index)], alone.finished[key("alone", index)]
            tokens, expected = together.tokens[key(str(number), index)], alone.tokens[key("alone", index)]
            if finished.reason == "cancelled":
                assert request["abort"] is not None
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, finished.reason, finished.matched) == (expected, alike.reason, alike.matched)
                assert together.prompts[str(number)].logprobs == alone.prompts["alone"].logprobs
            rows += max(len(expected) - 1, 0)
    observed = sum(len(rows.positions) for report in together.reports for rows in report.attention)
    # Every token is observed at most once, even if a preempted request computes the token again, and exactly once if no
    # request uses blocks of another request.
    nothing_shared = not config.prefix_cache and all(request["abort"] is None for request in requests)
    assert observed == rows if nothing_shared else observed <= rows


def test_tokens_follow_the_formula(harness, expected_hashing):
    one = harness()
    one.add("a", [5, 6, 7, 8, 9, 10, 11, 12, 13], 12)
    assert one.run()["a"] == expected_hashing([5, 6, 7, 8, 9, 10, 11, 12, 13], 12)


def test_requests_join_a_running_batch(harness):
    both = harness()
    both.add("first", [1] * 3, 10)
    both.step()
    both.add("second", [2] * 3, 2)
    both.step()
    assert (len(both.tokens["first"]), len(both.tokens["second"])) == (2, 1)


def test_a_long_prompt_is_computed_in_chunks_while_others_decode(harness):
    both = harness()
    both.add("decoding", [1], 12)
    both.step()
    both.add("long", range(20), 1)
    both.step(3)
    # The budget is 7: every step computes one token of the first request and six of the second, so 20 tokens take four
    # steps.
    assert (len(both.tokens["decoding"]), len(both.tokens["long"])) == (4, 0)
    both.step()
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
    one.step()
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
        some.step()
    assert list(some.failed) == ["running", "waiting 0"]  # the requests that the budget of 7 let in
    assert all(isinstance(error, EngineError) for error in some.failed.values())
    assert some.engine.blocks.free == BLOCKS
    some.run()
    assert sorted(some.finished) == ["waiting 1", "waiting 2", "waiting 3"]
    reasons = [ended.reason for report in some.reports for ended in report.finished]
    assert sorted(reasons) == ["error"] * 2 + ["length"] * 3


def test_a_step_that_cannot_be_planned_loses_what_runs_and_nothing_else(harness, monkeypatch):
    """If a step cannot be planned, the running requests fail and the waiting requests go on.

    The error does not say which request caused it.
    """
    several = harness(config=replace(LIMITS, max_sequences=2))
    for name in ("first", "second", "waiting"):
        several.add(name, [5, 6, 7], 4)
    several.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(BlockManager, "missing", lambda *_: 1 / 0)
        several.step()
    assert set(several.failed) == {"first", "second"}
    assert "a step of the engine failed: division by zero" in str(several.failed["first"])
    several.run()
    assert len(several.tokens["waiting"]) == 4


def test_an_error_without_words_is_named(harness, monkeypatch):
    """An error without a message is named by its type.

    Once a client read "a step of the engine failed: " without a reason.
    """
    some = harness()
    some.add("first", [5, 6, 7], 4)
    monkeypatch.setattr(some.engine._backend, "step", Mock(side_effect=MemoryError))
    some.step()
    assert str(some.failed["first"]) == "a step of the engine failed: MemoryError"


def test_a_request_that_can_never_be_planned_does_not_hold_up_the_others(harness, monkeypatch):
    cacheable = Sequence.cacheable.fget

    def fails_for_one(sequence):
        return 1 / 0 if sequence.request_id == "bad" else cacheable(sequence)

    monkeypatch.setattr(Sequence, "cacheable", property(fails_for_one))
    several = harness()
    several.add("bad", [5, 6, 7], 4)
    several.add("good", [5, 6, 7], 4)
    several.run()
    assert set(several.failed) == {"bad"}
    assert len(several.tokens["good"]) == 4


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
        some.step()
    assert list(some.failed) == ["bad"]
    assert "not finite" in str(some.failed["bad"])
    some.run()
    assert list(some.finished) == ["good"]
    assert some.engine.blocks.free == BLOCKS


def test_steps_that_fail_in_a_row_are_counted_until_one_does_not(harness):
    """Failed steps in a row are counted, because health fails for a model that gives NaN to every request."""
    run = harness()
    step = run.engine._backend.step

    def broken(batch):
        result = step(batch)
        result.logits[:] = np.nan
        return result

    for expected in (1, 2):
        run.add(f"broken {expected}", [1, 2, 3], 4)
        with mock.patch.object(run.engine._backend, "step", broken):
            run.run()
        assert run.engine.failed_steps == expected
    run.add("whole", [1, 2, 3], 2)
    run.run()
    assert run.engine.failed_steps == 0


def test_a_gpus_cache_takes_its_share_of_the_memory(hashing):
    manifest = read_manifest(hashing)
    each = bytes_per_block(manifest)
    assert cache_blocks(manifest, None, 100 * each, "cuda", EngineConfig(gpu_memory_share=0.5)) == 50
    assert cache_blocks(manifest, None, each, "cuda", EngineConfig(gpu_memory_share=0.5)) == 1


@pytest.mark.parametrize("field", ["logits", "stats"])
def test_an_output_of_another_size_fails_its_step_and_not_the_engine(harness, monkeypatch, field):
    running = harness()
    backend = running.engine._backend
    step = backend.step

    def short(batch):
        monkeypatch.setattr(backend, "step", step)
        output = step(batch)
        changed = output.logits[:0] if field == "logits" else output.stats[:, :0]
        return replace(output, **{field: changed})

    running.add("hit", [1, 2, 3], 4)
    monkeypatch.setattr(backend, "step", short)
    running.run()
    assert "the model returned" in str(running.failed["hit"])
    running.add("next", [1, 2, 3], 4)
    assert len(running.run()["next"]) == 4


def test_statistics_without_memory_fail_their_step_and_not_the_engine(harness):
    running = harness()
    running.add("hit", [1, 2, 3], 4)
    with mock.patch("sharp.serving.engine.engine.AttentionRows", side_effect=MemoryError):
        running.step()
    assert isinstance(running.failed["hit"], EngineError)
    running.add("next", [1, 2, 3], 4)
    assert len(running.run()["next"]) == 4
