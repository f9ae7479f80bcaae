"""What kind of checkpoint a path is, and the reader for it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sharp.exporter.checkpoints.hugging_face import read_hugging_face
from sharp.exporter.checkpoints.nano_gpt import is_ssa_nano_gpt
from sharp.exporter.checkpoints.norm_options import NO_OPTIONS, NormOptions
from sharp.exporter.checkpoints.own_model import read_own_model
from sharp.exporter.checkpoints.path_checks import KINDS, check_exists
from sharp.exporter.checkpoints.sampling_defaults import read_sampling
from sharp.exporter.checkpoints.source import Source
from sharp.exporter.programs.reading import NO_PROGRAM_OPTIONS, ProgramOptions, read_program
from sharp.exporter.programs.state_dicts import whose
from sharp.models.checkpoint_files import is_sharp_folder
from sharp.plugins.errors import InputError


def read_source(
    path: Path,
    norm: str | None,
    options: NormOptions = NO_OPTIONS,
    program: ProgramOptions = NO_PROGRAM_OPTIONS,
    trained_norm: Path | None = None,
    head: str | None = None,
) -> Source:
    """Read the checkpoint at `path` so that it can be exported with `norm` (None: its own), set up with `options`.

    `trained_norm` is a file that says what the norm of a Hugging Face folder or of a GGUF file has learned, `head` is
    what stands on an encoder of such a folder.

    `program` is for programs of torch.export (`.pt2`), and for one that is in memory, of which `path` is a name.

    Raises:
        NotFoundError: nothing is there.
        InputError: it is not a checkpoint that Sharp can read, or it cannot have this norm.
    """
    if trained_norm is not None and path.suffix != ".gguf" and not (path.is_dir() and not is_sharp_folder(path)):
        raise InputError(
            f"--trained-norm is for Hugging Face folders and GGUF files, and {path} is neither; leave it out"
        )
    if head is not None and not (path.is_dir() and not is_sharp_folder(path)):
        raise InputError(f"--head is for encoders in Hugging Face folders, and {path} is none; leave it out")
    if program.exported is not None:
        return read_program(path, norm, options, program)
    check_exists(path)
    if path.suffix == ".pt2":
        return read_program(path, norm, options, program)
    program.check_unused(path)
    if norm is not None:
        options.check(norm)
    sampling = read_sampling(path)
    try:
        if trained_norm is not None or head is not None:
            source = read_hugging_face(path, norm, options, trained_norm, head)
        else:
            source = _reader(path)(path, norm, options)
    except InputError as error:
        if (known := whose(path)) is not None:
            raise InputError(known) from error
        raise
    options.apply(source.model)
    return replace(source, sampling=sampling)


def _reader(path: Path) -> Callable[[Path, str | None, NormOptions], Source]:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{path} has no config.json; give {KINDS}")
        return read_own_model if is_sharp_folder(path) else read_hugging_face
    if path.suffix == ".gguf":
        return read_hugging_face
    if path.suffix in (".pt", ".safetensors"):
        return read_hugging_face if is_ssa_nano_gpt(path) else read_own_model
    raise InputError(f"{path} is not a checkpoint that Sharp can read; give {KINDS}")
