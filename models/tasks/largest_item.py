"""Max retrieval: the class of the item with the highest priority (adaptive-temperature paper, App. A.2)."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from sharp.models.objective import Batch
from sharp.models.tasks.task import check_whole


@dataclass(frozen=True)
class LargestItem:
    """Items with a priority rho ~ U(0, 1) and a class ~ U{1 .. classes}; the query ~ U(0, 1) means nothing."""

    classes: int = 10

    def __post_init__(self) -> None:
        check_whole("max-retrieval", 2, classes=self.classes)

    @property
    def outputs(self) -> int:
        """One logit per class."""
        return self.classes

    def tokens(self, length: int) -> int:
        """`length` items."""
        check_whole("max-retrieval", 1, length=length)
        return length

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> Batch:
        """Inputs items [sets, length, 1 + classes] and query [sets, 1], targets int64 [sets]."""
        self.tokens(length)
        priority = torch.rand(sequences, length, generator=generator)
        kind = torch.randint(self.classes, (sequences, length), generator=generator)
        query = torch.rand(sequences, 1, generator=generator)
        items = torch.cat([priority.unsqueeze(-1), functional.one_hot(kind, self.classes).float()], dim=-1)
        return Batch((items, query), kind.gather(1, priority.argmax(1, keepdim=True)).squeeze(1))
