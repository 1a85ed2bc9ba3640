"""Which positions of a field are stored, and where: arithmetic on sorted runs of extents.

A ragged field is stored as two arrays, end offsets and values. Its extents come in pairs: extent *i* of the values
holds whatever the rows of extent *i* of the offsets point to. A `Cover` carries both tuples, and every function here
cuts and orders by the offsets and keeps the partners parallel, each of them whole: how much of it is needed, only the
offsets say.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct

from spool.errors import IntegrityError
from spool.model.refs import Extent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from spool.model.fields import FieldSpec

_position = attrgetter("position")


class Range(Struct, frozen=True, gc=False, order=True):
    """Positions ``[position, position + n)``."""

    position: int
    n: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.position + self.n


class Cover(Struct, frozen=True):
    """What is stored of one field.

    Attributes:
        extents: of the field's array, or of a ragged field's offsets; ascending, never overlapping.
        partners: of a ragged field's values, parallel to ``extents``; empty for other fields.
        ranges: the positions that ``extents`` stand for, adjacent ones merged. Kept beside the extents so that the gaps
            of a chain of thousands of steps are found without visiting each.
    """

    extents: tuple[Extent, ...] = ()
    partners: tuple[Extent, ...] = ()
    ranges: tuple[Range, ...] = ()


EMPTY = Cover()


def cover(spec: FieldSpec, extents: Mapping[str, tuple[Extent, ...]]) -> Cover:
    """Return what ``extents``, by stored array's name, hold of the field ``spec``.

    Raises:
        IntegrityError: they overlap, are not in order, are empty, or a ragged field's are not paired.
    """
    first, second = _names(spec)
    own, partners = extents.get(first, ()), extents.get(second, ())
    if spec.ragged and len(own) != len(partners):
        raise IntegrityError(
            f"field {spec.name!r}: {len(own)} extents of offsets but {len(partners)} of values; they must be pairs",
            field=spec.name,
        )
    if not own:
        return EMPTY
    ranges: list[Range] = []
    for extent in own:
        if extent.n < 1 or (ranges and extent.position < ranges[-1].stop):
            raise IntegrityError(
                f"field {spec.name!r}: the extent of {extent.n} rows at {extent.position} is empty or not behind the "
                "one before it",
                field=spec.name,
                position=extent.position,
            )
        _put(ranges, Range(extent.position, extent.n))
    return Cover(own, partners, tuple(ranges))


def arrays(spec: FieldSpec, what: Cover) -> dict[str, tuple[Extent, ...]]:
    """Return ``what`` by stored array's name; nothing where it is empty."""
    if not what.extents:
        return {}
    first, second = _names(spec)
    return {first: what.extents, second: what.partners} if spec.ragged else {first: what.extents}


def _names(spec: FieldSpec) -> tuple[str, str]:
    """Return the names of the array that is cut and of its partner, if it has one."""
    if not spec.ragged:
        return spec.name, ""
    offsets, values = spec.arrays
    return offsets.name, values.name


def moved(what: Cover, position: int) -> Cover:
    """Return the same rows, the first of them standing for ``position``."""
    shift = position - what.extents[0].position if what.extents else 0
    return Cover(
        tuple(extent.at(extent.position + shift) for extent in what.extents),
        what.partners,
        tuple(Range(r.position + shift, r.n) for r in what.ranges),
    )


def cut(what: Cover, start: int, stop: int) -> Cover:
    """Return the part that stands for positions ``[start, stop)``."""
    extents = what.extents
    if not extents or stop <= start:
        return EMPTY
    if start <= extents[0].position and what.ranges[-1].stop <= stop:
        return what
    low = max(bisect_right(extents, start, key=_position) - 1, 0)
    low += extents[low].position + extents[low].n <= start
    high = bisect_left(extents, stop, lo=low, key=_position)
    if low >= high:
        return EMPTY
    kept = extents[low:high]
    first = _clip(kept[0], start, stop)
    if first is not kept[0]:
        kept = (first, *kept[1:])
    last = _clip(kept[-1], start, stop)
    if last is not kept[-1]:
        kept = (*kept[:-1], last)
    return Cover(kept, what.partners[low:high], cut_ranges(what.ranges, start, stop))


def _clip(extent: Extent, start: int, stop: int) -> Extent:
    return extent.cut(max(extent.position, start), min(extent.position + extent.n, stop))


def overlay(base: Cover, top: Cover) -> Cover:
    """Return ``top`` and what ``base`` holds beside it; appending costs one copy of the tuples."""
    if not top.extents or not base.extents:
        return base if base.extents else top
    if top.extents[0].position >= base.ranges[-1].stop:
        return Cover(
            base.extents + top.extents,
            base.partners + top.partners,
            (*base.ranges[:-1], *_merged((base.ranges[-1], *top.ranges))),
        )
    parts, at = [], base.extents[0].position
    for taken in top.ranges:
        parts += [cut(base, at, taken.position), cut(top, taken.position, taken.stop)]
        at = taken.stop
    parts.append(cut(base, at, base.ranges[-1].stop))
    return _join(parts)


def subtract(what: Cover, taken: Collection[Range]) -> Cover:
    """Return ``what`` without the positions of ``taken``, which are ascending and never overlap."""
    if not what.extents or not taken:
        return what
    parts, at = [], what.extents[0].position
    for hole in taken:
        parts.append(cut(what, at, hole.position))
        at = max(at, hole.stop)
    parts.append(cut(what, at, what.ranges[-1].stop))
    return _join(parts)


def _join(parts: list[Cover]) -> Cover:
    return Cover(
        tuple(chain.from_iterable(part.extents for part in parts)),
        tuple(chain.from_iterable(part.partners for part in parts)),
        _merged(chain.from_iterable(part.ranges for part in parts)),
    )


def gaps(what: Cover, start: int, stop: int) -> tuple[Range, ...]:
    """Return the positions of ``[start, stop)`` that ``what`` leaves out."""
    return subtract_ranges((Range(start, stop - start),), what.ranges) if stop > start else ()


def normalized(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges in any order as ascending ones, overlapping and adjacent ones merged, empty ones left out."""
    return _merged(sorted(each for each in ranges if each.n > 0))


def cut_ranges(ranges: tuple[Range, ...], start: int, stop: int) -> tuple[Range, ...]:
    """Return the part of ascending ``ranges`` inside ``[start, stop)``."""
    if not ranges or (start <= ranges[0].position and ranges[-1].stop <= stop):
        return ranges
    low = max(bisect_right(ranges, start, key=_position) - 1, 0)
    high = bisect_left(ranges, stop, key=_position)
    clipped = ((max(r.position, start), min(r.stop, stop)) for r in ranges[low:high])
    return tuple(Range(first, last - first) for first, last in clipped if last > first)


def subtract_ranges(ranges: tuple[Range, ...], taken: tuple[Range, ...]) -> tuple[Range, ...]:
    """Return ascending ``ranges`` without the positions of ascending ``taken``."""
    if not taken:
        return ranges
    left: list[Range] = []
    for whole in ranges:
        at = whole.position
        for hole in cut_ranges(taken, whole.position, whole.stop):
            if hole.position > at:
                left.append(Range(at, hole.position - at))
            at = hole.stop
        if at < whole.stop:
            left.append(Range(at, whole.stop - at))
    return tuple(left)


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    merged: list[Range] = []
    for each in ranges:
        _put(merged, each)
    return tuple(merged)


def _put(merged: list[Range], each: Range) -> None:
    """Append ``each``, which begins no earlier than the last of ``merged``."""
    if merged and each.position <= merged[-1].stop:
        first = merged[-1].position
        merged[-1] = Range(first, max(merged[-1].stop, each.stop) - first)
    else:
        merged.append(each)
