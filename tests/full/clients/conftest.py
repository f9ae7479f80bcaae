"""A server for other people's clients."""

import pytest

from tests.serving.conftest import start_server as start_server
from tests.serving.conftest import write_folder

TEMPLATE = (
    "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
MODEL = "counting-chat"


@pytest.fixture(scope="module")
def addresses(start_server, tmp_path_factory):
    """Addresses of HTTP and gRPC. The model counts on from the last character of a conversation."""
    folder = write_folder(tmp_path_factory.mktemp("models") / MODEL, hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    started = start_server(folder)
    return f"http://{started.http_address}", started.grpc_address
