"""Where bytes are: of what a reference names, by field and tier, and what of it is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from spool.look.references import Thing, refs_of

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.model.refs import SegmentRef, StepRef
    from spool.read.sample import ByteRange


class FieldPlace(Struct, frozen=True, kw_only=True):
    """One run of bytes in one file.

    Attributes:
        field: the field.
        file: path, or URL of an object.
        tier: ``hot`` or ``cold``.
        stream: the stream.
        start, stop: rows of the stream's array.
        offset, length: bytes of the file.
    """

    field: str
    file: str
    tier: str
    stream: str
    start: int
    stop: int
    offset: int
    length: int


class Places(Struct, frozen=True, kw_only=True):
    """Where a reference's bytes are.

    Attributes:
        ref: its name.
        ranges: runs of bytes, in the order of fields and rows.
        gaps: by field the half-open ranges of positions that were never sent.
        error: why the ranges could not be found, or all of them; None where they could.
    """

    ref: str
    ranges: tuple[FieldPlace, ...] = ()
    gaps: dict[str, tuple[tuple[int, int], ...]] = {}
    error: str | None = None


def places(sp: Spool, thing: Thing, most: int | None = None) -> tuple[list[Places], int]:
    """Return where the bytes of a thing are, and of how many references they are left out.

    What is damaged or released says so in its place.

    Args:
        sp: the spool.
        thing: a session, step or segment.
        most: of so many references at most; of all where None.

    Raises:
        NotFoundError, ReleasedError: it is not there.
        StorageError: the spool cannot be read.
    """
    refs = refs_of(sp, thing)
    found = [place_of(sp, ref) for ref in refs[:most]]
    return found, len(refs) - len(found)


def place_of(sp: Spool, ref: StepRef | SegmentRef) -> Places:
    """Return where the bytes of one reference are."""
    from spool.errors import SpoolError

    gaps: dict[str, tuple[tuple[int, int], ...]] = {}
    try:
        (covered,) = sp.coverage([ref])
        gaps = {name: found.gaps for name, found in covered.items() if found.gaps}
        ranges = tuple(_place(sp, found) for found in joined(sp.locate(ref)))
    except SpoolError as error:
        return Places(ref=ref.id, gaps=gaps, error=str(error))
    return Places(ref=ref.id, ranges=ranges, gaps=gaps)


def _place(sp: Spool, found: ByteRange) -> FieldPlace:
    root = sp.config.root
    hot = "://" not in found.file and root is not None and found.file.startswith(root)
    return FieldPlace(
        field=found.field,
        file=found.file,
        tier="hot" if hot else "cold",
        stream=found.stream,
        start=found.rows[0],
        stop=found.rows[1],
        offset=found.offset,
        length=found.length,
    )


def joined(ranges: Iterable[ByteRange]) -> Iterable[ByteRange]:
    """Yield the ranges in their order, with those that go on in the last one or behind it made one."""
    last = None
    for found in ranges:
        if (
            last is not None
            and (last.file, last.field) == (found.file, found.field)
            and last.offset <= found.offset <= last.offset + last.length
        ):
            stop = max(last.offset + last.length, found.offset + found.length)
            rows = min(last.rows[0], found.rows[0]), max(last.rows[1], found.rows[1])
            last = last._replace(length=stop - last.offset, rows=rows)
            continue
        if last is not None:
            yield last
        last = found
    if last is not None:
        yield last


def fetched_bytes(ranges: Iterable[FieldPlace]) -> dict[tuple[str, str], int]:
    """Return by field and tier the bytes that a read fetches, each byte of a file once.

    A compressed chunk counts whole, however few of its rows are wanted, and once, however many runs lie in it.
    """
    spans: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
    for place in ranges:
        spans[place.field, place.tier, place.file].append((place.offset, place.offset + place.length))
    found: dict[tuple[str, str], int] = defaultdict(int)
    for (field, tier, _), own in spans.items():
        reached = 0
        for start, stop in sorted(own):
            found[field, tier] += max(stop - max(start, reached), 0)
            reached = max(reached, stop)
    return dict(found)
