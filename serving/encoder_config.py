"""`EncoderConfig`: the settings of encoders."""

from dataclasses import dataclass
from typing import Annotated

from sharp.serving.setting import Setting, check_settings


@dataclass(frozen=True)
class EncoderConfig:
    """The settings for computing embeddings from hidden states. Values are checked at creation.

    Raises:
        InputError: a value is not one of the choices of its setting.
    """

    pooling: Annotated[
        str,
        Setting(
            "Pooling: the embedding of a text is the mean over all tokens, or the first (cls) or last token.",
            default="the model's",
            choices=("auto", "mean", "cls", "last"),
        ),
    ] = "auto"
    normalize: Annotated[
        str,
        Setting(
            "Whether embeddings are normalized to length 1 where the request does not choose.",
            default="the model's",
            choices=("auto", "on", "off"),
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        check_settings(self)
