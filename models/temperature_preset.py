"""Presets of the adaptive temperature: the published polynomials by name, and the files of `sharp fit-temperature`."""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeFloat, PositiveInt, ValidationError

from sharp.core.errors import InputError, NotFoundError
from sharp.plugins.op.schema import DEFAULT_ENTROPY_THRESHOLD, TEMPERATURE_PRESETS


@dataclass(frozen=True)
class AdaptiveTemperature:
    """An inverse temperature, max(poly(H), 1) above `entropy_threshold` nats; the highest power comes first."""

    coefficients: tuple[float, ...]
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD


class TemperaturePreset(BaseModel):
    """The file of a fitted polynomial: what `AdaptiveTemperature` needs, and where it comes from.

    `entropy_range` holds the least and the largest entropy, in nats, that the polynomial was fitted to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["sharp-temperature"] = "sharp-temperature"
    version: Literal[1] = 1
    temperature_coefficients: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]
    entropy_threshold: Annotated[NonNegativeFloat, FiniteFloat] = DEFAULT_ENTROPY_THRESHOLD
    entropy_range: tuple[NonNegativeFloat, NonNegativeFloat]
    source: str
    data: str
    date: datetime.date
    samples: PositiveInt

    def write(self, path: Path) -> None:
        """Write the preset as JSON to `path`, whose folder is made if it does not exist."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_temperature(preset: str) -> AdaptiveTemperature:
    """Read the adaptive temperature called `preset`: a name of `TEMPERATURE_PRESETS`, or the path of a preset file.

    Raises:
        NotFoundError: `preset` is neither a known name nor an existing file.
        InputError: the file is not a preset.
    """
    if preset in TEMPERATURE_PRESETS:
        return AdaptiveTemperature(TEMPERATURE_PRESETS[preset])
    path = Path(preset)
    if not path.is_file():
        raise NotFoundError(
            f"{preset} is neither a file of sharp fit-temperature nor a preset; "
            f"the presets are: {', '.join(TEMPERATURE_PRESETS)}"
        )
    try:
        read = TemperaturePreset.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(
            f"{path} is not a temperature preset: {field}: {first['msg']}; make one with sharp fit-temperature"
        ) from error
    return AdaptiveTemperature(read.temperature_coefficients, read.entropy_threshold)
