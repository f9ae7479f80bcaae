"""The request of `/v1/chat/completions`, which requests of other APIs become."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, ValidationError

from sharp.serving.api.errors import ContextLengthError, FieldError
from sharp.serving.api.guided import Guided
from sharp.serving.api.json_formats import with_real_dates
from sharp.serving.api.request import Prompt
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.foreign_fields import OF_CHATS
from sharp.serving.frontends.http.conversation import Conversation
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.openai_request import CompletionRequest, GenerationRequest
from sharp.serving.frontends.http.openai_response import (
    ChatResponse,
    ResponseBuilder,
)
from sharp.serving.frontends.http.tools import NamedTool, calls_only, calls_or_json, calls_or_words
from sharp.serving.frontends.json_fields import Flag
from sharp.serving.frontends.request_fields import RequestFields, renamed_error
from sharp.serving.frontends.unknown_fields import first_error
from sharp.serving.text.chat_forms import MessageParser
from sharp.serving.text.reasoning import ReasoningParser
from sharp.serving.text.tool_calls import ToolCallParser
from sharp.serving.text.tool_parsers import WholeHermesParser

Effort = Annotated[str, Field(max_length=64)]
CALL_FORMS = "those of Hermes, Qwen, Llama 3, Mistral and Python"


@dataclass(frozen=True)
class ChatApi:
    """Another API whose requests are conversations.

    Attributes:
        response: makes the builder of a response from the endpoint, the request's id, the parser of completions and the
            number of prompt tokens.
        names: the names of fields of `ChatRequest` in this API, as far as they differ.
    """

    response: Callable[[Endpoint, str, Callable[[], MessageParser], int], ResponseBuilder]
    names: Mapping[str, str]

    def renamed(self, error: FieldError) -> FieldError:
        """Return an error about a field of `ChatRequest` under its name in this API."""
        name = self.names.get(error.field, error.field)
        if isinstance(error, ContextLengthError):
            return ContextLengthError(name, str(error), error.limit, error.tokens, error.needed)
        return error if name == error.field else FieldError(name, str(error).replace(error.field, name, 1))


class ChatRequest(GenerationRequest, RequestFields, Conversation):
    """The body of `/v1/chat/completions`."""

    foreign = OF_CHATS
    _api: ChatApi | None = PrivateAttr(None)

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: Flag = True
    reasoning_effort: Effort | None = None
    documents: list[dict[str, Any]] | None = None
    echo: Flag = False

    @classmethod
    def converted(cls, api: ChatApi, conversation: Mapping[str, Any], fields: Mapping[str, Any]) -> "ChatRequest":
        """Return a request of another API as one of `/v1/chat/completions`; `fields` are checked already.

        Raises:
            FieldError: a field of the `Conversation` cannot be used.
        """
        try:
            checked = Conversation.model_validate(conversation)
        except ValidationError as error:
            raise first_error(error) from error
        chat = cls.model_construct(**{name: getattr(checked, name) for name in Conversation.model_fields}, **fields)
        chat._api = api
        return chat

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a prompt gets the tokenizer's special tokens; not by default, as the template has written them."""
        return bool(self.add_special_tokens)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables that the chat template gets if it knows them."""
        offered = {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        return {name: value for name, value in offered.items() if value is not None}

    def params(self) -> SamplingParams:
        """Return the sampling parameters, after checking the fields that a conversation cannot honour.

        Raises:
            FieldError: a field is unsupported or out of range.
        """
        self.check_stream()
        last = self.messages[-1].role if self.messages else ""
        if self.echo and (last == "assistant" or not self.add_generation_prompt):  # else vLLM echoes nothing, too
            raise FieldError("echo", "echo is true; a response does not begin with the last message here; join them")
        return super().params()

    def prompts(self, endpoint: Endpoint) -> Sequence[Prompt]:
        """Return the conversation as one prompt, made by the chat template of the model.

        Raises:
            FieldError: the messages or tools cannot be used, or do not fit the template.
        """
        rendered = self.rendered(endpoint.template)
        offered = self.template_variables
        unread = offered.keys() - endpoint.template.known(offered).keys()
        endpoint.fields.note(sorted(unread), "is not read by the model's chat template")
        if self.callable and self.forms.tools is None:
            message = f"tools is set, and the model writes calls in another form than {CALL_FORMS}, which are read here"
            raise FieldError("tools", f"{message}; leave tools out, or serve a model of such a form")
        return [rendered]

    def response(
        self, endpoint: Endpoint, request_id: str, prompts: Sequence[Prompt], computed: Sequence[Sequence[int]]
    ) -> ResponseBuilder:
        """Return the builder of the response to the conversation, whose token ids are `computed`."""
        parser = partial(self.message_parser, str(prompts[0]))
        if self._api is not None:
            return self._api.response(endpoint, request_id, parser, len(computed[0]))
        extras = self._extras(endpoint, computed)
        return ChatResponse(request_id, endpoint.name, self._texts(endpoint), extras, parser)

    def message_parser(self, prompt: str) -> MessageParser:
        """Return a parser that takes tool calls and reasoning out of a completion of the prompt."""
        # A guide writes calls in the form of Hermes, whatever form the model was trained with.
        kind = ToolCallParser if self._must_call else WholeHermesParser if self._must_match else self.forms.tools
        tools = kind(several=self.parallel_tool_calls) if kind is not None and self.callable else None
        form = None if self._must_match else self.forms.reasoning
        return MessageParser(tools, None if form is None else ReasoningParser(form, prompt))

    @property
    def shows_special_tokens(self) -> bool:
        """Whether the marks of calls or reasoning in a completion are special tokens, which must be seen."""
        tools, reasoning = self.forms.tools, self.forms.reasoning
        calls = bool(self.callable) and not self._must_match and tools is not None and tools.special_tokens
        return calls or (reasoning is not None and reasoning.special_tokens)

    @property
    def _must_call(self) -> bool:
        """Whether the completion must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def _must_match(self) -> bool:
        """Whether the completion must be of a form that has no room for reasoning."""
        return bool(self._structures) or (bool(self.callable) and self._must_call)

    @property
    def _structures(self) -> list[str]:
        """The names of the fields of structured output that are set."""
        return ["guided"] if self.guided is not None else self.structure_fields

    @property
    def limit(self) -> int | None:
        """The largest number of tokens to generate; None if the request sets no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def requested_logprobs(self) -> int | None:
        """The value of `SamplingParams.logprobs`.

        Raises:
            FieldError: `top_logprobs` is set without `logprobs`.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def renamed(self, error: FieldError) -> FieldError:
        """Return an error about a field of `GenerateRequest` under the name of the field in the client's API."""
        error = self._renamed(error)
        return error if self._api is None else self._api.renamed(error)

    def _renamed(self, error: FieldError) -> FieldError:
        """Return the error with the names of the chat's fields in place of the engine's."""
        if isinstance(error, ContextLengthError):
            return ContextLengthError("messages", str(error), error.limit, error.tokens, error.needed)
        if error.field == "prompt":
            return FieldError("messages", str(error).replace("prompt", "the prompt of messages", 1))
        if self.top_logprobs is not None and error.field == "logprobs":
            return renamed_error(error, "top_logprobs")
        if self.max_completion_tokens is not None and error.field == "max_tokens":
            return renamed_error(error, "max_completion_tokens")
        if not self._structures and error.field.startswith("guided") and self.callable:
            what = "required" if self._must_call else "strict"
            return FieldError("tools", f"tools cannot be {what}: {error}")
        return super().renamed(error)

    def guide(self) -> Guided | None:
        """Return what the completion must match: a grammar of tool calls, of structured output, or of either; or None.

        Raises:
            FieldError: tools and structured output other than a JSON schema are both set, or a value cannot be used.
        """
        tools = self.callable
        if tools and self._must_call:
            one = isinstance(self.tool_choice, NamedTool) or not self.parallel_tool_calls
            return calls_only(tools, several=not one)
        if tools and self._structures and (text := super().guide()) is not None:
            if text.json is None:
                message = f"tools and {self._structures[0]} are both set; that needs a JSON schema, or tool_choice none"
                raise FieldError("tools", message)
            return calls_or_json(tools, _schema(text.text), several=self.parallel_tool_calls)
        if self.forms.tools is ToolCallParser and any(tool.function.strict for tool in tools):
            return calls_or_words(tools, several=self.parallel_tool_calls)
        return super().guide()


def _schema(text: str) -> Any:
    """Return a JSON schema from its text, with the dates of the calendar.

    Raises:
        FieldError: the text is no JSON.
    """
    try:
        return with_real_dates(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise FieldError("guided.json", f"guided.json is no JSON: {error}") from error


TextRequest = CompletionRequest | ChatRequest  # a request for completions
