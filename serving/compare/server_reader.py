"""`ServerReader`: reads a model through a running server of any known program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharp.core.http_connection import HttpConnection, RefusedError
from sharp.serving.api.errors import InputError, SharpError
from sharp.serving.compare.formats import (
    Completions,
    LlamaCompletion,
    Models,
    TextGeneration,
    TextTokens,
    TokenList,
    by_text,
    joined,
    parsed,
)
from sharp.serving.compare.reading import TOP, Distribution, Reading, ReadingTask, StopTokens, Token

COMPLETIONS = "/v1/completions"
STEP_TOP = 100  # number of most likely tokens of a step, which must include the token of the text
MOST_STEPS = 48  # maximum requests per text to a server that gives the log-probabilities of one position only
BIAS_STEPS = 3  # tokens to request with a stop token made the likeliest, to see whether the server goes on
MOST_STOPS = 8
# OpenAI's API allows 5 most likely tokens, others 20.
TOPS = (TOP, 5)
GREEDY = {"temperature": 0, "repetition_penalty": 1.0}
# Fields with which vLLM returns token ids instead of texts. Other servers ignore them.
AS_IDS = {"return_tokens_as_token_ids": True, "return_token_ids": True}


class _NoLogprobsError(SharpError):
    """The server responds, but without the log-probabilities of the prompt."""


class ServerReader:
    """A `Reader` of a server: vLLM, llama-server, Text Generation Inference, sharp-serve or another of OpenAI's API.

    The first prompt finds out which kind of request the server understands. All later prompts use this kind.
    """

    precision = "8 bits"  # an estimate: servers compute in 16 bits or with quantized weights, and do not say which

    def __init__(self, connection: HttpConnection, model: str | None) -> None:
        """Use the served model named `model`, or ask the server for the first name that it lists.

        Raises:
            InputError: the server asks for a token.
            SharpError: there is no server.
        """
        self._connection = connection
        self._model = model if model is not None else self._served_model()
        self.name = f"{connection.url} ({self._model})" if self._model else connection.url
        self._tokenize: Callable[[str], list[int] | None] | None = None
        self._takes_ids = True
        self._read: Callable[[ReadingTask], Reading] | None = None

    def tokens(self, text: str) -> Sequence[int] | None:
        """Return the token ids of a text by the first API that the server knows; None if it knows none.

        Raises:
            SharpError: the server fails, or refuses a later text.
        """
        ways = (self._vllm_tokens, self._llama_tokens, self._text_generation_tokens, self._python_tokens)
        for way in (self._tokenize,) if self._tokenize is not None else (*ways, self._echoed_tokens):
            try:
                found = way(text)
            except (RefusedError, InputError):
                if self._tokenize is not None:
                    raise
                continue
            # llama-server returns an empty list if it does not know the request's field.
            if found:
                self._tokenize = way
                return found
        self._tokenize = _no_tokens
        return None

    def stops(self, declared: frozenset[int]) -> StopTokens | None:
        """Return the stop tokens in `declared` at which the server ends, or None if it does not show that.

        One token after the other is made the likeliest, to see whether the server ends the completion there. Only the 8
        lowest ids are tested; the others count as tokens at which it may end.
        """
        tested, untested = sorted(declared)[:MOST_STOPS], sorted(declared)[MOST_STOPS:]
        ending = set(untested)
        for token in tested:
            try:
                ends = self._ends_at(token)
            except (RefusedError, InputError):
                return None
            if ends is None:
                return None
            if ends:
                ending.add(token)
        return StopTokens(frozenset(), frozenset(ending), complete=False)

    def read(self, prompt: ReadingTask) -> Reading:
        """Return log-probabilities and a greedy continuation by the first kind of request that the server takes.

        Raises:
            InputError: the server takes no known kind of request.
            SharpError: the server fails.
        """
        if self._read is not None:
            return self._read(prompt)
        refusals = []
        for way in (self._echo, self._text_generation, self._llama_steps, self._completion_steps, self._greedy):
            try:
                reading = way(prompt)
            except (RefusedError, _NoLogprobsError) as error:
                refusals.append(error)
                continue
            self._read = way
            return reading
        raise InputError(f"{self._connection.url} gives neither log-probabilities nor completions: {refusals[0]}")

    def _served_model(self) -> str:
        """Return the name of the server's first model; "" if it does not list models.

        Raises:
            InputError: the server requires a token.
        """
        try:
            found = self._connection.request("/v1/models")
        except RefusedError as error:
            if error.status in (401, 403):
                raise InputError(f"{error}; give the server's token with --token") from error
            return ""  # older servers of Text Generation Inference do not list models
        models = parsed(Models, found, f"{self._connection.url}/v1/models").data
        return models[0].id if models else ""

    def _post(self, kind: type[Any], path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON to `path` and return the response as the model class `kind`."""
        return parsed(kind, self._connection.request(path, body), self._connection.url + path)

    def _native(self, kind: type[Any], path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON to an API of one particular program, and return the response as the model class `kind`.

        Raises:
            _NoLogprobsError: the response has another form, so another program sent it.
        """
        try:
            return self._post(kind, path, body)
        except InputError as error:
            raise _NoLogprobsError(str(error)) from error

    def _vllm_tokens(self, text: str) -> list[int]:
        """Return the token ids of a text from vLLM's /tokenize."""
        found: TokenList = self._post(TokenList, "/tokenize", {"model": self._model, "prompt": text})
        return found.tokens

    def _llama_tokens(self, text: str) -> list[int]:
        """Return the token ids of a text, with special tokens, from llama.cpp's /tokenize."""
        body = {"content": text, "add_special": True, "parse_special": True}
        found: TokenList = self._post(TokenList, "/tokenize", body)
        return found.tokens

    def _text_generation_tokens(self, text: str) -> list[int]:
        """Return the token ids of a text from Text Generation Inference's /tokenize."""
        found = self._post(TextTokens, "/tokenize", {"inputs": text})
        return [token.id for token in found]

    def _python_tokens(self, text: str) -> list[int]:
        """Return token ids from the server of llama-cpp-python.

        Its echo is not used, because its log-probabilities are one position late if a text has no token at its start.
        """
        found: TokenList = self._post(TokenList, "/extras/tokenize", {"input": text})
        self._takes_ids = False
        return found.tokens

    def _echoed_tokens(self, text: str) -> list[int] | None:
        """Return the token ids of a text from an echoing completion; None if the server shows texts instead of ids."""
        choice = self._complete(text, 1, echo=True, logprobs=1).choices[0]
        if choice.prompt_token_ids is not None:
            return choice.prompt_token_ids
        names = choice.logprobs.names[:-1] if choice.logprobs is not None else []
        return None if by_text(names) else [int(name) for name in names]

    def _complete(self, prompt: str | Sequence[int], new_tokens: int, **fields: Any) -> Completions:
        """Request a greedy completion of `new_tokens` tokens; `fields` are further fields of the body."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": new_tokens, **GREEDY, **AS_IDS, **fields}
        found: Completions = self._post(Completions, COMPLETIONS, body)
        return found

    def _prompts(self, prompt: ReadingTask) -> list[str | list[int]]:
        """Return the prompts to try: the token ids, whose log-probabilities are always comparable, then the text."""
        return [list(prompt.token_ids), prompt.text] if self._takes_ids else [prompt.text]

    def _tries(self, prompt: ReadingTask, new_tokens: int, **fields: Any) -> Completions:
        """Complete a prompt with the first form of the prompt and number of logprobs that the server accepts.

        Token ids are tried before the text, and with each 20 logprobs before 5. Later prompts are sent as ids only if
        the server accepted ids. `fields` are more fields of the request, without `logprobs`.

        Raises:
            RefusedError: the server accepts no combination.
        """
        last: RefusedError | None = None
        for sent in self._prompts(prompt):
            for top in TOPS:
                try:
                    found = self._complete(sent, new_tokens, logprobs=top, **fields)
                except RefusedError as error:
                    last = error
                    continue
                self._takes_ids = not isinstance(sent, str)
                return found
        assert last is not None
        raise last

    def _echo(self, prompt: ReadingTask) -> Reading:
        """Read a prompt by `echo` and `logprobs` of OpenAI's completions.

        Raises:
            _NoLogprobsError: the server leaves echo or logprobs out.
        """
        if self._tokenize == self._python_tokens:
            raise _NoLogprobsError("no echo")
        completions = self._tries(prompt, prompt.new_tokens, echo=True)
        found = completions.choices[0].logprobs
        if found is None or not (values := found.distributions) or values[0] is not None:
            raise _NoLogprobsError(f"{self._connection.url} leaves echo or logprobs out")
        read = len(prompt.token_ids) if completions.usage is None else completions.usage.prompt_tokens
        names = found.names
        return Reading(
            values[1:read],
            names[read:],
            [value for value in values[read:] if value is not None],
            by_text(names),
            None if self._takes_ids else names[:read],
        )

    def _text_generation(self, prompt: ReadingTask) -> Reading:
        """Read a prompt by `decoder_input_details` of Text Generation Inference.

        Raises:
            _NoLogprobsError: the server gives no details of the prompt.
        """
        options = {
            "max_new_tokens": prompt.new_tokens,
            "decoder_input_details": True,
            "details": True,
            "do_sample": False,
            "top_n_tokens": 5,  # the default limit of Text Generation Inference
        }
        body = {"inputs": prompt.text, "parameters": options}
        details = self._native(TextGeneration, "/generate", body).details
        values = [None if token.logprob is None else {token.name: token.logprob} for token in details.prefill]
        if not values:
            raise _NoLogprobsError(f"{self._connection.url} gives no details of the prompt")
        tops = details.top_tokens or [[] for _ in details.tokens]
        generated = [
            joined((entry.name, entry.logprob) for entry in (*top, token))
            for token, top in zip(details.tokens, tops, strict=True)
        ]
        return Reading(
            values[1:],
            [token.name for token in details.tokens],
            generated,
            read=[token.name for token in details.prefill],
        )

    def _llama_steps(self, prompt: ReadingTask) -> Reading:
        """Read a prompt position by position by `n_probs` of llama-server, which has no echo."""

        def complete(token_ids: Sequence[int], new_tokens: int, top: int) -> tuple[list[Token], list[Distribution]]:
            """Return greedy tokens after these ids, with the `top` likeliest of each, by llama.cpp's own API."""
            body = {
                "prompt": list(token_ids),
                "n_predict": new_tokens,
                "n_probs": top,
                "return_tokens": True,
                "cache_prompt": True,
                "temperature": 0,
                "repeat_penalty": 1.0,
            }
            found: LlamaCompletion = self._native(LlamaCompletion, "/completion", body)
            if not found.completion_probabilities:
                raise _NoLogprobsError(f"{self._connection.url} gives no probabilities")
            entries = found.completion_probabilities
            return [entry.name for entry in entries], [entry.distribution for entry in entries]

        return _by_steps(prompt, complete)

    def _completion_steps(self, prompt: ReadingTask) -> Reading:
        """Read a prompt position by position by OpenAI's completions, if they take token ids but have no echo.

        Raises:
            _NoLogprobsError: the server takes no token ids.
        """

        def complete(token_ids: Sequence[int], new_tokens: int, _top: int) -> tuple[list[Token], list[Distribution]]:
            """Return greedy tokens after these ids, with log-probabilities, by the completions API."""
            return self._completed(ReadingTask(prompt.text, tuple(token_ids), 0), new_tokens)

        if not self._takes_ids:
            raise _NoLogprobsError(f"{self._connection.url} takes no token ids")
        complete(prompt.token_ids, 1, TOP)
        if not self._takes_ids:  # the server took the text instead
            raise _NoLogprobsError(f"{self._connection.url} takes no token ids")
        return _by_steps(prompt, complete)

    def _greedy(self, prompt: ReadingTask) -> Reading:
        """Read only a greedy continuation of the text, without log-probabilities of the prompt."""
        tokens, generated = self._completed(prompt, prompt.new_tokens)
        read = None if self._takes_ids else self.tokens(prompt.text) or ()
        return Reading(None, tokens, generated, by_text(tokens), read, ("log-probabilities of the prompt",))

    def _completed(self, prompt: ReadingTask, new_tokens: int) -> tuple[list[Token], list[Distribution]]:
        """Return generated tokens, and log-probabilities per token, of a greedy completion.

        Raises:
            _NoLogprobsError: the server gives none.
        """
        choice = self._tries(prompt, new_tokens).choices[0]
        if choice.logprobs is None or not choice.logprobs.names:
            raise _NoLogprobsError(f"{self._connection.url} gives no log-probabilities")
        return choice.logprobs.names, [row for row in choice.logprobs.distributions if row is not None]

    def _ends_at(self, token: int) -> bool | None:
        """Return whether the server ends a completion at a token; None if it ignores `logit_bias`."""
        sent: list[int] | str = [token] if self._takes_ids else "a"
        bias = {"logit_bias": {str(token): 100}, "logprobs": 1}
        try:
            found = self._complete(sent, BIAS_STEPS, **bias)
        except RefusedError:
            if isinstance(sent, str):
                raise
            found = self._complete("a", BIAS_STEPS, **bias)
        choice = found.choices[0]
        if choice.finish_reason == "stop":
            return True
        generated = choice.token_ids or (choice.logprobs.names if choice.logprobs is not None else [])
        return False if list(generated) == [token] * BIAS_STEPS else None


def _by_steps(
    prompt: ReadingTask, complete: Callable[[Sequence[int], int, int], tuple[list[Token], list[Distribution]]]
) -> Reading:
    """Read the distributions after at most MOST_STEPS starts of a prompt, including the first and the last.

    `complete` gets token ids, a number of new tokens and a number of likeliest tokens, and returns the new tokens and
    their distributions.
    """
    token_ids = prompt.token_ids
    predicted = len(token_ids) - 1
    steps = min(predicted, MOST_STEPS)
    chosen = {1 + round(step * (predicted - 1) / max(1, steps - 1)) for step in range(steps)}
    rows: list[Distribution | None] = []
    for length in range(1, len(token_ids)):
        rows.append(complete(token_ids[:length], 1, STEP_TOP)[1][0] if length in chosen else None)
    tokens, generated = complete(token_ids, prompt.new_tokens, TOP)
    left = f"log-probabilities of {predicted - len(chosen)} of {predicted} tokens" if len(chosen) < predicted else ""
    return Reading(rows, tokens, generated, by_text(tokens), lacks=(left,) if left else ())


def _no_tokens(_text: str) -> None:
    """Return None instead of the text's tokens, for a server that has no such API."""
