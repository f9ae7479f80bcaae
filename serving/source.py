"""The model folder of what a user names: a folder of sharp-export, a checkpoint that is exported first, or a Hub id."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from sharp.core import hub
from sharp.core.cli import announce
from sharp.core.manifest import MANIFEST_FILE
from sharp.core.model_cache import describe_entry, entry_of, folder_of, locked
from sharp.serving.api.errors import InputError, NotFoundError

CONFIG_FILE = "config.json"  # in the folder of a Hugging Face checkpoint
EXPORT = "from sharp.core.cli import export_main; export_main()"
EXPORTED_BY = ("--norm", "--quantize")


def export_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags --norm and --quantize, for checkpoints that it exports first."""
    norm = click.option(
        "--norm", metavar="NAME", help="Attention norm for the export of a checkpoint, as in sharp-export."
    )
    kinds = click.Choice(["int8", "int4", "int4-128"])
    return norm(
        click.option("--quantize", type=kinds, help="Bits of the weights in the export of a checkpoint.")(command)
    )


def export_options(norm: str | None, quantize: str | None) -> tuple[str, ...]:
    """Return the options of `sharp-export` for the values of the flags --norm and --quantize; None means not given."""
    given = zip(EXPORTED_BY, (norm, quantize), strict=True)
    return tuple(word for option, value in given if value is not None for word in (option, value))


def model_folder(source: str, options: Sequence[str] = ()) -> Path:
    """Return the model folder for `source`, exporting a checkpoint into the cache on its first use.

    The export runs in a process of its own, because the server imports no PyTorch; its progress goes to stderr. If it
    fails, this process ends with its exit code, as it has printed the reason.

    Args:
        source: a model folder, a checkpoint that `sharp-export` takes, or the id of a model on the Hugging Face Hub.
        options: the options of `sharp-export` for a checkpoint.

    Raises:
        NotFoundError: there is nothing at `source`, and no such model on the Hub.
        InputError: options are given for a model folder, or the cache cannot be written.
    """
    path = Path(source)
    if path.is_dir() and not ((path / CONFIG_FILE).exists() and not (path / MANIFEST_FILE).exists()):
        if options:
            raise InputError(f"{path} is not a checkpoint, and {options[0]} is for checkpoints only; leave it out")
        return path  # whoever opens the folder refuses one that is no model folder
    if hub.is_hub_id(source):
        announce(f"Fetching {source} from the Hugging Face Hub")
        path = hub.download(source)
    if not path.exists():
        raise NotFoundError(
            f"{source} does not exist; give a model folder, a checkpoint (a Hugging Face folder or a .gguf file), or "
            "the id of a model on the Hugging Face Hub"
        )
    entry = entry_of(path, options)
    with locked(entry, lambda: announce(f"Another command is exporting {source}; waiting for it")):
        folder = folder_of(entry, path)
        if not folder.exists():
            announce(f"Exporting {source} for its first use, into {entry}")
            describe_entry(entry, path, options)
            _export(path, options, folder)
    os.utime(entry / "lock")
    return folder


def _export(checkpoint: Path, options: Sequence[str], folder: Path) -> None:
    """Run `sharp-export`, and end this process if it fails."""
    command = [sys.executable, "-P", "-c", EXPORT, str(checkpoint), *options, "--output", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C, or SIGTERM
            process.terminate()
            process.wait()
            raise
    if code != 0:
        shutil.rmtree(folder, ignore_errors=True)  # it is there if its verification failed
        click.get_current_context().exit(code if code > 0 else 128 - code)
