"""The resources that this process may use: CPUs and memory, and the control groups that hold a container's limits."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
# Files of a control group (version 2, then 1): its limit, its usage, and the entry of `memory.stat` that counts the
# part of the usage that is file cache, which can be reclaimed.
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def groups(controller: str, cgroups: Path = CGROUPS, own: Path = OWN) -> Iterator[Path]:
    """Yield the folders of this process's control groups for `controller`, and of the groups above them.

    Version 2 has one hierarchy for all controllers, version 1 one hierarchy for each. A container often sees its own
    group as the root of the file system, whatever the group's path says, so callers must skip folders that do not
    exist.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux, or no /proc
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # A controller that is mounted together with others has a link of its own name.
        root = cgroups / controller if controllers else cgroups
        group = root / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if root in (folder, *folder.parents))


def available_cpus() -> int:
    """Return the number of CPUs that this process may use, at most its container's limit and at least 1.

    Python's own counts ignore a container's limit. With one thread for each of a node's 64 CPUs and a limit of 2, the
    kernel would stop all threads most of the time. A limit of 2.5 is rounded down to 2.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _limits())]))


def _limits() -> Iterator[float]:
    """Yield the CPU limits of this process's control groups, in CPUs."""
    for group in groups("cpu"):
        yield from _limit(group)


def _limit(group: Path) -> Iterator[float]:
    """Yield the CPU limit of a control group's folder in cores, as 0.5; nothing if it has no limit.

    Both versions of control groups are tried; files that are missing are skipped.
    """
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError):  # a file of the other version, or the root group, which has no limit
            continue


def available_memory(*, swap: bool = False) -> int:
    """Return the bytes of memory that this process can still allocate, with those of free swap if `swap`."""
    meminfo = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
    counted = ("MemAvailable", "SwapFree") if swap else ("MemAvailable",)
    available = sum(int(meminfo[name].split()[0]) * 1024 for name in counted)
    return max(0, min([available, *(left for group in groups("memory") for left in _memory_left(group))]))


def _memory_left(group: Path) -> Iterator[int]:
    """Yield the bytes that the limit of a control group leaves. Reclaimable file cache does not count as used."""
    for limit, used, files in GROUP_FILES:
        try:
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            taken = int((group / used).read_text(encoding="ascii")) - int(stat.get(files, 0))
            yield int((group / limit).read_text(encoding="ascii")) - taken
        except (OSError, ValueError):  # a file of the other version, the root group, or the limit is the word "max"
            continue
