"""A model's source: a model folder, a checkpoint that is exported once, or a model of the Hub."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from sharp.core.cache_cli import cache
from sharp.core.errors import InputError, NotFoundError
from sharp.core.manifest import read_manifest
from sharp.core.model_cache import cached_models
from sharp.serving import source
from sharp.serving.source import export_options, model_folder
from tests.serving.conftest import write_folder

# A stand-in for sharp-export, which takes seconds. It copies a model folder, and records its calls.
COPIES = """
import os, pathlib, shutil, sys
checkpoint, output = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
with open(os.environ["CALLS"], "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if "bad" in checkpoint:
    print("Error: it is damaged", file=sys.stderr)
    sys.exit(2)
shutil.copytree(os.environ["MADE"], output)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("MADE", str(write_folder(tmp_path / "made", hashing=0)))
    monkeypatch.setattr(source, "EXPORT", COPIES)
    return tmp_path / "calls"


def checkpoint(tmp_path: Path, name: str = "tiny.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(b"GGUF")
    return path


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_a_model_folder_is_taken_as_it_is(calls: Path) -> None:
    made = Path(os.environ["MADE"])
    assert model_folder(str(made)) == made
    with pytest.raises(InputError, match="is not a checkpoint, and --norm is for checkpoints only; leave it out"):
        model_folder(str(made), export_options("entmax", None))
    # a folder without a checkpoint is refused later, where it is opened
    assert model_folder(str(made.parent)) == made.parent
    assert count(calls) == 0


def test_a_checkpoint_is_exported_once_for_its_content_and_options(tmp_path: Path, calls: Path) -> None:
    path = checkpoint(tmp_path)
    (hugging_face := tmp_path / "org").mkdir()
    (hugging_face / "config.json").write_text("{}")
    assert model_folder(str(hugging_face)).name == "org"
    calls.unlink()
    first = model_folder(str(path))
    assert (first.name, read_manifest(first).source.architecture) == ("tiny", "Counting")
    assert model_folder(str(path)) == first
    assert count(calls) == 1
    other = model_folder(str(path), export_options("entmax", "int8"))
    assert other != first
    assert "--norm entmax --quantize int8 --output" in calls.read_text().splitlines()[-1]
    path.write_bytes(b"GGUF of another training")
    assert model_folder(str(path)) not in (first, other)
    assert count(calls) == 3


def test_a_failed_export_ends_the_command_and_leaves_no_model(tmp_path: Path, calls: Path) -> None:
    path = checkpoint(tmp_path, "bad.gguf")
    program = f"from sharp.serving import cli, source; source.EXPORT = {COPIES!r}; cli.serve()"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr.splitlines()) == (2, ["Error: it is damaged"])
    assert count(calls) == 2


def test_two_commands_at_once_export_once(tmp_path: Path, calls: Path) -> None:
    path = checkpoint(tmp_path)
    slow = f"import time; time.sleep(1)\n{COPIES}"
    program = f"import sys; from sharp.serving import source; source.EXPORT = {slow!r}; "
    command = [sys.executable, "-c", f"{program}source.model_folder(sys.argv[1])", str(path)]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=60) for process in running] == [0, 0]
    assert count(calls) == 1


def test_an_interrupted_export_ends_with_its_command(tmp_path: Path, calls: Path) -> None:
    path = checkpoint(tmp_path)
    program = (
        "import sys; from sharp.core.cli import exit_on_terminate; from sharp.serving import source; "
        "source.EXPORT = 'import os, time; "
        'open(os.environ["CALLS"], "w").write(str(os.getpid())); time.sleep(60)\'; '
        "exit_on_terminate(); source.model_folder(sys.argv[1])"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)])
    while not (calls.exists() and calls.read_text()):
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=30) == 143
    assert not Path(f"/proc/{calls.read_text()}").exists()


def test_nothing_of_this_name(tmp_path: Path, calls: Path) -> None:
    with pytest.raises(NotFoundError, match=r"does not exist; give a model folder, a checkpoint .* Hugging Face Hub"):
        model_folder(str(tmp_path / "none"))


def test_a_cache_that_cannot_be_written(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARP_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cannot be written: .*; set SHARP_CACHE to another folder"):
        model_folder(str(checkpoint(tmp_path)))


def test_the_cache_is_listed_and_emptied(tmp_path: Path, calls: Path) -> None:
    for name in ("first.gguf", "second.gguf"):
        model_folder(str(checkpoint(tmp_path, name)))
    first = next(model.name for model in cached_models() if "first" in model.name)
    listed = CliRunner().invoke(cache, []).output
    assert "first.gguf" in listed and "second.gguf" in listed and "2 models" in listed
    refused = CliRunner().invoke(cache, ["remove", "none"])
    assert (refused.exit_code, "the cache has no model none" in refused.output) == (2, True)
    assert CliRunner().invoke(cache, ["remove", first]).output == "Removed 1 model.\n"
    assert [model.name.partition("-")[0] for model in cached_models()] == ["second"]
    assert CliRunner().invoke(cache, ["remove"]).exit_code == 2
    CliRunner().invoke(cache, ["remove", "--all"])
    assert cached_models() == []


FILES = {
    "people/tiny": {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"not fetched"},
    "people/files": {"a-Q4_K_M.gguf": b"GGUF 4", "a-Q8_0.gguf": b"GGUF 8"},
}


class Hub(BaseHTTPRequestHandler):
    """The parts of the Hub's interface that huggingface_hub uses to fetch a model."""

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.respond(body=False)

    def do_GET(self) -> None:
        self.respond(body=True)

    def respond(self, *, body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            name, files = "/".join(parts[2:4]), FILES.get("/".join(parts[2:4]))
            siblings = [{"rfilename": file} for file in files or ()]
            content = json.dumps({"id": name, "modelId": name, "sha": "c" * 40, "siblings": siblings}).encode()
            if "tree" in parts:
                entries = [
                    {"type": "file", "path": file, "size": len(one), "oid": "0"} for file, one in (files or {}).items()
                ]
                content = json.dumps(entries).encode()
        else:
            files = FILES.get("/".join(parts[:2]))
            content = (files or {}).get(parts[-1], b"")
        known = not {"revision", "resolve", "tree"} & {*parts} or {"main", "v1", "c" * 40} & {*parts}
        status = 200 if files is not None and known else 404
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{len(content)}-{parts[-1]}"')
        self.send_header("X-Repo-Commit", "c" * 40)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound" if files is None else "RevisionNotFound")
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = {
        "SHARP_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    yield {**os.environ, **home, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    server.shutdown()
    server.server_close()


def fetched(name: str, environment: dict[str, str]) -> str:
    program = (
        "import sys; from sharp.core.errors import SharpError; from sharp.core.hub import download\n"
        "try:\n    print(download(sys.argv[1]))\nexcept SharpError as error:\n    print('refused:', error)"
    )
    command = [sys.executable, "-c", program, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_models_of_the_hub(hub: dict[str, str]) -> None:
    found = fetched("people/tiny", hub)
    assert "refused" not in found
    folder = Path(found)
    assert folder.name == "tiny"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert Path(fetched("people/files:q8_0", hub)).read_bytes() == b"GGUF 8"
    assert fetched("people/files", hub).endswith("as people/files:Q4_K_M, of: a-Q4_K_M.gguf, a-Q8_0.gguf")
    assert "choose one GGUF file" in fetched("people/files:gguf", hub)
    assert "no model of this name on the Hugging Face Hub" in fetched("people/nobody", hub)


def test_a_revision_of_a_model_of_the_hub(hub: dict[str, str]) -> None:
    chosen = Path(fetched("people/tiny@v1", hub))
    assert chosen.name == "tiny"
    assert (chosen / "model.safetensors").read_bytes() == b"weights"
    assert chosen != Path(fetched("people/tiny", hub))
    assert Path(fetched("people/files@v1:q8_0", hub)).read_bytes() == b"GGUF 8"
    assert fetched("people/tiny@v2", hub) == "refused: the Hugging Face Hub has no revision v2 of people/tiny"
    away = {**hub, "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert fetched("people/tiny@v1", away) == str(chosen)
    assert fetched("people/tiny@v2", away).endswith("hf download people/tiny --revision v2 --local-dir tiny")


def test_without_a_network(hub: dict[str, str]) -> None:
    complete = fetched("people/tiny", hub)
    away = {**hub, "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert fetched("people/tiny", away) == complete
    assert "cannot be reached" in (refused := fetched("people/other", away))
    assert refused.endswith("hf download people/other --local-dir other")
