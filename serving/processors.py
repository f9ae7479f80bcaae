"""How many processors this process may use: its affinity, and the CPU limit of its container."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cpus() -> int:
    """The processors that this process may run on, and no more than its container may keep busy; at least 1.

    Python's own counts do not know a container's limit: with a thread for each of a node's 64 processors and a limit of
    2, the kernel stops all of them most of the time. Of a limit of 2.5 two count.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _limits())]))


def _limits(cgroups: Path = CGROUPS, own: Path = OWN) -> Iterator[float]:
    """The CPU limits of this process's control groups and those above them, in processors.

    Version 2 has them in `cpu.max`, version 1 in two files of the controller `cpu`. In a container the file system
    often shows its own group as the root, whatever the path says: groups that are not there are passed over.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux, or no such file system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = (
            cgroups / "cpu" if controllers else cgroups
        )  # where it is mounted with others, there is a link of its name
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if root in (folder, *folder.parents):
                yield from _limit(folder)


def _limit(group: Path) -> Iterator[float]:
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError):  # another version's group, or the root, which has no limit
            continue
