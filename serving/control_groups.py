"""The control groups of this process, in which a container's limits are."""

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
