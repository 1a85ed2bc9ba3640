"""In which order an epoch goes over the segments, which of them make a batch, and who gets it. Pure.

The batches of an epoch are numbered over all ranks: batch ``position + rank`` is the next one of a rank, and so on in
steps of ``world_size``. DataLoader workers take turns at those of their rank, as a DataLoader asks them. So the
batches, and the order in which a rank gets them, do not depend on how many workers there are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Order = Literal["recorded", "shuffled"]
BatchBy = Literal["segment", "group"]
Ends = Literal["uneven", "repeat", "drop"]
Indices = NDArray[np.int64]


class Rules(Struct, frozen=True, kw_only=True):
    """What the batches of an epoch follow from, beside the segments.

    Attributes:
        order: ``recorded``, or ``shuffled``: another order each epoch.
        seed: of the orders.
        buffer: how many units the next one is drawn from, in recorded order; all where None.
        batch_by: what stays together, the unit of order and batch.
        max_tokens: most rows of a batch; None for any number.
        batch_size: most units of a batch; None for any number.
    """

    order: Order
    seed: int
    buffer: int | None
    batch_by: BatchBy
    max_tokens: int | None
    batch_size: int | None


class Units(NamedTuple):
    """Segments, or groups of them.

    Attributes:
        members: int64: numbers of the segments, unit by unit.
        starts: int64 ``[n_units + 1]``: where each begins among the members.
        rows: int64 ``[n_units]``: rows of each together.
    """

    members: Indices
    starts: Indices
    rows: Indices


class Epoch(NamedTuple):
    """The batches of an epoch.

    Attributes:
        order: int64: numbers of the segments, batch by batch.
        cuts: int64 ``[n_batches + 1]``: where each batch begins.
    """

    order: Indices
    cuts: Indices

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def batch(self, number: int) -> list[int]:
        """Return the segments of a batch; past the last one it begins anew."""
        at = number % len(self)
        return [int(index) for index in self.order[self.cuts[at] : self.cuts[at + 1]]]


def units_of(rows: Indices, groups: Indices, batch_by: BatchBy) -> Units:
    """Return the units of segments, in recorded order.

    Args:
        rows: int64 ``[n]``: rows of each segment.
        groups: int64 ``[n]``: number of the group of each, by first appearance.
        batch_by: what a unit is.
    """
    if batch_by == "segment" or not len(rows):
        return Units(np.arange(len(rows)), np.arange(len(rows) + 1), rows)
    starts = _cumulated(np.bincount(groups))
    members = np.argsort(groups, kind="stable")
    return Units(members, starts, np.add.reduceat(rows[members], starts[:-1]))


def epoch_of(units: Units, rules: Rules, epoch: int) -> Epoch:
    """Return the batches of epoch number ``epoch``; the same for the same arguments, in any process."""
    order = _ordered(len(units.rows), rules, epoch)
    cuts = _cuts(units.rows[order], rules)
    sizes = np.diff(units.starts)[order]
    begins = _cumulated(sizes)
    inside = np.arange(begins[-1]) - np.repeat(begins[:-1], sizes)
    return Epoch(units.members[np.repeat(units.starts[:-1][order], sizes) + inside], begins[cuts])


def end_of(n_batches: int, position: int, world_size: int, ends: Ends) -> int:
    """Return one past the last batch number of an epoch, of which numbers below ``position`` are done.

    ``uneven``: the number of batches; some ranks get one less than others. ``repeat``: so many that all ranks get as
    many; the last are the first ones again. ``drop``: what would make them uneven is left out.
    """
    left = n_batches - position
    if ends == "uneven" or not n_batches:
        return n_batches
    return position + (-(-left // world_size) if ends == "repeat" else left // world_size) * world_size


def _ordered(n: int, rules: Rules, epoch: int) -> Indices:
    if rules.order == "recorded":
        return np.arange(n)
    rng = np.random.default_rng([rules.seed, epoch])
    if rules.buffer is None or rules.buffer >= n:
        return rng.permutation(n)
    waiting, order = list(range(rules.buffer)), np.empty(n, np.int64)
    for to, drawn in enumerate(rng.integers(0, rules.buffer, n - rules.buffer).tolist()):
        order[to] = waiting[drawn]
        waiting[drawn] = rules.buffer + to
    order[n - rules.buffer :] = rng.permutation(waiting)
    return order


def _cuts(rows: Indices, rules: Rules) -> Indices:
    """Return where batches begin among units, and where the last one ends: each takes as many as fit, at least one."""
    before = _cumulated(rows)
    cuts = [0]
    while cuts[-1] < len(rows):
        start = cuts[-1]
        stop = len(rows) if rules.batch_size is None else min(start + rules.batch_size, len(rows))
        if rules.max_tokens is not None:
            most = before[start] + min(rules.max_tokens, before[-1])  # which 64 bits hold, whatever max_tokens is
            fits = int(np.searchsorted(before, most, "right")) - 1
            stop = max(min(stop, fits), start + 1)
        cuts.append(stop)
    return np.array(cuts, np.int64)


def _cumulated(counts: Indices) -> Indices:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
