"""The process that compiles schemas and grammars on trial ends all it has begun, and works in large servers."""

import os
import resource
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from sharp.serving.api.errors import QueueFullError, UnavailableError
from sharp.serving.engine import guide_trial
from sharp.serving.engine.guide_trial import GuideTrial
from tests.serving.conftest import EOS, VOCAB, byte_tokenizer, wait_for

HOSTILE = '{"type": "string", "allOf": [' + ",".join(f'{{"pattern": ".*a{n}.*"}}' for n in range(20)) + "]}"


@pytest.fixture
def trial():
    made = GuideTrial(byte_tokenizer().to_str(), VOCAB, [EOS])
    yield made
    made.close()


def children(process):
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_waits_when_the_server_ends_is_told_so_and_the_fork_ends(trial, monkeypatch):
    monkeypatch.setattr(guide_trial, "SECONDS", 30)
    monkeypatch.setattr(guide_trial, "WALL_SECONDS", 30)
    monkeypatch.setattr(guide_trial, "MEMORY_BYTES", 2**30)
    assert not trial.run("regex", "a+").error
    process = trial._process.pid
    errors = []

    def ask():
        try:
            trial.run("json", HOSTILE)
        except UnavailableError as error:
            errors.append(str(error))

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    wait_for(lambda: children(process))
    (fork,) = children(process)
    trial.end()
    for thread in asking:
        thread.join(20)
    assert errors == ["the server ends; ask another one"] * 3
    wait_for(lambda: not runs(process) and not runs(fork))


def test_a_process_that_is_killed_under_a_schema_does_not_make_the_schema_wrong(trial, monkeypatch):
    """A killed process does not make its schema wrong.

    Once the schema counted as too slow to compile, and was refused for as long as the server ran.
    """
    monkeypatch.setattr(guide_trial, "MEMORY_BYTES", 2**30)
    monkeypatch.setattr(guide_trial, "SECONDS", 30)
    assert not trial.run("regex", "a+").error
    killed, outcomes = [], []

    def ask():
        try:
            outcomes.append(trial.run("json", HOSTILE))
        except UnavailableError as error:
            outcomes.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(2):
        wait_for(lambda: trial._process.pid not in killed and children(trial._process.pid))
        killed.append(trial._process.pid)
        (fork,) = children(killed[-1])
        os.kill(killed[-1], signal.SIGKILL)
        wait_for(lambda fork=fork: not runs(fork))
    asking.join(20)
    assert outcomes == ["the process that compiles schemas and grammars was killed; try again in 1 s"]
    assert not trial.run("regex", "b+").error


@pytest.mark.parametrize("size", [10, 100_000])  # one size that fits into a pipe, and one that does not
def test_a_process_that_is_stopped_is_given_up(trial, monkeypatch, size):
    """A stopped process is given up after a while.

    Once a schema of more than 64 kB waited forever, and all requests behind it.
    """
    assert not trial.run("regex", "a+").error
    monkeypatch.setattr(guide_trial, "WALL_SECONDS", -0.8)  # the trial waits one second longer than this
    os.kill(trial._process.pid, signal.SIGSTOP)
    with pytest.raises(QueueFullError, match="the machine is too busy to compile it within"):
        trial.run("regex", "a" * size)
    monkeypatch.undo()
    assert not trial.run("regex", "a+").error


def test_a_busy_machine_is_no_fault_of_a_schema(trial, monkeypatch):
    """A busy machine does not make a schema wrong.

    Once the schema was refused with "more than 1 s", and remained refused.
    """
    monkeypatch.setattr(guide_trial, "SECONDS", 30)
    monkeypatch.setattr(guide_trial, "WALL_SECONDS", 0.05)
    monkeypatch.setattr(guide_trial, "MEMORY_BYTES", 2**30)
    with pytest.raises(QueueFullError, match="the machine is too busy"):
        trial.run("json", HOSTILE)


def test_limits_hold_where_the_signals_of_timers_are_blocked(trial, monkeypatch):
    monkeypatch.setattr(guide_trial, "SECONDS", 0.2)
    monkeypatch.setattr(guide_trial, "MEMORY_BYTES", 2**30)
    numbers = (signal.SIGPROF, signal.SIGALRM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        assert trial.run("json", HOSTILE).error == "compiling it takes more than 0.2 s; simplify it"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_more_than_1024_open_files_do_not_matter(trial):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this process may not open that many files")
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert not trial.run("regex", "a+").error
        trial.close()
