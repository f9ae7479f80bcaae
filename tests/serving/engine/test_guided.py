import json
import re
import shutil
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from llguidance import LLParserLimits
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as FileTokenizer

from sharp.serving import LLM, Guided, SamplingParams
from sharp.serving.api.errors import FieldError, InputError
from sharp.serving.api.request import GenerateRequest
from sharp.serving.config import BackendConfig
from sharp.serving.engine import guide, guide_worker

BACKEND = BackendConfig(threads=1, kernels=False)


@pytest.fixture(scope="module")
def llm(counting):
    return LLM(counting, backend=BACKEND)


def complete(llm, prompt="a", **params):
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 60, **params}))[0]


def test_greedy_takes_the_most_likely_token_that_is_allowed(llm):
    # The model writes "b" and counts on from there. Where the next letter is not allowed, "0" is the first of the
    # allowed tokens.
    assert complete(llm, guided=Guided(regex="[b-d]{3}[0-9]")).text == "bcd0"


def test_a_completion_that_can_have_no_more_ends_at_once(llm):
    completion = complete(llm, guided=Guided(regex="bcd"))
    assert (completion.text, completion.finish_reason, completion.matched) == ("bcd", "stop", None)
    assert completion.token_ids == tuple(b"bcd")


@pytest.mark.parametrize("seed", range(5))
def test_json_of_a_schema(llm, seed):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["kind", "legs"],
        "additionalProperties": False,
    }
    completion = complete(llm, guided=Guided(json=schema), temperature=1, seed=seed, logit_bias={ord(" "): -100})
    value = json.loads(completion.text)
    assert value["kind"] in ("cat", "dog")
    assert 0 <= value["legs"] <= 99


def test_a_grammar(llm):
    completion = complete(llm, guided=Guided(grammar='start: "(" start ")" | /[x-z]/'), temperature=1, seed=3)
    assert re.fullmatch(r"(\(*)[x-z](\)*)", completion.text)
    assert completion.text.count("(") == completion.text.count(")")


def test_guided_and_other_requests_run_together(llm):
    params = SamplingParams(temperature=0, max_tokens=4)
    guided = SamplingParams(temperature=0, max_tokens=4, guided=Guided(regex="[0-9]*"), n=2)
    free, digits = llm.generate(["a", "a"], [params, guided])
    assert (free.text, digits.text, digits.others[0].text) == ("bcde", "0123", "0123")


def test_the_end_of_sequence_token_ends_what_is_complete(llm):
    # After 255 comes the end-of-sequence token, which the expression allows after any number of digits.
    completion = llm.generate([[255]], SamplingParams(temperature=0, guided=Guided(regex="[0-9]*")))[0]
    assert (completion.text, completion.finish_reason, completion.matched) == ("", "stop", 256)


def test_a_schema_is_compiled_once(llm, monkeypatch):
    compiled = []
    compile_ = llm.model.guides._compile
    monkeypatch.setattr(llm.model.guides, "_compile", lambda guided: compiled.append(guided) or compile_(guided))
    texts = [complete(llm, guided=Guided(regex="[b-e]{2}[0-9]")).text for _ in range(3)]
    assert texts == ["bc0"] * 3
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("guided", "message"),
    [
        (Guided(regex="(["), r"guided.regex cannot be used: .*unclosed character class$"),
        (Guided(grammar="start: missing"), r'guided.grammar cannot be used: .*unknown name: "missing"$'),
        (Guided(grammar="start: start"), "guided.grammar cannot be used: no text matches it$"),
        (Guided(json='{"type": 5'), "guided.json cannot be used"),
        (Guided(json={"type": "nonsense"}), "guided.json cannot be used: Invalid type: nonsense$"),
        (Guided(json='{"items":' * 5000 + "{}" + "}" * 5000), "guided.json cannot be used: recursion limit"),
        (Guided(regex="(" * 5000 + "a" + ")" * 5000), "guided.regex cannot be used"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_sentence(llm, guided, message):
    with pytest.raises(FieldError, match=message) as caught:
        complete(llm, guided=guided)
    assert caught.value.field == f"guided.{guided.kind}"
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_a_grammar_that_becomes_too_costly_fails_its_own_request(llm, monkeypatch):
    monkeypatch.setattr(guide_worker, "LIMITS", LLParserLimits(max_items_in_row=7, verbose_errors=False))
    costly = Guided(grammar="start: a b\na: /x*/ | /[xy]+/ a\nb: /[a-z]+/ b | /foo/")
    request = llm.model.prepare(
        GenerateRequest("a", SamplingParams(guided=costly, logit_bias={ord("x"): 100}), request_id="costly")
    )
    other = llm.model.prepare(GenerateRequest("a", SamplingParams(temperature=0, max_tokens=3), request_id="other"))
    engine = llm._engine
    engine.add(request)
    engine.add(other)
    events = [event for _ in range(6) if engine.has_work for event in engine.step()]
    (failed,) = [event for event in events if event.request_id == "costly" and hasattr(event, "error")]
    assert isinstance(failed.error, InputError)
    assert str(failed.error).startswith("the completion cannot follow guided: Parser Error: Current row has")
    assert events[-1].reason == "length"
    engine.check_integrity()


@pytest.fixture
def clock(monkeypatch):
    """Return a function that sets how many seconds of processor time each call of a guide takes."""
    counted = count()

    def take(seconds):
        monkeypatch.setattr(guide, "time", SimpleNamespace(thread_time=lambda: next(counted) * seconds))

    return take


def test_many_completions_of_a_costly_grammar_do_not_hold_up_a_step(llm, clock):
    clock(0.003)  # less than the limit for a completion alone
    with pytest.raises(InputError, match=r"cannot follow guided: .* the limit is 0.25 ms where all grammars of a step"):
        complete(llm, guided=Guided(regex="[b-y]*"), n=16)
    assert complete(llm, guided=Guided(regex="[b-y]*"), max_tokens=5).text == "bcdef"


def test_many_completions_of_a_usual_grammar_run_together(llm, clock):
    clock(0.0001)
    completion = complete(llm, guided=Guided(regex="[b-y]*"), n=16, max_tokens=40)
    assert {completion.finish_reason, *(other.finish_reason for other in completion.others)} == {"length"}


@pytest.mark.parametrize(("seconds", "accepted"), [(0.0001, 4), (0.01, 1)])
def test_drafts_of_a_costly_grammar_are_short(llm, clock, seconds, accepted):
    clock(seconds)
    assert llm.model.guides.compile(Guided(regex="[b-y]*")).accepts(b"bcde") == accepted


@pytest.mark.parametrize("fields", [{"guided": Guided(regex="b{3}")}, {"stop_token_ids": range(257)}])
def test_min_tokens_that_leaves_no_token_is_no_fault_of_the_model(llm, fields):
    with pytest.raises(InputError, match="no token may follow: guided, allowed_token_ids, bad_words and min_tokens"):
        complete(llm, **{"stop_token_ids": list(b"b"), "min_tokens": 2, **fields})


def test_a_model_without_a_tokenizer_cannot_be_guided(ids_only):
    with pytest.raises(FieldError, match="guided needs text that can end, and ids-only has no tokenizer"):
        LLM(ids_only, backend=BACKEND).generate([[97]], SamplingParams(guided=Guided(regex="a")))


def test_an_end_of_sequence_token_that_the_model_has_not_is_refused(counting, tmp_path):
    folder = Path(shutil.copytree(counting, tmp_path / "other"))
    manifest = json.loads((folder / "sharp.json").read_text())
    manifest["tokenizer"]["eos_token_ids"] = [300, 256]
    (folder / "sharp.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="eos_token_ids has the token 300, but the model has tokens 0 to 256"):
        LLM(folder, backend=BACKEND)


@pytest.mark.parametrize("added", [AddedToken("<image>", special=True), AddedToken("<image>", special=False)])
def test_tokens_that_the_model_has_not_leave_all_others_as_they_are(counting, tmp_path, caplog, added):
    """Tokens of the tokenizer that the model lacks leave all other tokens usable.

    Gemma 3 1B has one token more than embeddings. Once llguidance refused it, and the server ended.
    """
    folder = Path(shutil.copytree(counting, tmp_path / "other"))
    tokenizer = FileTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([added])
    tokenizer.save(str(folder / "tokenizer.json"))
    llm = LLM(folder, backend=BACKEND)
    assert "tokens beyond the 257 of the model" in caplog.text and "<image> (257)" in caplog.text
    llm.model.guides.load()
    assert llm.model.guides.available
    assert complete(llm, guided=Guided(regex="[b-d]{3}[0-9]")).text == "bcd0"
    with pytest.raises(FieldError, match="prompt has token id 257; counting has ids 0 to 256"):
        llm.generate("a<image>b")


def test_a_tokenizer_of_another_model_is_refused(counting, tmp_path):
    folder = Path(shutil.copytree(counting, tmp_path / "other"))
    words = {f"w{number}": number for number in range(300)}
    FileTokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    with pytest.raises(InputError, match="has 300 tokens, but the model has 257; give the tokenizer that the model"):
        LLM(folder, backend=BACKEND)


def test_guides_are_off_where_the_library_cannot_use_the_tokenizer(counting, tmp_path, caplog):
    """Guides are off if llguidance cannot use the tokenizer, because it knows byte-level tokenizers only.

    Once the server ended with a traceback.
    """
    folder = Path(shutil.copytree(counting, tmp_path / "other"))
    words = {chr(0x100 + number): number for number in range(257)}
    FileTokenizer(models.WordLevel(words, unk_token=chr(0x100))).save(str(folder / "tokenizer.json"))
    llm = LLM(folder, backend=BACKEND)
    llm.model.guides.load()
    assert "guided generation is off: llguidance cannot use the tokenizer of counting" in caplog.text
    assert not llm.model.guides.available
    for _ in range(2):
        with pytest.raises(FieldError, match=r"guided is off: llguidance cannot use the tokenizer of counting \(can't"):
            llm.generate([[97]], SamplingParams(guided=Guided(regex="a")))
    assert llm.generate([[97]], SamplingParams(temperature=0, max_tokens=2))[0].token_ids == (98, 99)
