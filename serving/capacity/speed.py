"""The speed of a device in reading and computing: measured if `bench/results` has it, else from its data sheet."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import InputError
from sharp.serving.capacity.devices import Device

# Assumed shares of the data sheet's numbers that a good runtime reaches, not measured on any of these devices.
BANDWIDTH_SHARE = 0.6
COMPUTE_SHARE = 0.4
FILES = "generation*.json"
# The rows of bench/generation.py, by the quantization of their weights.
ROWS = {None: "sharp float32", "int8": "sharp int8", "int4": "sharp int4", "int4-128": "sharp int4-128"}


@dataclass(frozen=True)
class Speed:
    """Bytes and operations a second, and the origin of these numbers."""

    bytes_per_second: float
    operations_per_second: float
    measured: bool
    origin: str


def speed_of(name: str, device: Device, dtype: str, quantization: str | None, results: Path | None) -> Speed:
    """Return the speed of `device` for a model that computes in `dtype`, with weights of that quantization.

    If a file in the folder `results` was measured on the device's machine, the speed is from there. Otherwise it is
    estimated from the data sheet, and `origin` says so with the device's `name`.

    Raises:
        InputError: the file of results cannot be used.
    """
    if results is not None and device.machine is not None:
        for file in sorted(results.glob(FILES)):
            if found := _measured(file, device, quantization):
                return found
    return Speed(
        device.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE,
        device.operations_per_second(dtype) * COMPUTE_SHARE,
        measured=False,
        origin=f"an estimate: nothing was measured on {name}; {BANDWIDTH_SHARE:.0%} of the bandwidth and "
        f"{COMPUTE_SHARE:.0%} of the operations in {dtype} of its data sheet ({device.source}, {device.date})",
    )


def _measured(file: Path, device: Device, quantization: str | None) -> Speed | None:
    """Return the speed that bench/generation.py measured on this machine; None without rows of it and of float32.

    Raises:
        InputError: the file is not a result of bench/generation.py.
    """
    try:
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        same_machine = results["machine"] == device.machine
        rows = {row["runtime"]: row for row in results["rows"]}
        row, plain = rows.get(ROWS[quantization]), rows.get(ROWS[None])
        if not same_machine or row is None or plain is None:
            return None
        weights = plain["weight_bytes"] / 4  # float32
        return Speed(
            row["decode_tokens_per_second"] * row["weight_bytes"],
            2 * weights * results["prompt_tokens"] / (row["first_token_ms"] / 1000),
            measured=True,
            origin=f"measured on {results['machine']}, {results['date']} ({file}, {row['runtime']})",
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is not what bench/generation.py writes: {error!r}") from error
