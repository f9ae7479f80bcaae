"""`LLM`: generates text in this process, without a server."""

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

# No user watches the tokens arrive, so prompts need not be split to keep decoding fast.
OFFLINE = EngineConfig(attention_interval=0, prefill_chunk_tokens=EngineConfig.max_batch_tokens)


class LLM:
    """A model folder that completes prompts. Many prompts at once run together in one batch.

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
        """Load the model of a folder.

        Raises:
            NotFoundError: there is no model folder at `folder`.
            InputError: the folder cannot be used.
            SharpError: software that the backend needs is missing, or (`DeviceLostError`) the GPU is lost.
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
        """Return one completion per prompt, in order.

        A prompt is a text or a list of token ids; a single prompt is accepted, too. `params` applies to all prompts, or
        has one entry for each. With `attention`, completions have attention statistics. Only calls with the same
        `cache_salt` share the prefix cache.

        Raises:
            InputError: a prompt or `params` cannot be used, or a `stream` still runs, so nothing was generated; or no
                token may follow in a completion (`guided`, `allowed_token_ids`, `bad_words`).
            EngineError: the model failed.
        """
        several = _several(prompts)
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(several)
        if not all(isinstance(entry, SamplingParams) for entry in each):
            raise InputError(f"params is {params!r}; give SamplingParams, or a list with one per prompt")
        if len(each) != len(several):
            raise InputError(f"params has {len(each)} entries for {len(several)} prompts; give one, or one per prompt")
        requests = [
            self.model.prepare(
                GenerateRequest(prompt, own, request_id=str(number), attention=attention, cache_salt=cache_salt)
            )
            for number, (prompt, own) in enumerate(zip(several, each, strict=True))
        ]
        builders = {request.request_id: CompletionBuilder(request.params) for request in requests}
        with closing(self._events(requests)) as events:
            for event in events:
                builders[event.request_id].add(event)
        return [builder.build() for builder in builders.values()]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, attention: bool = False, cache_salt: str = ""
    ) -> Generator[Delta | Finished]:
        """Yield the completion of one prompt as it is generated, in the events of `sharp.client.Client.stream`.

        With `n` completions, each `index` has its own `Finished`. Closing the iterator ends all completions.

        Raises:
            InputError: the prompt or `params` cannot be used, another `stream` still runs, or no token may follow
                (`guided`, `allowed_token_ids`, `bad_words`).
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
        """Yield the events of the requests until all have ended.

        Raises:
            InputError: another `stream` still runs.
        """
        if self._engine.has_work:
            raise InputError("another stream of this LLM still runs; read it to its end or close it first")
        waiting = deque(requests)
        try:
            while waiting or self._engine.has_work:
                self._feed(waiting)
                yield from self._engine.step()
                # Without metrics nothing else takes the reports, and counts that are not taken pile up.
                self._engine.report()
        finally:  # no request may stay in the engine after an error or Ctrl-C
            for request in requests:
                self._engine.abort(request.request_id)
            self._engine.report()

    def _feed(self, waiting: deque[GenerateRequest]) -> None:
        """Move requests from `waiting` to the engine until its queue is full."""
        while waiting:
            try:
                self._engine.add(waiting[0])
            except QueueFullError:
                return
            waiting.popleft()


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list; a list of integers is one prompt of token ids.

    Raises:
        InputError: the prompts are something else or mixed.
    """
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
