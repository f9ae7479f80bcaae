"""Files from someone else, damaged or made to hurt, load or are refused in one sentence."""

import shutil

import pytest

from sharp.core.errors import InputError
from tests.full.fuzz.fuzz import check, fuzz
from tests.full.fuzz.hostile import HOSTILE, write
from tests.full.fuzz.readers import READERS, Reader

RUNS = 40
BY_NAME = {reader.name: reader for reader in READERS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that copies the sample of a reader into a folder; each sample is made once."""
    made = {}

    def copy(reader, folder):
        if reader.make not in made:
            made[reader.make] = tmp_path_factory.mktemp(reader.name)
            reader.make(made[reader.make])
        shutil.copytree(made[reader.make], folder, dirs_exist_ok=True)

    return copy


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_files_load_or_are_refused_in_one_sentence(reader, whole, tmp_path):
    whole(reader, tmp_path)
    assert [finding.problem for finding in fuzz(reader, tmp_path, RUNS, seed=1)] == []


@pytest.mark.parametrize(("reader", "name"), [(reader, name) for reader, files in HOSTILE.items() for name in files])
def test_hostile_files_are_refused_in_one_sentence(reader, name, whole, tmp_path):
    whole(BY_NAME[reader], tmp_path)
    write(reader, name, tmp_path / BY_NAME[reader].file)
    with pytest.raises(InputError) as refused:
        BY_NAME[reader].read(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("error", [ValueError("what"), InputError("two\nlines"), MemoryError(), RecursionError()])
def test_the_fuzzer_finds_what_is_not_one_sentence(tmp_path, error):
    def read(_folder):
        raise error

    assert check(Reader("broken", lambda _folder: None, "file", read), tmp_path) is not None
