"""Speculative decoding drafts tokens by looking up the prompt, and leaves completions unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.core.manifest import read_manifest
from sharp.serving import SamplingParams
from sharp.serving.api.events import Delta, Failed, Finished
from sharp.serving.api.guided import Guided
from sharp.serving.backends import load_backend
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.engine import Engine
from sharp.serving.engine.guide import GuideCompiler
from sharp.serving.engine.speculation import PromptLookup
from sharp.serving.text.tokenizer import Tokenizer
from tests.serving.running_engine import GREEDY

COUNTED = [*range(10, 30), *range(10, 14)]  # the tiny model counts, so it continues as the text did before


def guide_of(folder, regex):
    manifest, tokenizer = read_manifest(folder), Tokenizer(folder / "tokenizer.json")
    return GuideCompiler(manifest, tokenizer).compile(Guided(regex=regex))


def by_definition(tokens, most):
    """Return the tokens that followed the longest match of the text's end, or the latest of several longest."""
    best, following = 0, None
    for end in range(len(tokens) - 1):
        length = 0
        while length <= min(end, most) and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length and length >= best:
            best, following = length, end + 1
    draft = []
    while len(draft) < min(best - 1, most):
        at = following + len(draft)
        draft.append(tokens[at] if at < len(tokens) else draft[at - len(tokens)])
    return draft


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(0, 2), max_size=30), st.integers(1, 9)
)
def test_what_followed_the_longest_match_is_the_draft(prompt, completion, most):
    history = PromptLookup(prompt)
    for token in completion:
        history.append(token)
    assert history.draft(most) == by_definition([*prompt, *completion], most)


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5]),
        ([1, 2, 3, 4, 5, 9, 3], []),  # a match of one token means nothing
        ([2, 3, 7, 2, 3, 8, 2, 3], [8]),  # the latest match of a length counts
        ([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], [7, 2]),  # a longer match counts more than a later one
        ([5, 6, 5, 6, 5, 6, 5], [6, 5, 6, 5]),  # a loop goes on
        ([4], []),
    ],
)
def test_drafts(tokens, draft):
    assert PromptLookup(tokens).draft(4) == draft


def test_right_drafts_save_steps(start_engine):
    running = start_engine(speculative_tokens=4)
    running.add("a", COUNTED, 12)
    running.run()
    assert running.tokens("a") == list(range(14, 26))
    # The steps: the prompt, twice a token with four right drafts, and the one token that is left.
    assert running.chunks()[1:] == [[8], [5], [5], [1]]
    report = running.engine.report()
    assert (report.generated_tokens, report.draft_tokens, report.accepted_tokens) == (12, 8, 8)
    assert [len(delta.token_ids) for delta in running.of(Delta)] == [1, 5, 5, 1]
    assert len(report.first_token) + len(report.inter_token) == 12


def test_the_time_of_a_step_is_shared_by_its_tokens(start_engine, clock):
    running = start_engine(speculative_tokens=4)
    running.add("a", COUNTED, 12)
    for _ in range(5):
        clock.now += 10
        running.step()
    report = running.engine.report()
    assert [duration.seconds for duration in report.first_token] == [20]  # the prompt takes two steps
    assert [duration.seconds for duration in report.inter_token] == [2] * 10 + [10]


def test_wrong_drafts_cost_tokens_and_change_nothing(start_engine):
    running = start_engine(speculative_tokens=4)
    running.add("a", [5, 6, 7, 9, 9, 5, 6], 6)  # the token 7 was followed by 9
    running.run()
    assert running.tokens("a") == list(range(7, 13))
    report = running.engine.report()
    assert report.draft_tokens > report.accepted_tokens == 0


def test_a_stop_token_among_the_drafts_ends_the_completion(start_engine):
    running = start_engine(speculative_tokens=8, attention_interval=1)
    running.add("a", COUNTED, 12, SamplingParams(temperature=0, stop_token_ids=(18,)), attention=True)
    running.run()
    assert running.tokens("a") == [14, 15, 16, 17, 18]
    (finished,) = running.of(Finished)
    assert (finished.reason, finished.matched) == ("stop", 18)
    # The last token ends the completion, so it is not computed.
    assert finished.attention.tokens == len(COUNTED) + 4
    assert sum(len(rows.positions) for rows in running.engine.report().attention) == len(COUNTED) + 4


def test_a_stop_string_among_the_drafts_ends_the_completion(start_engine):
    running = start_engine(speculative_tokens=8, attention_interval=1)
    text = [*b"abcdefghijklmn", *b"abcd"]
    running.add("a", text, 12, SamplingParams(temperature=0, stop=("gh",)), attention=True)
    running.run()
    (finished,) = running.of(Finished)
    assert "".join(delta.text for delta in running.of(Delta)) == "ef"
    assert (finished.reason, finished.matched, finished.usage.completion_tokens) == ("stop", "gh", 4)
    report = running.engine.report()
    # Draft tokens behind the end do not belong to the completion.
    assert report.accepted_tokens == 2
    assert finished.attention.tokens == sum(len(rows.positions) for rows in report.attention) == len(text) + 3


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1, "temperature": 0.8},
        {"frequency_penalty": 1.5, "temperature": 0.8},
        {"min_tokens": 9, "stop_token_ids": (16, 17)},
    ],
    ids=["repetition", "frequency", "min_tokens"],
)
def test_what_depends_on_earlier_tokens_is_drafted_too(start_engine, params):
    def tokens(speculative_tokens):
        running = start_engine(speculative_tokens=speculative_tokens)
        running.add("a", COUNTED, 60, SamplingParams(**{"temperature": 0, "seed": 3, **params}))
        running.run()
        return running.tokens("a"), running.engine.report()

    (expected, _), (drafted, report) = tokens(0), tokens(4)
    assert drafted == expected
    assert 0 < report.accepted_tokens < report.draft_tokens


def test_a_guided_completion_has_drafts_as_far_as_its_guide_goes(start_engine, counting):
    # After "l" the guide requires "x", where the text continued with "m".
    guide = guide_of(counting, "[e-l]{8}x[a-z]{3}")
    running = start_engine(speculative_tokens=8)
    running.add("a", [*b"abcdefghijklmnopqrstuv", *b"abcd"], 40, guide=guide)
    running.run()
    assert "".join(delta.text for delta in running.of(Delta)) == "efghijklxyza"
    report = running.engine.report()
    assert report.accepted_tokens > 0
    assert running.of(Finished)[0].reason == "stop"


def test_drafts_are_shared_out_and_prompts_come_first(start_engine):
    running = start_engine(speculative_tokens=4, max_batch_tokens=32)
    for name in "ab":
        running.add(name, COUNTED, 30)
    running.step(3)
    running.add("c", [99] * 6, 1)
    running.step(2)
    assert running.chunks()[2:] == [[3, 3], [1, 1, 6], [3, 3]]


def test_nobody_gives_up_blocks_for_a_draft(start_engine, monkeypatch):
    monkeypatch.setattr(PromptLookup, "draft", lambda _history, most: [0] * most)  # all drafts are wrong
    running = start_engine(blocks=7, speculative_tokens=8)  # blocks of 4 tokens
    running.add("a", [5] * 9, 12)
    running.add("b", [9] * 11, 3)
    running.run()
    report = running.engine.report()
    assert report.draft_tokens
    assert not report.preemptions


def test_a_guide_that_ends_inside_a_draft(start_engine, counting):
    guide = guide_of(counting, "efgh")
    running = start_engine(speculative_tokens=8)
    running.add("a", [*b"abcdefghijklmn", *b"abcd"], 12, SamplingParams(temperature=0, min_tokens=10), guide=guide)
    running.run()
    assert not running.of(Failed)
    assert (bytes(running.tokens("a")), running.of(Finished)[0].reason) == (b"efgh", "stop")
    assert running.engine.report().accepted_tokens


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_cache_with_scales_drafts_nothing_by_itself(counting, dtype):
    """By default, a cache with scales has no draft tokens.

    A block has one scale, so a draft token would round the other tokens of its block again.
    """
    manifest = read_manifest(counting)
    backend = load_backend(counting, manifest, BackendConfig(threads=1, kernels=False))
    scaled = manifest.model_copy(update={"cache": manifest.cache.model_copy(update={"dtype": dtype})})
    assert Engine(backend, manifest, None, 8, EngineConfig()).speculative_tokens > 0
    assert Engine(backend, scaled, None, 8, EngineConfig()).speculative_tokens == 0


def test_logprobs_are_those_of_every_token(start_engine):
    def logprobs(speculative_tokens):
        running = start_engine(speculative_tokens=speculative_tokens)
        running.add("a", COUNTED, 12, SamplingParams(temperature=0, logprobs=2))
        running.run()
        return [of_token for delta in running.of(Delta) for of_token in delta.logprobs]

    assert logprobs(4) == logprobs(0)
    assert len(logprobs(4)) == 12


def test_a_sampled_completion_is_the_same(start_engine):
    def tokens(speculative_tokens):
        running = start_engine(speculative_tokens=speculative_tokens)
        for seed in range(4):
            # The temperature is so low that drafts are sometimes right, and wrong as often.
            running.add(str(seed), COUNTED, 40, SamplingParams(temperature=0.8, seed=seed, n=2))
        running.run()
        report = running.engine.report()
        return [running.tokens(str(seed), index) for seed in range(4) for index in range(2)], report

    alone, _ = tokens(0)
    drafted, report = tokens(8)
    assert drafted == alone
    assert 0 < report.accepted_tokens < report.draft_tokens


def test_zero_drafts_none_and_a_processor_drafts_by_itself(start_engine):
    for settings, drafts in (({"speculative_tokens": 0}, False), ({}, True)):
        running = start_engine(**settings)
        running.add("a", COUNTED, 12, GREEDY)
        running.run()
        assert bool(running.engine.report().draft_tokens) is drafts
