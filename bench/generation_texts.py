"""Requests to a chat model: prompts that hold nothing of their completion, and prompts that hold much of it."""

import json
import pydoc
from pathlib import Path

from sharp.plugins.manifest import read_manifest
from sharp.serving.text.chat_template import load_chat_template
from sharp.serving.text.tokenizer import load_tokenizer

HELP = pydoc.render_doc(json.dumps, renderer=pydoc.plaintext)[:1500]  # type: ignore[attr-defined]  # typeshed lacks it
CODE = (Path(__file__).parents[1] / "serving" / "text" / "stop_condition.py").read_text()
QUESTIONS = {
    "explain": "Explain how a refrigerator works.",
    "story": "Write a short story about a lighthouse keeper.",
    "list": "List ten facts about the planet Mars.",
    "code": "Write a Python function that parses a CSV line with quotes, and explain it.",
    "summary": f"Summarize this text:\n\n{HELP}",
    "edit": f"Rewrite this Python file with longer variable names, and print the whole file:\n\n{CODE}",
    "extract": f"Copy the sentences about parameters from this text, word by word:\n\n{HELP}",
}


def prompts_of(folder: Path) -> dict[str, list[int]]:
    """Their tokens for the chat model in a folder of ours."""
    manifest = read_manifest(folder)
    tokenizer, template = load_tokenizer(folder, manifest), load_chat_template(folder)
    assert tokenizer is not None and template is not None, f"{folder} has no chat template"
    return {
        name: tokenizer.encode(template.render([{"role": "user", "content": question}]), special_tokens=False)
        for name, question in QUESTIONS.items()
    }
