"""The read planner: wanted runs of rows -> few, bounded byte ranges, each read once. Pure.

Two readers of the same rows, neighbouring rows of many references and the slices of a context-parallel rank all
come down to the same thing here: pieces of an object that overlap, touch or nearly touch. They are sorted and swept
once, so the cost is that of the sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Piece(NamedTuple):
    """A run of whole rows of one object, and what becomes of it.

    Attributes:
        key: the object.
        offset: first byte; a multiple of ``row_bytes``.
        length: bytes; a multiple of ``row_bytes``.
        row_bytes: bytes of a row; the same for all pieces of an object.
        target: number of the array that takes the rows; -1 where the bytes are only checked.
        row: row of that array which takes the first one.
        check: number of the checksum that these bytes belong to; -1 for none.
    """

    key: str
    offset: int
    length: int
    row_bytes: int
    target: int
    row: int
    check: int = -1


class Fetch(NamedTuple):
    """One byte range to read, and the pieces that lie in it, by offset."""

    key: str
    offset: int
    length: int
    pieces: Sequence[Piece]


def plan(pieces: Iterable[Piece], *, gap: int, limit: int) -> list[Fetch]:
    """Return the byte ranges to read for ``pieces``, by key and offset.

    Every wanted byte lies in exactly one range, however many pieces want it. Empty pieces ask for nothing.

    Args:
        pieces: what is wanted, in any order.
        gap: unwanted bytes between two pieces that are rather read than skipped.
        limit: most bytes of a range (one row where a row is larger). Pieces are cut between rows to keep it.
    """
    fetches: list[Fetch] = []
    run: list[Piece] = []
    key, end = "", 0
    for piece in sorted(pieces):
        stop = piece[1] + piece[2]
        if stop == piece[1]:
            continue
        if run and piece[0] == key and piece[1] <= end + gap:
            run.append(piece)
            end = max(end, stop)
            continue
        if run:
            fetches += _cut(run, end, limit)
        run, key, end = [piece], piece[0], stop
    if run:
        fetches += _cut(run, end, limit)
    return fetches


def _cut(run: list[Piece], end: int, limit: int) -> Iterable[Fetch]:
    start = run[0].offset
    if end - start <= limit:
        return (Fetch(run[0].key, start, end - start, run),)
    return _windows(run, max(limit // run[0].row_bytes, 1) * run[0].row_bytes)


def _windows(run: list[Piece], step: int) -> Iterator[Fetch]:
    carried: list[Piece] = []
    taken = 0
    while carried or taken < len(run):
        start = (carried[0] if carried else run[taken]).offset
        stop = start + step
        first = taken
        while taken < len(run) and run[taken].offset < stop:
            taken += 1
        inside: list[Piece] = []
        rest: list[Piece] = []
        for piece in carried + run[first:taken]:
            head = min(piece.length, stop - piece.offset)
            inside.append(piece if head == piece.length else piece._replace(length=head))
            if head < piece.length:
                rows = head // piece.row_bytes
                rest.append(piece._replace(offset=stop, length=piece.length - head, row=piece.row + rows))
        carried = rest
        end = max(piece.offset + piece.length for piece in inside)
        yield Fetch(run[0].key, start, end - start, inside)
