"""The command `sharp run`."""

from typing import Any

import click

from sharp.core.cli import SharpCommand, exit_on_terminate, status
from sharp.serving.api.errors import InputError
from sharp.serving.source import export_flags, export_options, model_folder


@click.command(cls=SharpCommand, epilog="See also: sharp docs serving, sharp serve, sharp generate.")
@click.argument("source", metavar="FOLDER|CHECKPOINT|HUB-ID")
@export_flags
@click.option("--system", help="The system message.")
@click.option(
    "--temperature",
    type=float,
    help="Temperature; 0 always chooses the most likely token.  [default: the model's, else 1]",
)
@click.option("--max-tokens", type=int, default=1024, show_default=True, help="Maximum number of tokens to generate.")
@click.option("--seed", type=int, help="The same seed samples the same tokens.  [default: random]")
def run(
    source: str,
    norm: str | None,
    quantize: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int,
    seed: int | None,
) -> None:
    """Chat with a model in the terminal.

    A model FOLDER of sharp-export runs as it is. A CHECKPOINT (a Hugging Face folder, a .gguf file) or the id of a
    model on the Hugging Face Hub is exported on its first use, into a cache that sharp cache lists. After each
    response the command prints how dispersed the attention of its tokens was: the mean entropy of the heads, as a share
    of ln n.
    """
    exit_on_terminate()
    from sharp.serving.api.sampling_params import SamplingParams

    given: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    folder = model_folder(source, export_options(norm, quantize))
    with status(f"Loading {folder}"):
        from sharp.serving.llm import LLM
        from sharp.serving.terminal_chat import Chat, start
        from sharp.serving.text.chat_template import load_chat_template

        llm = LLM(folder)
        template = load_chat_template(folder)
    if llm.model.tokenizer is None:
        raise InputError(f"{folder} has no tokenizer, so it reads no text; export it with --tokenizer")
    chat = Chat(llm, template, params)
    start(chat, system)
