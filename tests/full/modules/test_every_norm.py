"""The table of docs/reference/foreign-modules.md agrees with the archive of `every_norm`, and no export failed."""

from tests.full.modules.every_norm import BEGIN, END, PAGE, VERIFIED, archived, is_refusal, jobs, table


def test_the_page_has_the_archived_table() -> None:
    assert PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0] == table()


def test_all_that_was_run_is_verified_or_refused_with_the_reason() -> None:
    found = archived()
    assert set(found) <= {*jobs()}
    assert [case for case, one in found.items() if one != VERIFIED and not is_refusal(one)] == []
