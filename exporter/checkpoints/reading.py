"""The choice of the reader for the checkpoint at a path."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sharp.core.errors import InputError
from sharp.core.manifest import SamplingDefaults
from sharp.exporter.checkpoints.hugging_face import read_hugging_face
from sharp.exporter.checkpoints.nano_gpt import is_ssa_nano_gpt
from sharp.exporter.checkpoints.own_model import read_own_model
from sharp.exporter.checkpoints.path_checks import KINDS, check_exists
from sharp.exporter.checkpoints.sampling_defaults import GENERATION_CONFIG, read_sampling
from sharp.exporter.programs.foreign_files import owner_of
from sharp.exporter.programs.reading import NO_PROGRAM_OPTIONS, ProgramOptions, read_program
from sharp.exporter.programs.state_dicts import whose
from sharp.exporter.programs.tokenizers import read_tokenizer
from sharp.exporter.sources.norm_options import NO_OPTIONS, NormOptions
from sharp.exporter.sources.source import Source
from sharp.models.checkpoint_files import is_sharp_folder


def read_source(
    path: Path,
    norm: str | None,
    options: NormOptions = NO_OPTIONS,
    program: ProgramOptions = NO_PROGRAM_OPTIONS,
    trained_norm: Path | None = None,
    head: str | None = None,
    ignore: Sequence[str] = (),
) -> Source:
    """Read the checkpoint at `path` for an export.

    Args:
        path: The checkpoint; only a name if `program` has a program in memory.
        norm: The norm to export with; None means the checkpoint's own.
        options: The options of `norm`.
        program: Options for programs of torch.export (`.pt2`, or in memory), and a tokenizer for any model without one.
        trained_norm: A file that says which weights the norm of a Hugging Face folder or of a GGUF file has learned.
        head: The head of an encoder in a Hugging Face folder; None means the head that it was saved with.
        ignore: Keys and tensors of the checkpoint, names or patterns, that the user says change nothing.

    Raises:
        NotFoundError: nothing is at `path`, or the tokenizer, the file `trained_norm` or a file of temperature
            coefficients does not exist.
        InputError: Sharp cannot read the checkpoint, or cannot export it with this norm, or an option is not for this
            kind of checkpoint.
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
        try:
            return read_program(path, norm, options, program)
        except InputError as error:
            if (known := owner_of(path)) is not None:
                raise InputError(known) from error
            raise
    program.check_unused(path)
    if norm is not None:
        options.check(norm)
    sampling = None if path.suffix == ".gguf" else read_sampling(path)
    try:
        if trained_norm is not None or head is not None:
            source = read_hugging_face(path, norm, options, trained_norm, head, ignore=ignore)
        else:
            source = _reader(path)(path, norm, options, ignore=ignore)
    except InputError as error:
        if is_ssa_nano_gpt(path) or (known := whose(path)) is None:
            raise
        raise InputError(known) from error
    options.apply(source.model)
    source = source if program.tokenizer is None else _with_tokenizer(path, source, program.tokenizer)
    if sampling is None or sampling == SamplingDefaults():
        return source
    return replace(source, sampling=sampling, sampling_source=GENERATION_CONFIG)


def _with_tokenizer(path: Path, source: Source, given: str) -> Source:
    """Return the source with the tokenizer that the user gave. Special tokens that the checkpoint names are kept.

    Raises:
        NotFoundError: the tokenizer does not exist.
        InputError: the tokenizer cannot be used, or the model already has a tokenizer, or reads no text.
    """
    if source.write_tokenizer is not None:
        raise InputError(f"--tokenizer is for models that have none, and {path} has its own; leave it out")
    if not source.reads_tokens:
        raise InputError(f"{path} holds a {source.architecture}, which reads no text; leave --tokenizer out")
    tokenizer = read_tokenizer(given, source.model.config.vocab_size)
    for model in (source.model, source.original):
        own = model.config
        model.config = replace(
            own,
            bos_token_id=tokenizer.bos if own.bos_token_id is None else own.bos_token_id,
            eos_token_ids=own.eos_token_ids or tokenizer.eos,
        )
    return replace(source, write_tokenizer=tokenizer.write)


def _reader(path: Path) -> Callable[..., Source]:
    """Return the function that reads the checkpoint, chosen by file name and content. InputError for any other file."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{path} has no config.json; give {KINDS}")
        return read_own_model if is_sharp_folder(path) else read_hugging_face
    if path.suffix == ".gguf":
        return read_hugging_face
    if path.suffix in (".pt", ".safetensors"):
        return read_hugging_face if is_ssa_nano_gpt(path) else read_own_model
    raise InputError(f"{path} is not a checkpoint that Sharp can read; give {KINDS}")
