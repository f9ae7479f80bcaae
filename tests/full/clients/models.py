"""Models for the servers that clients use."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sharp.serving.demo import checkpoint
from tests.sentence_encoders import export_encoder, save_sentence_encoder
from tests.serving.conftest import write_folder
from tests.tensor_models import export_tensor_model, set_model

HERMES = Path(__file__).parents[2] / "serving" / "text" / "families" / "hermes3.jinja"
TEMPLATE = (
    "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)


def counting_chat(folder: Path) -> Path:
    """Write a model that counts on from the last character of a conversation."""
    written = write_folder(folder / "counting-chat", hashing=0)
    (written / "chat_template.jinja").write_text(TEMPLATE)
    return written


def smollm2(folder: Path) -> Path:
    """Export SmolLM2-135M-Instruct, with a template that shows tools as Hermes does."""
    exported = folder / "smollm2"
    command = [str(Path(sys.executable).with_name("sharp-export")), str(checkpoint("smollm2")), "--norm", "softmax"]
    subprocess.run([*command, "--quiet", "--output", str(exported)], check=True)
    shutil.copy(HERMES, exported / "chat_template.jinja")
    return exported


MODELS: Mapping[str, Callable[[Path], Path]] = {
    "decoder": counting_chat,
    "encoder": lambda folder: export_encoder(save_sentence_encoder(folder / "bert")),
    "agent": smollm2,
    "set": lambda folder: export_tensor_model(folder, set_model()),
}
"""Functions that write a model folder into an empty folder, by kind of model."""
