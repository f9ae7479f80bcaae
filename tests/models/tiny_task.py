"""Tiny models of tasks, and samples of the tasks."""

from dataclasses import replace

import torch

from sharp.models.checkpoint import Model
from sharp.models.objective import TrainingBatch
from sharp.models.tasks.recipe import Choices, choose_task, make_model
from sharp.models.tasks.registry import TASKS
from sharp.models.tasks.task import Task


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sample(sampler, length, sequences=20, seed=0) -> TrainingBatch:
    return sampler.sample(sequences, length, generator(seed))


def tiny(name, norm="softmax", **choices) -> tuple[Task, Model]:
    """Return the task `name` and a tiny model for it."""
    chosen = Choices(norm, steps=10, **choices)
    if name != "max-retrieval":
        chosen = replace(chosen, layers=1, heads=2, hidden_size=16)
    task = choose_task(TASKS[name], chosen, ())
    torch.manual_seed(0)
    return task, make_model(task, chosen)
