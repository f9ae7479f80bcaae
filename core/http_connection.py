"""`HttpConnection`: sends JSON requests to another server over HTTP, within limits of time and size."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import IO, Any

from sharp.core.errors import InputError, SharpError
from sharp.core.failed_connection import explain, http_endpoint

MOST_BYTES = 2**27  # limit for a response; 20 log-probabilities of 8,192 tokens are a tenth of it
PART_BYTES = 2**16
MODELS = "/v1/models"
ATTEMPTS = 3
BUSY = (429, 502, 503)  # the server may respond later
RETRY_SECONDS, MOST_RETRY_SECONDS = 1.0, 10.0


class RefusedError(SharpError):
    """The server refuses a request. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that treats a redirect as an error, so that a token is not sent to another host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """Return None, so that the redirect is not followed."""


class HttpConnection:
    """The server at a URL. A trailing `/v1` is removed, because the native APIs of servers have other paths."""

    def __init__(self, url: str, *, token: str | None, seconds: float) -> None:
        """Prepare requests to `url`. Each may take `seconds`, and sends `token` as a bearer token if given.

        Raises:
            InputError: `url` is no URL of an HTTP server.
        """
        self._endpoint = http_endpoint(url)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._seconds = seconds
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def check_responds(self) -> None:
        """Send a request, so that an address without a server is refused before long work; a refusal of it passes.

        Raises:
            InputError: the response is not JSON.
            SharpError: no server responds.
        """
        with suppress(RefusedError):
            self.request(MODELS)

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of a response. The request is a POST if there is a body, else a GET.

        A request is sent up to 3 times while the server is busy (status 429, 502 or 503) or resets the connection.

        Raises:
            RefusedError: the response has the status of an error, or redirects.
            InputError: the response is not JSON.
            SharpError: no server responds, or not in time; or the response is too large.
        """
        deadline = time.monotonic() + self._seconds
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._parsed(path, self._send(path, body, deadline))
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in BUSY or attempt == ATTEMPTS:
                        raise RefusedError(error.code, self._refusal(path, error)) from error
                    pause = _pause(error.headers.get("Retry-After"))
            except TimeoutError as error:
                raise self._late(path) from error
            except (OSError, HTTPException, ValueError) as error:
                reason = getattr(error, "reason", None) or error
                if isinstance(reason, TimeoutError):
                    raise self._late(path) from error
                if not isinstance(error, ConnectionResetError) or attempt == ATTEMPTS:
                    raise SharpError(explain(self._endpoint, str(reason))) from error
                pause = RETRY_SECONDS
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        raise AssertionError

    def _send(self, path: str, body: Mapping[str, Any] | None, deadline: float) -> bytes:
        """Send a GET request if `body` is None, else a POST request with JSON, and return the response's bytes.

        `deadline` is a time of `time.monotonic()`.

        Raises:
            TimeoutError: the deadline passed before all bytes were there.
            _TooLargeError: the response has more than `MOST_BYTES`.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)  # noqa: S310 - checked by http_endpoint
        left = max(0.001, deadline - time.monotonic())
        with self._opener.open(request, timeout=left) as response:
            parts, size = [], 0
            # read() would wait for all bytes of a slow server, and so miss the deadline.
            while part := response.read1(PART_BYTES):
                parts.append(part)
                size += len(part)
                if size > MOST_BYTES:
                    raise _TooLargeError
                if time.monotonic() > deadline:
                    raise TimeoutError
        return b"".join(parts)

    def _parsed(self, path: str, content: bytes) -> Any:
        """Return the JSON value of a response's bytes.

        Raises:
            InputError: the bytes are no JSON; the message quotes their beginning and the address of `path`.
        """
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{self.url}{path} sends no JSON, but {shortened(content)}; is it the address of a model's server?"
            ) from error

    def _late(self, path: str) -> SharpError:
        """Return the error for a request to `path` that exceeded the timeout."""
        return SharpError(f"{self.url}{path} took more than {self._seconds:g} s; allow more with --timeout")

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> str:
        """Return a sentence with the HTTP status of a refused request and the beginning of the server's message."""
        try:
            said = shortened(error.read(PART_BYTES))
        except (OSError, HTTPException):
            said = "nothing more"
        return f"{self.url}{path} refuses the request with status {error.code}: {said}"


class _TooLargeError(SharpError):
    def __init__(self) -> None:
        super().__init__(f"a response has more than {MOST_BYTES >> 20} MB; ask for fewer tokens")


def shortened(content: bytes) -> str:
    """Return the start of a server's response as one short line."""
    text = " ".join(content[:2000].decode(errors="replace").split())
    return repr(text if len(text) <= 200 else text[:200] + "...")


def _pause(header: str | None) -> float:
    """Return the seconds to wait before a retry, from the header Retry-After, limited to 0 ... `MOST_RETRY_SECONDS`.

    Without a header, or with one that is no number, wait `RETRY_SECONDS`.
    """
    try:
        return min(max(float(header or RETRY_SECONDS), 0.0), MOST_RETRY_SECONDS)
    except ValueError:
        return RETRY_SECONDS
