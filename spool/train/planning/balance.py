"""Sharing out numbers evenly: over data-parallel ranks by cost, over micro-batches by cost under a limit. Pure.

Deterministic: equal input gives equal output, in any process.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from spool.errors import InputError

Bins = list[list[int]]
"""For each bin the numbers of its items, ascending."""

_MAX_CELLS = 1 << 22
"""Items times bins beyond which largest differencing takes too long (1 s); the greedy alone is even there."""


def partition(costs: np.ndarray, n_bins: int, *, equal_counts: bool = False) -> Bins:
    """Return ``n_bins`` bins of nearly equal cost, the costliest first; none is empty while another has two items.

    The better of largest differencing (Karmarkar and Karp, 1982, for k sets) and of the greedy that gives each item,
    the costliest first, to the cheapest bin. So it is never worse than that greedy.

    Args:
        costs: float64 ``[n]``, at least 0.
        n_bins: how many bins.
        equal_counts: all bins get the same number of items.

    Raises:
        InputError: ``equal_counts``, and the items do not go evenly into the bins.
    """
    if equal_counts and len(costs) % max(n_bins, 1):
        raise InputError(
            f"equal_counts: {len(costs)} items do not go evenly into {n_bins} ranks; leave out {len(costs) % n_bins}, "
            "or plan without equal_counts",
            n_items=len(costs), n_ranks=n_bins,
        )  # fmt: skip
    if not n_bins:
        return []
    candidates = [_greedy(costs, n_bins, equal_counts=equal_counts)]
    if n_bins > 1 and len(costs) * n_bins <= _MAX_CELLS:
        candidates.insert(0, _largest_differencing(costs, n_bins, equal_counts=equal_counts))
    best = min(candidates, key=lambda labels: _unevenness(labels, costs, n_bins))
    return _ordered(_occupied(_bins(best, n_bins), costs), costs)


def fit(costs: np.ndarray, sizes: np.ndarray, n_bins: int, capacity: int, *, alike: bool) -> Bins:
    """Return ``n_bins`` bins of nearly equal cost, none of them larger than ``capacity``.

    Args:
        costs: float64 ``[n]``.
        sizes: int64 ``[n]``, each at most ``capacity``.
        n_bins: at least `n_needed`.
        capacity: most that a bin holds.
        alike: each item of a bin takes as much as the largest of them.
    """
    bins = partition(costs, n_bins)
    if all(size_of(sizes[found], alike=alike) <= capacity for found in bins):
        return bins
    labels = _first_fit(sizes, capacity, n_bins, alike=alike, costs=costs)
    if labels is None:
        labels = _first_fit(sizes, capacity, n_bins, alike=alike)
    assert labels is not None, "more bins are needed than n_needed says"
    return _ordered(_occupied(_bins(labels, n_bins), costs), costs)


def n_needed(sizes: np.ndarray, capacity: int, *, alike: bool) -> int:
    """Return how many bins of ``capacity`` hold all items, as first fit decreasing finds it."""
    labels = _first_fit(sizes, capacity, len(sizes), alike=alike)
    assert labels is not None, "an item is larger than the capacity"
    return int(labels.max(initial=-1)) + 1


def size_of(sizes: np.ndarray, *, alike: bool) -> int:
    """Return what a bin with items of ``sizes`` takes."""
    return int(len(sizes) * sizes.max(initial=0)) if alike else int(sizes.sum())


def _greedy(costs: np.ndarray, n_bins: int, *, equal_counts: bool) -> np.ndarray:
    labels = np.zeros(len(costs), np.int64)
    limit = len(costs) // n_bins if equal_counts else len(costs)
    heap = [(0.0, 0, number) for number in range(n_bins)]
    for item in np.argsort(-costs, kind="stable").tolist():
        load, count, number = heapq.heappop(heap)
        labels[item] = number
        if count + 1 < limit:
            heapq.heappush(heap, (load + float(costs[item]), count + 1, number))
    return labels


def _largest_differencing(costs: np.ndarray, n_bins: int, *, equal_counts: bool) -> np.ndarray:
    """Merge the two most uneven partial partitions, largest bin with smallest, until one is left; then look back."""
    width = n_bins if equal_counts else 1
    order = np.argsort(-costs, kind="stable")
    leaves = [order[at : at + width] for at in range(0, len(order), width)]
    loads: dict[int, np.ndarray] = {}
    heap = []
    for number, leaf in enumerate(leaves):
        low = costs[leaf[-1]] if equal_counts else 0.0
        heap.append((float(low - costs[leaf[0]]), number))
    heapq.heapify(heap)
    merged: list[tuple[int, int, np.ndarray]] = []
    while len(heap) > 1:
        (_, left), (_, right) = heapq.heappop(heap), heapq.heappop(heap)
        total = _loads(loads, left, leaves, costs, n_bins) + _loads(loads, right, leaves, costs, n_bins)[::-1]
        ranks = np.argsort(-total, kind="stable")
        total = total[ranks]
        number = len(leaves) + len(merged)
        merged.append((left, right, ranks.astype(np.int32)))
        loads[number] = total
        heapq.heappush(heap, (float(total[-1] - total[0]), number))
    return _labels(leaves, merged, len(costs), n_bins)


def _loads(
    loads: dict[int, np.ndarray], number: int, leaves: Sequence[np.ndarray], costs: np.ndarray, n_bins: int
) -> np.ndarray:
    """Return the loads of a partial partition, descending, and forget them."""
    if number >= len(leaves):
        return loads.pop(number)
    found = np.zeros(n_bins)
    found[: len(leaves[number])] = costs[leaves[number]]
    return found


def _labels(
    leaves: Sequence[np.ndarray], merged: Sequence[tuple[int, int, np.ndarray]], n_items: int, n_bins: int
) -> np.ndarray:
    """Follow the merges back: which bin of the last partition each item is in."""
    labels = np.zeros(n_items, np.int64)
    if not leaves:
        return labels
    waiting = {len(leaves) + len(merged) - 1: np.arange(n_bins, dtype=np.int32)}
    for number in range(len(leaves) + len(merged) - 1, -1, -1):
        names = waiting.pop(number)
        if number < len(leaves):
            labels[leaves[number]] = names[: len(leaves[number])]
            continue
        left, right, ranks = merged[number - len(leaves)]
        mine = np.empty(n_bins, np.int32)
        mine[ranks] = names
        waiting[left], waiting[right] = mine, mine[::-1]
    return labels


def _first_fit(
    sizes: np.ndarray, capacity: int, n_bins: int, *, alike: bool, costs: np.ndarray | None = None
) -> np.ndarray | None:
    """Return the bin of each item, the largest placed first: the first that has room, with ``costs`` the cheapest.

    Where items of a bin are ``alike`` its first is its largest, so that room is counted in items.
    """
    labels = np.zeros(len(sizes), np.int64)
    free, load = np.full(n_bins, capacity, np.int64), np.zeros(n_bins)
    opened = np.zeros(n_bins, bool)
    for item in np.argsort(-sizes, kind="stable"):
        room = free >= np.where(opened, 1, sizes[item]) if alike else free >= sizes[item]
        number = int(room.argmax()) if costs is None else int(np.where(room, load, np.inf).argmin())
        if not room[number]:
            return None
        if alike:
            free[number] = (free[number] if opened[number] else capacity // sizes[item]) - 1
        else:
            free[number] -= sizes[item]
        opened[number] = True
        labels[item] = number
        load[number] += 0.0 if costs is None else costs[item]
    return labels


def _unevenness(labels: np.ndarray, costs: np.ndarray, n_bins: int) -> tuple[float, float, int]:
    loads = np.bincount(labels, weights=costs, minlength=n_bins)
    counts = np.bincount(labels, minlength=n_bins)
    return float(loads.max()), float(loads.max() - loads.min()), int(counts.max())


def _bins(labels: np.ndarray, n_bins: int) -> Bins:
    order = np.argsort(labels, kind="stable")
    stops = np.cumsum(np.bincount(labels, minlength=n_bins))[:-1]
    return [part.tolist() for part in np.split(order, stops)]


def _occupied(bins: Bins, costs: np.ndarray) -> Bins:
    """Give each empty bin the costliest item of the costliest bin with more than one; no bin grows by that."""
    for number, found in enumerate(bins):
        if found:
            continue
        crowded = [other for other in bins if len(other) > 1]
        if not crowded:
            break
        source = max(crowded, key=lambda other: float(costs[other].sum()))
        bins[number] = [source.pop(int(costs[source].argmax()))]
    return bins


def _ordered(bins: Bins, costs: np.ndarray) -> Bins:
    return sorted(bins, key=lambda found: (-float(costs[found].sum()), found))
