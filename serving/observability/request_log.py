"""The log of requests: one line for each, when it has ended."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from sharp.serving.api.errors import SharpError
from sharp.serving.observability.log_limit import LogLimit
from sharp.serving.observability.log_writer import LogWriter
from sharp.serving.observability.request_record import RequestOrigin, RequestRecord
from sharp.serving.text.tokenizer import Tokenizer

logger = logging.getLogger("sharp.requests")

MOST_ERROR_CHARACTERS = 1000  # it may repeat what a client sent
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logging(log_format: str) -> logging.Handler:
    """Write the log to stderr, as lines of text or of one JSON object each; flush what is returned at the end."""
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
    """Write the line of a request that has ended; JSON has each of its fields by name."""
    fields = _fields(record, model, trace_id)
    line = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
    logger.info("request %s", line, extra=fields)


@contextmanager
def refusals_logged(origin: RequestOrigin, model: str | None) -> Iterator[None]:
    """Write the line of a request that is refused inside, before a `GenerationService` has it.

    `model` is None where it is not known yet.
    """
    try:
        yield
    except SharpError as error:
        log_request(RequestRecord(origin, error=str(error)), model, None)
        raise


def log_prompt(record: RequestRecord, tokenizer: Tokenizer | None) -> None:
    """Write the prompt of a request, for those who ask for it: it may hold what nobody else should read."""
    if record.request is not None:
        read = [list(ids) if tokenizer is None else tokenizer.decode(ids) for ids in record.request.prompts]
        prompt: Any = read[0] if len(read) == 1 else read
        fields = {"request_id": record.request.request_id, "prompt": prompt}
        logger.info("prompt of %s: %r", record.request.request_id, prompt, extra=fields)


def _fields(record: RequestRecord, model: str | None, trace_id: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"protocol": record.origin.protocol, "outcome": record.outcome}
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
    """A value as one word: ids and messages may hold what clients wrote, and must not look like lines of their own."""
    text = str(value)
    return text if re.fullmatch(r"[\w.,:/-]+", text, re.ASCII) else json.dumps(text)


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
