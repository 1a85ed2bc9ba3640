"""What a table of sessions shows after the spool was looked at again, with the cursor on the session where it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spool.catalog import SessionLook
    from spool.listing import Listing

NEAR = 100
"""Places by which the cursor's session may move within a window, which has more rows than are in sight."""


class Sight(NamedTuple):
    """What was found.

    Attributes:
        n_rows: sessions in the listing.
        shift: by how many places the session under the cursor moved.
        start: place of the first of ``rows``.
        rows: sessions; None for one that is gone.
    """

    n_rows: int
    shift: int
    start: int
    rows: Sequence[SessionLook | None]


def look(listing: Listing, cursor: int, window: tuple[int, int], number: int | None, *, refresh: bool) -> Sight:
    """Look at sessions; may take as long as the spool takes.

    Args:
        listing: the sessions; nobody else uses it now.
        cursor: place of the cursor.
        window: places ``[start, stop)`` of the rows that are wanted; far off where the cursor's session moved far.
        number: of the session under the cursor; None where there is none.
        refresh: take in what is new first.
    """
    if refresh:
        listing.refresh()
    place = None if number is None else listing.place(number)
    shift = 0 if place is None else place - cursor
    start, stop = window
    if abs(shift) > NEAR:
        start, stop = max(start + shift, 0), stop + shift
    return Sight(len(listing), shift, start, at_places(listing, start, stop))


def at_places(listing: Listing, start: int, stop: int) -> list[SessionLook | None]:
    """Return the sessions at places ``[start, stop)``, with None where one is gone."""
    known = {row.number: row for row in listing.rows(start, stop)}
    return [known.get(number) for number in listing.numbers(start, stop)]
