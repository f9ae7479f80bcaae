"""The sampling parameters that a checkpoint recommends."""

from pathlib import Path

from pydantic import ValidationError

from sharp.plugins.errors import InputError
from sharp.plugins.manifest import Sampling

FILE = "generation_config.json"


def read_sampling(path: Path) -> Sampling:
    """What `generation_config.json` of the checkpoint at `path` says, whatever its `do_sample` is, as in vLLM.

    Raises:
        InputError: a value is of another type or out of its range.
    """
    file = path / FILE
    if not file.is_file():  # also where the checkpoint is one file
        return Sampling()
    try:
        return Sampling.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"{file}: {field}: {first['msg']}; correct it, or leave it out") from error
