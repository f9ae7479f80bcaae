"""The init container of model-from-url puts a whole model into its folder, or says in one sentence why not."""

import hashlib
import io
import os
import socket
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.full.deploy.rendering import KUBERNETES

SCRIPT = KUBERNETES / "components" / "model-from-url" / "fetch_model.py"
FILES = {"sharp.json": b"{}", "model.onnx": b"graph" * 1000, "model.onnx.data": b"weights" * 1000}


def archive(files, prefix="", mode="w:gz"):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(prefix + name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return content.getvalue()


@pytest.fixture
def web():
    """Yield the URL of a web server, and its list of responses, the last of which is repeated."""
    responses = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = responses.pop(0) if len(responses) > 1 else responses[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/model.tar.gz", responses
    server.shutdown()
    server.server_close()


def fetch(folder, url, sha256):
    known = {"PATH": os.environ["PATH"], "MODEL_URL": url, "MODEL_SHA256": sha256, "MODEL_WAIT_SECONDS": "0.01"}
    return subprocess.run(
        [sys.executable, "-I", SCRIPT, folder], env=known, capture_output=True, text=True, timeout=60, check=False
    )


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("prefix", "mode"), [("", "w:gz"), ("text-ssa-ssa/", "w"), ("./", "w:xz")])
def test_a_model_arrives(tmp_path, web, prefix, mode):
    url, responses = web
    body = archive(FILES, prefix, mode)
    responses.append((200, body))
    for _ in range(2):  # a restarted container finds the model in its place
        result = fetch(tmp_path, url, hashlib.sha256(body).hexdigest().upper())
        assert (result.returncode, result.stderr) == (0, "")
        assert content(tmp_path) == FILES
        responses[:] = [(404, b"")]


def test_a_start_that_was_killed_while_it_moved_the_files_goes_on(tmp_path, web):
    url, responses = web
    body = archive({**FILES, "templates/tool.jinja": b"a template"}, "text-ssa-ssa/")
    responses.append((200, body))
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "tool.jinja").write_bytes(b"moved by the start before")
    result = fetch(tmp_path, url, hashlib.sha256(body).hexdigest())
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "templates" / "tool.jinja").read_bytes() == b"a template"
    assert (tmp_path / "sharp.json").exists()


def test_a_passing_error_is_tried_again(tmp_path, web):
    url, responses = web
    body = archive(FILES)
    responses += [(503, b""), (500, b""), (200, body)]
    result = fetch(tmp_path, url, hashlib.sha256(body).hexdigest())
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("trying again") == 2
    assert content(tmp_path) == FILES


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc", "3 of 1000 bytes arrived"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\nabc", "IncompleteRead"),
        (b"nonsense\r\n\r\n", "nonsense"),
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", "429"),
    ],
    ids=["cut-off", "chunk-cut-off", "no-http", "busy"],
)
def test_a_download_that_breaks_is_tried_again(tmp_path, broken, said):
    body = archive(FILES)
    responses = [broken, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def respond():
            for response in responses:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(response)

        threading.Thread(target=respond, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/model.tar.gz"
        result = fetch(tmp_path, url, hashlib.sha256(body).hexdigest())
    assert (result.returncode, result.stderr) == (0, "")
    assert said in result.stdout
    assert content(tmp_path) == FILES


def escaping():
    return archive({"sharp.json": b"{}", "../escaped": b"x"})


@pytest.mark.parametrize(
    ("status", "body", "sha256", "expected"),
    [
        (200, archive(FILES), "0" * 64, "the SHA-256 of"),
        (200, archive(FILES), "unset", "MODEL_SHA256 must be the 64 hexadecimal digits"),
        (404, b"", "0" * 64, "HTTP Error 404"),
        (503, b"", "0" * 64, "HTTP Error 503"),
        (200, b"no archive", None, "cannot be unpacked"),
        (200, archive(FILES)[:-500], None, "cannot be unpacked"),
        (200, escaping(), None, "cannot be unpacked"),
        (200, archive({"config.json": b"{}"}), None, "has no sharp.json"),
    ],
    ids=["checksum", "no-checksum", "missing", "down", "no-archive", "cut-off", "escaping", "no-model"],
)
def test_nothing_arrives_but_one_sentence(tmp_path, web, status, body, sha256, expected):
    url, responses = web
    responses.append((status, body))
    folder = tmp_path / "model"
    folder.mkdir()
    result = fetch(folder, url, sha256 or hashlib.sha256(body).hexdigest())
    assert result.returncode == 1
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert not [path for path in folder.iterdir() if path.name != ".staging"]
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("models/text-ssa.tar.gz", "unknown url type: 'models/text-ssa.tar.gz'"),
        ("http://localhost/a b", "URL can't contain control characters. '/a b' (found at least ' ')"),
    ],
)
def test_an_address_that_is_none(tmp_path, url, why):
    result = fetch(tmp_path, url, "0" * 64)
    assert result.returncode == 1
    assert result.stderr == f"fetch_model: {url} cannot be downloaded: {why}\n"
