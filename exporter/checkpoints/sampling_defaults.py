"""The sampling parameters that a checkpoint recommends."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sharp.core.errors import InputError
from sharp.core.manifest import SamplingDefaults

GENERATION_CONFIG = "generation_config.json"


def read_sampling(path: Path) -> SamplingDefaults:
    """Read the sampling parameters in the `generation_config.json` of a checkpoint. Like vLLM, ignore `do_sample`.

    Parameters that the file does not name have Sharp's defaults, as all have without a file.

    Raises:
        InputError: the file is no JSON, or a value is of another type or out of its range.
    """
    file = path / GENERATION_CONFIG
    if not file.is_file():  # always so if the checkpoint itself is a file
        return SamplingDefaults()
    try:
        return SamplingDefaults.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"{file}: {field}: {first['msg']}; correct it, or leave it out") from error


def chosen_sampling(given: Sequence[str], recommended: SamplingDefaults) -> SamplingDefaults:
    """Return the recommended sampling parameters, replaced where the user gave NAME=VALUE.

    Raises:
        InputError: an entry of `given` is no NAME=VALUE, has an unknown name, or a value that is out of range.
    """
    values: dict[str, Any] = recommended.model_dump()
    for entry in given:
        name, _, value = entry.partition("=")
        if name not in values:
            raise InputError(f"--sampling is {entry!r:.80}; it must be NAME=VALUE, with a name of {', '.join(values)}")
        try:
            values[name] = json.loads(value)
        except ValueError as error:
            raise InputError(f"--sampling is {entry!r:.80}; the value must be a number") from error
    try:
        return SamplingDefaults.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"--sampling {first['loc'][0]}={first['input']!r:.40}: {first['msg']}") from error
