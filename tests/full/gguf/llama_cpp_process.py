"""llama.cpp in its own process (`make foreign` builds it), which reads jobs from stdin and writes results, as JSON.

A job names a GGUF file. With `tokens`, a sequence of tokens, the result has the logits at every position. With `texts`
the result has the tokens of each text, whose special tokens are recognized, and to which the tokens are added that the
file's flags ask for; `ends` are the tokens that end a generation. With `float32` the dequantized file is written to
that path. A file that llama.cpp does not load gives `{"error": ...}`.
"""

import ctypes
import json
import sys
from typing import Any

import llama_cpp.llama_cpp as library
import numpy as np


def results(job: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a job."""
    if "float32" in job:
        quantization = library.llama_model_quantize_default_params()
        quantization.ftype, quantization.allow_requantize, quantization.nthread = 0, True, 1
        source, target = job["file"].encode(), job["float32"].encode()
        failed = library.llama_model_quantize(source, target, ctypes.byref(quantization))
        return {"error": "llama.cpp does not dequantize the file"} if failed else {}
    settings = library.llama_model_default_params()
    settings.vocab_only = "texts" in job
    settings.use_mmap = False
    model = library.llama_model_load_from_file(job["file"].encode(), settings)
    if not model:
        return {"error": "llama.cpp does not load the file"}
    vocabulary = library.llama_model_get_vocab(model)
    if "texts" in job:
        count = library.llama_vocab_n_tokens(vocabulary)
        return {
            "tokens": [tokenized(vocabulary, text) for text in job["texts"]],
            "ends": [token for token in range(count) if library.llama_vocab_is_eog(vocabulary, token)],
        }
    return {"logits": logits(model, vocabulary, job["tokens"])}


def tokenized(vocabulary: Any, text: str) -> list[int]:
    """Return the tokens of a text."""
    data = text.encode()
    room = len(data) + 8
    tokens = (ctypes.c_int32 * room)()
    count = library.llama_tokenize(vocabulary, data, len(data), tokens, room, True, True)
    assert count >= 0
    return list(tokens[:count])


def logits(model: Any, vocabulary: Any, tokens: list[int]) -> list[list[float]]:
    """Return the logits at every position of a sequence."""
    settings = library.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 128
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = 0  # float32
    settings.flash_attn_type = 0  # off, because flash attention rounds to half precision
    context = library.llama_init_from_model(model, settings)
    assert context and len(tokens) <= 128
    batch = library.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for position, token in enumerate(tokens):
        batch.token[position] = token
        batch.pos[position] = position
        batch.n_seq_id[position] = 1
        batch.seq_id[position][0] = 0
        batch.logits[position] = 1
    assert library.llama_decode(context, batch) == 0
    width = library.llama_vocab_n_tokens(vocabulary)
    return [
        np.ctypeslib.as_array(library.llama_get_logits_ith(context, at), (width,)).tolist() for at in range(len(tokens))
    ]


if __name__ == "__main__":
    silent = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(silent, None)
    library.llama_backend_init()
    jobs = json.load(sys.stdin)
    json.dump([results(job) for job in jobs], sys.stdout)
