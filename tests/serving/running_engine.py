"""`RunningEngine`: an engine for tests that look at its events and at the batches of its model."""

import numpy as np

from sharp.core.manifest import read_manifest
from sharp.serving import SamplingParams
from sharp.serving.api.events import Delta, Finished
from sharp.serving.api.request import GenerateRequest
from sharp.serving.config import EngineConfig
from sharp.serving.engine.engine import Engine
from sharp.serving.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0)


def prepared(name, prompt, params, max_new_tokens, **fields):
    """Return a request as `ModelFolder.prepare` gives it to the engine; `prompt` is token ids."""
    ids = tuple(prompt)
    return GenerateRequest(ids, params, request_id=name, prompt_ids=ids, max_new_tokens=max_new_tokens, **fields)


class RunningEngine:
    """An engine, all its events, and all its batches."""

    def __init__(self, backend, folder, monkeypatch, blocks, config):
        self.batches = []
        step = backend.step

        def recorded(batch):
            self.batches.append(batch)
            return step(batch)

        monkeypatch.setattr(backend, "step", recorded)
        self.engine = Engine(
            backend, read_manifest(folder), Tokenizer(folder / "tokenizer.json"), blocks, EngineConfig(**config)
        )
        self.events = []

    def add(self, name, prompt, count, params=GREEDY, **fields):
        self.engine.add(prepared(name, prompt, params, count, **fields))

    def step(self, steps=1):
        for _ in range(steps):
            self.events += self.engine.step()
            self.engine.check_integrity()

    def run(self):
        while self.engine.has_work:
            self.step()

    def of(self, kind, name=None):
        return [event for event in self.events if isinstance(event, kind) and name in (None, event.request_id)]

    def tokens(self, name, index=0):
        return [token for event in self.of(Delta, name) if event.index == index for token in event.token_ids]

    def order(self):
        return [event.request_id for event in self.of(Finished)]

    def chunks(self):
        """Return how many tokens every sequence of every step computed."""
        return [np.diff(batch.query_start).tolist() for batch in self.batches]
