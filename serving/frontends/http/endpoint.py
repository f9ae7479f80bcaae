"""`Endpoint`: what all routes of a model need."""

from dataclasses import dataclass

from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.frontends.service import GenerationService
from sharp.serving.frontends.unknown_fields import UnknownFields
from sharp.serving.text.chat_forms import ChatForms
from sharp.serving.text.chat_template import ChatTemplate, NoChatTemplate
from sharp.serving.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Endpoint:
    """A served model as the HTTP routes see it: its service, and the settings by which bodies are read.

    Attributes:
        service: runs requests.
        template: the chat template, or the reason why there is none.
        texts: the texts of single tokens, for logprobs.
        fields: parses bodies, with the policy for unknown fields.
        max_body_bytes: the size of the largest body that may be valid.
        forms: the formats in which the model writes tool calls and reasoning.
    """

    service: GenerationService
    template: ChatTemplate | NoChatTemplate
    texts: TokenTexts
    fields: UnknownFields
    max_body_bytes: int
    forms: ChatForms

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.service.model.manifest.name

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model; None if it has none."""
        return self.service.model.tokenizer
