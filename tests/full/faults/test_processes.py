"""A few of the faults of processes that `python -m tests.full.faults` injects, and the overload of a server."""

from pathlib import Path

import pytest

from tests.full.faults.commands import check_command_fault, check_next_run, commands_in
from tests.full.faults.harmed_server import chat, faulty_server
from tests.full.faults.overload import overload
from tests.full.faults.server_ends import check_end
from tests.full.faults.server_faults import FAULTS, check_server_fault

COMMANDS = ("export", "adapt", "train")
# Clients that vanish have tests of their own, and a step that hangs is in `tests/serving/server/test_forced_exit.py`.
ON_A_SERVER = [name for name in FAULTS if not name.startswith("a client: ")]
ENDS = (
    "kill -9 of the server under load",
    "SIGTERM under load",
    "SIGTERM without descriptors and disk",
    "few descriptors at the start of the server",
)


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    with commands_in(tmp_path_factory.mktemp("commands")) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def server(folder: Path):
    with faulty_server(folder) as made:
        chat(made)
        yield made


@pytest.mark.parametrize("name", COMMANDS)
def test_no_half_result_is_left_and_the_next_run_works(commands, name: str) -> None:
    commands.clear()
    faults = [f"sharp {name}: {kind}" for kind in ("kill -9", "a limit of the size of files", "no room at one write")]
    assert sum(check_command_fault(commands, fault, seed) for seed, fault in enumerate(faults))
    check_next_run(commands, faults[0])


@pytest.mark.parametrize("name", ON_A_SERVER)
def test_a_server_goes_on(server, name: str) -> None:
    check_server_fault(server, name, 0)


@pytest.mark.parametrize("name", ENDS)
def test_a_server_starts_and_ends_in_time_and_leaves_nothing(folder: Path, name: str) -> None:
    check_end(folder, name, 0)


def test_ten_times_its_capacity_is_served_or_refused_and_the_server_recovers(folder: Path) -> None:
    figures = overload(folder, 5)
    assert figures["broken"] == [], figures
