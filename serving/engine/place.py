"""`Place`: where in a sequence a token is drawn."""

from dataclasses import dataclass

from sharp.serving.engine.sequence import Sequence


@dataclass(frozen=True)
class Place:
    """Behind the tokens of a sequence and `guessed`, the first ones of its draft."""

    sequence: Sequence
    guessed: tuple[int, ...] = ()

    @property
    def too_early(self) -> bool:
        """Whether the answer must not end here."""
        return self.sequence.generated + len(self.guessed) < self.sequence.request.params.min_tokens
