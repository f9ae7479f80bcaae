"""Does the written model write what PyTorch writes? Greedy tokens, one by one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sharp.exporter.verification.comparison import Floats, Tokens

DRAFT_TOKENS = 16  # read at a time

# New tokens int64 [n] of one sequence -> the logits [n, vocab] after each of them.
Append = Callable[[Tokens], Floats]


@dataclass(frozen=True)
class Continuation:
    """The greedy tokens of one runtime, and what PyTorch predicts at each of them.

    `same` counts the tokens that PyTorch too picks after the tokens before them; up to the first other one, at index
    `first_difference`, the completion is PyTorch's own. `tied` counts those of the others that PyTorch finds as likely
    as its own, within what logits may differ by.
    """

    runtime: str
    prompt: int
    tokens: int
    same: int
    tied: int
    first_difference: int | None

    @property
    def passed(self) -> bool:
        """No token differs but by a tie."""
        return self.same + self.tied == self.tokens

    @property
    def difference(self) -> str:
        """What differs where, for a message."""
        wrong = self.tokens - self.same - self.tied
        return (
            f"greedy decoding ({self.runtime}): {wrong} of {self.tokens} tokens, the first at {self.first_difference}"
        )


def continue_greedily(append: Append, prompt: Tokens, tokens: int) -> Tokens:
    """The most likely tokens [tokens] after `prompt` [any]."""
    completion: list[int] = []
    following = prompt
    for _ in range(tokens):
        following = append(following)[-1:].argmax(-1)
        completion.append(int(following[0]))
    return np.array(completion)


def continue_as_drafted(begin: Callable[[], Append], prompt: Tokens, draft: Tokens) -> Tokens:
    """What `continue_greedily` gives; in a few steps where that is `draft`, as the same tokens have the same next one.

    `begin` starts the sequence, anew where it was begun before.
    """
    append = begin()
    chunks = np.split(draft[:-1], range(DRAFT_TOKENS, len(draft) - 1, DRAFT_TOKENS))
    said = [append(prompt)[-1:].argmax(-1), *(append(chunk).argmax(-1) for chunk in chunks if len(chunk))]
    if np.array_equal(np.concatenate(said), draft):
        return draft
    return continue_greedily(begin(), prompt, len(draft))


def check_continuation(
    completions: Mapping[str, Tokens], prompt: Tokens, logits: Callable[[Tokens], Floats], tolerance: float
) -> tuple[Continuation, ...]:
    """Compare the tokens of every runtime with PyTorch's `logits` in one pass over prompt and completion.

    `tolerance` is what logits may differ by, relative to the largest.
    """
    passes: dict[bytes, Floats] = {}  # runtimes that agree need one
    found: list[Continuation] = []
    for runtime, completion in completions.items():
        key = completion.tobytes()
        if key not in passes:
            passes[key] = logits(np.concatenate([prompt, completion[:-1]]))[-len(completion) :]
        rows = passes[key]
        other = np.flatnonzero(rows.argmax(-1) != completion)
        # Either logit may be off by the tolerance.
        gap = rows[other].max(-1) - np.take_along_axis(rows[other], completion[other, None], -1)[:, 0]
        tied = int((gap <= 2 * tolerance * np.abs(rows).max()).sum())
        first = int(other[0]) if len(other) else None
        found.append(Continuation(runtime, len(prompt), len(completion), len(completion) - len(other), tied, first))
    return tuple(found)
