"""Models of the Hugging Face Hub, by their ids.

An id is `organization/name`. `organization/name:Q4_K_M` chooses a GGUF file, and `organization/name@REVISION` a commit,
a tag or a branch; both may be given, in the order `organization/name@REVISION:Q4_K_M`.
"""

import os
import re
from pathlib import Path

from sharp.core.errors import InputError, NotFoundError
from sharp.core.model_cache import cache_folder

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w.-]*))?(?::([\w.-]+))?")
WHOLE = ("*.json", "*.jinja", "*.safetensors", "*.txt", "*.model")  # the files that a folder is exported from
SHOWN = 6  # names in a message


def is_hub_id(source: str) -> bool:
    """Whether `source` can only be the id of a model on the Hub: it has the form of an id, and no path of this name."""
    return HUB_ID.fullmatch(source) is not None and not Path(source).exists()


def download(source: str) -> Path:
    """Return the local copy of a model on the Hub, downloading what is missing: its folder, or the chosen GGUF file.

    A copy that is complete is returned without a network.

    Args:
        source: the id. Behind `@` a revision; behind a colon, a part of the name of one `.gguf` file of the model.

    Raises:
        NotFoundError: huggingface_hub is not installed, the Hub has no such model, revision or file or cannot be
            reached, and there is no local copy.
        InputError: the model has GGUF files only and the id does not choose one.
    """
    found = HUB_ID.fullmatch(source)
    assert found is not None
    repository, revision, part = found.groups()
    try:
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ModuleNotFoundError as error:
        raise NotFoundError(
            f"there is no file or folder {source}; to take the model of this name from the Hugging Face Hub, install "
            f"huggingface_hub, or fetch its files where that is installed: {download_command(source)}"
        ) from error
    try:
        if part is None:
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=list(WHOLE)))
            if any(folder.glob("*.safetensors")):
                return _link(folder, repository, revision)
        files = HfApi().list_repo_files(repository, revision=revision)
        names = sorted(name for name in files if name.endswith(".gguf"))
        return Path(hf_hub_download(repository, _gguf_file(source, repository, part, names), revision=revision))
    except RevisionNotFoundError as error:
        raise NotFoundError(f"the Hugging Face Hub has no revision {revision} of {repository}") from error
    except RepositoryNotFoundError as error:
        raise NotFoundError(
            f"there is no file or folder {source}, and no model of this name on the Hugging Face Hub that can be read "
            "without a login (hf auth login)"
        ) from error
    except EntryNotFoundError as error:
        if not isinstance(error, LocalEntryNotFoundError):
            raise NotFoundError(f"the Hugging Face Hub has no such file of {repository}: {_line(error)}") from error
        raise NotFoundError(_unreachable(source, error)) from error
    except (OSError, ValueError) as error:  # the errors of HTTP clients are OSErrors
        if isinstance(error, InputError):
            raise
        raise NotFoundError(_unreachable(source, error)) from error


def _link(folder: Path, repository: str, revision: str | None) -> Path:
    """Return a path to a downloaded folder that ends in the model's name, and not in a commit as the folder's own does.

    The path is a symbolic link in Sharp's cache. If the cache cannot be written, it is `folder` itself.
    """
    link = cache_folder() / "hub" / (f"@{revision}" if revision else "") / repository
    fresh = link.with_name(f"{link.name}.{os.getpid()}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        fresh.symlink_to(folder)
        fresh.replace(link)
    except OSError:  # the cache cannot be written
        return folder
    return link


def _gguf_file(source: str, repository: str, part: str | None, names: list[str]) -> str:
    """Return the one name in `names` that contains `part`, in any case of letters.

    Raises:
        InputError: no name does, or several do.
    """
    fitting = [name for name in names if part is not None and part.lower() in name.lower()]
    if len(fitting) == 1:
        return fitting[0]
    if not names:
        raise InputError(
            f"{repository} has neither safetensors nor GGUF files, which is what Sharp exports; choose another model"
        )
    listed = ", ".join((fitting or names)[:SHOWN]) + (" ..." if len(fitting or names) > SHOWN else "")
    raise InputError(
        f"{source} is to choose one GGUF file; say a part of its name behind a colon, as {repository}:Q4_K_M, of: "
        f"{listed}"
    )


def _unreachable(source: str, error: BaseException) -> str:
    """Return the message for a `source` that is no local file while the Hugging Face Hub cannot be reached."""
    return (
        f"there is no file or folder {source}, and the Hugging Face Hub cannot be reached ({_line(error)}); fetch the "
        f"files where there is a network, and give their folder: {download_command(source)}"
    )


def download_command(source: str) -> str:
    """Return the shell command `hf download OWNER/NAME --local-dir NAME` for the id `source`, with its revision.

    Behind a colon, the id may name a GGUF file; the command fetches the whole model anyway.
    """
    found = HUB_ID.fullmatch(source)
    assert found is not None
    chosen = f" --revision {found[2]}" if found[2] else ""
    return f"hf download {found[1]}{chosen} --local-dir {found[1].partition('/')[2]}"


def _line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:200]
