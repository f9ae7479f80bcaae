"""`Endpoint`: what all routes of a model need."""

from dataclasses import dataclass

from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.frontends.service import GenerationService
from sharp.serving.frontends.unknown_fields import UnknownFields
from sharp.serving.text.chat_forms import ChatForms
from sharp.serving.text.chat_template import ChatTemplate
from sharp.serving.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Endpoint:
    """The model's service, and how its requests are read."""

    service: GenerationService
    template: ChatTemplate | None
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
        """The model's."""
        return self.service.model.tokenizer
