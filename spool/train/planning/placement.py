"""Where the rows of a piece go in a packed array: one rule for replay, for shares filled by hand, and for delivery.

Pure. Row *i* of every packed field is the same position of the same sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spool.errors import InputError
from spool.train.planning.items import Piece, Range


class Placement(NamedTuple):
    """Rows ``[first, last)`` of a packed array that belong to a piece.

    Attributes:
        first: the first row.
        last: one past the last.
        skip: rows that are read before the first one that belongs here; those of a unit that was cut.
        repeats: int64: how many rows each row that is read takes; None where each takes one.
        exact: whether just these rows are read, so that they can be read right into their place.
    """

    first: int
    last: int
    skip: int
    repeats: NDArray[np.int64] | None
    exact: bool

    def slot(self, array: NDArray[Any]) -> NDArray[Any] | None:
        """Return the view of ``array`` that the rows can be read into; None where `put` has to place them."""
        return array[self.first : self.last] if self.exact else None

    def put(self, array: NDArray[Any], rows: NDArray[Any]) -> None:
        """Place rows that were read: all of the piece's tokens."""
        if self.repeats is not None:
            rows = np.repeat(rows, self.repeats, axis=0)
        array[self.first : self.last] = rows[self.skip : self.skip + self.last - self.first]


def placement(piece: Piece, align: str, *, absent: int = 0) -> Placement:
    """Return where a piece's rows of a field go.

    Args:
        piece: the piece.
        align: of the field: ``token``, ``response`` or ``forward``.
        absent: leading tokens of the piece that the field has no row for: those before the response.
    """
    if align == "forward":
        return Placement(piece.to, piece.to + piece.n_forward, piece.skip, None, not piece.units)
    stop = piece.to + piece.n_rows
    if not piece.units:
        return Placement(piece.to + absent, stop, 0, None, exact=True)
    repeats = piece.repeats()[absent:]
    return Placement(stop - int(repeats.sum()), stop, 0, repeats, exact=False)


def before_response(piece: Piece, response_start: int) -> int:
    """Return how many of the piece's tokens come before the response."""
    return min(max(response_start - piece.start, 0), piece.stop - piece.start)


def uncovered(n_rows: int, placements: Iterable[Placement]) -> list[Range]:
    """Return the runs of ``n_rows`` that no placement takes; placements ascend."""
    found, at = [], 0
    for place in placements:
        if place.first > at:
            found.append((at, place.first))
        at = max(at, place.last)
    if at < n_rows:
        found.append((at, n_rows))
    return found


def rebased(positions: NDArray[Any], first_rows: NDArray[np.int64] | None, begin: int) -> NDArray[np.int64]:
    """Return token positions of a sequence as rows of a packed array; negative ones, which are none, stay.

    Args:
        positions: of tokens, any shape.
        first_rows: the first row of each token, counted in the sequence; None where each token is a row.
        begin: the sequence's first row in the packed array.

    Raises:
        InputError: there is no such token.
    """
    rows = positions.astype(np.int64)
    real = rows >= 0
    if first_rows is not None and rows.max(initial=-1) >= len(first_rows):
        raise InputError(f"a position is {rows.max()}, and the sequence has {len(first_rows)} tokens")
    rows[real] = (rows[real] if first_rows is None else first_rows[rows[real]]) + begin
    return rows
