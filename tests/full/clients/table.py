"""Runs every client and writes docs/compatibility.md: `python -m tests.full.clients.table`, as `make clients` does."""

import datetime
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sharp.serving.frontends.kserve.inference_request import NO_EFFECT as OF_KSERVE
from sharp.serving.frontends.unsupported_fields import NO_EFFECT, UNSUPPORTED
from tests.full.clients.clients import CLIENTS, Client
from tests.full.clients.model_tools import CASES, REFUSED, TOOLS, export_case, run_tools, versions
from tests.full.clients.models import MODELS
from tests.serving.processes import server_process

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
COMMAND = Path(sys.executable).with_name("sharp-serve")
HEAD = """\
<!-- Written by `make clients` (python -m tests.full.clients.table). -->
# Clients that work unchanged

Each program of tests/full/clients/programs uses a client at a pinned version ([Python](../tests/full/clients/requirements.txt),
[npm](../tests/full/clients/package.json), those with dependencies of their own in `requirements-NAME.txt` beside them) against a
server, and changes nothing but its base URL. Run on {date}.

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
Of `structural_tag`, the form with `structures` and `triggers` is followed, and of the newer `format` `triggered_tags` whose contents are JSON
schemas; its other formats and contents, `at_least_one` and `stop_after_first` are refused, as nothing here follows them.

## Fields without effect

These are accepted and change nothing; the server's log names each once, as far as it is more than bookkeeping:
{names}.

Any other field that is not known is left out and named in the log (`--unknown-fields error` refuses it); a misspelt one is refused with
"did you mean". Parameters of KServe's protocol follow the same tables and the same flag; those without effect there are, besides:
{kserve}. `lora_name`, `return_logprobs` and `detokenize: false` are refused there.
Models of sets and of numbers know the parameter `timeout`.

`/v1/responses` keeps no responses: `previous_response_id`, `previous_response`, `previous_input_messages`, `conversation`, `prompt`,
`background`, `context_management` and `enable_response_messages` are refused; `background_options` and `access_programs` change nothing. Messages hold text; parts of images, audio and files are refused, and `image` is.
`echo` of a chat is refused where the response would begin with the last message. `/tokenize` leaves out `media_io_kwargs` and
`mm_processor_kwargs`, and refuses `chat_template`.

## Not here

langchain-openai's `OpenAIEmbeddings` sends tokens of OpenAI's own vocabulary unless `check_embedding_ctx_length=False` is given.
tritonclient's calls that load models, share memory, or set logs and traces are refused: this server loads its model when it starts.

"""
TOOLS_HEAD = """
## The model in other tools

A model folder is one ONNX file, whose attention is an op of Sharp's with its function of standard ops: ONNX Runtime loads it without
Sharp's library. Models exported with `--target portable` have standard ops only, which more tools read. Each tool was given a small
Llama (`--cache contiguous`); what it read or wrote gave the logits, within what its precision allows. Run with
{versions}.

"""
TAIL = """
Of a paged model whose embedding is its head as well (`tie_word_embeddings`) `quantize_dynamic` writes a model that does not load: it turns
the shared weights over for one of their two uses. `sharp-export --quantize` does not.

To have float16 weights and activations without a new export, keep attention in float32, whose logits need it, and its function with it
(`--dtype float16` of `sharp-export` does more: our kernels then read float16 too):

```python
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

blocked = [*DEFAULT_OP_BLOCK_LIST, "SharpAttention"]
model = convert_float_to_float16(
    onnx.load("model.onnx"), keep_io_types=True, disable_shape_infer=True, op_block_list=blocked
)
```

A folder of symbolic links, as Hugging Face's cache makes them, is served. `docs/clients/browser` is a page that runs a model in a browser.
optimum-onnx warns that the model has no `position_ids`: prompts of a batch must have one length, as padding on the left is read as tokens.
"""


def label(client: Client) -> str:
    """What the page calls a client."""
    kind = "npm" if client.node else "Prometheus" if client.binary else "Python"
    return f"{client.package} ({kind})"


def rows() -> list[str]:
    """The first cells of the table."""
    return [label(client) for client in CLIENTS]


def main() -> None:
    """Run all of them, each against a server of its kind of model, and write the page."""
    found: dict[Client, str] = {}
    for kind, write in MODELS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = write(Path(temporary))
            with server_process(folder, "--no-kernels", "--threads", 1) as server:
                for client in CLIENTS:
                    if client.model == kind:
                        found[client] = _row(client, f"http://{server.http}", folder.name, server.grpc)
    lines = [found[client] for client in CLIENTS]
    refused = "".join(f"| `{name}` | {sentence} |\n" for name, (_, sentence) in sorted(UNSUPPORTED.items()))
    others = OTHERS.format(names=_listed(NO_EFFECT), kserve=_listed(OF_KSERVE))
    date = datetime.datetime.now(tz=datetime.UTC).date()
    page = HEAD.format(date=date) + "".join(lines) + FIELDS + refused + others + _tools() + TAIL
    PAGE.write_text(page, encoding="utf-8")
    print("".join(lines))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _tools() -> str:
    """What the tools for models do with each case."""
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, case in enumerate(CASES):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            found[case] = run_tools(export_case(case, folder), folder / "out")
    lines = [f"| tool | {' | '.join(CASES)} |\n| --- |{' --- |' * len(CASES)}\n"]
    for tool, name in TOOLS.items():
        cells = [_cell(tool, case, found[case][tool]) for case in CASES]
        lines.append(f"| {name} | {' | '.join(cells)} |\n")
    return TOOLS_HEAD.format(versions=versions()) + "".join(lines)


def _cell(tool: str, case: str, error: str) -> str:
    reason = REFUSED.get((tool, case))
    if error:
        print(f"{tool}, {case}: {error}", file=sys.stderr)
    return "passed" if not error else f"refused: {reason}" if reason else "FAILED"


def _row(client: Client, base: str, model: str, grpc: str) -> str:
    if not client.installed:
        return f"| {label(client)} | | | not installed |\n"
    result = client.run(base, model, grpc)
    if result.returncode:
        print(result.stdout, result.stderr, file=sys.stderr)
    called = result.stdout.strip().splitlines()[-1] if result.returncode == 0 else ""
    return f"| {label(client)} | {client.version} | {called} | {'passed' if called else 'FAILED'} |\n"


if __name__ == "__main__":
    main()
