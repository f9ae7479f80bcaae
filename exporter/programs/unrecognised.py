"""Messages on attention that is written out and matches no norm of the op: what differs, and what to write instead.

The weights of such a graph are compared with every norm once more, to name the nearest norm and the difference.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from sharp.core.errors import InputError
from sharp.exporter.programs.attention_call import AttentionCall
from sharp.exporter.programs.logits import MASKED, given_at
from sharp.exporter.programs.nodes import name_of
from sharp.exporter.programs.norm_fits import Trial
from sharp.exporter.programs.norms import LENGTHS, Sizes, Trials, candidates, closeness, cuts, trials_of
from sharp.exporter.programs.program import Program
from sharp.exporter.programs.sizes import Roles
from sharp.exporter.programs.written_out import PRODUCTS, readings

RESEMBLES = 0.2  # largest difference of a weight at which a norm is named as the nearest
CLOSE = 1e-4  # largest difference of a weight at which a norm matches
INFINITE = "z.masked_fill(~mask, float('-inf'))"


def unrecognised_attention(program: Program, roles: Roles, found: list[AttentionCall]) -> str:
    """Return a sentence about the first product with weights that is not among `found`; empty if there is none."""
    known = {call.written_out.mixed for call in found if call.written_out is not None}
    sizes = [given_at(program, roles, 2, length, padded=False) for length in LENGTHS]
    for node in program.graph.nodes:
        if name_of(node) in PRODUCTS and node not in known:
            try:
                call = next((reading for reading in readings(program, node) if reading.result is node), None)
                reason = "" if call is None else _reason(program, call, sizes)
            except (InputError, RuntimeError, IndexError):  # the node is no product of weights with values
                continue
            if reason:
                return f"attention at {call.where if call else ''} has weights that no norm of Sharp's makes; {reason}"
    return ""


def _reason(program: Program, call: AttentionCall, sizes: Sizes) -> str:
    """Return why no norm fits and what to write instead; empty if these are no weights of attention."""
    parts = call.written_out
    assert parts is not None
    at_cuts = (
        trials_of(program, replace(call, written_out=replace(parts, logits=logits)), sizes)
        for logits in cuts(program, call)
    )
    found = [trials for trials in at_cuts if trials is not None and not (trials.first.found < 0).any()]
    nearest = min((_nearest(trials) for trials in found), default=None)
    for reason in (_hidden_keys_count, _finite_mask, _not_divided):
        if sentence := next((sentence for trials in found if (sentence := reason(trials))), ""):
            return sentence
    of_your_own = (
        "call sharp.models.normalized_attention, or register the function as a normalizer of your own "
        "(sharp check-normalizer)"
    )
    if nearest is not None and nearest[0] <= RESEMBLES:
        error, far_error, name = nearest
        if error <= CLOSE < far_error:
            return (
                f"for small logits they are {name}'s, and they differ by {far_error:.1g} for logits up to 30: leave "
                f"out what clips the logits, or {of_your_own}"
            )
        return f"the nearest is {name}, from which they differ by up to {error:.1g}: write that norm, {of_your_own}"
    masked = any(not trials.first.visible.all() for trials in found)
    return of_your_own if masked else ""


def _nearest(trials: Trials) -> tuple[float, float, str]:
    """Return the distances of the nearest norm, for logits near 0 and far from 0, and its name."""
    return min(
        (
            max(closeness(candidate, trial) for trial in trials.near),
            closeness(candidate, trials.far),
            candidate.own.normalizer,
        )
        for scaled in (False, True)
        for candidate in candidates(trials, scaled=scaled)
        if candidate is not None
    )


def _changed(trials: Trials, change: Callable[[Trial], Trial]) -> Trials:
    """Return trials in which each trial is replaced by `change(trial)`."""
    return Trials(tuple(map(change, trials.near)), change(trials.far))


def _hidden_keys_count(trials: Trials) -> str:
    """Return a sentence if weights of visible keys change with the logits of hidden keys; otherwise ""."""
    trial = trials.first
    changed = trial.weighting(torch.where(trial.visible, trial.z, trial.z + 1))
    if not (changed - trial.found).abs()[trial.visible].max() > CLOSE:
        return ""
    return (
        f"keys that its mask hides still count in the sums of the others: write the mask as {INFINITE} before the norm"
    )


def _finite_mask(trials: Trials) -> str:
    """Return a sentence if the weights match a norm once the mask is -inf; otherwise ""."""
    base = trials.first.weighting.base
    masked = base[(base <= MASKED) & base.isfinite()]
    if not masked.numel():
        return ""

    def hidden(trial: Trial) -> Trial:
        """Return the trial with finite masks as -inf."""
        graph = trial.weighting
        graph = replace(graph, base=graph.base.masked_fill(graph.base <= MASKED, -torch.inf))
        return replace(trial, weighting=graph, found=graph(trial.z))

    error, far_error, name = _nearest(_changed(trials, hidden))
    if not max(error, far_error) <= CLOSE:
        return ""
    return (
        f"they are {name}'s but for a mask of {float(masked[0]):.3g}, which leaves hidden keys a weight: write the "
        f"mask as {INFINITE} before the norm"
    )


def _not_divided(trials: Trials) -> str:
    """Return a sentence if the weights match a norm once they add up to 1; otherwise ""."""

    def divided(trial: Trial) -> Trial:
        """Return the trial with its weights divided by their row's sum."""
        found = torch.where(trial.visible, trial.found, 0.0)
        total = found.sum(-1, keepdim=True)
        return replace(trial, found=found / total.masked_fill(total == 0, 1.0))

    error, far_error, name = _nearest(_changed(trials, divided))
    if not max(error, far_error) <= CLOSE:
        return ""
    return (
        f"but for a factor of every row they are {name}'s: divide them by their sum, w / w.sum(-1, keepdim=True), with "
        "nothing added to it, before they are multiplied with the values"
    )
