"""A replica that unloads a model gives its memory back, without Ray."""

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack

import pytest

from sharp.ray.replica import ReplicaModel
from sharp.serving.api.errors import DrainingError
from sharp.serving.frontends.http.app import make_app
from sharp.serving.frontends.running import run_model
from sharp.serving.observability.metrics import Metrics
from tests.serving.conftest import SETTINGS, write_folder


def test_an_unloaded_model_is_gone_and_its_counters_stay(tmp_path):
    folder = write_folder(tmp_path / "counting", hashing=0)
    metrics = Metrics()

    async def load_and_unload():
        stack = AsyncExitStack()
        running = await stack.enter_async_context(run_model(folder, SETTINGS, metrics))
        loaded = ReplicaModel(running, make_app(running, metrics, 1000), stack, 0.2, (folder,))
        known = weakref.ref(running.engine), weakref.ref(running.engine._engine)
        await loaded.__del__()  # as Serve calls it
        with pytest.raises(DrainingError):
            running.service.check_serving()
        assert running.engine.ended.done()
        loaded.__del__ = None
        return known

    for _ in range(2):  # a model that comes back starts no second series of metrics
        known = asyncio.run(load_and_unload())
        gc.collect()
        assert [reference() for reference in known] == [None, None]
        text, _type = metrics.text("")
        assert text.count(b'sharp_requests_running{model="counting"}') == 1
