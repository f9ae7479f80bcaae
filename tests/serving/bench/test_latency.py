"""`sharp bench latency` times the chosen models and prompts, and prints a table."""

import json
import string

import pytest
from click.testing import CliRunner

from sharp.core.cli import main
from sharp.serving.api.errors import InputError
from sharp.serving.api.events import Delta
from sharp.serving.bench import latency
from sharp.serving.llm import LLM


def run(*arguments: object):
    return CliRunner().invoke(main, ["bench", "latency", *map(str, arguments)])


def test_models_are_interleaved_after_every_prompt(counting, hashing, tmp_path, monkeypatch):
    calls = []

    def milliseconds(llm: LLM, prompt: list[int], completion_tokens: int) -> float:
        calls.append((llm.model.manifest.name, len(prompt), completion_tokens))
        return 8.0 if len(calls) % 2 else float(len(calls))

    monkeypatch.setattr(latency, "_milliseconds_a_token", milliseconds)
    options = ("--prompt-tokens", 5, "--prompt-tokens", 9, "--passes", 3, "--completion-tokens", 4)
    result = run(counting, hashing, *options, "--output", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    names = [name for name, _, _ in calls]
    assert names[0] != names[1] and names == names[:2] * 6
    assert [length for _, length, _ in calls] == [5] * 6 + [9] * 6
    assert {tokens for _, _, tokens in calls} == {4}
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [(row["model"], row["prompt_tokens"], row["best"], row["median"], row["times_as_fast"]) for row in rows] == [
        (str(counting), 5, 8.0, 8.0, 1.0),
        (str(hashing), 5, 2.0, 4.0, 2.0),
        (str(counting), 9, 8.0, 8.0, 1.0),
        (str(hashing), 9, 8.0, 10.0, 0.8),
    ]
    assert "0.80" in result.output


def test_a_token_takes_time(counting):
    [row] = latency.measure_latency([counting], [20], completion_tokens=8, passes=2)
    assert 0 < row.best <= row.median


def test_every_step_computes_one_token(counting, monkeypatch):
    """Every timed step computes one token, because speculative decoding is off even for a text that repeats itself."""
    stream, pieces = LLM.stream, []

    def recorded(llm, prompt, params):
        for event in stream(llm, prompt, params):
            if isinstance(event, Delta):
                pieces.append(len(event.token_ids))
            yield event

    monkeypatch.setattr(LLM, "stream", recorded)
    latency.measure_latency([counting], [60], completion_tokens=12, passes=1, text=string.ascii_lowercase * 100)
    assert set(pieces) == {1}


def test_tokens_that_come_in_one_piece_of_text_are_not_timed():
    class InOnePiece:
        def stream(self, _prompt, _params):
            yield Delta("a", "ab", (97, 98))

    with pytest.raises(InputError, match="all 2 tokens came in one piece of text; give more completion tokens"):
        latency._milliseconds_a_token(InOnePiece(), [1], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--prompt-tokens", 10**12),
            "tokens, and 1000000000033 are needed; give fewer, or export it with --max-context",
        ),
        (("--prompt-tokens", 20, "--text", "{short}"), "the text has 5 tokens, and 20 are needed; give a longer"),
        (("--text", "{folder}"), "cannot be read as UTF-8 text"),
        (("--text", "{latin}"), "cannot be read as UTF-8 text"),
    ],
)
def test_bad_input_is_one_sentence(counting, tmp_path, options, message):
    (tmp_path / "short.txt").write_text("abcde")
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    files = {"short": tmp_path / "short.txt", "latin": tmp_path / "latin.txt", "folder": tmp_path}
    result = run(counting, *(str(option).format(**files) for option in options))
    assert result.exit_code == 2
    assert message in result.output
