"""Run every client and write docs/compatibility.md: `python -m tests.full.clients.table`, as `make clients` does.

With `agents` or `fields` as the argument, run only the agents, or only try the fields of other APIs' descriptions, and
replace that section of the page.
"""

import datetime
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from sharp.serving.frontends.foreign_fields import OF_KSERVE, OF_OPENAI, ForeignFields
from tests.full.clients.clients import CLIENTS, Client
from tests.full.clients.contract import EXAMPLES, Found, Operation, operations, tried
from tests.full.clients.model_tools import CASES, REFUSED, TOOLS, export_case, run_tools, versions
from tests.full.clients.models import MODELS
from tests.serving.processes import server_process

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
COMMAND = Path(sys.executable).with_name("sharp-serve")
HEAD = """\
<!-- Written by `make clients` (python -m tests.full.clients.table). -->
# Clients that work unchanged

Each program in tests/full/clients/programs uses a client at a pinned version
([Python](../tests/full/clients/requirements.txt), [npm](../tests/full/clients/package.json); clients with their own
dependencies are in `requirements-NAME.txt` in the same folder). A program sends requests to Sharp's server and changes
only the base URL of the client. Run on {date}.

| client | version | what was called | |
| --- | --- | --- | --- |
"""
AGENTS_HEAD = """
## Agents

Each program has three turns with an agent library. A turn is a question, a tool call that the program or the library
requires, the result of the tool and a reply. The model is SmolLM2-135M-Instruct with a template in the form of Hermes.
Run on {date}.

| library | version | what was called | |
| --- | --- | --- | --- |
"""
FOUND_HEAD = """
## Fields of OpenAI's and Anthropic's descriptions

Each field of a request in OpenAI's OpenAPI description and in the types of Anthropic's Python client was sent with up
to {examples} values that Schemathesis made from the description, to a server with `--unknown-fields error`. A field is
honoured if the server uses it, and ignored if the server knows it but it changes no response. Some values are refused
because the description allows more than the server, the model or the other fields of the request: an image, a value out
of range, a number of tokens beyond the context. Every refusal named the field, every response of OpenAI's endpoints was
valid by the description, and no request crashed the server. Run on {date}.

The messages of KServe's protocol have Triton's numbers, and every response of `/v2`, to bodies that Hypothesis made, is
valid by KServe's OpenAPI description (tests/serving/frontends/kserve).

"""
FIELDS = """
## Fields that are refused

If a field would change a completion and the server does not support it, the request fails with status 400 and an error
that names the field.

| field | what the error says |
| --- | --- |
"""
OTHERS = """
`structural_tag` works in the form with `structures` and `triggers`, and in the newer form `format` with
`triggered_tags` whose contents are JSON schemas. Other formats and contents, `at_least_one` and `stop_after_first` are
not supported and are refused. In a request with `tools`, a JSON schema or object constrains the text; other formats
(`guided_regex`, `guided_grammar`, `guided_choice`, `structural_tag`) need `tool_choice: none`.

## Fields without effect

The following fields are accepted and have no effect. The log names each of them once, except fields for bookkeeping:
{names}.

Other unknown fields are ignored and named in the log; with `--unknown-fields error` they are refused. A misspelt name
of a known field is refused with "did you mean". The tables and the flag also apply to parameters of KServe's protocol.
In that protocol the following parameters have no effect, either:
{kserve}.
`lora_name`, `return_logprobs` and `detokenize: false` are refused in KServe's protocol. Models of sets and of numbers
also take the parameter `timeout`.

`/v1/responses` stores no responses, so `previous_response_id`, `previous_response`, `previous_input_messages`,
`conversation`, `prompt`, `background`, `context_management` and `enable_response_messages` are refused;
`background_options` and `access_programs` have no effect. Messages may contain only text: parts with images, audio or
files are refused, and so is the field `image`. `echo` of a chat is refused if the response would begin with the last
message. `/tokenize` ignores `media_io_kwargs` and `mm_processor_kwargs`, and refuses `chat_template`.

## Not supported

langchain-openai's `OpenAIEmbeddings` sends tokens of OpenAI's own vocabulary unless `check_embedding_ctx_length=False`
is given. tritonclient's calls that load models, share memory, or set logs and traces are refused, because Sharp's
server loads one model when it starts.

"""
TOOLS_HEAD = """
## The model in other tools

A model folder has one ONNX file. Attention in this file is an op of Sharp with a function of standard ops, so ONNX
Runtime loads the file without Sharp's library. Models exported with `--target portable` have standard ops only, which
more tools can read. Each tool read a small Llama (`--cache contiguous`). "passed" means that the logits after reading
or conversion were right within the precision of the tool. Run with
{versions}.

"""
TAIL = """
For a paged model whose output layer shares the weights of the embedding (`tie_word_embeddings`), `quantize_dynamic`
writes a model that does not load, because it transposes the shared weights for one of their two uses. Use
`sharp-export --quantize` instead.

To convert weights and activations to float16 without a new export, keep attention and its function in float32, because
the logits need this precision. (With `--dtype float16` of `sharp-export`, Sharp's kernels also read float16.)

```python
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

blocked = [*DEFAULT_OP_BLOCK_LIST, "SharpAttention"]
model = convert_float_to_float16(
    onnx.load("model.onnx"), keep_io_types=True, disable_shape_infer=True, op_block_list=blocked
)
```

Sharp serves a folder of symbolic links, as in Hugging Face's cache. `docs/clients/browser` is a page that runs a model
in a browser. optimum-onnx warns that the model has no `position_ids`. The prompts of a batch must have the same length,
because the model reads padding on the left as tokens.
"""


def label(client: Client) -> str:
    """Return the name of a client on the page."""
    kind = "npm" if client.node else "Prometheus" if client.binary else "Python"
    return f"{client.package} ({kind})"


def rows() -> list[str]:
    """Return the first cell of each row of the table."""
    return [label(client) for client in CLIENTS]


def main() -> None:
    """Run what the arguments name, or everything, and write the page."""
    date = datetime.datetime.now(tz=datetime.UTC).date()
    chosen = sys.argv[1:]
    if chosen == ["agents"]:
        _replace_section(_agents(date))
    elif chosen == ["fields"]:
        _replace_section(found_section(_tried(), date))
    else:
        refused = "".join(
            f"| `{name}` | {field.refusal} |\n" for name, field in sorted(OF_OPENAI.items()) if field.refusal
        )
        kserve = {name: field for name, field in OF_KSERVE.items() if name not in OF_OPENAI}
        others = OTHERS.format(names=_without_effect(OF_OPENAI), kserve=_without_effect(kserve))
        page = HEAD.format(date=date) + "".join(_rows(kind for kind in MODELS if kind != "agent")) + _agents(date)
        page += found_section(_tried(), date) + FIELDS + refused + others + _tools() + TAIL
        PAGE.write_text(page, encoding="utf-8")


def _replace_section(section: str) -> None:
    """Replace the section of the page that has the same heading."""
    heading = section.strip().splitlines()[0]
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(rf"^{re.escape(heading)}\n.*?(?=^## )", re.DOTALL | re.MULTILINE)
    PAGE.write_text(pattern.sub(lambda _: section.lstrip() + "\n", page, count=1), encoding="utf-8")


def _agents(date: datetime.date) -> str:
    return AGENTS_HEAD.format(date=date) + "".join(_rows(["agent"]))


def _rows(kinds: Iterable[str]) -> list[str]:
    """Run the clients of these kinds of models, and return their lines of the table."""
    found: dict[Client, str] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as temporary:
            folder = MODELS[kind](Path(temporary))
            options = () if kind == "agent" else ("--no-kernels", "--threads", 1)
            with server_process(folder, *options) as server:
                for client in CLIENTS:
                    if client.model == kind:
                        found[client] = _row(client, f"http://{server.http}", folder.name, server.grpc)
                        print(found[client], end="", flush=True)
    return [found[client] for client in CLIENTS if client in found]


def _tried() -> dict[str, dict[str, Found]]:
    """Try the fields of each operation, and return the outcomes by path."""
    found: dict[str, dict[str, Found]] = {}
    for operation in operations():
        found[operation.path] = _tried_on_server(operation)
        for name, outcome in found[operation.path].items():
            for wrong in outcome.wrong:
                print(f"{operation.path}, {name}: {wrong}", file=sys.stderr)
    return found


def _tried_on_server(operation: Operation) -> dict[str, Found]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = MODELS[operation.model](Path(temporary))
        options = ("--no-kernels", "--threads", 1, "--unknown-fields", "error")
        with server_process(folder, *options) as server:
            return tried(operation, f"http://{server.http}", folder.name)


def found_section(found: Mapping[str, Mapping[str, Found]], date: datetime.date) -> str:
    """Return the section with a table of the outcomes for each API, by field and path."""
    section = FOUND_HEAD.format(examples=EXAMPLES, date=date)
    for anthropic in (False, True):
        paths = [path for path in found if path.startswith("/v1/messages") == anthropic]
        section += f"| field | {' | '.join(f'`{path}`' for path in paths)} |\n| --- |{' --- |' * len(paths)}\n"
        for name in sorted({name for path in paths for name in found[path]}):
            cells = [found[path][name].cell if name in found[path] else "" for path in paths]
            section += f"| `{name}` | {' | '.join(cells)} |\n"
        section += "\n"
    return section.rstrip("\n") + "\n"


def _without_effect(table: ForeignFields) -> str:
    """Return the names of a table's fields that change nothing, as lines of the page."""
    names = ", ".join(f"`{name}`" for name, field in sorted(table.items()) if not field.refusal)
    return textwrap.fill(names, 119, break_on_hyphens=False)


def _tools() -> str:
    """Run the tools for ONNX models on each case, and return their table."""
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
    return TOOLS_HEAD.format(versions=textwrap.fill(versions(), 119, break_on_hyphens=False)) + "".join(lines)


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
