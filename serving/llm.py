"""`LLM`: generation in this process, without a server."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sharp.serving.attention import AttentionSummary
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.events import Delta, Failed, Finished, FinishReason, Timing, Usage
from sharp.serving.errors import InputError
from sharp.serving.model_folder import load_model_folder
from sharp.serving.request import Prompt
from sharp.serving.sampling_params import SamplingParams


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        text: the generated text; empty for a model without a tokenizer.
        token_ids: the generated tokens, with the one that ended the answer.
        finish_reason: "stop", "length" or "cancelled".
        matched: the stop string or stop token that ended the answer.
        usage: how many tokens prompt and answer have.
        timing: seconds since the request was made.
        attention: means over the tokens of this request, when asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched: str | int | None
    usage: Usage
    timing: Timing
    attention: AttentionSummary | None


@dataclass
class _Answer:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None


class LLM:
    """A model folder that answers prompts; many at once run together in one batch.

    Example:
        >>> LLM("smollm2-softmax").generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=48))
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        backend: BackendConfig | None = None,
        engine: EngineConfig | None = None,
    ) -> None:
        """Load the model.

        Raises:
            NotFoundError: there is no model folder at `folder`.
            InputError: the folder cannot be used.
        """
        self.model, _, self._engine = load_model_folder(
            Path(folder), backend or BackendConfig(), engine or EngineConfig(attention_interval=0)
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        attention: bool = False,
    ) -> list[Completion]:
        """One completion per prompt, in order. A prompt is text or a list of token ids; one alone is fine too.

        `params` is for all prompts, or one for each. With `attention`, completions have attention statistics.

        Raises:
            InputError: a prompt cannot be used; nothing was generated.
            EngineError: the model failed.
        """
        several = _several(prompts)
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(several)
        if len(each) != len(several):
            raise InputError(f"params has {len(each)} entries for {len(several)} prompts; give one, or one per prompt")
        requests = [
            self.model.prepare(str(number), prompt, one, attention=attention)
            for number, (prompt, one) in enumerate(zip(several, each, strict=True))
        ]
        answers = {request.request_id: _Answer() for request in requests}
        try:
            for request in requests:
                self._engine.add(request)
            while self._engine.has_work:
                self._step(answers)
        finally:  # after an error or Ctrl-C nothing may be left in the engine
            for request_id in answers:
                self._engine.abort(request_id)
            self._engine.report()
        return [_completion(answer) for answer in answers.values()]

    def _step(self, answers: dict[str, _Answer]) -> None:
        for event in self._engine.step():
            answer = answers[event.request_id]
            if isinstance(event, Delta):
                answer.text.append(event.text)
                answer.token_ids.extend(event.token_ids)
            elif isinstance(event, Finished):
                answer.finished = event
            elif isinstance(event, Failed):
                raise event.error
        self._engine.report()  # there are no metrics here, and what is not taken would pile up


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Prompt | int] = list(prompts)
    tokens = [entry for entry in listed if not isinstance(entry, str | Iterable)]
    if tokens:
        if len(tokens) < len(listed):
            raise InputError("prompts mixes token ids with prompts; a prompt is a text or a list of token ids")
        return [tokens]
    return [entry if isinstance(entry, str) else list(entry) for entry in listed if isinstance(entry, Iterable)]


def _completion(answer: _Answer) -> Completion:
    finished = answer.finished
    if finished is None:
        raise RuntimeError("the engine lost a request")
    return Completion(
        "".join(answer.text),
        tuple(answer.token_ids),
        finished.reason,
        finished.matched,
        finished.usage,
        finished.timing,
        finished.attention,
    )
