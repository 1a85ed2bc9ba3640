"""From what a caller asks for to runs of stored rows. Pure: tokens -> positions of a field -> parts of extents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from spool.arguments import listed
from spool.errors import InputError
from spool.model.refs import Extent, Ref, SegmentRef, Unit

if TYPE_CHECKING:
    from spool.model.fields import Align

Range = tuple[int, int]
"""Half-open: tokens, or positions of a field."""

Tokens = slice | Sequence[slice] | None
"""Tokens of one reference: all, a slice, or slices to be concatenated in the order given."""


class Run(NamedTuple):
    """Rows ``[row, row + n)`` of the stored array, for rows ``[to, to + n)`` of the result.

    Attributes:
        extent: where they come from; ``row`` is absolute, so an extent wanted whole has ``row == extent.row``.
        number: which of the field's extents that is.
    """

    extent: Extent
    number: int
    row: int
    n: int
    to: int


class Gap(NamedTuple):
    """Positions ``[start, stop)`` that no extent covers; they would be rows from ``to`` on of the result."""

    start: int
    stop: int
    to: int


def token_ranges(tokens: Tokens, n_tokens: int) -> list[Range]:
    """Return the token ranges that ``tokens`` names, with the meaning slices have for a sequence of ``n_tokens``.

    Raises:
        InputError: not slices, or a slice with a step.
    """
    if tokens is None:
        return [(0, n_tokens)]
    if isinstance(tokens, slice):
        return [plain_range(tokens, n_tokens, what="tokens")]
    parts = listed("tokens", tokens, slice, "slices, as slice(start, stop)")
    return [plain_range(part, n_tokens, what="tokens") for part in parts]


def plain_range(part: slice, n: int, *, what: str) -> Range:
    """Return the half-open range of ``part`` over ``n`` items.

    Raises:
        InputError: not a slice, or one with a step.
    """
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise InputError(f"{what} must be slices without a step, as slice(start, stop); got {part!r}", got=repr(part))
    try:
        start, stop, _ = part.indices(n)
    except TypeError as error:
        raise InputError(f"{what} must begin and end at integers, got {part!r}", got=repr(part)) from error
    return start, max(start, stop)


def layer_range(part: slice, n: int, *, field: str) -> Range:
    """Return the half-open range of the absolute layers that ``part`` names.

    Raises:
        InputError: not a slice, one with a step, or one that begins behind the last layer.
    """
    start, stop = plain_range(part, n, what="layers")
    if start == stop == n and part.start is not None and part.start >= n and part.start != part.stop:
        raise InputError(f"{field} has layers 0 to {n - 1}, and none of {part!r}", field=field, got=repr(part))
    return start, stop


def n_steps(ref: Ref, extents: Sequence[Extent] = ()) -> int:
    """Return how many rows a ``step`` field of ``ref`` has."""
    steps = len(ref.steps) if isinstance(ref, SegmentRef) else 1
    return max(steps, extents[-1].position + extents[-1].n) if extents else steps


def origin(align: Align, ref: Ref) -> int:
    """Return the first position of a field."""
    return ref.response_start if align == "response" else 0


def positions(align: Align, ref: Ref, ranges: Sequence[Range], extents: Sequence[Extent] = ()) -> list[Range]:
    """Return the positions that a field of ``align`` has for the token ``ranges``.

    ``token``: the tokens. ``response``: those from ``response_start`` on. ``forward``: the rows the tokens expand
    to, without the last row of all, which no forward has. ``step``: every step, whatever the tokens.
    """
    if align == "token":
        return list(ranges)
    if align == "response":
        first = ref.response_start
        return [(max(start, first), max(stop, first)) for start, stop in ranges]
    if align == "step":
        return [(0, n_steps(ref, extents))]
    last = max(ref.n_rows - 1, 0)
    if not ref.units:
        return [(min(start, last), min(stop, last)) for start, stop in ranges]
    row_of = _forward_rows(ref.units)
    return [(min(row_of(start), last), min(row_of(stop), last)) for start, stop in ranges]


def _forward_rows(units: Sequence[Unit]) -> Callable[[int], int]:
    """Return what maps a token to the forward row where it begins."""
    after = [unit.position + 1 for unit in units]
    shifts = [0, *accumulate(unit.n_rows - 1 for unit in units)]
    return lambda token: token + shifts[bisect_right(after, token)]


def cover(extents: Sequence[Extent], ranges: Iterable[Range]) -> tuple[list[Run], list[Gap], int]:
    """Return what of ``ranges`` lies in ``extents``, what does not, and how many rows it is together.

    Args:
        extents: ascending positions, never overlapping.
        ranges: wanted positions; the result has their rows one range after the other.
    """
    runs: list[Run] = []
    gaps: list[Gap] = []
    to = 0
    for start, stop in ranges:
        at = start
        index = bisect_right(extents, start, key=_position)
        while index and (extents[index - 1].position + extents[index - 1].n > start or not extents[index - 1].n):
            index -= 1
        while at < stop:
            extent = extents[index] if index < len(extents) else None
            if extent is None or extent.position >= stop:
                gaps.append(Gap(at, stop, to + at - start))
                break
            if extent.position > at:
                gaps.append(Gap(at, extent.position, to + at - start))
                at = extent.position
            end = min(extent.position + extent.n, stop)
            if end > at:
                runs.append(Run(extent, index, extent.row + at - extent.position, end - at, to + at - start))
            at = max(at, end)
            index += 1
        to += stop - start
    return runs, gaps, to


def _position(extent: Extent) -> int:
    return extent.position


def inside_spans(gaps: Iterable[Gap], ref: Ref) -> list[Gap]:
    """Return the parts of ``gaps`` that are generated tokens: a response field is 0 everywhere else."""
    stops = [span.stop for span in ref.spans]
    parts = []
    for gap in gaps:
        index = bisect_right(stops, gap.start)
        while index < len(stops) and ref.spans[index].start < gap.stop:
            span = ref.spans[index]
            start, stop = max(gap.start, span.start), min(gap.stop, span.stop)
            if start < stop:
                parts.append(Gap(start, stop, gap.to + start - gap.start))
            index += 1
    return parts
