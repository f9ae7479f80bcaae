"""The line of the report that says what an export was verified against, and what only Sharp has read."""

import shlex
from pathlib import Path

from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.mapped_decoder import MappedDecoder
from sharp.exporter.sources.source import Source
from sharp.models.checkpoint_files import config_of, is_sharp_folder


def checked_against(path: Path, source: Source, folder: Path, *, program: bool, cache: str) -> str:
    """Return the report's line on what checked an export: PyTorch's reading, and how `sharp compare` can check more.

    The line says what the written model was compared with, and names the command by which another program (llama.cpp,
    transformers) would check the reading of the checkpoint, or why there is none. `path` is the checkpoint, `folder`
    the model folder, `cache` the form (`--cache`); `program` says that the source is a program of torch.export.
    """
    if program:
        return (
            "Checked against PyTorch with the program's own operators; "
            "no second reader has checked how the program was read, as there is none for programs of torch.export"
        )
    if path.is_file() and path.suffix != ".gguf" and source.architecture.startswith("Sharp"):
        return _own(source)
    if path.is_dir() and is_sharp_folder(path):
        return _own(source)
    norm = source.model.norm_name if isinstance(source.model, Decoder) else source.model.config.norm
    attention = "" if norm == "softmax" else f" with {norm} in its attention"
    line = (
        f"Checked against PyTorch with transformers' {source.architecture}{attention}, from the same reading of "
        f"{path.name}; no second reader has checked that reading (weights, tokenizer, metadata)"
    )
    return f"{line}: {_how(path, source, folder, cache)}"


def _own(source: Source) -> str:
    """Return the sentence that says that only Sharp reads this kind of checkpoint."""
    return (
        f"Checked against PyTorch with Sharp's own {source.architecture}, which trained it; "
        "no second reader has checked the reading of the file, as only Sharp reads such files"
    )


def _how(path: Path, source: Source, folder: Path, cache: str) -> str:
    """Return the command by which a user can have the reading checked, or the reason why there is no such command."""
    if not isinstance(source.model, Decoder):
        return "sharp compare reads decoders only"
    if not (path.is_dir() or path.suffix == ".gguf"):  # a checkpoint of the SSA authors' nanoGPT
        return "no other program reads such a file"
    if source.write_tokenizer is None:
        return "sharp compare needs a tokenizer, and there is none"
    code = path.is_dir() and bool(config_of(path).get("auto_map"))  # the folder comes with code of its own
    softmax = source.model.config.norm == "softmax" and not isinstance(source.model, MappedDecoder)
    given = f"--with {shlex.quote(str(path))}{' --trust-remote-code' if code else ''}"
    if not softmax and source.original.config.norm == "softmax":
        return f"export it with --norm softmax, and run sharp compare on that: sharp compare SOFTMAX_FOLDER {given}"
    if not softmax and not code:
        return f"no other program is known to compute {source.model.config.norm}"
    if cache != "paged":
        return f"export it with --cache paged, and run sharp compare on that: sharp compare PAGED_FOLDER {given}"
    return f"sharp compare {shlex.quote(str(folder))} {given}"
