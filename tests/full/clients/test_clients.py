"""Third-party clients, unchanged, at the versions of requirements.txt and package.json.

`make clients` installs them in build/clients, apart from the project's environment, runs them and writes
docs/compatibility.md.
"""

import pytest

from tests.full.clients.clients import CLIENTS
from tests.full.clients.table import PAGE, rows


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.program)
def test_a_client_works_unchanged(server_of, client, record_property):
    if not client.installed:
        pytest.skip(f"{client.package} is not installed; make clients")
    result = client.run(*server_of(client.model))
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    record_property("called", result.stdout.strip().splitlines()[-1])


def test_the_page_has_every_client():
    page = PAGE.read_text(encoding="utf-8")
    for row in rows():
        assert f"| {row} |" in page, "run: make clients"
