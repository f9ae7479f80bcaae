"""Schemas, expressions and grammars that take minutes or gigabytes to compile are refused without harm to others."""

import json
import os
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from sharp.serving.engine import guide, guide_trial

HOSTILE_SCHEMA = {"type": "string", "allOf": [{"pattern": f".*a{number}.*"} for number in range(20)]}
HOSTILE = {
    "patterns": {"guided_json": HOSTILE_SCHEMA},
    "repetitions": {"guided_regex": "(x{1000}){1000}"},
}
MEMORY = 200 * 2**20


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Make the trial wait longer than on a busy machine, where clients would be told to retry."""
    monkeypatch.setattr(guide_trial, "WALL_SECONDS", 30)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(guide_trial, "SECONDS", 0.2)


@pytest.fixture
def ask(start_server, counting):
    address = start_server(counting).http_address

    def ask(seconds=20, **fields):
        body = {"model": "counting", "prompt": "a", "max_tokens": 8, "temperature": 0, **fields}
        request = urllib.request.Request(
            f"http://{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                return response.status, json.load(response)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    return ask


def guided(fields):
    ((name, value),) = fields.items()
    return {"guided": {name.removeprefix("guided_"): value}}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_it_is_refused_with_the_reason_and_again_at_once(ask, fields):
    before = resident()
    status, message = ask(**guided(fields))
    assert status == 400
    assert "compiling it takes more than" in message or "cannot be used" in message
    assert "\n" not in message
    assert resident() - before < MEMORY
    began = time.monotonic()
    assert ask(**guided(fields)) == (status, message)
    assert time.monotonic() - began < 0.5  # the refusal is cached by now


def test_eight_at_once_do_not_keep_others(ask):
    refused = []

    def attack(number):
        # a schema of its own for each request, so that none is cached
        schema = {**HOSTILE_SCHEMA, "title": str(number)}
        refused.append(ask(60, **guided({"guided_json": schema}))[0])

    attackers = [threading.Thread(target=attack, args=(number,), daemon=True) for number in range(8)]
    for attacker in attackers:
        attacker.start()
    for _ in range(5):
        assert ask(5) == (200, "bcdefghi")
    for attacker in attackers:
        attacker.join(60)
    assert refused == [400] * 8


def test_what_takes_too_long_to_compile_is_refused(ask, monkeypatch):
    monkeypatch.setattr(guide_trial, "SECONDS", 0.01)
    values = [{"a": f"value{number}" * 3, "b": number} for number in range(1200)]
    status, message = ask(**guided({"guided_json": {"enum": values}}))
    assert (status, message) == (400, "guided.json cannot be used: compiling it takes more than 0.01 s; simplify it")


def test_an_ambiguous_grammar_loses_its_own_request_and_not_the_time_of_others(ask, monkeypatch):
    monkeypatch.setattr(guide, "MASK_SECONDS", 0.001)
    monkeypatch.setattr(guide, "SECONDS_PER_TOKEN", 0.00001)
    grammar = 'start: s\ns: s s | "a" | "aa" | "aaa" | s s s\n'
    status, message = ask(60, **guided({"guided_grammar": grammar}), max_tokens=120)
    assert status == 400
    assert "ms a token to follow; the limit is 0.01 ms" in message
