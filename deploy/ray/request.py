"""The facts about a request by which it is routed: its model and the beginning of its prompt."""

import hashlib
from typing import Any

from sharp.kserve import grpc_service_pb2
from sharp.serving.api.errors import FieldError
from sharp.serving.frontends.kserve.tensors import TEXT_INPUT, read_inputs
from sharp.v1 import inference_pb2

MODEL_FIELDS = ("model", "model_name", "name")  # sharp.v1's, and two of KServe's
# The length of the beginning by which a prompt is routed. A longer one shares more of a cache, but less often.
PREFIX_TOKENS = 64
PREFIX_CHARACTERS = 256


def model_of(request: Any) -> str | None:
    """Return the model that a request names, empty for the first model; None for a request that is about no model."""
    known = [field for field in MODEL_FIELDS if field in request.DESCRIPTOR.fields_by_name]
    return str(getattr(request, known[0])) if known else None


def prefix_key(request: Any) -> str:
    """Return a key that is equal for requests with the same model, cache salt and beginning of the prompt.

    The key is 16 hexadecimal digits. The beginning of a prompt is its first 64 token ids or 256 characters. The key is
    empty for messages other than GenerateRequest and ModelInferRequest, and for inputs that cannot be read.
    """
    beginning: Any
    if isinstance(request, inference_pb2.GenerateRequest):
        ids = request.HasField("token_ids")
        beginning = request.token_ids.ids[:PREFIX_TOKENS] if ids else request.text[:PREFIX_CHARACTERS]
        salt = request.cache_salt
    elif isinstance(request, grpc_service_pb2.ModelInferRequest):
        try:
            beginning = str(read_inputs(request).get(TEXT_INPUT, ""))[:PREFIX_CHARACTERS]
        except FieldError:  # the replica reports this error
            return ""
        salt = ""
    else:
        return ""
    known = repr((model_of(request), salt, beginning))
    return hashlib.blake2b(known.encode(errors="replace"), digest_size=8).hexdigest()
