"""The devices that `sharp plan` knows: a table that the user may add to."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sharp.serving.api.errors import InputError, NotFoundError


class Device(BaseModel):
    """The processor or GPU of one server; units are 10^9 bytes and 10^12 operations per second."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    memory_gb: float = Field(gt=0)
    bandwidth_gb_s: float = Field(gt=0)
    tflops: float = Field(gt=0)
    tflops_float32: float | None = Field(None, gt=0)
    source: str
    date: str
    machine: str | None = None
    price_per_hour: float | None = Field(None, ge=0)

    def operations_per_second(self, dtype: str) -> float:
        """Return the speed of dense products in `dtype`; by default float32 (as TF32) has half that of 16 bits."""
        share = self.tflops if dtype != "float32" else self.tflops_float32 or self.tflops / 2
        return share * 1e12


def read_devices(own: Path | None) -> dict[str, Device]:
    """Return Sharp's table of devices, with what the TOML file `own` adds to it or replaces in it.

    Raises:
        InputError: the file cannot be read, or a device lacks a field or has an unknown one.
    """
    table: dict[str, dict[str, Any]] = tomllib.loads((files(__package__) / "devices.toml").read_text("utf-8"))
    if own is not None:
        try:
            added = tomllib.loads(own.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"{own} is not a TOML file of devices: {error}") from error
        for name, fields in added.items():
            if not isinstance(fields, dict):
                raise InputError(f"{own}: {name} must be a table of fields, [{name}]")
            table[name] = table.get(name, {}) | fields
    devices = {}
    for name, fields in table.items():
        try:
            devices[name] = Device.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"{own}: {name}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return devices


def find_device(devices: dict[str, Device], name: str) -> tuple[str, Device]:
    """Return the full name and the device of this name, or of the only name that begins with it.

    The case of letters does not matter.

    Raises:
        NotFoundError: there is no such device, or there are several.
    """
    matches = [known for known in devices if known.lower() == name.lower()] or [
        known for known in devices if known.lower().startswith(name.lower())
    ]
    if len(matches) != 1:
        raise NotFoundError(f"there is no device {name!r}; there are: {', '.join(devices)}; --devices FILE adds others")
    return matches[0], devices[matches[0]]
