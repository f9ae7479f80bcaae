"""Sections of the page about what a server survives: budgets, faults, fuzzing, a soak."""

from collections.abc import Iterator

from bench.sections import Row, field, table


def budgets(result: Row) -> Iterator[str]:
    """Yield a Markdown table of the requests that cost the server the most: longest gap, memory, CPU time.

    The limits are a gap of 250 ms for another stream, and 200 MB.
    """
    rows = result["rows"]
    worst = {
        row["name"]: row
        for key in ("gap", "memory", "cpu_seconds")
        for row in sorted(rows, key=lambda row: -row[key])[:4]
    }
    yield f"`{result['command']}`, {len(rows)} kinds of requests. The most expensive (limits: a gap of 250 ms, 200 MB):"
    yield ""
    columns = {
        "": field("name"),
        "status": field("status"),
        "kB sent": lambda row: f"{row['sent'] / 1e3:.0f}",
        "CPU s": field("cpu_seconds", ".2f"),
        "MB": lambda row: f"{row['memory'] / 1e6:.0f}",
        "longest gap, ms": lambda row: f"{1e3 * row['gap']:.0f}",
        "without it": lambda row: f"{1e3 * row['gap_before']:.0f}",
    }
    yield from table(columns, list(worst.values()))


def faults(result: Row) -> Iterator[str]:
    """Yield Markdown: the outcome of requests under overload, and a table of injected faults by kind."""
    counts = f"{result['faults']:,} faults of {result['kinds']} kinds, {len(result['broken'])} broke an invariant"
    yield f"`{result['command']}`: {counts}."
    yield ""
    if (load := result.get("overload")) is not None:
        sent = f"{load['times']} times its capacity for {load['seconds']:g} s: {load['sent']:,} requests"
        became = f"{load['served']:,} served, {load['refused']:,} refused, {load['lost']} lost"
        waited = (
            f"99 % waited {load['first_token_p99']:.2f} s for a first token (bound {load['first_token_bound']:.2f} s)"
        )
        yield f"{sent}, {became}; {waited}; as fast as before {load['recovery_seconds']:.1f} s after it."
        yield ""
    rows = [{"name": name, "value": value} for name, value in result["reached"].items()]
    yield from table({"": field("name"), "faults": field("value")}, rows)


def key_screen_calls(result: Row) -> Iterator[str]:
    """Yield Markdown: the number of wrong batches, and a table with the number of randomized calls of each kind."""
    yield f"`{result['command']}`: {result['calls']:,} calls, {len(result['wrong'])} batches with a wrong one."
    yield ""
    yield from table({"kind": field("kind"), "calls": field("calls", ",")}, result["rows"])


def fuzz(result: Row) -> Iterator[str]:
    """Yield a Markdown table with a row per fuzz target: executions, seconds, covered edges and open findings."""
    minutes = sum(row["seconds"] for row in result["rows"]) / 60
    counts = f"{result['executions']:,} executions in {minutes:.0f} minutes, {result['findings']} findings open"
    yield f"`{result['command']}`: {counts}."
    yield ""
    columns = {
        "target": field("name"),
        "by": field("by"),
        "executions": field("executions", ","),
        "seconds": lambda row: f"{row['seconds']:.0f}" if row["seconds"] else "",
        "edges": lambda row: f"{row['edges']:,}" if row["edges"] else "",
        "findings": lambda row: str(len(row["findings"])),
    }
    yield from table(columns, result["rows"])


def soak(result: Row) -> Iterator[str]:
    """Yield a Markdown table of the resources that a server held in the first and in the last third of a long run."""
    counts = f"{sum(result['requests'].values()):,} requests of {len(result['requests'])} kinds"
    drift = f"honest ones {result['latency_drift']:.2f} times as long in the end"
    yield f"`{result['command']}`: {counts}, {len(result['wrong'])} wrong, {drift}."
    yield ""
    rows = [{"name": name, "first": result["first"][name], "last": result["last"][name]} for name in result["first"]]
    yield from table(
        {"median of": field("name"), "first third": field("first", ",.0f"), "last": field("last", ",.0f")}, rows
    )
