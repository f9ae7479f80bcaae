"""`LibraryReader`: reads a GGUF file with llama.cpp, or a Hugging Face folder with transformers."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from sharp.serving.api.errors import InputError, SharpError
from sharp.serving.compare.reading import TOP, Distribution, Reading, ReadingTask, StopTokens
from sharp.serving.worker_process import WorkerLostError, WorkerProcess

PROGRAM = Path(__file__).with_name("library_worker.py")
INSTALL = {  # messages about missing packages
    "llama_cpp": "llama-cpp-python, which reads GGUF files, is not installed; install it with: "
    "pip install llama-cpp-python",
    "": "{} is not installed; install it with: pip install 'sharp-attention[export]'",
}
REMOTE_CODE = "trust_remote_code"  # part of transformers' message about folders with code


class LibraryReader(AbstractContextManager["LibraryReader"]):
    """A `Reader` in its own process, so that a crash of a library does not end the command."""

    def __init__(self, path: Path, context: int, *, trust_remote_code: bool, seconds: float) -> None:
        """Load the model for sequences of up to `context` tokens. Every reply may take `seconds`.

        Raises:
            InputError: a package is missing, or the library cannot read the model.
            SharpError: the library crashed or took too long.
        """
        self._path, self._seconds = path, seconds
        self._process = WorkerProcess(PROGRAM)
        try:
            made = self._ask({"path": str(path.resolve()), "context": context, "trust_remote_code": trust_remote_code})
        except SharpError:
            self._process.close()
            raise
        self.name: str = made["name"]
        self.precision: str = made["precision"]
        self._stops = StopTokens(frozenset(made["declared"]), frozenset(made["allowed"]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._process.close()

    def tokens(self, text: str) -> Sequence[int]:
        """Return the token ids of a text in the library's tokenizer.

        Raises:
            InputError: the library cannot read the text.
            SharpError: the library crashed or took too long.
        """
        found: list[int] = self._ask({"text": text})["tokens"]
        return found

    def stops(self, declared: frozenset[int]) -> StopTokens:  # noqa: ARG002 - the library knows its own
        """Return the stop tokens that the library itself knows; `declared`, the other program's, are not used."""
        return self._stops

    def read(self, prompt: ReadingTask) -> Reading:
        """Return the log-probabilities of the prompt and a greedy continuation.

        Raises:
            InputError: the library cannot read the prompt.
            SharpError: the library crashed or took too long.
        """
        reply = self._ask({"token_ids": prompt.token_ids, "new_tokens": prompt.new_tokens, "top": TOP})
        return Reading(
            [_distribution(row) for row in reply["prompt"]],
            reply["tokens"],
            [_distribution(row) for row in reply["generated"]],
        )

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON message to the process that reads the model, and return its reply.

        Raises:
            SharpError: the process crashed, took too long or failed.
            InputError: its library is not installed.
        """
        try:
            reply = self._process.exchange(json.dumps(message).encode(), self._seconds)
        except TimeoutError as error:
            raise SharpError(
                f"reading {self._path} took more than {self._seconds:g} s; allow more with --timeout"
            ) from error
        except WorkerLostError as error:
            raise SharpError(
                f"the library that reads {self._path} crashed ({error}), or there was not enough memory for it"
            ) from error
        if (missing := reply.get("missing")) is not None:
            raise InputError(INSTALL.get(missing, INSTALL[""]).format(missing))
        if (failure := reply.get("error")) is not None:
            if REMOTE_CODE in failure:
                raise InputError(f"{self._path} has code of its own; add --trust-remote-code to run it")
            raise InputError(f"{self._path} cannot be read: {failure}")
        return reply


def _distribution(row: Sequence[tuple[int, float]]) -> Distribution:
    """Return log-probabilities by token id, from pairs."""
    return {token: logprob for token, logprob in row}  # noqa: C416 - JSON has lists for pairs
