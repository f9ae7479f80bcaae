"""The log: its form and limits, and the request log with one line for each request, written when it has ended."""

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from sharp.serving.api.errors import SharpError
from sharp.serving.observability.log_writer import LogWriter
from sharp.serving.observability.request_record import RequestOrigin, RequestRecord
from sharp.serving.text.tokenizer import Tokenizer

logger = logging.getLogger("sharp.requests")

MOST_ERROR_CHARACTERS = 1000  # limit, because an error may repeat the client's input
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
REPEAT_SECONDS = 10.0
MOST_REPEATS = 10  # maximum number of warnings with the same text in REPEAT_SECONDS
MOST_TEXTS = 1000


class LogLimit(logging.Filter):
    """A filter that passes `MOST_REPEATS` warnings or errors of one text in `REPEAT_SECONDS`, and drops the others.

    The first message after that time tells how many were dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. Records below WARNING always pass."""
        if record.levelno < logging.WARNING:
            return True
        key, now = (record.name, str(record.msg)), time.monotonic()
        began, count = self._seen.get(key, (now, 0))
        if now - began >= REPEAT_SECONDS:
            if count > MOST_REPEATS:
                record.msg = f"{record.msg} (and {count - MOST_REPEATS} more like it in the {now - began:.0f} s before)"
            began, count = now, 0
        if len(self._seen) >= MOST_TEXTS:
            self._seen.clear()
        self._seen[key] = began, count + 1
        return count < MOST_REPEATS


def set_up_logging(log_format: str) -> logging.Handler:
    """Write the log to stderr from level INFO on, as lines of JSON if `log_format` is "json", else of text.

    The function replaces all handlers of the root logger. It returns the new handler, which must be flushed at the end.
    """
    handler = LogWriter(sys.stderr)
    if log_format == "json":
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=names))
    else:
        handler.setFormatter(logging.Formatter(TEXT_FORMAT))
    handler.addFilter(LogLimit())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    return handler


def log_request(record: RequestRecord, model: str | None, trace_id: str | None) -> None:
    """Log a request that has ended. In JSON, every field has its name."""
    fields = _fields(record, model, trace_id)
    line = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
    logger.info("request %s", line, extra=fields)


@contextmanager
def refusals_logged(origin: RequestOrigin, model: str | None) -> Iterator[None]:
    """Log a request that is refused inside the `with` block, before a `GenerationService` has it.

    `model` is None if the model is not known yet.
    """
    try:
        yield
    except SharpError as error:
        log_request(RequestRecord(origin, error=str(error)), model, None)
        raise


def log_prompt(record: RequestRecord, tokenizer: Tokenizer | None) -> None:
    """Log the prompt of a request. This must be switched on, because prompts may be confidential."""
    if record.request is not None:
        read = [list(ids) if tokenizer is None else tokenizer.decode(ids) for ids in record.request.prompts]
        prompt: Any = read[0] if len(read) == 1 else read
        fields = {"request_id": record.request.request_id, "prompt": prompt}
        logger.info("prompt of %s: %r", record.request.request_id, prompt, extra=fields)


def _fields(record: RequestRecord, model: str | None, trace_id: str | None) -> dict[str, Any]:
    """Return the fields of a request's log line; a field is absent if its value is not known."""
    fields: dict[str, Any] = {"protocol": record.origin.protocol, "outcome": record.outcome}
    if record.origin.host:
        fields["client"] = record.origin.host
    if model is not None:
        fields["model"] = model
    if record.request is not None:
        fields = {"request_id": record.request.request_id, **fields}
        fields["prompt_tokens"] = record.request.prompt_tokens
        fields["cached_tokens"] = record.cached_tokens
        fields["generated_tokens"] = record.generated_tokens
    if record.timing is not None:
        fields["queue_seconds"] = _seconds(record.timing.queue)
        fields["first_token_seconds"] = _seconds(record.timing.time_to_first_token)
    if record.ended is not None:
        fields["total_seconds"] = _seconds(record.ended - record.arrived)
    if trace_id is not None:
        fields["trace_id"] = trace_id
    if record.error is not None:
        fields["error"] = record.error[:MOST_ERROR_CHARACTERS]
    return fields


def _plain(value: Any) -> str:
    """Return a value as a single word, so that a client's text in ids and messages cannot look like other log lines."""
    text = str(value)
    return text if re.fullmatch(r"[\w.,:/-]+", text, re.ASCII) else json.dumps(text)


def _seconds(value: float | None) -> float | None:
    """Return seconds rounded to microseconds; None stays None."""
    return None if value is None else round(value, 6)
