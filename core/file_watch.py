"""A watch of files that may be replaced while the server runs, as Kubernetes does with secrets."""

import logging
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int] | None, ...]
# The watch looks at the files this often, so a token removed from its file is refused after this time at the latest.
INTERVAL_SECONDS = 0.25


class Reloaded(Protocol):
    """An object that is made from files, and that `watch` updates when they change."""

    @property
    def watched(self) -> Iterable[Path]:
        """The files from which the object is made."""

    def reload(self) -> None:
        """Read the files again; called in the thread of the watch, after any of them has changed."""


def watch(reloaded: Reloaded, before: Signature) -> None:
    """Start a thread that calls `reloaded.reload` whenever one of its files has changed, while the object exists.

    `before` is the signature of the files before they were first read, so that no change is missed. Neither requests
    nor the event loop touch the files. A file system that does not respond, such as NFS without its server, blocks
    only this thread, and the content that was read last stays valid.
    """
    # The thread holds no strong reference to the object, so it ends when the object is garbage-collected. As a daemon
    # thread it does not delay the end of the process.
    threading.Thread(target=_watch, args=(weakref.ref(reloaded), before), name="file watch", daemon=True).start()


def _watch(reference: "weakref.ref[Reloaded]", before: Signature) -> None:
    """Reload the referenced object whenever the signature of its watched files changes, until the object is collected.

    `before` is the signature at the start. Exceptions of the reload are logged, and the watch goes on.
    """
    while True:
        time.sleep(INTERVAL_SECONDS)
        reloaded = reference()
        if reloaded is None:
            return
        now = signature(reloaded.watched)
        if now != before:
            before = now
            try:
                reloaded.reload()
            except Exception:  # a single failure to read must not end the watch
                logger.exception("%s could not be read again", ", ".join(map(str, reloaded.watched)))
        del reloaded


def signature(files: Iterable[Path]) -> Signature:
    """Return a value that changes when one of the files is written or replaced; a file that cannot be read is None."""
    return tuple(_signature_of(file) for file in files)


def _signature_of(file: Path) -> tuple[int, int, int] | None:
    """Return inode, time of modification (ns) and size (bytes) of a file; None if it cannot be read."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
