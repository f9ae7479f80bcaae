from dataclasses import replace

import numpy as np
import pytest

from sharp.serving import LLM, SamplingParams
from sharp.serving.api.errors import EngineError, FieldError, InputError, NotFoundError
from sharp.serving.config import BackendConfig, EngineConfig
from tests.serving.conftest import EOS

GREEDY = SamplingParams(temperature=0, max_tokens=8)
BACKEND = BackendConfig(threads=1, kernels=False)


@pytest.fixture(scope="module")
def llm(counting):
    return LLM(counting, backend=BACKEND)


def test_one_completion_per_prompt_in_order(llm):
    first, second = llm.generate(["a", [ord("0"), ord("1")]], GREEDY)
    assert (first.text, second.text) == ("bcdefghi", "23456789")
    assert second.token_ids == tuple(b"23456789")
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (2, 8)
    assert (first.finish_reason, first.matched, first.attention) == ("length", None, None)


def test_one_prompt_alone_and_parameters_per_prompt(llm):
    assert llm.generate("a", GREEDY)[0].text == "bcdefghi"
    assert llm.generate([97, 98], GREEDY)[0].text == "cdefghij"
    both = llm.generate(["a", "b"], [GREEDY, SamplingParams(temperature=0, max_tokens=2)])
    assert [completion.text for completion in both] == ["bcdefghi", "cd"]


def test_token_ids_in_arrays(llm):
    assert [completion.text for completion in llm.generate([np.array([97]), np.array([98])], GREEDY)] == [
        "bcdefghi",
        "cdefghij",
    ]
    assert [completion.text for completion in llm.generate(np.array([[97, 98], [98, 99]]), GREEDY)] == [
        "cdefghij",
        "defghijk",
    ]


def test_stops_at_eos_unless_told_not_to(llm):
    stopped = llm.generate([[253]], GREEDY)[0]
    assert (stopped.finish_reason, stopped.matched, stopped.token_ids) == ("stop", 256, (254, 255, 256))
    going_on = llm.generate([[253]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0]
    assert going_on.token_ids == (254, 255, 256, 0, 1, 2)


def test_stop_token_is_in_the_tokens_and_not_in_the_text(llm):
    completion = llm.generate("a", SamplingParams(temperature=0, stop_token_ids=[ord("e")]))[0]
    assert (completion.text, completion.token_ids, completion.matched) == ("bcd", tuple(b"bcde"), ord("e"))


def test_stop_string_over_token_borders(llm):
    completion = llm.generate("a", SamplingParams(temperature=0, stop=["fgh", "zzz"]))[0]
    assert (completion.text, completion.finish_reason, completion.matched) == ("bcde", "stop", "fgh")
    assert completion.token_ids == tuple(b"bcdefgh")


@pytest.mark.parametrize(
    ("prompt", "fields", "text", "matched"),
    [
        ("a", {"stop": ["fgh", "zzz"]}, "bcdefgh", "fgh"),
        ("a", {"stop": "ef!", "max_tokens": 4}, "bcde", None),
        ("a", {"stop_token_ids": [ord("e")]}, "bcde", ord("e")),
        ("a", {"stop": ["de"], "stop_token_ids": [ord("e")]}, "bcde", "de"),
        ("a", {"stop": ["ez"], "stop_token_ids": [ord("e")]}, "bcde", ord("e")),
        ([125], {"stop_token_ids": [EOS], "logit_bias": {EOS: 100}}, "", EOS),  # a special token has no text
        ([125], {"stop": "<eos>", "ignore_eos": True, "logit_bias": {EOS: 100}}, "<eos>", "<eos>"),
    ],
)
def test_what_ended_a_completion_may_be_a_part_of_its_text(llm, prompt, fields, text, matched):
    params = SamplingParams(temperature=0, include_stop_str_in_output=True, **fields)
    (completion,) = llm.generate([prompt], params)
    assert (completion.text, completion.matched) == (text, matched)


def test_top_k_is_off_at_0_and_at_minus_1(llm):
    params = [SamplingParams(temperature=3, seed=1, top_k=k, max_tokens=8, ignore_eos=True) for k in (-1, 0)]
    assert params[0] == params[1]
    off, without = llm.generate(["a", "a"], params)
    assert off.token_ids == without.token_ids != tuple(b"bcdefghi")


def test_a_stop_string_that_is_a_special_token_is_found_though_no_text_shows_it(llm):
    params = SamplingParams(temperature=0, stop="<eos>", ignore_eos=True, max_tokens=9)
    completion = llm.generate([[253]], params)[0]
    assert (completion.finish_reason, completion.matched, completion.token_ids) == ("stop", "<eos>", (254, 255, 256))
    later = llm.generate([[253]], replace(params, min_tokens=4))[0]
    assert (later.finish_reason, len(later.token_ids)) == ("length", 9)


def test_text_that_only_looked_like_a_stop_string_is_shown(llm):
    completion = llm.generate("a", SamplingParams(temperature=0, max_tokens=4, stop="ef!"))[0]
    assert (completion.text, completion.finish_reason) == ("bcde", "length")


def test_without_max_tokens_the_context_is_the_limit(llm):
    completion = llm.generate("a", SamplingParams(temperature=0))[0]
    assert completion.usage.completion_tokens == 127
    assert completion.finish_reason == "length"


def test_max_tokens_0_reads_the_prompt_only(llm):
    completion = llm.generate("abc", SamplingParams(max_tokens=0), attention=True)[0]
    assert (completion.token_ids, completion.finish_reason) == ((), "length")
    assert completion.attention.tokens == 3


def test_attention_summary_over_prompt_and_completion_in_chunks(counting):
    llm = LLM(counting, backend=BACKEND, engine=EngineConfig(max_batch_tokens=4, max_sequences=4, attention_interval=0))
    with_attention = llm.generate(["abcdefghij", "ab"], GREEDY, attention=True)[0].attention
    keys = np.arange(1, 18)  # 10 prompt tokens and 8 generated tokens, the last of which is not computed
    assert with_attention.tokens == len(keys)
    np.testing.assert_allclose(with_attention.entropy[0], np.log(keys).mean() * np.array([1, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(with_attention.normalized_entropy[0], [1, 0.5], rtol=1e-6)
    np.testing.assert_allclose(with_attention.support_ratio[0], [1, 0.5], rtol=1e-6)
    np.testing.assert_allclose(with_attention.inverse_temperature[0], [1, 2], rtol=1e-6)


def test_several_completions_of_a_prompt(llm):
    completion = llm.generate("a", SamplingParams(n=3, temperature=3, seed=1, max_tokens=8, ignore_eos=True))[0]
    completions = [completion, *completion.others]
    assert [completion.usage.completion_tokens for completion in completions] == [8, 8, 8]
    assert len({completion.text for completion in completions}) == 3
    assert completion == replace(
        llm.generate("a", SamplingParams(temperature=3, seed=1, max_tokens=8, ignore_eos=True))[0],
        timing=completion.timing,
        others=completion.others,
    )


def test_a_completion_as_it_comes(llm):
    *deltas, finished = llm.stream("a", GREEDY)
    assert "".join(delta.text for delta in deltas) == "bcdefghi"
    assert len(deltas) > 1
    assert (finished.reason, finished.usage.completion_tokens) == ("length", 8)


def test_one_streamed_completion_at_a_time_and_closing_it_ends_it(llm):
    running = llm.stream("a", GREEDY)
    next(running)
    with pytest.raises(InputError, match="another stream of this LLM still runs"):
        llm.generate("b", GREEDY)
    running.close()
    assert llm.generate("b", GREEDY)[0].text == "cdefghij"


def test_every_sequence_has_the_statistics_of_its_prompt(llm):
    completion = llm.generate("pqrstuvwxy", SamplingParams(n=2, temperature=0, max_tokens=3), attention=True)[0]
    assert [sequence.attention.tokens for sequence in (completion, *completion.others)] == [12, 12]


def test_tokens_of_the_prefix_cache_are_not_observed_again(counting):
    llm = LLM(counting, backend=BACKEND)
    seen = [llm.generate("abcdefghij", GREEDY, attention=True)[0] for _ in range(2)]
    assert [completion.usage.cached_tokens for completion in seen] == [0, 8]
    assert [completion.attention.tokens for completion in seen] == [17, 9]
    apart = llm.generate("abcdefghij", GREEDY, attention=True, cache_salt="apart")[0]
    assert (apart.usage.cached_tokens, apart.attention.tokens) == (0, 17)


def test_logprobs(llm):
    completion = llm.generate("ab", replace(GREEDY, max_tokens=2, logprobs=1, prompt_logprobs=0))[0]
    likely = 4 - np.log(np.exp(4) + 256)  # the model gives the next token a logit of 4
    assert [entry.logprob for entry in completion.logprobs] == pytest.approx([likely] * 2)
    assert [entry.top[0][0] for entry in completion.logprobs] == list(b"cd")
    assert [(entry.token_id, entry.top) for entry in completion.prompt_logprobs] == [(ord("b"), ())]
    without = llm.generate("ab", GREEDY)[0]
    assert (without.logprobs, without.prompt_logprobs) == (None, None)


def test_min_tokens(llm):
    completion = llm.generate([[253]], replace(GREEDY, min_tokens=4))[0]
    # Where the end-of-sequence token is not allowed, all other tokens are equally likely, and the first is taken.
    assert completion.token_ids == (254, 255, 0, 1, 2, 3, 4, 5)
    stopped = llm.generate("a", replace(GREEDY, min_tokens=4, stop=["cd", "gh"]))[0]
    assert (stopped.text, stopped.matched) == ("bcdef", "gh")


def test_logit_bias_and_penalties(llm):
    assert llm.generate("a", replace(GREEDY, logit_bias={ord("b"): -5, ord("z"): 2}))[0].text.startswith("z{")
    assert llm.generate([[97, 98, 99, 97]], replace(GREEDY, max_tokens=1, repetition_penalty=5))[0].text == "b"


def test_more_prompts_than_the_queue_takes(counting):
    llm = LLM(counting, backend=BACKEND, engine=EngineConfig(max_waiting_requests=2, max_sequences=2))
    completions = llm.generate([[number] for number in range(50)], SamplingParams(temperature=0, max_tokens=1))
    assert [completion.token_ids for completion in completions] == [(number + 1,) for number in range(50)]


def test_a_parameter_that_this_model_cannot_follow(llm):
    with pytest.raises(FieldError, match="logit_bias has token id 257; counting has ids 0 to 256"):
        llm.generate("a", SamplingParams(logit_bias={257: 1}))
    with pytest.raises(FieldError, match="stop_token_ids has token id 300; counting has ids 0 to 256"):
        llm.generate("a", SamplingParams(stop_token_ids=[3, 300]))
    with pytest.raises(FieldError, match="min_tokens is 200; the prompt leaves room for 127 tokens"):
        llm.generate("a", SamplingParams(min_tokens=200))


def test_model_without_a_tokenizer_takes_and_gives_ids(ids_only):
    llm = LLM(ids_only, backend=BACKEND)
    completion = llm.generate([[97]], SamplingParams(temperature=0, max_tokens=3))[0]
    assert (completion.text, completion.token_ids) == ("", (98, 99, 100))
    with pytest.raises(InputError, match="send token ids"):
        llm.generate("a")
    with pytest.raises(InputError, match="stop_token_ids"):
        llm.generate([[97]], SamplingParams(stop=["x"]))


def test_logprobs_of_a_long_prompt_are_bounded(llm, monkeypatch):
    monkeypatch.setattr("sharp.serving.engine.model_folder.MAX_PROMPT_LOGPROBS", 100)
    params = replace(GREEDY, prompt_logprobs=4)
    llm.generate("a" * 20, params)
    with pytest.raises(
        FieldError, match="prompt_logprobs is 4, which makes 105 numbers for 21 tokens; the limit is 100"
    ):
        llm.generate("a" * 21, params)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt has 0 tokens"),
        ([257], "token id 257.*0 to 256"),
        ([-1], "token id -1"),
        ("x" * 128, "prompt has 128 tokens; the limit is 127"),
        ([1.5, 2], "prompt is neither text nor a list of token ids: 'float'"),
        (["a", "b"], "prompt is neither text nor a list of token ids: 'str'"),
        ("ab\udcff", "prompt is not valid text: it has half of a surrogate pair"),
    ],
)
def test_prompts_that_cannot_be_used(llm, prompt, message):
    with pytest.raises(InputError, match=message):
        llm.generate([prompt])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "prompts is None; give a text, a list of token ids, or a list of such prompts"),
        (("a", {"temperature": 0}), "params is {'temperature': 0}; give SamplingParams, or a list with one per prompt"),
    ],
)
def test_arguments_that_are_something_else(llm, arguments, message):
    with pytest.raises(InputError, match=message):
        llm.generate(*arguments)


def test_a_prompt_that_the_cache_can_never_hold_is_refused_at_once(counting):
    llm = LLM(counting, backend=BACKEND, engine=EngineConfig(cache_tokens=16))
    with pytest.raises(InputError, match="prompt has 20 tokens; the limit is 15"):
        llm.generate("x" * 20)
    assert llm.generate("a", SamplingParams(temperature=0))[0].usage.completion_tokens == 15


def test_a_model_that_fails_says_so_and_can_be_used_again(counting, monkeypatch):
    llm = LLM(counting, backend=BACKEND)
    backend = llm._engine._backend
    monkeypatch.setattr(backend, "step", lambda batch: 1 / 0)
    with pytest.raises(EngineError, match="division by zero"):
        llm.generate(["a", "b"], GREEDY)
    monkeypatch.undo()
    assert llm.generate("a", GREEDY)[0].text == "bcdefghi"


def test_a_manifest_of_a_newer_major_version_is_refused_whatever_else_it_says(tmp_path):
    (tmp_path / "sharp.json").write_text('{"format_version": "2.0", "layers": "many"}')
    with pytest.raises(InputError, match=r"format version 2\.0, this Sharp reads 1\.\d+; upgrade Sharp"):
        LLM(tmp_path)


def test_folders_that_cannot_be_loaded(tmp_path, counting):
    with pytest.raises(NotFoundError, match=r"no sharp\.json"):
        LLM(tmp_path)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in counting.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"model\.onnx is not an ONNX model"):
        LLM(broken, backend=BACKEND)
