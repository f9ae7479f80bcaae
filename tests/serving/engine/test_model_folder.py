"""Requests beyond a limit are refused before they reach the engine; requests at the limit are accepted."""

import hashlib

import pytest
from tokenizers import AddedToken

from sharp.core.manifest import read_manifest
from sharp.serving import LLM, Guided, SamplingParams
from sharp.serving.api.errors import ContextLengthError, FieldError, InputError, UnavailableError
from sharp.serving.api.request import GenerateRequest
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.guide import GuideCompiler
from sharp.serving.text.tokenizer import Tokenizer
from tests.serving.conftest import MAX_CONTEXT, VOCAB, byte_tokenizer

BACKEND = BackendConfig(threads=1, kernels=False)


@pytest.fixture(scope="module")
def prepare(counting):
    return LLM(counting, backend=BACKEND).model.prepare


@pytest.mark.parametrize(
    ("last", "params"),
    [
        (VOCAB - 1, lambda token: {"logit_bias": {token: 1.0}}),
        (VOCAB - 1, lambda token: {"stop_token_ids": (token,)}),
        (VOCAB - 1, lambda token: {"allowed_token_ids": (token,)}),
    ],
    ids=["logit_bias", "stop_token_ids", "allowed_token_ids"],
)
def test_the_last_token_of_the_vocabulary_is_one(prepare, last, params):
    prepare(GenerateRequest("a", SamplingParams(**params(last))))
    with pytest.raises(FieldError, match=str(last + 1)):
        prepare(GenerateRequest("a", SamplingParams(**params(last + 1))))


@pytest.mark.parametrize("cache_tokens", [None, 16])
def test_the_cache_is_named_only_where_it_is_what_limits_a_prompt(counting, cache_tokens):
    llm = LLM(counting, backend=BACKEND, engine=EngineConfig(cache_tokens=cache_tokens))
    with pytest.raises(ContextLengthError) as caught:
        llm.model.prepare(GenerateRequest(tuple([1] * MAX_CONTEXT)))
    assert ("the server's cache has no room" in str(caught.value)) == (cache_tokens is not None)


def test_a_folder_of_another_version_is_refused(counting):
    whole = hashlib.sha256((counting / "sharp.json").read_bytes()).hexdigest()
    for version in ("", whole[:12], whole):
        LLM(counting, backend=BackendConfig(threads=1, kernels=False, model_version=version))
    with pytest.raises(InputError, match=f"has the version {whole[:14]}, not 0123456789abcd; change model_version"):
        LLM(counting, backend=BackendConfig(threads=1, kernels=False, model_version="0123456789abcd"))
    for unusable in (whole[:11], whole + "0", "V" + whole[:12]):
        with pytest.raises(InputError, match="it must be 12 to 64 of the hexadecimal digits"):
            BackendConfig(model_version=unusable)


def test_a_cache_salt_has_at_most_256_characters(prepare):
    prepare(GenerateRequest("a", cache_salt="s" * 256))
    with pytest.raises(FieldError, match="at most 256 characters"):
        prepare(GenerateRequest("a", cache_salt="s" * 257))


def test_a_priority_is_a_number_of_32_bits(prepare):
    for most in (2**31 - 1, 1 - 2**31):
        assert prepare(GenerateRequest("a", priority=most)).priority == most
    for beyond in (2**31, -(2**31)):
        with pytest.raises(FieldError, match="from -2147483647 to 2147483647"):
            prepare(GenerateRequest("a", priority=beyond))


def test_the_vocabulary_for_guides_is_made_before_the_first_of_them(counting):
    """The vocabulary for guides is made at start.

    It takes a second, for which other requests would wait at the first guide.
    """
    model = LLM(counting, backend=BACKEND).model
    guides = GuideCompiler(read_manifest(counting), model.tokenizer)
    guides.load()
    assert guides._vocabulary is not None
    guides.end()
    without = GuideCompiler(read_manifest(counting), None)
    without.load()  # there is nothing to load, and that is no error
    with pytest.raises(FieldError, match="has no tokenizer"):
        without.compile(Guided(regex="a"))


def test_tokens_that_are_written_like_tags_are_known_but_for_those_that_end(counting, tmp_path):
    """Tokens that are written like tags are known to guides, but tokens that end a text are not.

    A tool call can begin with `<call>`. The guide itself handles the end of the text.
    """
    manifest = read_manifest(counting)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<call>", special=False), AddedToken("<end>", special=False)])
    call, end = tokenizer.token_to_id("<call>"), tokenizer.token_to_id("<end>")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ends = manifest.tokenizer.model_copy(update={"eos_token_ids": (end,)})
    guides = GuideCompiler(
        manifest.model_copy(update={"vocab_size": end + 1, "tokenizer": ends}), Tokenizer(tmp_path / "tokenizer.json")
    )
    guides.load()
    assert guides._tags == {"<call>": call}
    for mark, first in (("<call>", call), ("<tool>", ord("<"))):
        guide = guides.compile(Guided(grammar="start: mark_0", marks=(mark,)))
        assert guide.allowed(end + 1).nonzero()[0].tolist() == [first]
    guides.end()
    with pytest.raises(UnavailableError, match="the server ends"):
        guides.compile(Guided(regex="another"))
