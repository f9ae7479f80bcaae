"""A replica whose steps take a while, so that streams are still open when a test stops or replaces something."""

import json
import os
import time
from pathlib import Path

import ray
from ray import serve

from sharp.ray.replica import ModelServer
from sharp.serving.engine.engine import Engine

STEP_SECONDS = 0.1
FOLDER = "SHARP_TEST_REPLICAS"  # folder in which every replica describes itself
HELD = "held"  # while a file of this name is beside that folder, no replica makes a step


class SlowServer(ModelServer.func_or_class):
    async def __init__(self, *arguments, **options):
        step, folder = Engine.step, Path(os.environ[FOLDER])

        def slow_step(engine):
            time.sleep(STEP_SECONDS)
            while (folder.parent / HELD).exists():
                time.sleep(STEP_SECONDS / 10)
            return step(engine)

        Engine.step = slow_step
        await super().__init__(*arguments, **options)
        announce(self)


def announce(server, **more):
    """Write a file that describes a replica: its process, node and addresses."""
    context = serve.get_replica_context()
    text = {
        "pid": os.getpid(),
        "actor": context.replica_id.to_full_id_str(),
        "node": ray.get_runtime_context().get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "metrics": f"http://127.0.0.1:{server._metrics_server.port}/metrics",
        **more,
    }
    (Path(os.environ[FOLDER]) / context.replica_id.unique_id).write_text(json.dumps(text))
