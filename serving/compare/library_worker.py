"""Reads a model with llama.cpp or transformers, as the program of `sharp.serving.compare.library_reader`.

The program imports nothing of Sharp, because a second opinion must not share code with the first. It runs in its own
process, because serving does not import torch, and llama.cpp aborts the process at files that it cannot read. Messages
are lines of JSON on stdin and stdout.
"""

import ctypes
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS = 256  # number of tokens whose logits are in memory at a time
FLOAT32 = 0  # GGML_TYPE_F32 and LLAMA_FTYPE_ALL_F32
LARGEST_COPY = 16 << 30  # bytes of the weights in float32 up to which llama.cpp copies them to float32
# The last words of llama.cpp's description of a model; all other types are quantized.
PRECISIONS = {" all F32": "float32", " F16": "16 bits", " BF16": "16 bits"}
STOP_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

Row = list[list[float]]  # pairs of token id and log-probability
Logits = NDArray[np.float32]


class GgufModel:
    """A GGUF file in llama.cpp, through the package llama-cpp-python.

    llama.cpp rounds activations to the precision of the weights, by 0.08 nats for SmolLM2-135M in Q4_1. That would hide
    small errors, so llama.cpp first copies other weights to float32, if they are at most 16 GiB and the disk has room.
    """

    def __init__(self, path: str, context: int, trust_remote_code: bool) -> None:  # noqa: ARG002 - for the other class
        import llama_cpp

        self._library = llama_cpp
        self._messages: list[str] = []
        # kept referenced, because llama.cpp calls it until the end
        self._log = llama_cpp.llama_log_callback(self._keep)
        llama_cpp.llama_log_set(self._log, None)
        self._model = self._load(path, context)
        self.precision = self._precision()
        if self.precision != "float32":
            with tempfile.TemporaryDirectory(prefix="sharp-compare-") as folder:
                copy = Path(folder, "float32.gguf")
                if self._copy(path, copy):
                    self._model.close()
                    self._model = self._load(str(copy), context)
                    self.precision = self._precision()
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocabulary)
        self._batch = llama_cpp.llama_batch_init(ROWS, 0, 1)
        metadata = self._model.metadata
        declared = [metadata.get(key) for key in STOP_KEYS] if STOP_KEYS[0] in metadata else [self._model.token_eos()]
        self.declared = sorted({int(token) for token in declared if token is not None and int(token) >= 0})
        self.allowed = [token for token in range(self.vocab_size) if self._ends(token)]
        architecture = metadata.get("general.architecture", "model")
        self.name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), {architecture}"

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text, with the model's BOS token. Special tokens in the text are recognized."""
        return list(self._model.tokenize(text.encode(), add_bos=True, special=True))

    def start(self) -> Callable[[Sequence[int]], Iterable[Logits]]:
        """Return a function that appends tokens to a new sequence, and yields the logits of all appended tokens.

        The function yields float32 [tokens, vocab] for up to 256 tokens at a time, and raises ValueError if llama.cpp
        fails. The new sequence replaces all earlier ones, whose functions must not be called any more.
        """
        library, batch, length = self._library, self._batch, 0
        library.llama_memory_clear(library.llama_get_memory(self._model.ctx), True)

        def append(tokens: Sequence[int]) -> Iterable[Logits]:
            """Append tokens to the sequence, and yield the logits after each of them."""
            nonlocal length
            for begin in range(0, len(tokens), ROWS):
                part = tokens[begin : begin + ROWS]
                batch.n_tokens = len(part)
                for row, token in enumerate(part):
                    batch.token[row], batch.pos[row] = token, length + row
                    batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, True
                if (code := library.llama_decode(self._model.ctx, batch)) != 0:
                    raise ValueError(f"llama_decode fails with code {code}")
                length += len(part)
                rows = (library.llama_get_logits_ith(self._model.ctx, row) for row in range(len(part)))
                yield np.stack([np.ctypeslib.as_array(row, (self.vocab_size,)) for row in rows])

        return append

    def _load(self, path: str, context: int) -> Any:
        """Load the GGUF file at `path` by llama.cpp on the CPU, with room for `context` tokens."""
        try:
            return self._library.Llama(
                path,
                n_ctx=context,
                n_batch=ROWS,
                n_ubatch=ROWS,
                n_gpu_layers=0,
                type_k=FLOAT32,
                type_v=FLOAT32,
                # The package's defaults would replace the file's YaRN; below 0, llama.cpp takes the file's.
                yarn_attn_factor=-1.0,
                yarn_beta_fast=-1.0,
                yarn_beta_slow=-1.0,
                verbose=True,  # False would turn off the log, which tells the reason of a failure
            )
        except ValueError as error:
            raise ValueError("; ".join(self._messages[:2]) or str(error)) from error

    def _precision(self) -> str:
        description = ctypes.create_string_buffer(256)  # has a type even if the file does not say it
        self._library.llama_model_desc(self._model.model, description, len(description))
        text = description.value.decode(errors="replace")
        return next((kind for end, kind in PRECISIONS.items() if text.endswith(end)), "8 bits")

    def _copy(self, path: str, copy: Path) -> bool:
        """Let llama.cpp write the model with float32 weights to `copy`, and return whether it did."""
        size = 4 * int(self._library.llama_model_n_params(self._model.model))
        if size > min(LARGEST_COPY, shutil.disk_usage(copy.parent).free // 2):
            return False
        parameters = self._library.llama_model_quantize_default_params()
        parameters.ftype, parameters.allow_requantize = FLOAT32, True
        return bool(
            self._library.llama_model_quantize(os.fsencode(path), os.fsencode(copy), ctypes.byref(parameters)) == 0
        )

    def _ends(self, token: int) -> bool:
        """Whether the token id ends a generation."""
        return bool(self._library.llama_vocab_is_eog(self._vocabulary, token))

    def _keep(self, level: int, text: bytes, _data: Any) -> None:
        """Keep the first ten error messages of llama.cpp; the function is its log callback."""
        if level == 4 and len(self._messages) < 10:  # GGML_LOG_LEVEL_ERROR
            self._messages.append(text.decode(errors="replace").strip())


class HuggingFaceModel:
    """A Hugging Face folder in transformers' own classes, or in the folder's classes with `trust_remote_code`."""

    def __init__(self, path: str, context: int, trust_remote_code: bool) -> None:  # noqa: ARG002 - for the other class
        import torch
        import transformers

        self._torch = torch
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, **options)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", use_safetensors=True, **options
        ).eval()
        stop = self._model.generation_config.eos_token_id
        self.declared = sorted({stop} if isinstance(stop, int) else set(stop or ()))
        own = self._tokenizer.eos_token_id  # ends a generation in vLLM, but not in transformers' generate()
        self.allowed = sorted({*self.declared, *([] if own is None else [own])})
        self._stored = _stored_tokenizer(Path(path))
        self.precision = "float32"
        self.name = f"transformers {transformers.__version__}, {type(self._model).__name__}"

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text by the folder's tokenizer file, plus special tokens that transformers adds.

        The file is used directly, because transformers 5 rebuilds the tokenizer of many classes with other splits.
        """
        whole = list(self._tokenizer(text)["input_ids"])
        if self._stored is None:
            return whole
        plain = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        first = next(start for start in range(len(whole) + 1) if whole[start : start + len(plain)] == plain)
        found: list[int] = self._stored.encode(text, add_special_tokens=False).ids
        return [*whole[:first], *found, *whole[first + len(plain) :]]

    def start(self) -> Callable[[Sequence[int]], Iterable[Logits]]:
        """Return a function that appends tokens to a new sequence, and yields the logits of all appended tokens.

        The function yields float32 [tokens, vocab] for up to 256 tokens at a time.
        """
        torch, before = self._torch, list[int]()
        cache: Any = None

        def append(tokens: Sequence[int]) -> Iterable[Logits]:
            """Append tokens to the sequence, and return the logits after each of them."""
            nonlocal cache
            # without a cache, which not every class has, all tokens are read again
            read = list(tokens) if cache is not None else [*before, *tokens]
            before.extend(tokens)
            with torch.no_grad():
                computed = self._model(torch.tensor([read]), past_key_values=cache, use_cache=True)
            cache = getattr(computed, "past_key_values", None)
            for rows in computed.logits[0, -len(tokens) :].split(ROWS):
                yield rows.float().numpy()

        return append


def _stored_tokenizer(path: Path) -> Any | None:
    """Return the tokenizer of a folder's `tokenizer.json`, or None if there is no such file."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    stored = Tokenizer.from_file(str(file))
    stored.no_truncation()
    stored.no_padding()
    return stored


def main() -> None:
    """Reply to messages until stdin ends."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # code and files that a folder references elsewhere are not fetched
    replies = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - hides what libraries print from stdout and stderr
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    model: Any = None
    for line in sys.stdin.buffer:
        message = json.loads(line)
        try:
            if model is None:
                kind = GgufModel if Path(message["path"]).is_file() else HuggingFaceModel
                model = kind(**message)
                names = ("name", "precision", "declared", "allowed")
                reply: dict[str, Any] = {name: getattr(model, name) for name in names}
            elif "text" in message:
                reply = {"tokens": [int(token) for token in model.tokens(message["text"])]}
            else:
                reply = read(model, **message)
        except ModuleNotFoundError as error:
            reply = {"missing": error.name}
        except MemoryError:
            reply = {"error": "there is not enough memory"}
        except Exception as error:  # the libraries may raise anything for a user's file
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def read(model: Any, token_ids: list[int], new_tokens: int, top: int) -> dict[str, Any]:
    """Return the log-probabilities of a prompt's tokens after the first and of a greedy continuation.

    `prompt` and `generated` have a row of `likeliest` for each token, with the `top` likeliest tokens. `tokens` are the
    generated tokens: up to `new_tokens`, or up to the first one that may end a completion.
    """
    append = model.start()
    prompt: list[Row] = []
    last: Logits | None = None
    for rows in append(token_ids):
        following = token_ids[len(prompt) + 1 :]
        for row, token in zip(rows, following, strict=False):
            prompt.append(likeliest(row, token, top))
        last = rows[-1]
    generated: list[int] = []
    distributions: list[Row] = []
    while last is not None and len(generated) < new_tokens:
        token = int(last.argmax())
        generated.append(token)
        distributions.append(likeliest(last, token, top))
        if token in model.allowed or len(generated) == new_tokens:
            break
        (rows,) = append([token])
        last = rows[-1]
    return {"prompt": prompt, "tokens": generated, "generated": distributions}


def likeliest(logits: Logits, token: int, top: int) -> Row:
    """Return pairs of token id and log-probability of the `top` most likely tokens, in any order, and of `token`."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    values = shifted - np.log(np.exp(shifted).sum())
    best = np.argpartition(-values, min(top, len(values)) - 1)[:top].tolist()
    return [[index, float(values[index])] for index in dict.fromkeys((*best, token))]


if __name__ == "__main__":
    main()
