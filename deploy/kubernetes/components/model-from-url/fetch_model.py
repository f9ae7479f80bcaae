"""Download the archive MODEL_URL, compare its SHA-256 with MODEL_SHA256 and unpack the model folder into a folder.

    MODEL_URL=https://... MODEL_SHA256=... python3 fetch_model.py FOLDER

The archive is a tar file (also .gz, .bz2, .xz) of the model folder: sharp.json lies at its root or in its one folder.
FOLDER gets the model whole or not at all. The script runs before the server, in its image, with the standard library.
"""

import hashlib
import http.client
import lzma
import os
import re
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from typing import NoReturn

ATTEMPTS = 5
BUSY = (408, 429)  # the statuses below 500 that may pass
WAIT_SECONDS = float(os.environ.get("MODEL_WAIT_SECONDS", "2"))  # before the second attempt; doubles
CHUNK = 1 << 20


def fail(message: str) -> NoReturn:
    """Print one sentence to stderr, and end the program with exit code 1."""
    sys.exit(f"fetch_model: {message}")


def download(url: str, archive: Path) -> str:
    """Download `url` to `archive`, and return its SHA-256 as 64 hexadecimal digits.

    Raises:
        OSError: the server cannot be reached, responds with an error, or closes the connection early.
        ValueError: `url` is not a URL.
        http.client.HTTPException: the response is not HTTP, or `url` has characters that no URL has.
    """
    digest = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as file:
        while chunk := response.read(CHUNK):
            digest.update(chunk)
            file.write(chunk)
        arrived, announced = file.tell(), int(response.headers.get("Content-Length", file.tell()))
    if arrived < announced:  # a connection that broke looks like the end of the file
        raise OSError(f"{arrived} of {announced} bytes arrived")
    return digest.hexdigest()


def download_patiently(url: str, archive: Path) -> str:
    """Download `url` to `archive` in up to 5 attempts, and return its SHA-256 as 64 hexadecimal digits.

    Errors that may pass (of the connection, and the statuses 408, 429 and 5xx) are tried again after
    `MODEL_WAIT_SECONDS` (2 s), which doubles each time. Any other error, and the last one, ends the program.
    """
    wait = WAIT_SECONDS
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return download(url, archive)
        except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
            final = isinstance(error, ValueError | http.client.InvalidURL) or (
                isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in BUSY
            )
            why = str(error).strip() or type(error).__name__
            if final or attempt == ATTEMPTS:
                fail(f"{url} cannot be downloaded: {why}")
            print(f"fetch_model: {why}; trying again in {wait:g} s", flush=True)
            time.sleep(wait)
            wait *= 2
    raise AssertionError


def main(folder: Path) -> None:
    """Put the model of MODEL_URL into `folder`, unless `folder` has `sharp.json` already.

    The folder is created if it is missing. The environment must have MODEL_URL and MODEL_SHA256. If the archive cannot
    be downloaded or used, the program ends with a sentence on stderr, and `folder` has no `sharp.json`.
    """
    url, expected = os.environ.get("MODEL_URL", ""), os.environ.get("MODEL_SHA256", "").lower()
    if not re.fullmatch(r"[0-9a-f]{64}", expected):
        fail("MODEL_SHA256 must be the 64 hexadecimal digits that sha256sum prints")
    if (folder / "sharp.json").is_file():  # the container was restarted in the same pod
        return
    staging = folder / ".staging"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    archive, unpacked = staging / "archive", staging / "unpacked"
    found = download_patiently(url, archive)
    if found != expected:
        shutil.rmtree(staging)
        fail(f"the SHA-256 of {url} is {found}, not {expected}")
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")  # "data" refuses paths outside the folder, links and devices
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        shutil.rmtree(staging)
        fail(f"{url} cannot be unpacked: {str(error).splitlines()[0].rstrip(':')}")
    manifests = [unpacked / "sharp.json", *unpacked.glob("*/sharp.json")]
    root = next((path.parent for path in manifests if path.is_file()), None)
    if root is None:
        shutil.rmtree(staging)
        fail(f"{url} has no sharp.json; pack a folder that sharp-export made")
    archive.unlink()
    # sharp.json comes last, because its presence says that the rest is there.
    for path in sorted(root.iterdir(), key=lambda path: path.name == "sharp.json"):
        if path.is_dir():  # of an earlier start that was killed here
            shutil.rmtree(folder / path.name, ignore_errors=True)
        path.replace(folder / path.name)
    shutil.rmtree(staging)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        fail("usage: fetch_model.py FOLDER")
    main(Path(sys.argv[1]))
