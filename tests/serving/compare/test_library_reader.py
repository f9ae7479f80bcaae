"""The process in which other programs read models imports the right package, and its failures become sentences."""

import ast

import pytest

from sharp.serving.api.errors import InputError, SharpError
from sharp.serving.compare.compare import HARD_TEXTS
from sharp.serving.compare.library_reader import PROGRAM, LibraryReader
from tests.serving.compare.test_servers import run


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch):
    """Return a function that makes `import llama_cpp` run the given code in the other process."""

    def write(code):
        (tmp_path / "llama_cpp").mkdir()
        (tmp_path / "llama_cpp" / "__init__.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


def test_the_program_imports_nothing_of_sharp():
    for node in ast.walk(ast.parse(PROGRAM.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.startswith((".", "sharp"))]


def test_a_missing_package_is_the_command_that_installs_it(counting, gguf, llama_cpp):
    llama_cpp("raise ModuleNotFoundError('No module', name='llama_cpp')")
    result = run(counting, gguf)
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: llama-cpp-python, which reads GGUF files, is not installed; "
        "install it with: pip install llama-cpp-python\n"
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.abort()", "crashed (exit code -6)"),
        ("print('noise'); raise RuntimeError('no\\nsuch file')", "cannot be read: RuntimeError: no such file"),
        ("raise MemoryError", "there is not enough memory"),
    ],
)
def test_a_library_that_fails_is_one_sentence(gguf, llama_cpp, code, message):
    llama_cpp(code)
    with pytest.raises(SharpError) as raised:
        LibraryReader(gguf, 16, trust_remote_code=False, seconds=60)
    assert message in str(raised.value)


def test_a_library_that_hangs_is_ended(gguf, llama_cpp):
    llama_cpp("import time; time.sleep(100)")
    with pytest.raises(SharpError, match=r"took more than 0.5 s; allow more with --timeout"):
        LibraryReader(gguf, 16, trust_remote_code=False, seconds=0.5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("none", (), "does not exist; give a URL such as"),
        ("empty", (), "has no config.json, so it is no Hugging Face folder"),
        ("model.safetensors", (), "is no .gguf file"),
        ("model.gguf", ("--trust-remote-code",), "--trust-remote-code is for a Hugging Face folder"),
        ("model.gguf", ("--model", "a"), "--model is for a server"),
    ],
)
def test_what_nothing_else_reads_is_refused_before_anything_is_loaded(tmp_path, gguf, name, options, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.safetensors").touch()
    result = run(tmp_path / "folder", tmp_path / name, *options)
    assert (result.exit_code, message in result.stderr, result.stderr.count("\n")) == (2, True, 1), result.stderr


def test_a_folder_of_our_own_is_no_second_opinion(counting, hashing):
    result = run(counting, hashing)
    assert (result.exit_code, "which is no second opinion" in result.stderr) == (2, True)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_a_text_that_cannot_be_read(counting, gguf, tmp_path, content):
    path = tmp_path / "text"
    path.write_bytes(content)
    result = run(counting, gguf, "--text", path)
    assert (result.exit_code, str(path) in result.stderr) == (2, True)


def test_a_model_without_a_tokenizer_is_refused(ids_only, gguf):
    result = run(ids_only, gguf)
    assert (result.exit_code, "has no tokenizer" in result.stderr) == (2, True)


def test_the_texts_have_what_tokenizers_disagree_about():
    everything = "".join(HARD_TEXTS.values())
    for part in ("\n    ", "\t", "  ", "1234567890", "'ll", "你", "👩‍👩‍👧", "\u00a0", "e\u0301"):
        assert part in everything


def test_errors_are_those_of_input(gguf, llama_cpp):
    llama_cpp("raise OSError('damaged')")
    with pytest.raises(InputError, match="cannot be read: OSError: damaged"):
        LibraryReader(gguf, 16, trust_remote_code=False, seconds=60)
