"""Bins of distributions: their edges, and the histogram of what SQLite counted."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from spool.catalog.shape import Bin, Histogram

LEAST_STEP, MOST_STEP, LEAST_DIGIT = 1e-290, 1e290, 1e-13
"""Bounds of the widths of bins of rewards, the last beside the rewards themselves."""
EXACT = 16
"""Whole numbers below are bins of their own where bins grow."""


def gathered(found: Sequence[tuple[Any, ...]], bins: tuple[Bin, ...], n_missing: int = 0) -> Histogram:
    """Return the histogram of rows of a bin, a count, least, most and sum."""
    n = sum(int(row[1]) for row in found)
    if not n:
        return Histogram(n_missing=n_missing)
    total = sum(float(row[4]) for row in found)
    low, high = min(float(row[2]) for row in found), max(float(row[3]) for row in found)
    return Histogram(n=n, n_missing=n_missing, low=low, high=high, mean=total / n, total=total, bins=bins)


def filled(bins: dict[int, int], bounds: Callable[[int], tuple[float, float]]) -> tuple[Bin, ...]:
    """Return bins by number, from the first to the last that holds something; ``bounds`` are those of a number."""
    if not bins:
        return ()
    return tuple(Bin(*bounds(number), bins.get(number, 0)) for number in range(min(bins), max(bins) + 1))


def edges(low: float, high: float, most: int) -> list[float] | None:
    """Return round edges of bins, ascending: ``most`` bins, or fewer, that hold ``low`` and ``high``.

    None where numbers of 64 bits cannot tell such bins apart.
    """
    step = (high / most - low / most) or abs(high) / most or 1.0 / most
    if not max(LEAST_STEP, LEAST_DIGIT * max(abs(low), abs(high))) < step < MOST_STEP:
        return None
    power = 10.0 ** math.floor(math.log10(step))
    found = (_multiples(low, high, factor * power) for factor in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0))
    return next((multiples for multiples in found if len(multiples) <= most + 1), None)


def _multiples(low: float, high: float, width: float) -> list[float]:
    """Return the multiples of a width from the last up to ``low`` to the first from ``high`` on, two at least."""
    digits = 3 - math.floor(math.log10(width))
    # rounded, they are without the last digits that come of multiplying
    edges = [round(at * width, digits) for at in range(math.floor(low / width) - 1, math.ceil(high / width) + 2)]
    first = bisect_right(edges, low) - 1
    return edges[first : max(bisect_left(edges, high), first + 1) + 1]


def steps(bins: dict[int, int]) -> tuple[Bin, ...]:
    """Return bins of one whole number each up to `EXACT`, then such that double; -1 is all that are ahead."""
    if not bins:
        return ()
    lows, most = [min(bins)], max(bins)
    while lows[-1] < most:
        lows.append(lows[-1] + 1 if lows[-1] < EXACT else 2 * lows[-1])
    return tuple(Bin(low, low + 1 if low < EXACT else 2 * low, bins.get(low, 0)) for low in lows)
