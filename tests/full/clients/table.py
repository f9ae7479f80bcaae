"""Runs every client and writes docs/compatibility.md: `python -m tests.full.clients.table`, as `make clients` does."""

import datetime
import subprocess
import sys
import tempfile
from pathlib import Path

from sharp.serving.frontends.http.foreign_fields import NO_EFFECT, UNSUPPORTED
from tests.full.clients.clients import CLIENTS, Client
from tests.full.clients.conftest import MODEL, TEMPLATE
from tests.serving.conftest import write_folder

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
COMMAND = Path(sys.executable).with_name("sharp-serve")
HEAD = """\
<!-- Written by `make clients` (python -m tests.full.clients.table). -->
# Clients that work unchanged

Each program of tests/full/clients/programs uses a client at the version of
[requirements.txt](../tests/full/clients/requirements.txt) or [package.json](../tests/full/clients/package.json) against a server, and
changes nothing but its base URL. Run on {date}.

| client | version | what was called | |
| --- | --- | --- | --- |
"""
FIELDS = """
## Fields that are refused

A field that would change a completion and cannot be honoured is an error of status 400 that names it.

| field | what the error says |
| --- | --- |
"""
OTHERS = """
## Fields without effect

These are accepted and change nothing; the server's log names each once, as far as it is more than bookkeeping:
{names}.

Any other field that is not known is left out and named in the log (`--unknown-fields error` refuses it); a misspelt one is refused with
"did you mean". `/v1/responses` keeps no responses: `previous_response_id`, `conversation`, `prompt` and `background` are refused.
Messages hold text; parts of images, audio and files are refused.

## Not here

`/v1/embeddings` and `/v1/rerank` are tested with the openai package, not here. guidellm, aiperf, lm-eval and kserve's own package were not run for this page.

## The model in other tools

A model folder is one ONNX file, whose attention is an op of Sharp's with its function of standard ops. Models exported with
`--target portable` have standard ops only. Tried with onnxruntime 1.32.0, openvino 2026.4.1, onnxslim 0.1.98, onnxconverter-common 1.16.0
on a small decoder, 2026-11-25:

| tool | `--target portable` | the default |
| --- | --- | --- |
| ONNX Runtime without Sharp's library | loads | loads |
| `onnxruntime.quantization.quantize_dynamic` | loads, close logits (tested) | loads, close logits |
| OpenVINO | the same logits (tested) | no conversion rule: it reads no functions |
| onnxslim | a model that does not load (types of `Greater`) | a model that does not load |
| `onnxconverter_common.float16` | a model that does not load; export with `--dtype float16` | a model that does not load; export with `--dtype float16` |

A folder of symbolic links, as Hugging Face's cache makes them, is served. onnxruntime-web and optimum-onnx were not tried.
"""


def label(client: Client) -> str:
    """What the page calls a client."""
    return f"{client.package} ({'npm' if client.node else 'Python'})"


def rows() -> list[str]:
    """The first cells of the table."""
    return [label(client) for client in CLIENTS]


def main() -> None:
    """Run all of them against one server, and write the page."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(Path(temporary) / MODEL, hashing=0)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        flags = ["--grpc-port", "0", "--http-port", "0", "--no-kernels", "--threads", "1"]
        server = subprocess.Popen([COMMAND, folder, *flags], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            ready = next(line for line in server.stdout if line.startswith("sharp-serve: ready"))
            address = "http://" + ready.rpartition("http=")[2].strip()
            lines = [_row(client, address) for client in CLIENTS]
        finally:
            server.terminate()
            server.wait(30)
    refused = "".join(f"| `{name}` | {sentence} |\n" for name, (_, sentence) in sorted(UNSUPPORTED.items()))
    others = OTHERS.format(names=", ".join(f"`{name}`" for name in sorted(NO_EFFECT)))
    date = datetime.datetime.now(tz=datetime.UTC).date()
    PAGE.write_text(HEAD.format(date=date) + "".join(lines) + FIELDS + refused + others, encoding="utf-8")
    print("".join(lines))


def _row(client: Client, address: str) -> str:
    if not client.installed:
        return f"| {label(client)} | | | not installed |\n"
    result = client.run(address, MODEL)
    if result.returncode:
        print(result.stdout, result.stderr, file=sys.stderr)
    called = result.stdout.strip().splitlines()[-1] if result.returncode == 0 else ""
    return f"| {label(client)} | {client.version} | {called} | {'passed' if called else 'FAILED'} |\n"


if __name__ == "__main__":
    main()
