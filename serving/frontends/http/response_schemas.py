"""JSON schemas of responses for `/openapi.json`: the fields that all responses of a kind have; some have more."""

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"


def record(**fields: Schema) -> Schema:
    """Return the schema of an object with at least these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def listed(entry: Schema) -> Schema:
    """Return the JSON schema of a list whose entries have the schema `entry`."""
    return {"type": "array", "items": entry}


def optional(schema: Schema) -> Schema:
    """Return the JSON schema of a value that has this schema or is null."""
    return {"anyOf": [schema, {"type": "null"}]}


def constant(value: str) -> Schema:
    """Return the JSON schema of a value that is always this text."""
    return {"const": value}


ERROR = record(error=record(message=TEXT, type=TEXT, param=optional(TEXT), code=optional(TEXT)))
MESSAGES_ERROR = record(type=constant("error"), error=record(type=TEXT, message=TEXT))
USAGE = record(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE)
PROMPT_USAGE = record(prompt_tokens=WHOLE, total_tokens=WHOLE)
REASON = {"enum": ["stop", "length", "tool_calls"]}
COMPLETION = record(
    id=TEXT,
    object=constant("text_completion"),
    created=WHOLE,
    model=TEXT,
    choices=listed(record(index=WHOLE, text=TEXT, finish_reason=REASON)),
    usage=USAGE,
)
CHAT = record(
    id=TEXT,
    object=constant("chat.completion"),
    created=WHOLE,
    model=TEXT,
    choices=listed(
        record(index=WHOLE, message=record(role=constant("assistant"), content=optional(TEXT)), finish_reason=REASON)
    ),
    usage=USAGE,
)
RESPONSE = record(
    id=TEXT,
    object=constant("response"),
    created_at=WHOLE,
    status={"enum": ["completed", "incomplete"]},
    model=TEXT,
    output=listed(record(type=TEXT)),
    usage=record(input_tokens=WHOLE, output_tokens=WHOLE, total_tokens=WHOLE),
)
MESSAGE = record(
    id=TEXT,
    type=constant("message"),
    role=constant("assistant"),
    model=TEXT,
    content=listed(record(type={"enum": ["text", "tool_use", "thinking"]})),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    stop_sequence=optional(TEXT),
    usage=record(input_tokens=WHOLE, output_tokens=WHOLE),
)
COUNT = record(input_tokens=WHOLE)
MODELS = record(object=constant("list"), data=listed(record(id=TEXT, object=constant("model"), created=WHOLE)))
TOKENS = record(count=WHOLE, max_model_len=WHOLE, tokens=listed(WHOLE), token_strs=optional(listed(optional(TEXT))))
PROMPT = record(prompt=TEXT)
TOKENIZER = record(model_max_length=WHOLE, vocab_size=WHOLE, eos_token_ids=listed(WHOLE), chat_template=optional(TEXT))
HEALTH = record(status=TEXT)
UNHEALTHY = record(status=constant("unavailable"), reason=TEXT)
LOAD = record(server_load=WHOLE)
VERSION = record(version=TEXT)
EMBEDDINGS = record(
    object=constant("list"),
    model=TEXT,
    data=listed(record(object=constant("embedding"), index=WHOLE, embedding={"anyOf": [listed(NUMBER), TEXT]})),
    usage=PROMPT_USAGE,
)
SCORES = record(
    object=constant("list"),
    model=TEXT,
    data=listed(record(index=WHOLE, object=constant("score"), score=NUMBER)),
    usage=PROMPT_USAGE,
)
RANKING = record(
    model=TEXT, results=listed(record(index=WHOLE, relevance_score=NUMBER)), usage=record(total_tokens=WHOLE)
)
