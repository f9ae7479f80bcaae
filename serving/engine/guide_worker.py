"""Compiles grammars under limits of time and memory, as the program of `sharp.serving.engine.guide_trial`.

The program imports nothing of Sharp, so that it starts at once and stays small. It holds the vocabulary and forks for
every grammar. The kernel kills a fork that takes too much, and nothing of it is left. Messages are lines of JSON on
stdin and stdout.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl.h
STATM = Path("/proc/self/statm")  # numbers of virtual and resident pages
# These limits bound the cost of compiling a grammar and of the mask of a token.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=5_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
GRAMMARS: dict[str, Callable[[str], str]] = {
    "json": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "grammar": LLMatcher.grammar_from_lark,
}


def make_vocabulary(tokenizer: str, vocab_size: int, ends: list[int]) -> LLTokenizer:
    """Return llguidance's vocabulary of a `tokenizer.json`, with `ends` as its end-of-sequence tokens."""
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)


def make_matcher(vocabulary: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Compile a grammar and compute its first mask, which can take much longer than later masks.

    The returned matcher may hold an error.

    Raises:
        ValueError: the text is not JSON.
    """
    matcher = LLMatcher(vocabulary, GRAMMARS[kind](text), log_level=0, limits=LIMITS)
    if not matcher.is_error():
        bits = np.zeros(-(-vocabulary.vocab_size // 32), np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return matcher


def main() -> None:
    """Serve trials until stdin ends, which happens when the server ends."""
    with contextlib.suppress(OSError):
        os.nice(5)  # token generation has priority, but a trial must still finish within its limit on a busy machine
    # SIGINT and SIGTERM reach the whole process group, but the server ends this process
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    first = json.loads(sys.stdin.buffer.readline())
    vocabulary = make_vocabulary(first["tokenizer"], first["vocab_size"], first["ends"])
    make_matcher(vocabulary, "regex", "a")
    _reply({})
    for line in sys.stdin.buffer:
        given = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            _try(vocabulary, given, write)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            found = pipe.read()  # reads until the trial ends
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and found:
            _reply(json.loads(found))
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            _reply({"busy": True})
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            _reply({"error": f"compiling it takes more than {given['seconds']:g} s; simplify it", "size": 0})
        else:
            _reply({"error": f"compiling it takes more than {given['memory'] >> 20} MB; simplify it", "size": 0})


def _reply(message: dict[str, Any]) -> None:
    """Write a JSON message as one line to stdout."""
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def _try(vocabulary: LLTokenizer, given: dict[str, Any], write: int) -> NoReturn:
    """Compile a grammar in this fork, write the outcome as JSON to the pipe `write`, and exit.

    `given` has kind, text and limits.
    """
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        # A fork that kept stdout open would hide the end of its worker, if the worker is killed first, from the server.
        os.dup2(null, 1)
        os.dup2(null, 2)  # llguidance prints there before it aborts for lack of memory
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
        pages = int(STATM.read_text().split()[0])
        limit = pages * resource.getpagesize() + given["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # A fork inherits the signals that its parent ignores or blocks. Without a reset, no signal would end this fork.
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
        signal.setitimer(signal.ITIMER_PROF, given["seconds"])
        signal.setitimer(signal.ITIMER_REAL, given["wall_seconds"])
        before = _resident()
        try:
            error = make_matcher(vocabulary, given["kind"], given["text"]).get_error()
        except (ValueError, RecursionError) as caught:
            error = str(caught)
        found = {"error": error[:4096], "size": max(0, _resident() - before)}
        os.write(write, json.dumps(found).encode())
    except BaseException:  # a fork must not continue with the code of its parent
        os._exit(1)
    os._exit(0)


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
