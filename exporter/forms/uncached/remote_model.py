"""A model folder on a running server, scored through KServe's protocol over HTTP."""

import json
import urllib.error
import urllib.request
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.core.manifest import Manifest
from sharp.exporter.forms.uncached.model import COLLECT_STATS
from sharp.exporter.forms.uncached.scoring import ScoredConfig

HEADER_LENGTH = "Inference-Header-Content-Length"  # the number of bytes of JSON, which the bytes of the tensors follow
SECONDS = 600.0


class RemoteModel:
    """A model of `sharp-serve` as a callable from the model's input tensors to its output.

    Raises:
        InputError: `base` is not the address of a server of this model, or the server refuses. A call raises it, too.
    """

    def __init__(self, base: str, manifest: Manifest) -> None:
        """Connect to the server at `base`, its address of HTTP, such as http://127.0.0.1:8000.

        Raises:
            InputError: the address is no URL, no KServe server of this model responds there, or its model has other
                inputs.
        """
        if not base.startswith(("http://", "https://")):
            raise InputError(f"--server is {base!r}; it must be an address such as http://127.0.0.1:8000")
        self._url = f"{base.rstrip('/')}/v2/models/{quote(manifest.name)}"
        self._inputs = [port.name for port in manifest.inputs if port.name != COLLECT_STATS]
        try:
            there = [tensor["name"] for tensor in json.loads(self._ask("", None, {})[0])["inputs"]]
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{self._url} is no model of a KServe server; give the server's address of HTTP"
            ) from error
        if there != self._inputs:
            raise InputError(f"{self._url} has inputs {', '.join(there)}; serve {manifest.name} there")
        self.config = ScoredConfig(manifest.norm.name, manifest.vocab_size, q_heads=0)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the model's output for a batch, float32; the inputs are in the model's order and sent as float32.

        Raises:
            InputError: the server refuses, or does not respond for ten minutes.
        """
        arrays = [tensor.numpy().astype("<f4") for tensor in inputs]
        described = [
            {
                "name": name,
                "datatype": "FP32",
                "shape": array.shape,
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in zip(self._inputs, arrays, strict=True)
        ]
        header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
        body = b"".join((header, *(array.tobytes() for array in arrays)))
        content, length = self._ask("/infer", body, {HEADER_LENGTH: str(len(header))})
        (output,) = json.loads(content[:length])["outputs"]
        return torch.from_numpy(np.frombuffer(content[length:], "<f4").reshape(output["shape"]).copy())

    def _ask(self, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[bytes, int]:
        """Send a request; return the body of the response, and the number of its first bytes that are JSON.

        The method is POST if there is a `body`, else GET.

        Raises:
            InputError: the server refuses the request or does not respond.
        """
        try:
            request = urllib.request.Request(self._url + path, body, headers)  # noqa: S310 - checked above
            with urllib.request.urlopen(request, timeout=SECONDS) as response:  # noqa: S310
                content: bytes = response.read()
                return content, int(response.headers.get(HEADER_LENGTH) or len(content))
        except urllib.error.HTTPError as error:
            raise InputError(f"{self._url} says: {error.read(1000).decode(errors='replace')}") from error
        except (OSError, ValueError) as error:
            raise InputError(f"{self._url} does not respond ({error}); give the server's address of HTTP") from error
