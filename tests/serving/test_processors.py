"""The CPU limit of a container, as the kernel shows it."""

import os

import pytest

from sharp.serving import processors


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """Counts processors where 64 may be used and these control groups exist."""

    def count(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(64)))
        monkeypatch.setattr(processors._limits, "__defaults__", (tmp_path, tmp_path / "own"))
        return processors.available_cpus()

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


def test_without_control_groups_the_affinity_counts(tmp_path):
    assert list(processors._limits(tmp_path, tmp_path / "missing")) == []
    assert 1 <= processors.available_cpus() <= len(os.sched_getaffinity(0))
