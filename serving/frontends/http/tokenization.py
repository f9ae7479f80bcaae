"""vLLM's `/tokenize` and `/detokenize`."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sharp.serving.api.errors import FieldError, SharpError
from sharp.serving.engine.served_model import ServedModel
from sharp.serving.frontends.foreign_fields import OF_TOKENIZERS
from sharp.serving.frontends.http.body import read_body
from sharp.serving.frontends.http.conversation import ChatMessage, Conversation
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.origin import origin_of
from sharp.serving.frontends.json_fields import NULL_IS_UNSET, Flag, RequestBody, TokenIds
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.text.chat_template import ChatTemplate, NoChatTemplate
from sharp.serving.text.tokenizer import check_characters, check_token_ids, tokenize

MOST_TOKENS = 2**16  # to decode at once, unless the context is longer
MOST_ID_BYTES = 12  # a token id in JSON, with a comma and white space
OF_MESSAGES = Conversation.model_fields.keys() - {"messages"}


class TokenizerRequest(RequestBody, ABC):
    """The body of a request that needs the tokenizer only."""

    model: Annotated[str, NULL_IS_UNSET] = ""

    @classmethod
    def most_bytes(cls, most: int, context_limit: int) -> int:  # noqa: ARG003
        """Return the largest size of a body that may be valid, in bytes.

        `most` is the limit of any request, and `context_limit` the model's, in tokens.
        """
        return most

    @abstractmethod
    def respond(self, model: ServedModel, template: ChatTemplate | NoChatTemplate) -> dict[str, Any]:
        """Return the body of the response.

        Raises:
            FieldError: a field cannot be used with this model.
        """


class TokenizeRequest(TokenizerRequest, Conversation):
    """The body of `/tokenize`: a text, or a conversation as in `/v1/chat/completions`.

    The response has the token ids that a completion of it would read.
    """

    foreign = OF_TOKENIZERS

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], NULL_IS_UNSET] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: Flag = False

    def respond(self, model: ServedModel, template: ChatTemplate | NoChatTemplate) -> dict[str, Any]:
        """Return the token ids of the text or conversation, and their number.

        Raises:
            FieldError: a field cannot be used with this model.
        """
        if (self.prompt is None) == (not self.messages):
            raise FieldError("prompt", "give either prompt or messages")
        if self.prompt is not None and (unused := self.model_fields_set & OF_MESSAGES):
            raise FieldError(min(unused), f"{min(unused)} is for messages, and there is a prompt; send one of both")
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
    """The body of `/detokenize`: token ids, whose text is returned."""

    tokens: TokenIds

    @classmethod
    def most_bytes(cls, most: int, context_limit: int) -> int:
        """Return the size of the largest body that may be valid, at most `most`.

        `context_limit` is the model's context, which bounds how many tokens a request may decode (`most_tokens`).
        """
        return min(most, MOST_ID_BYTES * (1 + most_tokens(context_limit)))

    def respond(self, model: ServedModel, template: ChatTemplate | NoChatTemplate) -> dict[str, Any]:  # noqa: ARG002
        """Return the text of the token ids.

        Raises:
            FieldError: the model has no tokenizer, or the ids are too many or outside the vocabulary.
        """
        if model.tokenizer is None:
            raise FieldError("tokens", f"tokens have no text, as {model.manifest.name} has no tokenizer")
        limit = most_tokens(model.context_limit)
        if len(self.tokens) > limit:
            raise FieldError("tokens", f"tokens has {len(self.tokens)} entries; the limit is {limit}")
        check_token_ids("tokens", self.tokens, model.manifest)
        return {"prompt": model.tokenizer.decode(self.tokens, special_tokens=True)}


def most_tokens(context_limit: int) -> int:
    """Return how many tokens a request to detokenize may have, at least the model's context."""
    return max(MOST_TOKENS, context_limit)


def tokenization(
    endpoint: Endpoint,
    kind: type[TokenizerRequest],
    refusal: Callable[[SharpError], Response] = error_response,
) -> Callable[[Request], Awaitable[Response]]:
    """Return the route for requests of a kind; `refusal` writes its errors."""
    service, template = endpoint.service, endpoint.template

    def respond(body: bytes) -> Response:
        """Return the response to the request in `body`; runs in a thread."""
        request = endpoint.fields.parse(kind, body)
        service.check_model(request.model)
        # Python's own encoder would keep the interpreter's lock for half a second with a million tokens.
        return Response(to_json(request.respond(service.model, template)), media_type="application/json")

    async def route(request: Request) -> Response:
        """Respond to a request, or with its error in the form of the API."""
        try:
            return await counted(request)
        except SharpError as error:
            return refusal(error)

    async def counted(request: Request) -> Response:
        """Read the body within the limit of buffers and respond; log a refusal."""
        origin = origin_of(request.scope)
        logged = refusals_logged(origin, service.model.manifest.name)
        with logged, service.buffers.hold() as held:
            try:
                await read_body(request, kind.most_bytes(endpoint.max_body_bytes, service.model.context_limit), held)
            except ClientDisconnect:
                return Response()  # nobody reads this response
            # A long text takes a while, which would block the event loop.
            return await service.parsing.run(lambda: respond(held.take()), origin.client)

    return route
