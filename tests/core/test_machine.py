"""The limits of a container are read from the kernel's control groups."""

import os

import pytest

from sharp.core import machine
from sharp.core.machine import groups


@pytest.fixture
def contained(tmp_path, monkeypatch):
    """Return a function that makes control groups with the given files."""

    def make(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(groups, "__defaults__", (tmp_path, tmp_path / "own"))

    return make


@pytest.fixture
def limited(contained, monkeypatch):
    """Return a function that counts available processors, of 64, under the given control groups."""

    def count(own, files):
        contained(own, files)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(64)))
        return machine.available_cpus()

    return count


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {}, 64),
        (
            "0::/pod/one\n",
            {"cpu.max": "max 100000", "pod/cpu.max": "300000 100000", "pod/one/cpu.max": "max 100000"},
            3,
        ),
        ("0::/seen/from/outside\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/../other\n", {"cpu.max": "400000 100000\n"}, 4),
        (
            "4:cpu,cpuacct:/\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 64),
        ("3:cpuset:/\n", {"cpuset/cpu.max": "100000 100000"}, 64),
        ("0::/\n", {"cpu.max": "nonsense"}, 64),
    ],
)
def test_a_container_uses_what_it_may(limited, own, files, cpus):
    assert limited(own, files) == cpus


def memory(limit, used, files):
    return {"max": str(limit), "current": str(used), "stat": f"anon 1\ninactive_file {files}\nfile 9"}


def version_1(limit, used, files):
    return {"limit_in_bytes": str(limit), "usage_in_bytes": str(used), "stat": f"total_inactive_file {files}\nrss 1"}


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        ("0::/\n", {"": memory(900, 600, 0)}, 300),
        ("0::/\n", {"": memory(900, 890, 500)}, 510),  # memory of file caches is available
        ("0::/\n", {"": memory("max", 600, 0)}, 4096),
        ("0::/\n", {"": memory(9000, 600, 0)}, 4096),
        ("0::/\n", {"": memory(900, 1000, 0)}, 0),
        ("0::/service\n", {"": {}, "service/": memory(900, 600, 0)}, 300),
        ("4:memory:/a\n0::/\n", {"memory/": version_1(2**63 - 4096, 7, 0), "memory/a/": version_1(900, 600, 50)}, 350),
        ("0::/\n", {}, 4096),
    ],
)
def test_the_cache_is_given_what_a_container_leaves(contained, tmp_path, monkeypatch, own, files, free):
    contained(own, {f"{folder}memory.{name}": text for folder, all_ in files.items() for name, text in all_.items()})
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:     4 kB\nSwapFree: 1 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    assert machine.available_memory() == free


def test_without_control_groups_the_affinity_counts(tmp_path):
    assert list(groups("cpu", tmp_path, tmp_path / "missing")) == []
    assert 1 <= machine.available_cpus() <= len(os.sched_getaffinity(0))
