"""Sections of the page that `bench/tables.py` writes, one per benchmark: functions from a result to Markdown lines."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]
Cell = Callable[[Row], str]

DTYPES = ("float32", "float16", "bfloat16", "int8")
PEERS = {"torch SDPA": "x torch SDPA", "ONNX Runtime GQA": "x GroupQueryAttention", "softmax": "x softmax"}


def table(columns: dict[str, Cell], rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table; columns that are empty in every row are left out."""
    cells = {heading: [cell(row) for row in rows] for heading, cell in columns.items()}
    filled = {heading: values for heading, values in cells.items() if any(values)}
    lines = [f"| {' | '.join(filled)} |", "|" + " --- |" * len(filled)]
    return [*lines, *(f"| {' | '.join(line)} |" for line in zip(*filled.values(), strict=True))]


def field(name: str, form: str = "", scale: float = 1) -> Cell:
    """Return a cell that shows a field of a row, times `scale`, in the format `form`.

    The cell is empty if the row lacks the field, or if its value is None.
    """

    def cell(row: Row) -> str:
        """Return the row's value as text, scaled and formatted; "" if it is missing."""
        value = row.get(name)
        if value is None:
            return ""
        return format(value * scale if scale != 1 else value, form).replace("%", " %")

    return cell


def values(numbers: Row) -> list[str]:
    """Return the lines of a Markdown table of names and values; a value that is a dict has a line per entry."""
    rows = []
    for name, value in numbers.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in inner:
            shown = f"{number:.5g}" if isinstance(number, float) else str(number)
            rows.append({"name": f"{name} {part}".strip().replace("_", " "), "value": shown})
    return table({"": field("name"), "value": field("value")}, rows)


def attention(result: Row) -> Iterator[str]:
    """Yield Markdown: bandwidth limits, and a table: a row per phase, context, subject, a column per cache dtype."""
    for limit in result["limits"]:
        yield (
            f"{limit['phase']} {limit['context']:,}: memory bandwidth {limit['read'] / 1e9:.1f} GB/s, "
            f"matrix product {limit['peak'] / 1e9:.0f} GFLOP/s.  "
        )
    yield ""
    measured = {(row["phase"], row["context"], row["subject"], row["cache_dtype"]): row for row in result["rows"]}
    rows = []
    for phase, context, subject in dict.fromkeys(key[:3] for key in measured):
        of_dtype = {dtype: measured.get((phase, context, subject, dtype)) for dtype in DTYPES}
        row = {"phase": phase, "context": context, "subject": subject}
        row |= {f"{dtype} ms": found["milliseconds"] for dtype, found in of_dtype.items() if found}
        if base := of_dtype["float32"]:
            row["bandwidth"] = base["bandwidth_ratio"] if phase.startswith("decode") else None
            row["extra"] = base["extra_mb"]
            others = {name: measured.get((phase, context, name, "float32")) for name in PEERS}
            row |= {PEERS[name]: speedup(base, other) for name, other in others.items() if other and name != subject}
        rows.append(row)
    columns = {
        "phase": field("phase"),
        "context": field("context", ","),
        "subject": field("subject"),
        "float32, ms": field("float32 ms", ".3f"),
        "of memory bandwidth": field("bandwidth", ".0%"),
        **{heading: field(heading, ".2f") for heading in PEERS.values()},
        "extra MB": field("extra", ".1f"),
        **{f"{dtype}, ms": field(f"{dtype} ms", ".3f") for dtype in DTYPES[1:]},
    }
    yield from table(columns, rows)


def decode_in_short(result: Row) -> list[str]:
    """Return the README's Markdown table of decode times, a row per norm that users choose among.

    Its columns are milliseconds, the share of memory bandwidth, and ratios to float32 peers.
    """
    measured = {(row["subject"], row["cache_dtype"]): row for row in result["rows"]}
    rows = []
    for name, subject, dtype in (
        ("softmax", "softmax", "float32"),
        ("ssa", "ssa", "float32"),
        ("adaptive_softmax", "adaptive_softmax", "float32"),
        ("entmax 1.5", "entmax", "float32"),
        ("softmax, float16 cache", "softmax", "float16"),
        ("softmax, int8 cache", "softmax", "int8"),
    ):
        found = measured[subject, dtype]
        rows.append(
            {
                "name": name,
                "milliseconds": found["milliseconds"],
                # An entmax row reads few values, so its cache's bytes over the bandwidth are no limit.
                "limit": "skips values" if subject == "entmax" else f"{found['bandwidth_ratio']:.0%}",
                "group": speedup(found, measured["ONNX Runtime GQA", "float32"]),
                "sdpa": speedup(found, measured["torch SDPA", "float32"]),
            }
        )
    columns = {
        "": field("name"),
        "ms": field("milliseconds", ".2f"),
        "of memory bandwidth": field("limit"),
        "times as fast as GroupQueryAttention": field("group", ".1f"),
        "as torch SDPA": field("sdpa", ".1f"),
    }
    lines = table(columns, rows)
    return [lines[0].replace("|  |", "| |"), *lines[1:]]


def speedup(row: Row, other: Row) -> float:
    """Return how many times as fast a row is as another: the median over rounds, in older files the medians' ratio."""
    passes, theirs = row.get("passes", ()), other.get("passes", ())
    if passes and len(passes) == len(theirs):
        return statistics.median(b / a for a, b in zip(passes, theirs, strict=True))
    return float(other["milliseconds"] / row["milliseconds"])


def generation(result: Row) -> Iterator[str]:
    """Yield Markdown: a table, a row per runtime, with ratios of the first runtime to each; then ratios by prompt."""
    yield f"Memory bandwidth {result['read_bytes_per_second'] / 1e9:.1f} GB/s. Ratios are the first runtime's to each."
    if any(row["limit"] > 1 for row in result["rows"]):
        yield "More than 100 % of it: the streaming read itself was slowed, see [method](notes/method.md)."
    yield ""
    prompts = list(result["rows"][0].get("decode_of_each", ()))
    columns = {
        "runtime": field("runtime"),
        "decode, tokens per second": field("decode_tokens_per_second", ".1f"),
        "ratio": field("decode_ratio", ".2f"),
        "first token, ms": field("first_token_ms", ".0f"),
        "ratio of first token": field("first_token_ratio", ".2f"),
        "weights, MB": field("weight_bytes", ".0f", 1e-6),
        "of memory bandwidth": field("limit", ".0%"),
    }
    yield from table(columns, result["rows"])
    if len(prompts) > 1:
        yield from ("", "Ratio of decode speed, by prompt:", "")
        rows = [{"runtime": row["runtime"], **row["decode_ratio_of_each"]} for row in result["rows"]]
        columns = {"runtime": field("runtime"), **{prompt: field(prompt, ".2f") for prompt in prompts}}
        yield from table(columns, rows)


def normalizers(result: Row) -> Iterator[str]:
    """Yield a Markdown table with a row per norm, and for each context tokens per second and the ratio to softmax."""
    contexts = list(dict.fromkeys(row["context"] for row in result["rows"]))
    rows: dict[str, Row] = {}
    for row in result["rows"]:
        mine = rows.setdefault(row["norm"], {"norm": row["norm"]})
        mine |= {f"speed {row['context']}": row["tokens_per_second"], f"ratio {row['context']}": row["over_softmax"]}
    columns = {"norm": field("norm")}
    for context in contexts:
        columns[f"{context:,}: tokens per second"] = field(f"speed {context}", ".1f")
        columns[f"{context:,}: x softmax"] = field(f"ratio {context}", ".2f")
    yield from table(columns, list(rows.values()))


def precision(result: Row) -> Iterator[str]:
    """Yield a Markdown table with a row per model folder: perplexity, its change, time of a decode step, and size."""
    columns = {
        "weights": field("weights"),
        "cache": field("cache"),
        "tokens": field("tokens", ","),
        "perplexity": field("perplexity", ".2f"),
        "change": field("perplexity_change", "+.1%"),
        "decode step, ms": field("decode_ms", ".1f"),
        "fastest": field("decode_ms_least", ".1f"),
        "MB": field("mb"),
    }
    yield from table(columns, result["rows"])


def long_context(result: Row) -> Iterator[str]:
    """Yield a Markdown table per task: accuracy with a row per model and a column per document length."""
    tasks = list(dict.fromkeys(task for row in result["rows"] for task in row["tasks"]))
    for task in tasks:
        rows: list[Row] = []
        for model in result["models"]:
            line: Row = {"model": model}
            for row in result["rows"]:
                if row["model"] == model and task in row["tasks"]:
                    found = row["tasks"][task]["among"] or row["tasks"][task]["text"]
                    error = "" if found["standard_error"] is None else f" ± {found['standard_error']:.0%}"
                    line[str(row["length"])] = f"{found['value']:.0%}{error} ({row['documents']})"
            rows.append(line)
        yield f"{task}: right among the choices ± standard error (documents)"
        yield ""
        lengths = {f"{length:,}": field(str(length)) for length in result["lengths"]}
        yield from table({"model": field("model"), **lengths}, rows)
        yield ""


def long_prompt(result: Row) -> Iterator[str]:
    """Yield a Markdown table with a row per prompt length: seconds, and memory beyond that of the loaded model."""
    columns = {
        "prompt tokens": field("tokens", ","),
        "seconds": field("seconds", ".1f"),
        "MB beyond the loaded model": field("extra_mb"),
    }
    yield from table(columns, result["rows"])


def engine_step(result: Row) -> Iterator[str]:
    """Yield a Markdown table, a row per case, of the engine's and the step's time; then the prefix cache's gain."""
    rows = [{**row, "share": row["engine_ms"] / row["step_ms"]} for row in result["rows"]]
    columns = {
        "case": field("case"),
        "engine, ms": field("engine_ms", ".2f"),
        "step, ms": field("step_ms", ".1f"),
        "share": field("share", ".1%"),
    }
    yield from table(columns, rows)
    prefix = result["prefix"]
    yield ""
    yield (
        f"First token of a prompt of {prefix['tokens']:,} tokens: {prefix['first_token_s']} s; of one that shares all "
        f"but its last token: {prefix['shared_first_token_s']} s."
    )
    if "times_one_stream" in result:
        yield f"Throughput beside one stream: {result['times_one_stream']} times."


def host_share(result: Row) -> Iterator[str]:
    """Yield a Markdown table of step times with asynchronous and synchronous scheduling, a row per emulated device."""
    columns = {
        "the device gives": field("gives"),
        "sampling": field("case"),
        "device, ms": field("device_ms", "g"),
        "streams": field("streams"),
        "a wait, ms": field("wait_ms", ".2f"),
        "async: step, ms": field("async_step_ms", ".2f"),
        "host": field("async_host_share", ".1%"),
        "processor, ms": field("async_host_ms", ".2f"),
        "sync: step, ms": field("sync_step_ms", ".2f"),
        " host": field("sync_host_share", ".1%"),
        " processor, ms": field("sync_host_ms", ".2f"),
    }
    yield from table(columns, result["rows"])


def embeddings(result: Row) -> Iterator[str]:
    """Yield a Markdown table of texts per second, with all texts in one call, and with each text in its own."""
    columns = {
        "texts": field("texts"),
        "subject": field("subject"),
        "texts / s": field("texts_per_second", ".1f"),
        "x sentence-transformers": field("ratio", ".2f"),
    }
    yield from table(columns, result["rows"])


def plan(result: Row) -> Iterator[str]:
    """Yield a table of predicted and measured generated tokens a second, a line per number of streams."""
    columns = {
        "streams": field("streams"),
        "predicted tokens/s": field("predicted"),
        "measured tokens/s": field("measured"),
        "off": field("off", "+.1%"),
        "at most 25 %": field("holds"),
    }
    yield from table(columns, result["rows"])


def ray_serve(result: Row) -> Iterator[str]:
    """Yield a Markdown table of times to the first token and of throughput, through Ray Serve and without it."""
    names = ("first_token_ms", "ray_adds_ms", "tokens_per_second", "two_servers_over_one", "two_over_one")
    yield from values({name: result[name] for name in names})


def export_memory(result: Row) -> Iterator[str]:
    """Yield a Markdown table of one export: size of the weights, memory target, peak memory and time."""
    rows = [
        {"name": name, "value": f"{result[key] / 1e9:.2f} GB"}
        for key, name in (
            ("weights_float32", "weights in float32"),
            ("target_bytes", "target, at most"),
            ("peak_rss", "peak resident size"),
            ("peak_pss", "peak proportional size"),
        )
    ]
    rows.append({"name": "time", "value": f"{result['seconds']:.0f} s"})
    yield from table({"": field("name"), "value": field("value")}, rows)


def adapt(result: Row) -> Iterator[str]:
    """Yield a Markdown table of perplexity, support and retrieval: teacher, norm without training, and student."""
    rows = [
        {
            "model": name,
            "held_out": found["held_out"]["perplexity"],
            "unlike": found["unlike"]["perplexity"],
            "change": found["unlike"]["perplexity"] / result["teacher_figures"]["unlike"]["perplexity"] - 1,
            "support": found["mean_support"],
            "retrieved": found.get("retrieved"),
        }
        for name, found in (
            ("teacher", result["teacher_figures"]),
            (f"{result['norm']}, not trained", result["raw"]),
            (f"student, {result['recipe']['tokens']} tokens", result["student"]),
        )
    ]
    columns = {
        "model": field("model"),
        "perplexity, held out": field("held_out", ".2f"),
        f"perplexity, {result['unlike']}": field("unlike", ".2f"),
        "beside the teacher": field("change", "+.1%"),
        "keys with weight": field("support", ".1%"),
        "retrieved": field("retrieved", ".0%"),
    }
    yield from table(columns, rows)
    if result.get("head_parameters"):
        yield ""
        yield (
            "Median head: "
            + ", ".join(f"{name} {value:.2f}" for name, value in result["head_parameters"].items())
            + "."
        )


def adapt_decode(result: Row) -> Iterator[str]:
    """Yield a Markdown table of milliseconds per token of the exported teacher and student, a row per context."""
    yield f"Weights in {result.get('weights', 'float32')}."
    if result["greedy_tokens_equal"] is not None:
        yield f"{result['greedy_tokens_equal']} greedy tokens of the student equal PyTorch's."
    yield ""
    columns = {
        "tokens before": field("context"),
        "teacher, median ms a token": lambda row: f"{row['median_ms']['teacher']:.1f}",
        "student": lambda row: f"{row['median_ms']['student']:.1f}",
        "times as fast": field("times_as_fast", ".2f"),
    }
    yield from table(columns, result["rows"])


def adapt_walk(result: Row) -> Iterator[str]:
    """Yield a Markdown table of perplexities: the norm from the first step, or reached gradually from softmax."""
    yield f"{result['norm']}, {result['steps']} steps of {result['model']}."
    yield ""
    columns = {
        "path": field("path"),
        "perplexity, held out": field("held_out", ".2f"),
        "perplexity, another text": field("unlike", ".2f"),
        "seconds": field("seconds", ".0f"),
    }
    yield from table(columns, result["rows"])


def adapt_temperature(result: Row) -> Iterator[str]:
    """Yield a Markdown table with a row per polynomial, and a column of perplexity per range of positions."""
    yield f"{result['model']}, not trained; logits divided by the factor of the usual row, or the model's own."
    yield ""
    rows = [
        {"polynomial": row["polynomial"], "logits": "divided" if row["divided"] else "own", **_by_position(row)}
        for row in result["rows"]
    ]
    yield from table({name: field(name) for name in rows[0]}, rows)


def _by_position(row: Row) -> dict[str, str]:
    """Return perplexities of a row as text, by the range of positions, as "0 to 1023"."""
    return {f"{part['from']} to {part['to'] - 1}": f"{part['perplexity']:.2f}" for part in row["by_position"]}


def adapt_memory(result: Row) -> Iterator[str]:
    """Yield a Markdown table with a row per attention function: the peak MiB of a forward and backward pass."""
    columns = {"attention": field("subject"), "tokens": field("tokens"), "MiB": field("mib", ".1f")}
    yield from table(columns, result["rows"])


def certified(result: Row) -> Iterator[str]:
    """Yield a Markdown table, a row per context and normalizer: shares of keys and bytes that must be read in full."""
    columns = {
        "tokens": field("context"),
        "normalizer": field("normalizer"),
        "keys read in full": field("keys_read_in_full", ".1%"),
        "strips of 16": field("strips_read_in_full", ".1%"),
        "bytes of a float32 cache, by keys": field("bytes_float32", ".0%"),
        "by strips": field("bytes_float32_strips", ".0%"),
        "of a float16 cache, by keys": field("bytes_float16", ".0%"),
    }
    yield from table(columns, result["rows"])


def routing(result: Row) -> Iterator[str]:
    """Yield a Markdown table, a row per load and policy: cache hits, times to the first token, busiest server."""
    columns = {
        "load": field("load", ".1f"),
        "policy": field("policy"),
        "prompt tokens from a cache": field("hit_rate", ".0%"),
        "first token, median s": field("median", ".3f"),
        "p99 s": field("p99", ".3f"),
        "busiest server over the mean": field("busiest", ".1f"),
    }
    yield from table(columns, result["rows"])


def gpu_instructions(result: Row) -> Iterator[str]:
    """Yield Markdown tables of instruction counts and cycles, per kernel and pass over keys, and per sampler loop."""
    rows = []
    for kernel in result["rows"]:
        for number, counted in enumerate(kernel["passes"]):
            named = {"phase": "prefill", "dtype": "bfloat16", "cache_dtype": "bfloat16", **kernel}  # older files
            types = " / ".join(dict.fromkeys((named["dtype"], named["cache_dtype"])))
            named |= {"types": types, "keys": kernel["tile"][1], "ratio": None if number else kernel["ratio"]}
            rows.append(named | counted)
    columns = {
        "phase": field("phase"),
        "normalizer": field("normalizer"),
        "query / cache": field("types"),
        "keys of a tile": field("keys"),
        "pass": field("name"),
        "visits": field("visits"),
        "instructions": field("instructions"),
        "spills": field("spills"),
        "barriers": field("barriers"),
        "matrix products": field("products"),
        "cycles": field("cycles", ","),
        "of special functions": field("special", ","),
        "of matrix products": field("matrix", ","),
        "bound": field("bound", ","),
        "of memory": field("memory", ","),
        "estimated x softmax's time": field("ratio", ".2f"),
    }
    yield from table(columns, rows)
    if of_sampling := result.get("sampling_per_token"):
        yield ""
        loops = [{"loop": number, **counted} for number, counted in enumerate(of_sampling)]
        columns = {
            "loop of the sampler": field("loop"),
            "instructions a token": field("instructions", ".1f"),
            "special functions": field("special", ".2f"),
        }
        yield from table(columns, loops)


def gpu(result: Row) -> Iterator[str]:
    """Yield Markdown tables, one per section of `bench.gpu.run`; for correctness only the wrong rows and errors."""
    for section, part in result["sections"].items():
        rows = part["rows"]
        state = "" if part.get("complete") else ", incomplete"
        yield f"**{section}**: {part.get('device', '')}, {str(part.get('date', ''))[:10]}{state}."
        judged = [row for row in rows if "holds" in row]
        if judged:
            rows = [row for row in rows if not row.get("holds")]
            yield f"{len(judged)} results compared, {sum(not row['holds'] for row in judged)} wrong."
        yield ""
        names = dict.fromkeys(name for row in rows for name in row if name != "where")
        if rows:
            yield from (*table({name.replace("_", " "): shown(name) for name in names}, rows), "")


def shown(name: str) -> Cell:
    """Return a cell that shows a field as it is, with numbers to four digits."""

    def cell(row: Row) -> str:
        """Return the row's value as the text of a Markdown cell."""
        value = row.get(name, "")
        return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")

    return cell


def single_row(result: Row) -> Iterator[str]:
    """Yield a Markdown table of the names and numbers in the entry `row` of a result that has only one row."""
    yield from values(result["row"])
