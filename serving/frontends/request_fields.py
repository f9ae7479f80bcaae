"""`RequestFields`: the fields that requests for text have in OpenAI's API and in KServe's."""

from typing import Literal

from sharp.serving.api.errors import FieldError
from sharp.serving.api.guided import Guided
from sharp.serving.api.sampling_fields import SamplingFields, WholeNumber
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.structured_outputs import NESTED, StructuredFields
from sharp.serving.frontends.unsupported_fields import UnsupportedFields


class RequestFields(SamplingFields, UnsupportedFields, StructuredFields):
    """OpenAI's, vLLM's and ours."""

    truncate_prompt_tokens: WholeNumber | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None

    def params(self) -> SamplingParams:
        """See `SamplingFields`."""
        self.check_supported()
        return super().params()

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a prompt gets the tokenizer's special tokens."""
        return True if self.add_special_tokens is None else self.add_special_tokens

    def renamed(self, error: FieldError) -> FieldError:
        """An error about a field of `GenerateRequest`, under the name that the field has in this API."""
        if self.guided is None and error.field.startswith("guided") and (names := self.structure_fields):
            return renamed_error(error, names[0])
        return error

    def guide(self) -> Guided | None:
        """What the completion must match."""
        names = self.structure_fields
        if self.guided is not None and names:
            raise FieldError(names[0], f"{names[0]} and guided are both set; set one of them")
        return self.structure() if names else super().guide()


def renamed_error(error: FieldError, field: str) -> FieldError:
    """An error under another name of its field."""
    # guided.json is guided_json, or the json of structured_outputs.
    inner = error.field.partition(".")[2]
    name = f"{field}.{inner}" if field in NESTED and inner else field
    return FieldError(field, str(error).replace(error.field, name, 1))
