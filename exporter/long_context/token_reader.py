"""Readers of models that run in this process, in PyTorch or ONNX Runtime: tokenizer, chat form, greedy completions."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.exporter.long_context.documents import Question
from sharp.exporter.long_context.reader import Figures, ReadDocument, Response
from sharp.exporter.long_context.subjects import Form

MOST_TOKENS = 12  # most tokens of a greedy completion
TOGETHER = 16  # questions that are read at once
DOCUMENT, QUESTION = "<<document>>", "<<question>>"
PLAIN = ("", "\n\nQuestion: {question}\nAnswer: ")


class TokenRuntime(Protocol):
    """A model with the cache of one sequence, which is extended and cut back to the document that `read` has read."""

    max_context: int

    def read(self, ids: list[int]) -> Tensor:
        """Read a document into an empty cache and return its cross entropies in nats [ids - 1].

        This comes before all other methods.
        """
        ...

    def extend(self, ids: list[int]) -> Tensor:
        """Append tokens and return the logits [vocab] after the last one."""
        ...

    def extend_each(self, several: Sequence[list[int]]) -> list[Tensor]:
        """Return the logits [vocab] after each of several continuations, as if it alone followed the document.

        Afterwards the cache holds the document alone.
        """
        ...

    def rewind(self) -> None:
        """Forget all tokens that were appended since `read`."""
        ...

    def heads(self) -> tuple[Figures, Figures] | None:
        """Return entropy in nats and share of visible keys with a weight of every head, each [layers][heads].

        Both are means over the tokens appended since `read`; None if there are none.
        """
        ...


class TokenReader:
    """A `DocumentReader` that uses a runtime and a tokenizer of transformers; `name` is the model's name, for messages.

    `form` "auto" is "chat" if the tokenizer has a chat template, otherwise "plain".

    Raises:
        InputError: `form` is "chat" and the tokenizer has no chat template.
    """

    def __init__(self, runtime: TokenRuntime, tokenizer: Any, form: Form, name: str) -> None:
        self.runtime = runtime
        self.tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        if form == "chat" and not template:
            raise InputError(f"{name} has no chat template; choose --form plain")
        self.form: Form = "chat" if template and form != "plain" else "plain"
        self.before, self.between = self._chat() if self.form == "chat" else PLAIN
        opening = tokenizer("")["input_ids"][:1]
        bos = tokenizer.bos_token_id
        self.opening = opening if self.form == "plain" and bos is not None and opening == [bos] else []

    @property
    def max_context(self) -> int:
        """The most tokens of a prompt and its completion."""
        return self.runtime.max_context

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        return len(self._ids(text))

    def read(self, text: str) -> ReadDocument:
        """Read a document, after the opening token and the beginning of the chat form, whose tokens count, too."""
        ids = [*self.opening, *self._ids(self.before + text)]
        return ReadDocument(len(ids), self.runtime.read(ids))

    def ask(self, questions: Sequence[Question]) -> list[Response]:
        """Respond to each question as if it were the only question about the document of the last `read`.

        Questions are read 16 at a time. A greedy text has at most 12 tokens, and ends once it is right or cannot be.
        """
        prompts = [self.between.format(question=question.question) + question.lead for question in questions]
        tokens = [self._ids(prompt) for prompt in prompts]
        responses = []
        for start in range(0, len(questions), TOGETHER):
            part = slice(start, start + TOGETHER)
            found = self.runtime.extend_each(tokens[part])
            responses += [
                self._response(*each) for each in zip(questions[part], prompts[part], tokens[part], found, strict=True)
            ]
        return responses

    def _response(self, question: Question, prompt: str, ids: list[int], logits: Tensor) -> Response:
        """Return the scores of the choices' first tokens, and the greedy text while it agrees with the expected one.

        `ids` are the tokens of `prompt` after the document, and `logits` [vocab] those of the next token.
        """
        log_probabilities = torch.log_softmax(logits.float(), -1)
        scores: dict[int, tuple[str, float]] = {}
        for choice in (
            question.expected,
            *question.choices,
        ):  # if choices share their first token, the expected choice has it
            first = self._following(prompt, ids, choice)[0]
            scores.setdefault(first, (choice, log_probabilities[first].item()))
        made = [int(log_probabilities.argmax())]
        expected = question.expected.strip()
        # One token more than the expected text shows whether its last word goes on.
        while len(made) < MOST_TOKENS and expected.startswith(self.tokenizer.decode(made).strip()):
            made.append(int(self.runtime.extend([*ids, *made] if len(made) == 1 else made[-1:]).argmax()))
        self.runtime.rewind()
        return Response(dict(scores.values()), self.tokenizer.decode(made))

    def heads(self) -> tuple[Figures, Figures] | None:
        """Return `heads` of the runtime: entropy in nats and share of keys with a weight, or None."""
        return self.runtime.heads()

    def _ids(self, text: str) -> list[int]:
        """Return the token ids of `text` without special tokens."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def _following(self, prompt: str, ids: list[int], choice: str) -> list[int]:
        """Return the tokens of `choice` after the prompt, whose tokens are `ids`."""
        joined = self._ids(prompt + choice)
        return joined[len(ids) :] if joined[: len(ids)] == ids and len(joined) > len(ids) else self._ids(choice)

    def _chat(self) -> tuple[str, str]:
        """Return the text of a one-message chat before the document, and the format string from there to the response.

        The format string has the field {question}.
        """
        content = f"{DOCUMENT}\n\n{QUESTION}"
        rendered: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        before, _, rest = rendered.partition(DOCUMENT)
        middle, _, after = rest.partition(QUESTION)
        middle, after = (part.replace("{", "{{").replace("}", "}}") for part in (middle, after))
        return before, f"{middle}{{question}}{after}"
