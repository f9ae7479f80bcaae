"""`LLM`: generation in this process, without a server."""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from sharp.serving.api.completion import Completion, CompletionBuilder
from sharp.serving.api.errors import InputError, QueueFullError
from sharp.serving.api.events import Delta, Event, Failed, Finished
from sharp.serving.api.request import GenerateRequest, Prompt
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.loading import load_model_folder

# Nobody watches the tokens come, so prompts need not hold back for those that decode.
OFFLINE = EngineConfig(attention_interval=0, prefill_chunk_tokens=EngineConfig.max_batch_tokens)


class LLM:
    """A model folder that completes prompts; many at once run together in one batch.

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
        self.model, _, self._engine = load_model_folder(Path(folder), backend or BackendConfig(), engine or OFFLINE)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        attention: bool = False,
        cache_salt: str = "",
    ) -> list[Completion]:
        """One completion per prompt, in order. A prompt is text or a list of token ids; one alone is fine too.

        `params` is for all prompts, or one for each. With `attention`, completions have attention statistics. A
        `cache_salt` keeps what was computed apart from calls with another one.

        Raises:
            InputError: a prompt cannot be used, or `stream` still runs; nothing was generated.
            EngineError: the model failed.
        """
        several = _several(prompts)
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(several)
        if not all(isinstance(one, SamplingParams) for one in each):
            raise InputError(f"params is {params!r}; give SamplingParams, or a list with one per prompt")
        if len(each) != len(several):
            raise InputError(f"params has {len(each)} entries for {len(several)} prompts; give one, or one per prompt")
        requests = [
            self.model.prepare(
                GenerateRequest(prompt, one, request_id=str(number), attention=attention, cache_salt=cache_salt)
            )
            for number, (prompt, one) in enumerate(zip(several, each, strict=True))
        ]
        builders = {request.request_id: CompletionBuilder(request.params) for request in requests}
        with closing(self._events(requests)) as events:
            for event in events:
                builders[event.request_id].add(event)
        return [builder.build() for builder in builders.values()]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, attention: bool = False, cache_salt: str = ""
    ) -> Generator[Delta | Finished]:
        """The completion of one prompt as it comes, as `sharp.client.Client.stream` gives it.

        With `n` completions, each `index` has a `Finished` of its own. Closing the iterator ends them.

        Raises:
            InputError: the prompt cannot be used, or another `stream` still runs.
            EngineError: the model failed.
        """
        request = self.model.prepare(
            GenerateRequest(prompt, params or SamplingParams(), attention=attention, cache_salt=cache_salt)
        )
        with closing(self._events([request])) as events:
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta | Finished):
                    yield event

    def _events(self, requests: Sequence[GenerateRequest]) -> Generator[Event]:
        """The events of the requests until all have ended."""
        if self._engine.has_work:
            raise InputError("another stream of this LLM still runs; read it to its end or close it first")
        waiting = deque(requests)
        try:
            while waiting or self._engine.has_work:
                self._feed(waiting)
                yield from self._engine.step()
                self._engine.report()  # there are no metrics here, and what is not taken would pile up
        finally:  # after an error or Ctrl-C nothing may be left in the engine
            for request in requests:
                self._engine.abort(request.request_id)
            self._engine.report()

    def _feed(self, waiting: deque[GenerateRequest]) -> None:
        """Give the engine as many requests as its queue takes."""
        while waiting:
            try:
                self._engine.add(waiting[0])
            except QueueFullError:
                return
            waiting.popleft()


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts is {prompts!r}; give a text, a list of token ids, or a list of such prompts")
    listed: list[Prompt | int] = list(prompts)
    tokens = [entry for entry in listed if not isinstance(entry, str | Iterable)]
    if tokens:
        if len(tokens) < len(listed):
            raise InputError("prompts mixes token ids with prompts; a prompt is a text or a list of token ids")
        return [tokens]
    return [entry if isinstance(entry, str) else list(entry) for entry in listed if isinstance(entry, Iterable)]
