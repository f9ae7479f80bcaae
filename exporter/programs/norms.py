"""The normalizer that makes weights of logits in a graph, found by evaluating the graph and comparing it with the op's.

Between a product of queries with keys and the weights, some node holds the logits. It is the first node from which the
weights follow by a normalizer of the op, mask included. `masks` examines what is between the product and that node.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from sharp.core.errors import InputError, SharpError
from sharp.exporter.programs import norm_fits
from sharp.exporter.programs.attention_call import AttentionCall, OwnNorm
from sharp.exporter.programs.grid import Grid
from sharp.exporter.programs.logits import MASKED, logits_of
from sharp.exporter.programs.nodes import ancestors
from sharp.exporter.programs.norm_fits import Trial
from sharp.exporter.programs.positions import after
from sharp.exporter.programs.program import Program
from sharp.exporter.programs.weighting import Weighting, weighting
from sharp.plugins.op import custom_normalizer as custom
from sharp.plugins.op.attributes import NORMALIZERS, WITHOUT_SINK
from sharp.plugins.op.torch_normalizers import DEFAULT_TEMPERATURE, attention_weights

# Largest error of a weight, which is at most about 1. Graphs are evaluated in float64, so what remains is their own
# approximation: an epsilon in a sum or a logarithm, or bisection that ends early.
TOLERANCE = 2e-5
TOLERANCE_OF_FAR_LOGITS = 1e-4
SPREAD, FAR_SPREAD, FARTHEST = (
    1.5,
    10.0,
    30.0,
)  # deviations and limit of random logits; two logits of a row differ by up to 60
NEAREST = 0.05  # softpick gives a lone logit nearer to 0 a weight of the size of its authors' epsilon
PLAIN = ("softmax", "sigmoid", "relu", "relu2", "softpick")
LENGTHS = (7, 12, 40)  # lengths of rows that norms are evaluated at; the last has entropies up to 3.7 nats
MOST_NODES = 20_000  # most nodes between a product and its weights; an unrolled bisection has some hundreds
MOST_KEYS = 4096  # keys that a finite mask may have to hide
MOST_LEAKED = 1e-4  # largest share of a row's weights that all hidden keys together may have

Sizes = Sequence[Mapping[Node, Tensor]]


def find_norm(program: Program, call: AttentionCall, sizes: Sizes) -> AttentionCall | None:
    """Return `call` with the logits and the normalizer that make its weights; None if no normalizer does.

    `sizes` are inputs of several lengths. Normalizers are tried as they are first, then with a factor of the logits
    that is part of the normalizer and no node of its own, as in powers of 2.

    Raises:
        InputError: the normalizer is entmax whose alpha differs by head, which the op does not support; or SSA with a
            finite mask that leaves hidden keys a weight.
    """
    parts = call.written_out
    assert parts is not None
    for scaled in (False, True):
        found: AttentionCall | None = None
        for logits in cuts(program, call):
            trials = trials_of(program, replace(call, written_out=replace(parts, logits=logits)), sizes)
            norm = None if trials is None else _norm(trials, scaled=scaled)
            if trials is None or norm is None:
                continue
            first = trials.first.weighting
            if norm.own.normalizer != "ssa":
                if found is None:
                    return norm.applied(first.call)
                break  # SSA is itself computed as a softmax of logarithms
            # A factor of SSA's logits can as well be a factor of b. The last node that fits gives the module's own b,
            # unless the factor up to that node differs by head, as b does.
            if found is None or _alike_in_heads(first):
                found = norm.applied(first.call)
                _check_hidden(found, trials.first)
        if found is not None:
            return found
    return None


def cuts(program: Program, call: AttentionCall) -> Iterator[Grid]:
    """Yield the layouts of the nodes that all paths from the product to the weights go through, in order.

    A node may have several layouts. Nothing is yielded if more than `MOST_NODES` nodes are between.
    """
    parts = call.written_out
    assert parts is not None
    product, weights = parts.product.node, parts.weights.node
    before = ancestors(weights, through_sizes=False, until=frozenset({product}))
    if call.result is not parts.mixed:
        before |= ancestors(call.result, through_sizes=False, until=frozenset({product, call.value.node}))
    between = sorted(before & after(program, product), key=program.order.__getitem__)
    if len(between) > MOST_NODES:
        return
    reach = -1  # index of the last user of the nodes before
    for node in between:
        alone = program.order[node] >= reach
        if alone and node not in (weights, parts.mixed, call.result) and isinstance(node.meta.get("val"), Tensor):
            yield from [parts.product] if node is product else parts.product.at(node)
        reach = max(reach, *(program.order[user] for user in node.users if user in before), -1)


@dataclass(frozen=True)
class Candidate:
    """A normalizer, and the factor that it multiplies logits with, a number or a tensor [heads]."""

    own: OwnNorm
    factor: float | Tensor = 1.0

    def applied(self, call: AttentionCall) -> AttentionCall:
        """Return the call, whose attention is written out, with this normalizer and this factor of the logits."""
        assert call.written_out is not None
        return replace(call, norm=self.own, written_out=replace(call.written_out, factor=self.factor))

    def weights(self, z: Tensor, visible: Tensor) -> Tensor:
        """Return the candidate's weights of logits `z`; tensors are [batch, heads, queries, keys], `visible` bool."""
        own = self.own
        factor = self.factor[:, None, None] if isinstance(self.factor, Tensor) else self.factor
        return attention_weights(
            own.normalizer,
            z * factor,
            visible,
            head_params=own.head_params,
            alpha=own.alpha or 1.5,
            temperature_coefficients=own.temperature_coefficients or DEFAULT_TEMPERATURE,
            entropy_threshold=own.entropy_threshold,
        )


@dataclass(frozen=True)
class Trials:
    """Random logits and the graph's weights of them: near 0 at every length, far from 0 at the longest."""

    near: tuple[Trial, ...]
    far: Trial

    @property
    def first(self) -> Trial:
        """The trial of the shortest length."""
        return self.near[0]

    def confirm(self, candidate: Candidate) -> bool:
        """Return whether the candidate's weights equal the graph's in all trials, up to the tolerances."""
        near = all(closeness(candidate, trial) <= TOLERANCE for trial in self.near)
        return near and closeness(candidate, self.far) <= TOLERANCE_OF_FAR_LOGITS


def trials_of(program: Program, call: AttentionCall, sizes: Sizes) -> Trials | None:
    """Return the graph's weights of random logits of `call`.

    `sizes` are inputs of several lengths, shortest first; those at which the graph cannot be evaluated are left out.
    None if there are no others, if weights are not finite, or if a logit follows from another query and key.
    """
    near: list[Trial] = []
    for index, given in enumerate(sizes):
        try:
            graph = weighting(program, call, given)
            if not near and not _in_place(graph):
                return None
            near.append(_trial(graph, SPREAD, seed=3 + index))
        except (RuntimeError, IndexError):  # operators refuse these values, or a table ends before this length
            break
        if not near[-1].found[graph.visible.any(-1)].isfinite().all():
            return None
    if not near:
        return None
    far = _trial(near[-1].weighting, FAR_SPREAD, seed=11)
    return Trials(tuple(near), far) if far.found[far.visible.any(-1)].isfinite().all() else None


def _in_place(graph: Weighting) -> bool:
    """Whether a logit depends on the product of the same query and key, and not on that of the transposed place."""
    counted = graph.base > MASKED
    ones = torch.ones(graph.shape, dtype=torch.float64)
    for part in (ones.tril(-1), ones.triu(1)):
        places = counted & (part > 0)
        changed = logits_of(graph.program, graph.call, graph.given, part) != graph.base
        if (changed & places).any():
            return True
    return not (counted & (ones.tril(-1) + ones.triu(1) > 0)).any()


def _trial(graph: Weighting, spread: float, seed: int) -> Trial:
    """Return random logits of deviation `spread`, none near 0, and the weights that the graph makes of them."""
    z = torch.randn(graph.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    z = torch.where(z < 0, z.clamp(-FARTHEST, -NEAREST), z.clamp(NEAREST, FARTHEST))
    return Trial(graph, z, graph(z))


def closeness(candidate: Candidate, trial: Trial) -> float:
    """Return the largest difference between the candidate's and the graph's weights, over max(1, largest weight)."""
    expected = candidate.weights(trial.z, trial.visible)
    rows = trial.visible.any(-1, keepdim=True)  # rows without visible keys are ignored
    difference = torch.where(rows, expected - trial.found, 0.0)
    return float(difference.abs().max()) / max(1.0, float(expected.max()))


def _norm(trials: Trials, *, scaled: bool) -> Candidate | None:
    """Return the first candidate (`scaled`: with a factor) that agrees with the graph in all trials, or None."""
    found = next(
        (
            candidate
            for candidate in candidates(trials, scaled=scaled)
            if candidate is not None and trials.confirm(candidate)
        ),
        None,
    )
    if found is None and not scaled:
        _check_one_alpha(trials.first)
    return found


def candidates(trials: Trials, *, scaled: bool) -> Iterator[Candidate | None]:
    """Return an iterator over the normalizers that may make these weights, with the parameters that fit best.

    None stands for a normalizer that cannot make the weights. With `scaled`, the iterator has only normalizers that
    multiply their logits with a factor; otherwise it has only the others.
    """
    return _scaled(trials.first) if scaled else _unscaled(trials)


def _unscaled(trials: Trials) -> Iterator[Candidate | None]:
    """Yield the candidates that do not multiply their logits with a factor; None for a normalizer that cannot fit."""
    first = trials.first
    for normalizer in PLAIN:
        yield Candidate(OwnNorm(normalizer))
    for normalizer in WITHOUT_SINK:
        yield _candidate(norm_fits.with_length(first.weighting, normalizer))
    if _sums(first) == 1:
        yield _candidate(norm_fits.entmax(trials.near[-1]))
        yield _candidate(norm_fits.ssa(first.weighting))
        yield from map(_candidate, norm_fits.adaptive(trials.near))
    for name in custom.names():
        if _loads(name):
            yield Candidate(OwnNorm(name))


def _scaled(trial: Trial) -> Iterator[Candidate | None]:
    """Yield the candidates that multiply their logits with a factor; None for a normalizer that cannot fit."""
    if _sums(trial) == 1:
        yield _with_factor(OwnNorm("softmax"), norm_fits.scaled_softmax(trial))
    if (found := norm_fits.scaled_sigmoid(trial)) is not None:
        factor, bias = found
        biased = OwnNorm("sigmoid", head_params=torch.stack([bias, torch.zeros_like(bias)], -1).float())
        yield _with_factor(OwnNorm("sigmoid") if bias.abs().max() < 1e-6 else biased, factor)
    for normalizer, power in (("relu", 1), ("relu2", 2)):
        yield _with_factor(OwnNorm(normalizer), norm_fits.scaled_power(trial, power))


def _candidate(own: OwnNorm | None) -> Candidate | None:
    """Return the candidate with this normalizer and no factor; None for None."""
    return None if own is None else Candidate(own)


def _with_factor(own: OwnNorm, factor: Tensor | None) -> Candidate | None:
    """Return the candidate with factors [heads] of the logits (a number if all are equal); None for None."""
    if factor is None:
        return None
    same = bool((factor - factor[0]).abs().max() <= 1e-6 * factor[0])
    return Candidate(own, float(factor[0]) if same else factor)


def _sums(trial: Trial) -> float | None:
    """Return 1 if the graph's weights of every row that sees a key add up to 1 within 0.001; otherwise None."""
    sums = trial.found.sum(-1)[trial.visible.any(-1)]
    return 1 if ((sums - 1).abs() <= 1e-3).all() else None


def _loads(name: str) -> bool:
    """Whether a user's normalizer can be evaluated. A broken normalizer matters only to an export that names it."""
    try:
        return name not in NORMALIZERS and custom.get(name) is not None
    except SharpError:
        return False


def _check_one_alpha(trial: Trial) -> None:
    """Raise InputError if each head's weights are entmax with an alpha of its own; otherwise do nothing."""
    heads = range(trial.z.shape[1])
    of_heads = [norm_fits.entmax(replace(trial, z=trial.z[:, [head]], found=trial.found[:, [head]])) for head in heads]
    alphas = [norm.alpha for norm in of_heads if norm is not None and norm.alpha is not None]
    if len(alphas) < len(heads) or _sums(trial) != 1:
        return
    expected = [
        attention_weights("entmax", trial.z[:, [head]], trial.visible[:, [head]], alpha=alpha)
        for head, alpha in enumerate(alphas)
    ]
    if (torch.cat(expected, 1) - trial.found).abs().max() <= TOLERANCE:
        raise InputError(
            f"attention at {trial.weighting.call.where} is entmax whose alpha differs by head, from {min(alphas):.4g} "
            f"to {max(alphas):.4g}, and Sharp's op has one for a layer; call sharp.models.normalized_attention with one"
        )


def _alike_in_heads(graph: Weighting) -> bool:
    """Whether the graph multiplies the products with the same factor in every head."""
    ones = logits_of(graph.program, graph.call, graph.given, 1.0) - graph.base
    return bool((ones - ones[:, :1])[graph.visible].abs().max() <= 1e-6)


def _check_hidden(call: AttentionCall, trial: Trial) -> None:
    """Check that a finite mask hides keys of SSA, whose weights fall only as a power of the logit.

    Raises:
        InputError: hidden keys keep a weight.
    """
    graph = trial.weighting
    z = torch.full(graph.shape, -FARTHEST, dtype=torch.float64)
    weights, visible = graph(z), graph.visible
    shown = torch.where(visible, weights, torch.inf).amin(-1)
    hidden = torch.where(visible, 0.0, weights).amax(-1)
    leaked = float((hidden / shown)[visible.any(-1)].max()) * MOST_KEYS
    if leaked > MOST_LEAKED:
        raise InputError(
            f"attention at {call.where} is ssa, and its mask of {float(graph.base.min()):.3g} leaves hidden keys up to "
            f"{leaked:.0e} of the weights of {MOST_KEYS} tokens; write the mask as z.masked_fill(~mask, float('-inf')) "
            "before the norm"
        )
