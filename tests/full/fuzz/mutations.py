"""Damage of a file as by a bad disk, a broken transfer or an attacker."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

NUMBER = re.compile(rb"-?\d+(\.\d+)?")
NUMBERS = (
    b"0",
    b"-1",
    b"1",
    b"2147483648",
    b"18446744073709551616",
    b"1e999",
    b"1e30",
    b"NaN",
    b"null",
    b'"7"',
    b"[]",
    b"{}",
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 3, 0.5, 10**6, 2**31, 2**63, 10**30, 1e300, float("nan"), float("inf")),
    *("", "a", "../x", "/etc/passwd", "x" * 10_000, "\0", "\ud800", [], [0] * 1000, [[[]]], {}, {"a": {"b": 1}}),
)
LITTLE = (0, 1, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1)
MOST_BYTES = 1 << 20


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Return `content` with one kind of damage, sometimes with up to four."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change = rng.choice(MUTATIONS)
        content = (change_json if b"{" in content[:9] and rng.random() < 0.7 else change)(content, rng)
    return content[:MOST_BYTES]


def flip_bits(content: bytes, rng: random.Random) -> bytes:
    """Flip up to 16 bits, most of them near the start, where headers are."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 16) if changed else 0):
        end = min(len(changed), 512) if rng.random() < 0.7 else len(changed)
        changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(content: bytes, rng: random.Random) -> bytes:
    """Cut the content off at some byte."""
    return content[: rng.randint(0, len(content))]


def repeat(content: bytes, rng: random.Random) -> bytes:
    """Repeat a part, once or up to 50 times."""
    start = rng.randint(0, len(content))
    end = min(len(content), start + rng.randint(0, 200))
    return content[:end] + content[start:end] * rng.choice((1, 50)) + content[end:]


def leave_out(content: bytes, rng: random.Random) -> bytes:
    """Leave a part out."""
    start = rng.randint(0, len(content))
    return content[:start] + content[start + rng.randint(0, 64) :]


def change_number(content: bytes, rng: random.Random) -> bytes:
    """Replace a number in a text by an unusual number."""
    places = list(NUMBER.finditer(content[: 1 << 16]))
    if not places:
        return content
    place = rng.choice(places)
    return content[: place.start()] + rng.choice(NUMBERS) + content[place.end() :]


def change_size(content: bytes, rng: random.Random) -> bytes:
    """Replace four or eight bytes by a size that no file has."""
    width = rng.choice((4, 8))
    start = rng.randrange(max(1, min(len(content), 4096) - width))
    value = rng.choice(LITTLE) & ((1 << 8 * width) - 1)
    return content[:start] + value.to_bytes(width, "little") + content[start + width :]


def change_json(content: bytes, rng: random.Random) -> bytes:
    """Replace one value anywhere in valid JSON, also in the header of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    framed = not content.startswith(b"{") and length < len(content)
    start, end = (8, 8 + length) if framed else (0, len(content))
    try:
        document = json.loads(content[start:end])
    except ValueError:
        return content
    place: Any = {"": document}
    key: Any = ""
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.9:
        place = place[key]
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    if rng.random() < 0.2 and key != "":
        del place[key]
    else:
        place[key] = rng.choice(VALUES)
    changed = json.dumps(document).encode()
    return (len(changed).to_bytes(8, "little") if framed else b"") + changed + content[end:]


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip_bits,
    truncate,
    repeat,
    leave_out,
    change_number,
    change_size,
)
