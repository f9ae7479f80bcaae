"""Export a model of the Hugging Face Hub with sharp-export, keep the export in a cache, and copy it into a folder.

    MODEL_ID=organization/name MODEL_OPTIONS="--norm entmax" python3 export_model.py CACHE FOLDER

MODEL_ID and MODEL_OPTIONS are the arguments of sharp-export. A model that the cache has needs no network: one export
serves every pod that mounts the cache, with the same version of Sharp. FOLDER gets the model whole or not at all. The
script runs before the server, in the image `export`, with the standard library.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?")


def fail(message: str) -> NoReturn:
    """Print one sentence to stderr, and end the program with exit code 1."""
    sys.exit(f"export_model: {message}")


def entry_of(cache: Path, model: str, options: list[str]) -> Path:
    """Return the folder of the cache for the export of `model` with `options` by the installed version of Sharp."""
    identity = "\0".join([model, *options, importlib.metadata.version("sharp-attention")])
    name = re.split("[/@:]", model)[1]
    return cache / "exports" / hashlib.sha256(identity.encode()).hexdigest()[:12] / name


def export(model: str, options: list[str], entry: Path) -> None:
    """Export `model` into `entry`, unless `entry` is there. Of several pods at once, one exports and the others wait.

    If sharp-export fails, the program ends with the exit code of sharp-export, which has printed the reason.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with entry.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (entry / "sharp.json").is_file():
            print(f"export_model: {entry} has the export of {model}", flush=True)
            return
        code = subprocess.run(["sharp-export", model, *options, "--output", entry], check=False).returncode
        if code != 0:
            shutil.rmtree(entry, ignore_errors=True)  # a model that failed its verification
            sys.exit(code)


def copy(entry: Path, folder: Path) -> None:
    """Copy the files of `entry` into `folder`, sharp.json last, because its presence says that the rest is there."""
    for path in sorted(entry.iterdir(), key=lambda path: path.name == "sharp.json"):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            # A killed copy must not leave a part of sharp.json.
            shutil.copyfile(path, folder / ".part")
            (folder / ".part").replace(folder / path.name)


def main(cache: Path, folder: Path) -> None:
    """Put the export of MODEL_ID into `folder`, unless `folder` has `sharp.json` already.

    If the model cannot be exported or copied, the program ends with a sentence, and `folder` has no `sharp.json`.
    """
    model = os.environ.get("MODEL_ID", "")
    if not ID.fullmatch(model):
        fail(f"MODEL_ID is {model!r}; it must be organization/name, as the Hugging Face Hub has it")
    try:
        options = shlex.split(os.environ.get("MODEL_OPTIONS", ""))
    except ValueError as error:
        fail(f"MODEL_OPTIONS are not options of sharp-export: {error}")
    if (folder / "sharp.json").is_file():  # the container was restarted in the same pod
        return
    try:
        entry = entry_of(cache, model, options)
        export(model, options, entry)
        copy(entry, folder)
    except OSError as error:
        fail(f"the model cannot be brought to {folder}: {error}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        fail("usage: export_model.py CACHE FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
