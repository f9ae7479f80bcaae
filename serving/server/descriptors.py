"""How many connections the limit of open files allows."""

import logging
import resource

from sharp.serving.api.errors import InputError

logger = logging.getLogger(__name__)

RESERVED = 256  # for files, libraries, other processes and the connections that are just being closed
FEWEST = 8
LEAST_FILES = 64  # that a server opens without a connection; gRPC aborts the process where it gets too few


def allowed_connections(most: int, ports: int = 2) -> int:
    """The connections that each port may have, at most `most`. Raises the soft limit of open files for them.

    Raises:
        InputError: there may be too few open files for any.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = RESERVED + ports * most
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return most
    if soft < LEAST_FILES:
        raise InputError(f"at most {soft} files may be open (ulimit -n); a server needs {LEAST_FILES}, and some more")
    allowed = max(FEWEST, (soft - RESERVED) // ports)
    logger.warning("max_connections is %d; with at most %d open files (ulimit -n) it is %d", most, soft, allowed)
    return min(most, allowed)
