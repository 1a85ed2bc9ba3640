"""Sessions in an order, looked at a page at a time, however many there are, while more are recorded."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from spool.catalog import Catalog, SessionLook

ARRIVAL = ("-number",)
"""The newest first: what comes is put in front, and nothing is sorted again."""

REST = 10
"""After an order was worked out it stays for so many times as long as that took."""


class Listing:
    """Sessions that match a filter, in an order; made by `Spool.listing`. For one thread at a time.

    Their numbers are held, 8 bytes a session; what is known of them is fetched when it is asked for.

    Args:
        catalog: the index.
        catch_up: takes into it what is new.
        where: a filter that was checked; None for all.
        order: names of columns, or ``number``, the order of arrival; ``-`` in front for descending.
        discarded: withdrawn ones too.
        limit: at most so many.

    Raises:
        InputError: the order does not parse.
    """

    def __init__(
        self,
        catalog: Catalog,
        catch_up: Callable[[], object],
        where: str | None,
        order: Sequence[str],
        *,
        discarded: bool = True,
        limit: int | None = None,
    ) -> None:
        self._catalog, self._catch_up = catalog, catch_up
        self._where, self._order, self._discarded, self._limit = where, tuple(order), discarded, limit
        self._numbers = array("q")
        self._version: tuple[object, ...] = ()
        self._generation: object = None
        self._rest_until = 0.0
        self._sort()

    def __len__(self) -> int:
        return len(self._numbers)

    def rows(self, start: int, stop: int) -> list[SessionLook]:
        """Return the sessions at places ``[start, stop)``, as they are now; those that are gone are left out.

        Raises:
            StorageError: the index was made anew since, and places may mean others: `refresh`.
        """
        return self._catalog.looks(self._numbers[start:stop], self._generation)

    def numbers(self, start: int, stop: int) -> list[int]:
        """Return the numbers (`SessionLook.number`) of the sessions at places ``[start, stop)``."""
        return list(self._numbers[start:stop])

    def place(self, number: int) -> int | None:
        """Return where a session is now, or None where it is not in the listing."""
        try:
            return self._numbers.index(number)
        except ValueError:
            return None

    def refresh(self) -> bool:
        """Take in what was recorded since; return whether the order, or what is in it, changed.

        What is not by arrival, or has a filter, is worked out again only `REST` times as long after the last time as
        that took: of a million sessions about every ten seconds.
        """
        self._catch_up()
        version, before, generation = self._catalog.version, self._numbers, self._generation
        if version == self._version:
            return False
        is_anew = self._catalog.generation != generation
        if time.monotonic() < self._rest_until and not is_anew:
            return False
        if not is_anew and self._order == ARRIVAL and self._where is None and self._discarded and self._limit is None:
            self._version = version
            newer, now = self._catalog.numbers(None, ARRIVAL, after=before[0] if before else 0)
            if now == generation:
                self._numbers = newer + before if newer else before
                return bool(newer)
        self._sort()
        return self._numbers != before or self._generation != generation

    def _sort(self) -> None:
        began = time.monotonic()
        self._version = self._catalog.version
        self._numbers, self._generation = self._catalog.numbers(
            self._where, self._order, discarded=self._discarded, limit=self._limit
        )
        ended = time.monotonic()
        self._rest_until = ended + REST * (ended - began)
