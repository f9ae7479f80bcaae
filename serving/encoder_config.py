"""`EncoderConfig`: the settings of encoders."""

from dataclasses import dataclass
from typing import Annotated

from sharp.serving.setting import Setting, check_settings


@dataclass(frozen=True)
class EncoderConfig:
    """How an encoder's hidden states become embeddings."""

    pooling: Annotated[
        str,
        Setting(
            "Which tokens of a text its embedding is made of: the mean of all, the first (cls) or the last.",
            default="the model's",
            choices=("auto", "mean", "cls", "last"),
        ),
    ] = "auto"
    normalize: Annotated[
        str,
        Setting(
            "Whether embeddings are normalized to length 1 where a request does not say it.",
            default="the model's",
            choices=("auto", "on", "off"),
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        check_settings(self)
