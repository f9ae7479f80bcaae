"""vLLM's `/tokenize` and `/detokenize`."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sharp.serving.api.errors import FieldError, SharpError
from sharp.serving.api.sampling_fields import FAIL_FAST, NULL_IS_UNSET, Flag, StrictMessage, WholeNumber
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.frontends.http.body import read_body
from sharp.serving.frontends.http.conversation import ChatMessage, Conversation
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.unsupported_fields import UNSUPPORTED
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin
from sharp.serving.text.chat_template import ChatTemplate
from sharp.serving.text.tokenizer import check_characters, check_token_ids, tokenize

MOST_TOKENS = 2**16  # to decode at once, where the context is not longer
MOST_ID_BYTES = 12  # of a token id, a comma and white space
OF_MESSAGES = Conversation.model_fields.keys() - {"messages"}


class TokenizerRequest(StrictMessage, ABC):
    """The body of a request that needs the tokenizer only."""

    model: Annotated[str, NULL_IS_UNSET] = ""

    @classmethod
    def most_bytes(cls, most: int, context_limit: int) -> int:  # noqa: ARG003
        """The largest body that may be valid; that of any request has `most`."""
        return most

    @abstractmethod
    def respond(self, model: ModelFolder, template: ChatTemplate | None) -> dict[str, Any]:
        """The body of the response.

        Raises:
            FieldError: a field cannot be used with this model.
        """


class TokenizeRequest(TokenizerRequest, Conversation):
    """A text, or a conversation as in `/v1/chat/completions`: the tokens that a completion of it would read."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], NULL_IS_UNSET] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: Flag = False
    # Of vLLM: this server's messages are text.
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    chat_template: Any = None

    def respond(self, model: ModelFolder, template: ChatTemplate | None) -> dict[str, Any]:
        """See `TokenizerRequest`."""
        accepted, message = UNSUPPORTED["chat_template"]
        if self.chat_template not in accepted:
            raise FieldError("chat_template", message)
        if (self.prompt is None) == (not self.messages):
            raise FieldError("prompt", "give either prompt or messages")
        if self.prompt is not None and (unused := self.model_fields_set & OF_MESSAGES):
            raise FieldError(min(unused), f"{min(unused)} is for messages, and there is a prompt")
        text = self.rendered(template) if self.prompt is None else self.prompt
        check_characters(text, model.context_limit)
        special = self.prompt is not None if self.add_special_tokens is None else self.add_special_tokens
        token_ids = tokenize(text, model.manifest, model.tokenizer, special_tokens=special)
        names = model.tokenizer.names(token_ids) if self.return_token_strs and model.tokenizer is not None else None
        return {
            "count": len(token_ids),
            "max_model_len": model.context_limit,
            "tokens": token_ids,
            "token_strs": names,
        }


class DetokenizeRequest(TokenizerRequest):
    """Token ids to decode."""

    tokens: Annotated[list[WholeNumber], FAIL_FAST]

    @classmethod
    def most_bytes(cls, most: int, context_limit: int) -> int:
        """See `TokenizerRequest`."""
        return min(most, MOST_ID_BYTES * (1 + most_tokens(context_limit)))

    def respond(self, model: ModelFolder, template: ChatTemplate | None) -> dict[str, Any]:  # noqa: ARG002
        """See `TokenizerRequest`."""
        if model.tokenizer is None:
            raise FieldError("tokens", f"tokens have no text, as {model.manifest.name} has no tokenizer")
        limit = most_tokens(model.context_limit)
        if len(self.tokens) > limit:
            raise FieldError("tokens", f"tokens has {len(self.tokens)} entries; the limit is {limit}")
        check_token_ids("tokens", self.tokens, model.manifest)
        return {"prompt": model.tokenizer.decode(self.tokens, special_tokens=True)}


def most_tokens(context_limit: int) -> int:
    """The most tokens that a request may decode."""
    return max(MOST_TOKENS, context_limit)


def tokenization(
    endpoint: Endpoint,
    kind: type[TokenizerRequest],
    refusal: Callable[[SharpError], Response] = error_response,
) -> Callable[[Request], Awaitable[Response]]:
    """The route for requests of a kind; `refusal` writes its errors."""
    service, template = endpoint.service, endpoint.template

    def respond(body: bytes) -> Response:
        request = endpoint.fields.parse(kind, body)
        service.check_model(request.model)
        # Not Python's own encoder: of a million tokens it would keep the interpreter's lock for half a second.
        return Response(to_json(request.respond(service.model, template)), media_type="application/json")

    async def route(request: Request) -> Response:
        try:
            return await counted(request)
        except SharpError as error:
            return refusal(error)

    async def counted(request: Request) -> Response:
        logged = refusals_logged(RequestOrigin("http", dict(request.headers)), service.model.manifest.name)
        with logged, service.buffers.hold() as held:
            try:
                await read_body(request, kind.most_bytes(endpoint.max_body_bytes, service.model.context_limit), held)
            except ClientDisconnect:
                return Response()  # nobody reads it
            # A long text takes a while, and the loop serves everyone.
            return await service.parsing.run(lambda: respond(held.take()))

    return route
