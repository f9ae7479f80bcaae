"""`AsyncClient`: a client of a Sharp server for asyncio."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc

from sharp.serving.api.completion import Completion, CompletionBuilder
from sharp.serving.api.errors import SharpError
from sharp.serving.api.events import Delta, Event, Finished
from sharp.serving.api.request import GenerateRequest, Prompt
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.client.channel import error_of
from sharp.serving.client.connection import Connection
from sharp.serving.client.messages import event_of, request_message
from sharp.v1 import control_pb2, inference_pb2


class AsyncClient(Connection):
    """A connection of one event loop to the server at `address`, host:port, with the methods of `Client`.

    Example:
        >>> async with AsyncClient("localhost:50051") as client:
        ...     async for part in client.stream("Once upon a time"):
        ...         if isinstance(part, Delta):  # the last part is a Finished
        ...             print(part.text, end="")
    """

    _grpc = grpc.aio

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection, and every call that runs on it."""
        await self._channel.close()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Delta | Finished]:
        """Yield the completions of a prompt as they come: `Delta`s, and one `Finished` for each completion.

        `options` are fields of `GenerateRequest`: model, request_id, attention, priority, cache_salt. Other fields are
        not sent. Closing the generator early ends the request.

        Raises:
            InputError: the request cannot be written as a message, or the server refuses a value.
            SharpError: the server does not respond, or the server's own error.
        """
        async for event in self._events(GenerateRequest(prompt, params or SamplingParams(), **options)):
            if isinstance(event, Delta | Finished):
                yield event

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Return the whole completion of a prompt; `options` are fields of `GenerateRequest`, as in `stream`.

        Raises:
            InputError: the request cannot be written as a message, or the server refuses a value.
            SharpError: the server does not respond, or the server's own error.
        """
        request = GenerateRequest(prompt, params or SamplingParams(), **options)
        builder = CompletionBuilder(request.params)
        async for event in self._events(request):
            builder.add(event)
        return builder.build()

    async def tokenize(self, text: str, model: str = "") -> tuple[int, ...]:
        """Return the token ids that the server would use for a text. An empty `model` means the served model.

        Raises:
            SharpError: the server does not respond, or the server's own error.
        """
        request = inference_pb2.TokenizeRequest(model=model, text=text)
        return tuple((await self._call(self._inference.Tokenize, request)).token_ids)

    async def abort(self, request_id: str) -> None:
        """End a running request of any client.

        Raises:
            NotFoundError: the request does not run.
            SharpError: the server does not respond, or the server's own error.
        """
        await self._call(self._control.Abort, control_pb2.AbortRequest(request_id=request_id))

    async def model_info(self, model: str = "") -> control_pb2.GetModelInfoResponse:
        """Return the description of a model. An empty `model` means the served model.

        Raises:
            NotFoundError: the server has no model of this name.
            SharpError: the server does not respond, or the server's own error.
        """
        found: control_pb2.GetModelInfoResponse = await self._call(
            self._control.GetModelInfo, control_pb2.GetModelInfoRequest(model=model)
        )
        return found

    async def server_info(self) -> control_pb2.GetServerInfoResponse:
        """Return the configuration of the server.

        Raises:
            SharpError: the server does not respond, or the server's own error.
        """
        found: control_pb2.GetServerInfoResponse = await self._call(
            self._control.GetServerInfo, control_pb2.GetServerInfoRequest()
        )
        return found

    async def load(self) -> control_pb2.GetLoadResponse:
        """Return how busy the server is now.

        Raises:
            SharpError: the server does not respond, or the server's own error.
        """
        found: control_pb2.GetLoadResponse = await self._call(self._control.GetLoad, control_pb2.GetLoadRequest())
        return found

    async def _events(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Send a request and yield its events. The call is cancelled when the generator is closed.

        Raises:
            SharpError: the server refused or failed, or could not be reached.
        """
        call = self._inference.Generate(request_message(request), timeout=self._timeout, metadata=self._metadata)
        responded, request_id = False, request.request_id
        try:
            async for response in call:
                responded, self._unreached = True, None
                request_id = response.prompt_info.request_id or request_id
                yield event_of(response, request_id)
        except grpc.RpcError as error:
            raise await self._error_of(error, responded=responded) from error
        finally:
            call.cancel()

    async def _call(self, method: Any, request: Any) -> Any:
        """Call a unary RPC and return its response message. SharpError, by the status, if it fails."""
        try:
            response = await method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise await self._error_of(error) from error
        self._unreached = None
        return response

    async def _error_of(self, error: grpc.RpcError, *, responded: bool = False) -> SharpError:
        """Return the error for a failed call; `responded` says that the server had sent something before."""
        if self._unreached is None:
            return error_of(error, self.address, responded=responded)
        # A thread connects once more to find the reason, because that may take seconds.
        return await asyncio.to_thread(error_of, error, self.address, self._unreached, responded=responded)
