"""`ResponseLimit`: how much one response of the OpenAI API may hold."""

from dataclasses import replace

from sharp.serving.api.errors import FieldError
from sharp.serving.api.request import GenerateRequest
from sharp.serving.engine.guide import GUIDE_BYTES
from sharp.serving.engine.model_folder import MAX_PROMPT_LOGPROBS

# Tokens of prompts that a response which is no stream repeats with further completions, as text or ids: some 12 MB of
# JSON.
MOST_REPEATED_TOKENS = 2**20
# Tokens of all completions of a response that is no stream, which is in memory until it is complete: at most 150 MB, by
# estimate.
MOST_WHOLE_TOKENS = 2**20


class ResponseLimit:
    """The limits of one response. All its logprobs have the limit of one prompt's, and its tokens limits of their own.

    Every completion repeats the logprobs of its prompt, and a response that is no stream (`whole`) is held in memory
    until it is complete. The new logprobs of a stream are bounded by the number of messages that may wait for its
    reader.
    """

    def __init__(self, *, whole: bool, prompts: int = 1, repeated_by: str = "") -> None:
        """Start a response to `prompts`; `repeated_by` is the field that repeats each prompt in its completions."""
        self._whole = whole
        self._guides = prompts
        self._prompts = prompts  # the number of prompts that were not added yet
        self._new = 0
        self._repeated_by = repeated_by
        self._repeated = 0
        self._tokens = 0
        self._numbers = 0

    def add(self, request: GenerateRequest) -> GenerateRequest:
        """Count what the completions of a prompt may have, and return the request.

        A completion without `max_tokens` ends where the limit is.

        Raises:
            FieldError: with the prompts before, the completions may have too many tokens or logprobs.
        """
        params = request.params
        self._check_guides(request)
        if self._whole:
            request = self._within_whole(request)
        if self._repeated_by and self._whole:
            self._repeated += len(request.prompt_ids) * (params.n - 1)
            if self._repeated > MOST_REPEATED_TOKENS:
                message = f"{self._repeated_by} is true, and {params.n} completions of a prompt repeat {self._repeated}"
                limit = f"tokens of prompts; the limit is {MOST_REPEATED_TOKENS}; request fewer completions or a stream"
                raise FieldError(self._repeated_by, f"{message} {limit}")
        if params.prompt_logprobs is not None:
            self._count(len(request.prompt_ids) * params.n, params.prompt_logprobs)
        if params.logprobs is not None and self._whole:
            if params.max_tokens is None:
                room = (MAX_PROMPT_LOGPROBS - self._numbers) // (params.n * (1 + params.logprobs))
                request = _ending(request, room)
            self._count(request.max_new_tokens * params.n, params.logprobs)
        if self._numbers > MAX_PROMPT_LOGPROBS:
            echo = " with echo" if params.prompt_logprobs is not None else ""
            message = (
                f"logprobs is {params.logprobs}, which{echo} makes {self._numbers} numbers for {self._tokens} tokens "
                f"of all prompts and completions; the limit is {MAX_PROMPT_LOGPROBS}"
            )
            what = "; set a lower max_tokens, or request fewer completions or a stream" if self._whole else ""
            raise FieldError("logprobs", message + what)
        return request

    def _check_guides(self, request: GenerateRequest) -> None:
        """Refuse the first prompt already if the guides of all are too large, because waiting makes no room.

        Raises:
            FieldError: the guides of all prompts take more than `GUIDE_BYTES`.
        """
        guided, guide = request.params.guided, request.guide
        if guided is not None and guide is not None and self._guides * guide.size > GUIDE_BYTES:
            message = f"of {self._guides} prompts takes {self._guides * guide.size >> 20} MB"
            limit = f"the limit is {GUIDE_BYTES >> 20} MB; send fewer prompts at once, or simplify it"
            name = f"guided.{guided.kind}"
            raise FieldError(name, f"{name} {message}; {limit}")

    def _within_whole(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with a limit of tokens, so that all completions of the response can be held.

        Raises:
            FieldError: max_tokens is too large for a response that is no stream.
        """
        params = request.params
        if params.max_tokens is None:
            room = (MOST_WHOLE_TOKENS - self._new) // (params.n * max(self._prompts, 1))
            request = _ending(request, room)
        self._prompts -= 1
        self._new += request.max_new_tokens * params.n
        if self._new > MOST_WHOLE_TOKENS:
            message = f"max_tokens lets the completions have {self._new} tokens, which are held until the last is there"
            limit = f"the limit is {MOST_WHOLE_TOKENS}; request fewer completions or a stream"
            raise FieldError("max_tokens", f"{message}; {limit}")
        return request

    def _count(self, tokens: int, top: int) -> None:
        """Count tokens and their log-probabilities, `top` + 1 numbers per token."""
        self._tokens += tokens
        self._numbers += tokens * (1 + top)


def _ending(request: GenerateRequest, room: int) -> GenerateRequest:
    """Return `request` with completions of at most `room` tokens, but at least as many as it must have."""
    most = max(room, request.params.min_tokens, 1)
    return replace(request, max_new_tokens=min(request.max_new_tokens, most))
