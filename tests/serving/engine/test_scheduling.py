"""Scheduling: chunks, priorities, shared prompts, limits of time, and limits of the queue."""

from dataclasses import replace

import numpy as np
import pytest

from sharp.core.manifest import read_manifest
from sharp.serving import SamplingParams
from sharp.serving.api.errors import QueueFullError
from sharp.serving.api.events import Delta, Failed, Finished, PromptComputed
from sharp.serving.backends import load_backend
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine import scheduler
from sharp.serving.engine.engine import Engine
from sharp.serving.text.stop_condition import StopCondition
from sharp.serving.text.tokenizer import Tokenizer


def test_a_long_prompt_takes_small_chunks_while_others_decode_and_large_ones_alone(start_engine):
    running = start_engine(prefill_chunk_tokens=3)
    running.add("decoding", [1], 4)
    running.step()
    running.add("long", range(40), 1)
    running.run()
    assert running.chunks() == [[1], [1, 3], [1, 3], [1, 3], [16], [15]]


def test_a_short_prompt_is_computed_beside_a_long_one(start_engine):
    """A short prompt is computed beside a long prompt.

    Half of the budget is for short prompts, even behind another long prompt. The other half is for the first long
    prompt.
    """
    running = start_engine(prefill_chunk_tokens=4)
    running.add("decoding", [1], 30)
    running.step()
    for name, tokens in (("first", 40), ("second", 35), ("short", 6), ("shorter", 3)):
        running.add(name, range(tokens), 1)
    running.run()
    assert running.order() == ["short", "shorter", "first", "second", "decoding"]
    assert running.chunks()[1:7] == [[1, 2, 2], [1, 2, 2], [1, 2, 2], [1, 2, 2], [1, 4, 1], [1, 4]]


def test_a_short_prompt_of_a_worse_priority_waits(start_engine):
    running = start_engine(prefill_chunk_tokens=4)
    running.add("decoding", [1], 30)
    running.step()
    running.add("first", range(40), 1)
    running.add("short", [1, 2], 1, priority=1)
    running.run()
    assert running.order() == ["first", "short", "decoding"]


def test_short_prompts_share_a_step(start_engine):
    running = start_engine()
    for number in range(3):
        running.add(str(number), range(number, number + 5), 1)
    running.run()
    assert running.chunks() == [[5, 5, 5]]


def test_few_completions_of_a_long_prompt_join_in_one_step(start_engine, monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_JOINING_BLOCKS", 3)
    running = start_engine()
    running.add("long", range(8), 20, SamplingParams(temperature=0, n=4))  # two blocks for each sequence
    joined = []
    for _ in range(4):
        running.step()
        joined.append(len(running.engine.scheduler.running))
    assert joined == [1, 3, 4, 4]  # the first sequence reads the prompt
    running.run()
    assert [running.tokens("long", index) for index in range(4)] == [running.tokens("long")] * 4


def test_a_better_priority_goes_first(start_engine):
    running = start_engine(max_sequences=1)
    for name, priority in (("last", 5), ("second", 0), ("third", 0), ("first", -1)):
        running.add(name, [1], 2, priority=priority)
    running.run()
    assert running.order() == ["first", "second", "third", "last"]


def test_a_better_priority_takes_the_place_of_a_running_request_and_nothing_is_lost(start_engine):
    running = start_engine(max_sequences=1)
    running.add("low", [1], 8, priority=1)
    running.step(3)
    running.add("same", [1], 1, priority=1)
    running.add("high", [50], 2, priority=0)
    running.run()
    assert running.order() == ["high", "low", "same"]
    assert running.tokens("low") == list(range(2, 10))
    assert running.engine.report().preemptions == 1


def test_a_better_priority_takes_blocks(start_engine):
    running = start_engine(blocks=4)  # 16 tokens
    running.add("low", range(10), 6, priority=1)
    running.step()
    running.add("high", range(50, 60), 2)
    running.run()
    assert running.order() == ["high", "low"]
    assert running.tokens("low") == list(range(10, 16))


def test_a_preempted_request_computes_only_what_the_cache_lost(start_engine):
    running = start_engine(max_sequences=1)
    running.add("low", range(12), 4, priority=1)
    running.step()
    running.add("high", [200], 1)
    running.run()
    # Three full blocks of the low request's 13 tokens are still cached.
    assert running.chunks() == [[12], [1], [1], [1], [1]]


def test_a_second_request_computes_only_what_is_new(start_engine):
    running = start_engine()
    running.add("a", range(11), 1)
    running.run()
    running.add("b", [*range(10), 77, 78], 1)
    running.run()
    assert running.chunks() == [[11], [4]]  # two blocks of four tokens are shared
    assert [computed.cached_tokens for computed in running.of(PromptComputed)] == [0, 8]
    assert [finished.usage.cached_tokens for finished in running.of(Finished)] == [0, 8]
    report = running.engine.report()
    assert (report.prefix_cache_queries, report.prefix_cache_hits) == (11 + 12, 8)


def test_the_last_token_of_a_known_prompt_is_computed_for_its_logits(start_engine):
    running = start_engine()
    for name in ("a", "b"):
        running.add(name, range(8), 2)
        running.run()
    assert running.chunks() == [[8], [1], [4], [1]]
    assert running.tokens("a") == running.tokens("b") == [8, 9]


def test_completions_are_in_the_prefix_cache_too(start_engine):
    running = start_engine()
    running.add("turn 1", range(5), 8)
    running.run()
    running.add("turn 2", [*range(13), 99], 1)
    running.run()
    assert running.of(PromptComputed, "turn 2")[0].cached_tokens == 12


@pytest.mark.parametrize(("config", "salts"), [({}, ("mine", "yours")), ({"prefix_cache": False}, ("", ""))])
def test_nothing_is_shared_between_salts_or_without_a_prefix_cache(start_engine, config, salts):
    running = start_engine(**config)
    for name, salt in zip("ab", salts, strict=True):
        running.add(name, range(8), 1, cache_salt=salt)
        running.run()
    assert running.chunks() == [[8], [8]]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_n_sequences_compute_their_prompt_once(start_engine, prefix_cache):
    running = start_engine(prefix_cache=prefix_cache)
    running.add("a", range(10), 3, SamplingParams(n=3, seed=5))
    running.run()
    # The prompt's ten tokens are computed once. Every other sequence then computes the two tokens that fill no block.
    assert running.chunks()[:2] == [[10], [1, 2, 2]]
    assert [(finished.index, finished.last) for finished in running.of(Finished)] == [(0, False), (1, False), (2, True)]
    assert [finished.usage.completion_tokens for finished in running.of(Finished)] == [3, 3, 3]
    assert len(running.of(PromptComputed)) == 1
    assert running.engine.report().prompt_tokens == 10


def test_n_sequences_are_sampled_differently_and_repeatably(start_engine):
    running = start_engine()
    params = SamplingParams(n=4, seed=5, temperature=3)
    for name in ("a", "b"):
        running.add(name, range(10), 12, params)
        running.run()
    first = [running.tokens("a", index) for index in range(4)]
    assert first == [running.tokens("b", index) for index in range(4)]
    assert len({tuple(tokens) for tokens in first}) == 4


def test_abort_ends_every_sequence(start_engine):
    running = start_engine()
    running.add("a", range(20), 9, SamplingParams(n=3))
    running.step()  # the prompt is not complete, so two sequences wait for it
    running.events += running.engine.abort("a")
    running.engine.check_integrity()
    assert [(finished.reason, finished.index, finished.last) for finished in running.of(Finished)] == [
        ("cancelled", 0, False),
        ("cancelled", 1, False),
        ("cancelled", 2, True),
    ]
    assert not running.engine.has_work


def test_abort_gives_the_text_that_was_held_back(start_engine):
    running = start_engine()
    running.add("a", b"abc", 50, SamplingParams(temperature=0, stop=["fgh!"]))
    running.step(5)
    running.events += running.engine.abort("a")
    assert "".join(delta.text for delta in running.of(Delta)) == "defgh"
    assert [finished.reason for finished in running.of(Finished)] == ["cancelled"]


def test_one_sequence_that_fails_ends_its_request(start_engine, monkeypatch):
    running = start_engine()
    running.add("a", range(4), 9, SamplingParams(n=2, temperature=0))
    running.step(2)
    step = running.engine._backend.step

    def spoil(batch):
        output = step(batch)
        return replace(output, logits=output.logits * np.array([[np.nan], [1]], np.float32))

    with monkeypatch.context() as patch:
        patch.setattr(running.engine._backend, "step", spoil)
        running.step()
    assert len(running.of(Failed)) == 1
    assert not running.engine.has_work


def test_blocks_of_logits_that_are_no_numbers_are_never_shared(start_engine, monkeypatch):
    running = start_engine()
    running.add("bad", range(12), 9)
    step = running.engine._backend.step
    with monkeypatch.context() as patch:
        patch.setattr(
            running.engine._backend, "step", lambda batch: replace(step(batch), logits=np.full((1, 257), np.nan))
        )
        running.step()
    assert len(running.of(Failed)) == 1
    running.add("good", range(12), 1)
    running.run()
    assert running.of(PromptComputed, "good")[0].cached_tokens == 0


def test_a_request_whose_text_cannot_be_made_fails_alone(start_engine, monkeypatch):
    running = start_engine()
    running.add("good", b"x", 3)
    running.add("bad", b"a", 3)
    decode = Tokenizer.decode

    def break_on_c(self, token_ids, **fields):
        return decode(self, token_ids, **fields) if ord("c") not in token_ids else 1 / 0

    monkeypatch.setattr(Tokenizer, "decode", break_on_c)
    running.run()
    assert running.order() == ["good"]
    assert [str(failed.error) for failed in running.of(Failed, "bad")] == ["the request failed: division by zero"]


@pytest.mark.parametrize("ending", ["abort", "time limit"])
def test_text_that_cannot_be_made_at_the_end_fails_its_request_alone(start_engine, monkeypatch, clock, ending):
    running = start_engine()
    running.add("a", [1], 9, SamplingParams(temperature=0, n=2, time_limit_ms=500))
    running.add("b", [2], 9)
    running.step(3)
    with monkeypatch.context() as broken:
        broken.setattr(StopCondition, "flush", lambda stop: 1 / 0)
        if ending == "abort":
            running.events += running.engine.abort("a")
        else:
            clock.now += 1
            running.step()
    running.run()
    assert [str(failed.error) for failed in running.of(Failed)] == ["the request failed: division by zero"]
    assert running.tokens("b") == list(range(3, 12))


def test_blocks_of_a_failed_step_are_never_shared(start_engine, monkeypatch):
    running = start_engine()
    running.add("lost", range(12), 9)
    with monkeypatch.context() as patch:
        patch.setattr(running.engine._backend, "step", lambda batch: 1 / 0)
        running.step()
    running.add("good", range(12), 1)
    running.run()
    assert running.of(PromptComputed, "good")[0].cached_tokens == 0


def test_the_time_limit_ends_a_completion_with_what_there_is(start_engine, clock):
    running = start_engine()
    running.add("a", b"abc", 50, SamplingParams(temperature=0, time_limit_ms=500, stop=["fgh!"]))
    running.step(4)
    clock.now += 0.499
    running.step()
    clock.now += 0.002
    running.step()
    (finished,) = running.of(Finished)
    assert (finished.reason, finished.usage.completion_tokens) == ("time_limit", 5)
    assert "".join(delta.text for delta in running.of(Delta)) == "defgh"  # the text that was held back is shown
    assert not running.engine.has_work


def test_times_count_from_the_arrival_and_each_request_has_its_own(start_engine, clock):
    """Durations count from the arrival of each request, in its events and in the report.

    One request runs at once, and one waits.
    """
    running = start_engine(max_sequences=1)
    running.add("first", [1], 2)
    clock.now += 1
    running.add("waits", [1], 2)
    clock.now += 2
    for _ in range(4):
        running.step()
        clock.now += 4
    times = {finished.request_id: finished.timing for finished in running.of(Finished)}
    assert {name: (one.queue, one.time_to_first_token, one.total) for name, one in times.items()} == {
        "first": (3, 3, 7),
        "waits": (10, 10, 14),
    }
    report = running.engine.report()
    assert [(duration.request_id, duration.seconds) for duration in report.queue] == [("first", 3), ("waits", 10)]
    assert [(duration.request_id, duration.seconds) for duration in report.first_token] == [("first", 3), ("waits", 10)]
    assert [(duration.request_id, duration.seconds) for duration in report.inter_token] == [("first", 4), ("waits", 4)]
    assert [(duration.request_id, duration.seconds) for duration in report.finished] == [("first", 7), ("waits", 14)]


def test_the_time_limit_counts_while_a_request_waits(start_engine, clock):
    running = start_engine(max_sequences=1)
    running.add("first", [1], 9)
    running.add("waits", [1], 9, SamplingParams(n=2, time_limit_ms=10))
    clock.now += 1
    running.step()
    assert [(finished.reason, finished.last, finished.timing.queue) for finished in running.of(Finished)] == [
        ("time_limit", False, None),
        ("time_limit", True, None),
    ]


def test_what_waits_of_a_request_that_began_counts_once_each(start_engine):
    """The waiting sequences of a request that began count once each in the queue's limit.

    Two of three sequences wait, so two more of four have room, and then none.
    """
    running = start_engine(max_sequences=1, max_waiting_requests=4)
    running.add("began", [1], 9, SamplingParams(temperature=0, n=3))
    running.step(2)
    running.add("fits", [1], 1, SamplingParams(temperature=0, n=2))
    with pytest.raises(QueueFullError, match="4 sequences wait already; the limit is 4"):
        running.add("more", [1], 1)


def test_a_full_queue_refuses_with_a_time_to_come_back(start_engine, clock):
    running = start_engine(max_sequences=1, max_waiting_requests=3)
    running.add("runs", [1], 3)
    running.step()
    for number in range(3):
        running.add(str(number), [1], 1)
    with pytest.raises(QueueFullError, match=r"3 sequences wait .*; the limit is 3; try again in 1\.0 s") as caught:
        running.add("more", [1], 1)
    assert caught.value.retry_after == 1  # the rate is not known yet
    clock.now += 4
    running.step(3)  # one more request was admitted
    running.add("fits", [1], 1)
    with pytest.raises(QueueFullError) as caught:
        running.add("too many", [1], 1, SamplingParams(n=4))
    # Two requests were admitted in 4 s. Three wait and four would join, which is four too many.
    assert caught.value.retry_after == 8
    running.run()
    assert len(running.of(Finished)) == 5


def test_the_queue_counts_tokens_and_sequences(start_engine):
    running = start_engine(max_waiting_tokens=20, max_waiting_requests=5)
    running.add("a", range(15), 1)
    with pytest.raises(QueueFullError, match="15 prompt tokens wait already; the limit is 20"):
        running.add("b", range(6), 1)
    with pytest.raises(QueueFullError, match="15 prompt tokens wait already"):
        running.add("b", range(3), 1, SamplingParams(n=2))
    running.add("b", [1], 1, SamplingParams(n=4))
    with pytest.raises(QueueFullError, match="5 sequences wait already; the limit is 5"):
        running.add("c", [], 1)
    assert running.engine.report().refused == 3


def test_a_prompt_of_more_than_the_queue_takes_may_come_when_nothing_waits(start_engine):
    running = start_engine(max_waiting_tokens=20)
    running.add("a", range(30), 1)
    running.run()
    assert running.order() == ["a"]


def test_prompt_logprobs_are_complete_whatever_the_chunks_and_the_cache(start_engine):
    prompt = [5, 6, 7, 8, 9, 20, 21, 22, 23, 24]
    expected = None
    for config in ({}, {"max_batch_tokens": 4}, {}):
        running = start_engine(**config)
        running.add("warm", prompt, 1)
        running.run()
        running.add("a", prompt, 1, SamplingParams(temperature=0, prompt_logprobs=2))
        running.run()
        (computed,) = running.of(PromptComputed, "a")
        assert [entry.token_id for entry in computed.logprobs] == prompt[1:]
        assert expected in (None, computed.logprobs)
        expected = computed.logprobs
    likely = np.log(np.exp(4) / (np.exp(4) + 256))  # the model counts, with a logit of 4
    # Only the token 20 does not follow its predecessor.
    assert [entry.logprob for entry in expected] == pytest.approx(
        [likely if t != 20 else likely - 4 for t in prompt[1:]]
    )
    assert expected[4].top[0] == (10, pytest.approx(likely))


def test_logprobs_of_many_prompts_do_not_fill_the_memory(start_engine):
    running = start_engine(256, max_batch_tokens=1024, max_sequences=8)
    for number in range(8):
        running.add(str(number), range(number, number + 100), 1, SamplingParams(temperature=0, prompt_logprobs=0))
    running.run()
    assert max(len(batch.logits_indices) for batch in running.batches) <= 256 + 8
    assert [len(computed.logprobs) for computed in running.of(PromptComputed)] == [99] * 8
    assert [running.tokens(str(number)) for number in range(8)] == [[number + 100] for number in range(8)]


def test_how_long_chunks_beside_others_are_by_themselves(counting, monkeypatch):
    manifest = read_manifest(counting)
    backend = load_backend(counting, manifest, BackendConfig(threads=1, kernels=False))
    for device, tokens in (("cpu", 64), ("cuda", 512)):
        monkeypatch.setattr(type(backend), "device", device)
        assert Engine(backend, manifest, None, 8, EngineConfig()).prefill_chunk_tokens == tokens
        assert Engine(backend, manifest, None, 8, EngineConfig(prefill_chunk_tokens=7)).prefill_chunk_tokens == 7
