"""The models that the clients' servers have."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.sentence_encoders import export_encoder, save_sentence_encoder
from tests.serving.conftest import write_folder
from tests.tensor_models import export_tensor_model, set_model

TEMPLATE = (
    "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)


def counting_chat(folder: Path) -> Path:
    """It counts on from the last character of a conversation."""
    written = write_folder(folder / "counting-chat", hashing=0)
    (written / "chat_template.jinja").write_text(TEMPLATE)
    return written


MODELS: Mapping[str, Callable[[Path], Path]] = {
    "decoder": counting_chat,
    "encoder": lambda folder: export_encoder(save_sentence_encoder(folder / "bert")),
    "set": lambda folder: export_tensor_model(folder, set_model()),
}
"""What writes the model folder into an empty one, by kind."""
