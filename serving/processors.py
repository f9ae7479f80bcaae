"""How many processors this process may use: its affinity, and the CPU limit of its container."""

import os
from collections.abc import Iterator
from pathlib import Path

from sharp.serving.control_groups import groups


def available_cpus() -> int:
    """The processors that this process may run on, and no more than its container may keep busy; at least 1.

    Python's own counts do not know a container's limit: with a thread for each of a node's 64 processors and a limit of
    2, the kernel stops all of them most of the time. Of a limit of 2.5 two count.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _limits())]))


def _limits() -> Iterator[float]:
    """The CPU limits of this process's control groups, in processors."""
    for group in groups("cpu"):
        yield from _limit(group)


def _limit(group: Path) -> Iterator[float]:
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError):  # another version's group, or the root, which has no limit
            continue
