"""A model on a server with OpenAI's API, such as llama.cpp, vLLM or sharp-serve."""

import os
from collections.abc import Sequence
from typing import Any

from sharp.core.errors import InputError
from sharp.core.http_connection import MODELS, HttpConnection, RefusedError
from sharp.exporter.long_context.documents import Question
from sharp.exporter.long_context.reader import Figures, ReadDocument, Response
from sharp.exporter.long_context.subjects import KEY, SECONDS
from sharp.exporter.long_context.token_reader import PLAIN

TOP = 20  # likeliest tokens per position that servers report


class ServerDocumentReader:
    """A `DocumentReader` that sends the document with every question; the server's prefix cache keeps it.

    Questions are in the plain form, because no field of the API sets the beginning of a chat's response. Scores are
    those of the choices among the 20 likeliest tokens, which the server reports as `logprobs`. Without `logprobs`, only
    the text counts.

    Raises:
        InputError: `base` is not the address of such a server. All methods may raise this error, too.
        SharpError: no server responds, or it refuses a request; so may all methods.
    """

    form = "plain"
    max_context: int | None = None

    def __init__(self, base: str) -> None:
        """Ask the server at `base`, such as http://127.0.0.1:8000 or http://127.0.0.1:8000/v1, for its first model.

        Requests carry the key in the environment variable OPENAI_API_KEY, if there is one, and wait up to ten minutes.

        Raises:
            InputError: the server does not respond as OpenAI's API does, or lists no model.
            SharpError: no server responds, or it refuses the request.
        """
        self._connection = HttpConnection(base, token=os.environ.get(KEY), seconds=SECONDS)
        self._url = self._connection.url
        listed = self._ask(MODELS, None)
        try:
            entry = listed["data"][0]
            self.model = str(entry["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"{self._url}{MODELS} lists no model; give the address of an OpenAI-compatible server"
            ) from error
        longest = entry.get("max_model_len")
        self.max_context = longest if isinstance(longest, int) else None
        self._document = ""
        self._per_character: float | None = None

    def count(self, text: str) -> int:
        """Estimate the number of tokens of a text, by tokens per character.

        The server counts the tokens of (the beginning of) the first text; later texts are not sent.

        Raises:
            InputError: the server fails, or does not say the number of tokens of a prompt.
        """
        if self._per_character is None:
            sample = text[:8000]
            usage = self._complete(sample, 1, None).get("usage")
            if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
                raise InputError(f"{self._url} does not say the tokens of a prompt in its usage, which documents need")
            self._per_character = usage["prompt_tokens"] / max(1, len(sample))
        return round(len(text) * self._per_character)

    def read(self, text: str) -> ReadDocument:
        """Send a document to fill the server's prefix cache, and return its number of tokens; losses are None."""
        self._document = text
        usage = self._complete(text, 1, None).get("usage")
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return ReadDocument(tokens if isinstance(tokens, int) else self.count(text), None)

    def ask(self, questions: Sequence[Question]) -> list[Response]:
        """Send the document of the last `read` with each question, and return the responses in their order."""
        return [self._response(question) for question in questions]

    def _response(self, question: Question) -> Response:
        """Ask the server the question about the document; return its text and the scores of the choices.

        Raises:
            InputError: the server's response is no completion.
        """
        prompt = self._document + PLAIN[1].format(question=question.question) + question.lead
        most = 4 * len(question.expected.split()) + 4
        try:
            choice = self._complete(prompt, most, TOP)["choices"][0]
            text = str(choice["text"])
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"{self._url}/v1/completions sent no completion; give an OpenAI-compatible server"
            ) from error
        return Response(_scores(choice.get("logprobs"), question), text)

    def heads(self) -> tuple[Figures, Figures] | None:
        """Return None, because a server reports nothing of its heads."""
        return None

    def _complete(self, prompt: str, tokens: int, logprobs: int | None) -> dict[str, Any]:
        """Return the server's completion of `prompt`: at most `tokens` tokens, greedy.

        `logprobs` is how many likeliest tokens to list; None lists none.
        """
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return self._ask("/v1/completions", body | ({} if logprobs is None else {"logprobs": logprobs}))

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Send JSON to the server (GET if `body` is None) and return the JSON object of its response.

        Raises:
            InputError: the response is no JSON object, or the server requires a key.
        """
        try:
            content = self._connection.request(path, body)
        except RefusedError as error:
            if error.status in (401, 403):
                raise InputError(f"{error}; put the server's key into the variable {KEY}") from error
            raise
        if not isinstance(content, dict):
            raise InputError(f"{self._url}{path} sent no JSON object; give the address of an OpenAI-compatible server")
        return content


def _scores(logprobs: Any, question: Question) -> dict[str, float] | None:
    """Return the log-probability of each choice that begins with one of the likeliest tokens, if no other choice does.

    Other choices are missing. `logprobs` is that of a completion, in any form; the result is None if it has no
    log-probabilities.
    """
    try:
        likeliest = logprobs["top_logprobs"][0]
        tokens = {str(token): float(value) for token, value in likeliest.items()}
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        return None
    scores: dict[str, float] = {}
    for token, value in tokens.items():
        begun = [choice for choice in dict.fromkeys(question.choices) if token.strip() and choice.startswith(token)]
        if len(begun) == 1:
            scores[begun[0]] = max(value, scores.get(begun[0], value))
    return scores
