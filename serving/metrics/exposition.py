"""`/metrics` as text: `prometheus_client` writes what few series have, this writes arrays with a value per head.

30 layers of 9 heads are 7,000 lines. As samples of `prometheus_client` they took 91 ms to write (OpenMetrics: 155 ms)
where this takes 4 ms, best of ten on the same busy machine; all of it with the interpreter held, so tokens came late.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

OPENMETRICS = "application/openmetrics-text"
LAST_LINE = b"# EOF\n"


@dataclass(frozen=True)
class Family:
    """A metric and its lines, each without its end; a counter's name is that without _total."""

    name: str
    kind: str
    unit: str
    description: str
    lines: Iterable[str]


def labelled(**labels: str) -> str:
    """Labels as they stand between the braces of a line."""
    escaped = {
        name: value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for name, value in labels.items()
    }
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())


def line(name: str, labels: str, value: float) -> str:
    """A line of a series."""
    return f"{name}{{{labels}}} {value!r}"


def encode(registry: CollectorRegistry, families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """Both in the format that the `Accept` header asks for, and its content type."""
    encoder, content_type = choose_encoder(accept)
    openmetrics = content_type.startswith(OPENMETRICS)
    text = "".join(f"{one}\n" for family in families for one in _family(family, openmetrics)).encode()
    written: bytes = encoder(registry)
    if openmetrics:
        return written.removesuffix(LAST_LINE) + text + LAST_LINE, content_type
    return written + text, content_type


def _family(family: Family, openmetrics: bool) -> Iterator[str]:
    name = f"{family.name}_total" if family.kind == "counter" and not openmetrics else family.name
    yield f"# HELP {name} {family.description}"
    yield f"# TYPE {name} {family.kind}"
    if openmetrics and family.unit:
        yield f"# UNIT {name} {family.unit}"
    yield from family.lines
