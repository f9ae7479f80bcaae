"""Third-party tools read the exported model, at the versions of requirements-tools.txt."""

import pytest

from tests.full.clients.model_tools import CASES, REFUSED, TOOLS, export_case, installed, run_tools
from tests.full.clients.table import PAGE


@pytest.mark.parametrize("case", CASES)
def test_tools_read_the_model_or_refuse_it_as_the_page_says(tmp_path, case):
    if not installed():
        pytest.skip("the tools are not installed; make clients")
    found = run_tools(export_case(case, tmp_path), tmp_path / "out")
    assert set(found) == set(TOOLS)
    assert {name for name, error in found.items() if error} == {
        tool for tool, refusing in REFUSED if refusing == case
    }, found


def test_the_page_says_what_each_tool_does():
    page = PAGE.read_text(encoding="utf-8")
    for tool, name in TOOLS.items():
        cells = [f"refused: {REFUSED[tool, case]}" if (tool, case) in REFUSED else "passed" for case in CASES]
        assert f"| {name} | {' | '.join(cells)} |" in page, "run: make clients"
