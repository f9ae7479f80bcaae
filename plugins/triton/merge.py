"""The last kernels of decoding and of split prompts, which merge the parts of a row into its output and statistics."""

import triton
import triton.language as tl

from sharp.plugins.triton.loads import row_numbers, sink_of
from sharp.plugins.triton.normalizers import divided, row_statistics, sink_weight
from sharp.plugins.triton.plan import splits_of
from sharp.plugins.triton.rows import is_prompts_token, scratch_row, split_row, sums_of_launch, unit_of
from sharp.plugins.triton.solve import merged_sums

PROMPT_INTEGERS = ("sequences", "q_heads", "most_tokens", "parts", "stage", "parameters", "columns")
INTEGERS = ("sequences", "q_heads", "max_blocks", "most_tokens", "parameters", "columns", "window", "causal")


@triton.jit
def weight_of_sink(head_params, solution, head, exists, peak, parameters, OPTIONS: tl.constexpr):
    """Return the weight of one row's sink relative to those of the row's keys; `peak` is the peak of all parts.

    If the normalizer solves for the weight, `solution` + 2 points to it. It is 0 under pointwise normalizers.
    """
    if OPTIONS.solves:
        of_sink = tl.load(solution + 2)
    elif OPTIONS.pointwise:
        of_sink = peak * 0.0
    else:
        b, n = 0.0, 0.0
        if OPTIONS.normalizer == "ssa":
            b = tl.load(head_params + head * parameters)
            n = tl.load(head_params + head * parameters + 1)
        of_sink = sink_weight(sink_of(head_params, head, exists, parameters, OPTIONS), peak, b, n, OPTIONS)
    return of_sink


@triton.jit
def merge_row(
    head_params,
    sums,
    outputs,
    solution,
    collect_stats,
    output,
    stats,
    head,
    own,
    first,
    stride,
    active,
    parameters,
    columns,
    OPTIONS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
):
    """Merge the `active` parts of one row into its output and statistics at row `own`; `head` is its query head.

    The parts lie in scratch memory, `sums` [.., 8] and `outputs` [.., value_dim], from row `first` on, `stride` rows
    apart. `solution` points to three numbers of the row, the second its inverse temperature and the third its sink's
    weight, if the normalizer solves for them. The sink joins the parts here, once. A row without parts becomes 0.
    `columns` is the width of `stats`, which is written only if statistics are requested.
    """
    part = tl.arange(0, MOST_PARTS)
    used = part < active
    place = sums + (first + part * stride) * 8
    peaks = tl.load(place, mask=used, other=-float("inf"))
    totals = tl.load(place + 1, mask=used, other=0.0)
    weighted_logs = tl.load(place + 2, mask=used, other=0.0)
    visible = tl.sum(tl.load(place + 5, mask=used, other=0.0), 0)
    peak = tl.max(peaks, 0)
    total, weighted_log = merged_sums(peaks, peak, totals, weighted_logs)
    of_sink = weight_of_sink(head_params, solution, head, active > 0, peak, parameters, OPTIONS)

    shift = tl.where(peak == -float("inf"), 0.0, peak)
    opposed = 0.0
    if OPTIONS.normalizer == "softpick":
        opposed = tl.sum(tl.exp2(peaks - shift) * tl.load(place + 7, mask=used, other=0.0), 0)
    channels = tl.arange(0, OPTIONS.value_width)
    inside = (channels < OPTIONS.value_dim)[None, :]
    merged = tl.full([OPTIONS.value_width], 0, tl.float32)
    for start in tl.range(0, active, 16):
        some = start + tl.arange(0, 16)
        at = first + some * stride
        factor = tl.exp2(tl.load(sums + at * 8, mask=some < active, other=-float("inf")) - shift)
        shares = outputs + at[:, None] * OPTIONS.value_dim + channels[None, :]
        merged += tl.sum(factor[:, None] * tl.load(shares, mask=(some < active)[:, None] & inside, other=0.0), 0)
    none = tl.full([1], 0, tl.float32)
    result = divided(merged[None, :], total + opposed + of_sink + none, visible + none, OPTIONS)
    at = own * OPTIONS.value_dim + channels[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=inside)

    if OPTIONS.statistics:  # noqa: SIM102 - the first condition is for the compiler, the second for run time
        if tl.load(collect_stats).to(tl.int32) != 0:
            highest = tl.max(tl.load(place + 3, mask=used, other=-float("inf")), 0)
            lowest = tl.min(tl.load(place + 4, mask=used, other=float("inf")), 0)
            support = tl.sum(tl.load(place + 6, mask=used, other=0.0), 0)
            beta = 1.0
            if OPTIONS.normalizer == "adaptive_softmax":
                beta = tl.load(solution + 1)
            entropy, keys, beta, spread, mass = row_statistics(
                total, opposed, weighted_log, highest, lowest, visible, support, beta, of_sink, OPTIONS
            )
            of_row = stats + own * columns
            tl.store(of_row, entropy)
            tl.store(of_row + 1, keys)
            tl.store(of_row + 2, beta)
            tl.store(of_row + 3, spread)
            tl.store(of_row + 4, mass, mask=columns > 4)


@triton.jit(do_not_specialize=PROMPT_INTEGERS)
def merge_prompts(
    query_start,
    head_params,
    sums,
    outputs,
    collect_stats,
    output,
    stats,
    sequences,
    q_heads,
    most_tokens,
    parts,
    stage,
    parameters,
    columns,
    MOST_PARTS: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Merge the parts of a row of a prompt. Grid: tokens, query heads.

    `sums` and `outputs` have the rows of the output. The sums come from `prefill.py`, or from launch `stage` of
    `split_prefill.py`.

    Contiguous rows are numbered by sequence and head first, so a program may have another token's row. That is no
    problem, because contiguous sequences are either all prompts or none.
    """
    if not is_prompts_token(query_start, sequences, most_tokens, tl.program_id(0)):
        return
    row = tl.program_id(0).to(tl.int64) * q_heads + tl.program_id(1)
    head = tl.program_id(1)
    if OPTIONS.contiguous:
        head = (row // (tl.num_programs(0) // sequences) % q_heads).to(tl.int32)
    sums = sums_of_launch(sums, stage, tl.num_programs(0) * q_heads, parts)
    merge_row(
        head_params,
        sums,
        outputs,
        sums + row * parts * 8 + 5,
        collect_stats,
        output,
        stats,
        head,
        row,
        row * parts,
        1,
        parts,
        parameters,
        columns,
        OPTIONS,
        MOST_PARTS,
    )


@triton.jit(do_not_specialize=INTEGERS)
def merge(
    block_table,
    query_start,
    context_lens,
    head_params,
    plan,
    sums,
    outputs,
    solution,
    collect_stats,
    output,
    stats,
    sequences,
    q_heads,
    max_blocks,
    most_tokens,
    parameters,
    columns,
    window,
    causal,
    MOST_SPLITS: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Merge the splits of the rows of decoding. Grid: units * their most tokens, query heads.

    `sums` [items, tokens of a unit, q_heads, 8], `outputs` and `solution` [rows, 3] are what the other kernels of
    decoding stored. `output` and, if statistics are requested, `stats` are written.
    """
    index = tl.program_id(0) // tl.maximum(most_tokens, 1)
    unit = unit_of(query_start, sequences, most_tokens, index)
    token = tl.program_id(0) % tl.maximum(most_tokens, 1)
    _, first, count, _, _ = unit
    if token >= count:
        return
    item, active, _, _ = splits_of(plan, index, unit, context_lens, block_table, max_blocks, window, causal, OPTIONS)
    row = scratch_row(unit, token, most_tokens, q_heads, tl.program_id(1))
    own = row_numbers(first, count, token, tl.program_id(1), q_heads, OPTIONS)
    merge_row(
        head_params,
        sums,
        outputs,
        solution + row * 3,
        collect_stats,
        output,
        stats,
        tl.program_id(1),
        own,
        split_row(item, token, most_tokens, q_heads, tl.program_id(1)),
        split_row(1, 0, most_tokens, q_heads, 0),
        active,
        parameters,
        columns,
        OPTIONS,
        MOST_SPLITS,
    )
