"""`RequestBody`, the base of all bodies of requests, and the types of their fields."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError, PydanticUseDefault

from sharp.serving.frontends.foreign_fields import ForeignField


def _not_bool(value: Any) -> Any:
    """Return the value. PydanticCustomError if it is true or false, which Python takes as numbers."""
    if isinstance(value, bool):  # a bool is an int in Python
        raise PydanticCustomError("bool_as_number", "Input should be a number, not true or false")
    return value


def _not_null(value: Any) -> Any:
    """Return the value; null takes the field's default."""
    if value is None:
        raise PydanticUseDefault
    return value


def one_of(accepted: str) -> WrapValidator:
    """Return a validator for a field of several types, whose error names all `accepted` types in one message.

    Without it, pydantic reports one error for each of the types.
    """

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Validate the value; a failure names all accepted forms."""
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("one_of", "Input should be {accepted}", {"accepted": accepted}) from error

    return WrapValidator(validate)


WholeNumber = Annotated[int, BeforeValidator(_not_bool)]
Number = Annotated[float, BeforeValidator(_not_bool)]
# stops at the first bad entry of a list, because one error for each entry would take seconds
FAIL_FAST = Field(fail_fast=True)
NULL_IS_UNSET = BeforeValidator(_not_null)  # for fields whose default is not None: null selects the default
Flag = Annotated[bool, NULL_IS_UNSET]
LogitBias = dict[int, Number]
StopTexts = Annotated[str | Annotated[list[str], FAIL_FAST], one_of("a text or a list of texts")]
TokenIds = Annotated[list[WholeNumber], FAIL_FAST]


class StrictMessage(BaseModel):
    """An object inside a request, which refuses unknown fields and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RequestBody(BaseModel):
    """The body of a request. `UnknownFields.parse` reads it, and takes care of the fields that the body does not have.

    Attributes:
        foreign: the fields of other servers' APIs that this server knows and does nothing with.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    foreign: ClassVar[Mapping[str, ForeignField]] = {}
