"""HTTP requests to a replica without Ray: each goes to the requested model, and some paths need a token."""

from types import SimpleNamespace

import pytest
from ray import serve
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from sharp.ray.replica import ModelServer
from sharp.serving.api.errors import NotFoundError
from sharp.serving.security.tokens import Tokens


class Replica:
    """The HTTP side of a replica, without an engine."""

    _http = ModelServer.func_or_class._http
    _of_model = ModelServer.func_or_class._of_model
    _whichever = ModelServer.func_or_class._whichever
    app = ModelServer.func_or_class.__serve_build_asgi_app__


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return a client of a replica that holds the model `held`, and the list of the models that it loads."""
    (tmp_path / "tokens").write_text("secret")

    def model(name):
        service = SimpleNamespace(draining=False)
        return SimpleNamespace(app=PlainTextResponse(name), running=SimpleNamespace(service=service))

    async def load(name):
        loads.append(name)
        if name == "missing":
            raise NotFoundError("there is no such model")
        return model(name)

    loads = []
    replica = Replica()
    replica._tokens = Tokens(tmp_path / "tokens")
    replica._loaded = [model("held")]
    replica._model = load

    def ask(path, name="", **headers):
        monkeypatch.setattr(serve, "get_multiplexed_model_id", lambda: name)
        response = TestClient(replica.app(), root_path="/sharp").get(f"/sharp{path}", headers=headers)
        return response.status_code, response.text

    return ask, loads


def test_who_has_no_token_makes_a_replica_load_nothing(asked):
    ask, loads = asked
    assert ask("/v1/models", "other")[0] == 401
    assert ask("/v1/models", "other", authorization="Bearer wrong")[0] == 401
    assert loads == []
    assert ask("/v1/models", "other", authorization="Bearer secret") == (200, "other")
    assert ask("/v1/models", "missing", authorization="Bearer secret")[0] == 404


def test_health_and_metrics_do_not_load_a_model_either(asked):
    ask, loads = asked
    assert [ask(path, "other") for path in ("/health", "/metrics")] == [(200, "held")] * 2
    assert loads == []
