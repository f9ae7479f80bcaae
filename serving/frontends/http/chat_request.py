"""The request of `/v1/chat/completions`, and the base of other APIs that are conversations."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from sharp.serving.api.errors import ContextLengthError, FieldError
from sharp.serving.api.guided import Guided
from sharp.serving.api.request import Prompt
from sharp.serving.api.sampling_fields import (
    Flag,
    StrictMessage,
)
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.http.conversation import Conversation
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.openai_request import GenerationRequest
from sharp.serving.frontends.http.openai_response import (
    ChatResponse,
    ResponseBuilder,
)
from sharp.serving.frontends.http.tools import NamedTool, calls_only, calls_or_words
from sharp.serving.frontends.request_fields import renamed_error
from sharp.serving.text.chat_forms import MessageParser
from sharp.serving.text.reasoning import ReasoningParser
from sharp.serving.text.tool_calls import ToolCallParser

CALL_FORMS = "those of Hermes, Qwen, Llama 3, Mistral and Python"


class ChatRequest(GenerationRequest, Conversation):
    """The body of `/v1/chat/completions`."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: Flag = True
    modalities: list[str] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    documents: list[dict[str, Any]] | None = None
    echo: Flag = False

    @property
    def adds_special_tokens(self) -> bool:
        """Not by default: the template has written them."""
        return bool(self.add_special_tokens)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the template gets if it knows it."""
        offered = {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        return {name: value for name, value in offered.items() if value is not None}

    def params(self) -> SamplingParams:
        """See `SamplingFields`."""
        if self.modalities not in (None, ["text"]):
            raise FieldError("modalities", f'modalities is {json.dumps(self.modalities)}; only ["text"] is supported')
        last = self.messages[-1].role if self.messages else ""
        if self.echo and (last == "assistant" or not self.add_generation_prompt):  # otherwise vLLM returns none either
            raise FieldError("echo", "echo is true; a response does not begin with the last message here; join them")
        return super().params()

    def prompts(self, endpoint: Endpoint) -> Sequence[Prompt]:
        """See `GenerationRequest`."""
        rendered = self.rendered(endpoint.template)
        offered = self.template_variables
        unread = offered.keys() - (endpoint.template.known(offered).keys() if endpoint.template else ())
        endpoint.fields.note(sorted(unread), "is not read by the model's chat template")
        if self.callable and self.forms.tools is None:
            message = f"tools is set, and the model writes calls in another form than {CALL_FORMS}, which are read here"
            raise FieldError("tools", f"{message}; leave tools out, or serve a model of such a form")
        return [rendered]

    def response(
        self, endpoint: Endpoint, request_id: str, prompts: Sequence[Prompt], computed: Sequence[Sequence[int]]
    ) -> ResponseBuilder:
        """See `GenerationRequest`."""
        extras = self._extras(endpoint, computed)
        parser = partial(self.message_parser, str(prompts[0]))
        return ChatResponse(request_id, endpoint.name, self._texts(endpoint), extras, parser)

    def message_parser(self, prompt: str) -> MessageParser:
        """What takes calls and thoughts out of a completion of the prompt."""
        # Calls that must come are written as Hermes writes them, whatever the model is used to.
        kind = ToolCallParser if self._must_call else self.forms.tools
        tools = kind(several=self.parallel_tool_calls) if kind is not None and self.callable else None
        form = None if self._must_match else self.forms.reasoning
        return MessageParser(tools, None if form is None else ReasoningParser(form, prompt))

    @property
    def shows_special_tokens(self) -> bool:
        """See `GenerationRequest`."""
        tools, reasoning = self.forms.tools, self.forms.reasoning
        calls = bool(self.callable) and not self._must_call and tools is not None and tools.special_tokens
        return calls or (reasoning is not None and reasoning.special_tokens)

    @property
    def _must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def _must_match(self) -> bool:
        """Whether the completion is of a form that has no room for thoughts."""
        return self.guided is not None or bool(self.structure_fields) or (bool(self.callable) and self._must_call)

    @property
    def limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def requested_logprobs(self) -> int | None:
        """`SamplingParams.logprobs`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def renamed(self, error: FieldError) -> FieldError:
        """See `GenerationRequest`."""
        if isinstance(error, ContextLengthError):
            return ContextLengthError("messages", str(error), error.limit, error.tokens, error.needed)
        if error.field == "prompt":
            return FieldError("messages", str(error))
        if self.top_logprobs is not None and error.field == "logprobs":
            return renamed_error(error, "top_logprobs")
        if self.guided is None and error.field.startswith("guided") and self.callable:
            what = "required" if self._must_call else "strict"
            return FieldError("tools", f"tools cannot be {what}: {error}")
        return super().renamed(error)

    def guide(self) -> Guided | None:
        """What the completion must match: what its fields say, or calls of tools alone."""
        tools = self.callable
        if tools and (names := ["guided"] if self.guided is not None else self.structure_fields):
            raise FieldError("tools", f"tools and {names[0]} are both set; that needs tool_choice none")
        if tools and self._must_call:
            one = isinstance(self.tool_choice, NamedTool) or not self.parallel_tool_calls
            return calls_only(tools, several=not one)
        if self.forms.tools is ToolCallParser and any(tool.function.strict for tool in tools):
            return calls_or_words(tools, several=self.parallel_tool_calls)
        return super().guide()


class ConvertedRequest(StrictMessage):
    """The body of another API, which is a conversation too."""

    def generation(self) -> "ChatRequest":
        """The same as a request of `/v1/chat/completions`.

        Raises:
            FieldError: a field cannot be honoured.
        """
        raise NotImplementedError
