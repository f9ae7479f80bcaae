"""Objects of settings record which settings a class reads, however it reads them."""

from collections.abc import Callable
from typing import Any

import pytest

from sharp.exporter.user_class.recorded import RecordedDict, RecordedNamespace


@pytest.mark.parametrize("read", [lambda it: it["a"], lambda it: it.get("a"), lambda it: it.pop("a")])
def test_one_key_is_read(read: Callable[[RecordedDict], Any]) -> None:
    settings = RecordedDict(a=1, b=2)
    assert (read(settings), settings.read) == (1, {"a"})


@pytest.mark.parametrize("read", [lambda it: {**it}, dict, lambda it: dict(it.items()), lambda it: [*it.values()]])
def test_a_dictionary_that_is_passed_on_is_read_whole(read: Callable[[RecordedDict], Any]) -> None:
    settings = RecordedDict(a=1, b=2)
    read(settings)
    assert settings.read == {"a", "b"}


def test_a_namespace_is_read_by_name_or_whole() -> None:
    settings = RecordedNamespace(a=1, b=2)
    assert (settings.a, settings.read) == (1, {"a"})
    assert vars(settings)["b"] == 2
    assert settings.read == {"a", "b"}
