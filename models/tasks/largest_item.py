"""Max retrieval, the task to name the class of the item with the highest priority (adaptive-temperature, App. A.2)."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from sharp.models.objective import TrainingBatch
from sharp.models.tasks.task import check_whole


@dataclass(frozen=True)
class LargestItem:
    """The sampler of max retrieval.

    Items have a priority rho ~ U(0, 1) and a class ~ U{0 .. classes - 1}. The query ~ U(0, 1) carries no information. A
    length is the number of items.

    Raises:
        InputError: there are fewer than two classes.
    """

    classes: int = 10

    def __post_init__(self) -> None:
        check_whole("max-retrieval", 2, classes=self.classes)

    @property
    def outputs(self) -> int:
        """The number of outputs, one logit per class."""
        return self.classes

    def tokens(self, length: int) -> int:
        """Return the number of positions of a sample, its items.

        Raises:
            InputError: the length is below 1.
        """
        check_whole("max-retrieval", 1, length=length)
        return length

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
        """Return float inputs, items [sets, length, 1 + classes] and query [sets, 1], and targets int64 [sets].

        An item is its priority, then its class as a one-hot vector. `sequences` is the number of sets.
        """
        self.tokens(length)
        priority = torch.rand(sequences, length, generator=generator)
        kind = torch.randint(self.classes, (sequences, length), generator=generator)
        query = torch.rand(sequences, 1, generator=generator)
        items = torch.cat([priority.unsqueeze(-1), functional.one_hot(kind, self.classes).float()], dim=-1)
        return TrainingBatch((items, query), kind.gather(1, priority.argmax(1, keepdim=True)).squeeze(1))
