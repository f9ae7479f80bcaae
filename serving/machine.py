"""What this process may use of its machine: processors, and the control groups that hold a container's limits."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups(controller: str, cgroups: Path = CGROUPS, own: Path = OWN) -> Iterator[Path]:
    """The folders of this process's groups that `controller` may be in, and of those above them.

    Version 2 has one hierarchy for all controllers, version 1 one for each. In a container the file system often shows
    its own group as the root, whatever the path says: folders that are not there are to be passed over.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux, or no such file system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Where it is mounted with others, there is a link of its name.
        root = cgroups / controller if controllers else cgroups
        group = root / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if root in (folder, *folder.parents))


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
