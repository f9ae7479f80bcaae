"""The comparison of greedy decoding by the written model with PyTorch, token by token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sharp.exporter.verification.comparison import Floats, Tokens

DRAFT_TOKENS = 16  # the number of draft tokens that one step reads

# New tokens int64 [n] of one sequence -> the logits [n, vocab] after each of them.
Append = Callable[[Tokens], Floats]


@dataclass(frozen=True)
class Continuation:
    """The greedy tokens of one runtime, compared with PyTorch's prediction after the same tokens.

    `same` counts the tokens that PyTorch also picks. `first_difference` is the index of the first other token; up to
    this index, the completion is PyTorch's own; None means that there is no other token. `tied` counts the other tokens
    whose logit in PyTorch is the largest up to twice the tolerance. `prompt` and `tokens` are numbers of tokens.
    """

    runtime: str
    prompt: int
    tokens: int
    same: int
    tied: int
    first_difference: int | None

    @property
    def passed(self) -> bool:
        """Whether every token is PyTorch's own or tied with it."""
        return self.same + self.tied == self.tokens

    @property
    def difference(self) -> str:
        """A phrase for messages: the runtime, and the number and the place of wrong tokens."""
        wrong = self.tokens - self.same - self.tied
        return (
            f"greedy decoding ({self.runtime}): {wrong} of {self.tokens} tokens, the first at {self.first_difference}"
        )


def continue_greedily(append: Append, prompt: Tokens, tokens: int) -> Tokens:
    """Return the greedy continuation int64 [tokens] of `prompt`, int64 of any length above 0.

    `append` takes the next tokens of a sequence that has just begun, and returns the logits after each. Tokens after an
    end-of-text token are generated, too.
    """
    completion: list[int] = []
    following = prompt
    for _ in range(tokens):
        following = append(following)[-1:].argmax(-1)
        completion.append(int(following[0]))
    return np.array(completion)


def continue_as_drafted(begin: Callable[[], Append], prompt: Tokens, draft: Tokens) -> Tokens:
    """Return the greedy continuation of `prompt`, of the length of `draft`, in few steps if it equals `draft`.

    Each step reads several tokens of `draft`, which are the greedy tokens if the logits before each pick it. `begin`
    starts the sequence anew.
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

    `completions` has the tokens by runtime. `logits` takes int64 [tokens] and returns [tokens, vocab]. `tolerance` is
    the largest difference of a logit that passes, relative to the largest logit; a token whose logit is lower than the
    largest by up to twice that is a tie.
    """
    passes: dict[bytes, Floats] = {}  # runtimes with the same completion share a pass
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
