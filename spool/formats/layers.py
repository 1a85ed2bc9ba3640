"""Which of a field's absolute layers are stored, as slices: arithmetic on layer numbers, never on rows."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from spool.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spool.model.fields import FieldSpec


class Selection(NamedTuple):
    """How a range of absolute layers is made of stored ones.

    Attributes:
        pairs: (slice of the stored layers in the range, slice of the range), one pair where they are evenly spaced.
        dense: slices of the range that no stored layer fills.
    """

    pairs: tuple[tuple[slice, slice], ...]
    dense: tuple[slice, ...]


@lru_cache(maxsize=256)
def selection(layers: tuple[int, ...], start: int, stop: int) -> Selection:
    """Return how ``[start, stop)`` is made of the stored ``layers``; numbers in it count from ``start``."""
    inside = [layer - start for layer in layers if start <= layer < stop]
    pairs, n = [], 0
    for theirs in _slices(inside):
        width = len(range(theirs.start, theirs.stop, theirs.step))
        pairs.append((slice(n, n + width), theirs))
        n += width
    dense = sorted(set(range(stop - start)) - set(inside))
    return Selection(tuple(pairs), tuple(_slices(dense)))


def bounds(spec: FieldSpec, layers: slice | None) -> tuple[int, int]:
    """Return start and stop of absolute ``layers``, all of them for None.

    Raises:
        InputError: the field has no layers, or not these, or the slice has a step.
    """
    n = spec.num_layers
    if layers is None and n is not None:
        return 0, n
    if n is None or layers is None:
        raise InputError(f"{spec.name} has no layers to choose from", field=spec.name)
    start = 0 if layers.start is None else layers.start
    stop = n if layers.stop is None else layers.stop
    if layers.step not in (None, 1) or not 0 <= start <= stop <= n:
        raise InputError(f"{spec.name}: {layers} is no range of its layers 0 to {n}", field=spec.name, expected=[0, n])
    return start, stop


def stored_layers(spec: FieldSpec, layers: slice | None = None) -> slice:
    """Return which of the stored layers carry the absolute ``layers``; no more than one range, possibly empty."""
    start, stop = bounds(spec, layers)
    if spec.layers is None:
        return slice(start, stop)
    return slice(bisect_left(spec.layers, start), bisect_left(spec.layers, stop))


def moe_parts(spec: FieldSpec, n_layers: int) -> tuple[slice, ...]:
    """Return the stored layers as slices of a layer axis of ``n_layers`` (all, or just the stored ones)."""
    if spec.layers is None or n_layers == len(spec.layers):
        return (slice(0, n_layers),)
    return tuple(theirs for _, theirs in selection(spec.layers, 0, n_layers).pairs)


def name_layers(layers: Sequence[int]) -> str:
    """Return ascending layer numbers for people: ``0-2, 5``."""
    return ", ".join(
        f"{run.start}-{run.stop - 1}" if run.stop - run.start > 1 else str(run.start) for run in _runs(layers)
    )


def _slices(numbers: Sequence[int]) -> list[slice]:
    """Ascending numbers as one slice where they are evenly spaced, else as runs."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) == 1:
        return [slice(numbers[0], numbers[-1] + 1, steps.pop())]
    return _runs(numbers)


def _runs(numbers: Sequence[int]) -> list[slice]:
    breaks = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    edges = [0, *breaks, len(numbers)] if numbers else []
    return [slice(numbers[a], numbers[b - 1] + 1, 1) for a, b in pairwise(edges)]
