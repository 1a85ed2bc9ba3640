"""Room in the hot tier, asked for in grants so that an append rarely asks."""

from __future__ import annotations

import threading
from typing import Protocol

from spool.errors import CapacityError
from spool.sizes import format_size

GRANT_BYTES = 16 << 20
LEAST_BYTES = 64 << 10
"""Of a grant where a whole one does not fit."""


class Space(Protocol):
    """Who knows how much room the hot tier has left."""

    def reserve(self, stream: str, n_bytes: int) -> bool:
        """Set ``n_bytes`` aside for ``stream``; False where they are not to be had."""
        ...

    def settle(self, stream: str, n_bytes: int) -> None:
        """Take back ``n_bytes`` that were reserved for ``stream`` and not needed; below 0 it took so much more."""
        ...

    def totals(self) -> tuple[int | None, int]:
        """Return the limit, if there is one, and what all streams together have reserved."""
        ...


class Grants:
    """A stream's account: what was reserved, and what of it is used.

    Args:
        space: where room comes from.
        stream: whose room it is.
    """

    def __init__(self, space: Space, stream: str) -> None:
        self._space = space
        self._stream = stream
        self._lock = threading.Lock()
        self._reserved = 0
        self._used = 0

    def take(self, n_bytes: int) -> None:
        """Use ``n_bytes``; ask for another grant where the last one does not hold them.

        Raises:
            CapacityError: there is no room; nothing was taken.
        """
        with self._lock:
            short = self._used + n_bytes - self._reserved
            if short > 0:
                grant = -(-short // GRANT_BYTES) * GRANT_BYTES
                if not self._space.reserve(self._stream, grant):
                    # near the limit what is small still fits: endings and releases, by which room returns
                    least = -(-short // LEAST_BYTES) * LEAST_BYTES
                    if least >= grant or not self._space.reserve(self._stream, least):
                        raise self._refused(n_bytes, grant)
                    grant = least
                self._reserved += grant
            self._used += n_bytes

    def _refused(self, n_bytes: int, grant: int) -> CapacityError:
        limit, taken = self._space.totals()
        all_of = "" if limit is None else f" of {format_size(limit)}"
        return CapacityError(
            f"the hot tier has no room for another {format_size(grant)}: {format_size(taken)}{all_of} are taken, this "
            f"write needs {format_size(n_bytes)}, stream {self._stream} holds {format_size(self._reserved)}; room "
            "returns as packs are evicted that are safe in the cold root or, where there is none, as sessions are "
            "released: see `spool status` and `spool gc --dry-run`, raise hot_bytes, or record into another root",
            stream=self._stream,
            need=n_bytes,
            grant=grant,
            reserved=self._reserved,
            used=self._used,
            limit=limit,
            taken=taken,
        )

    def put_back(self, n_bytes: int) -> None:
        """Undo a `take`."""
        with self._lock:
            self._used -= n_bytes

    def settle(self, taken: int, on_disk: int) -> None:
        """Close the account of a sealed pack: it took ``taken`` bytes and its files now have ``on_disk``.

        What was granted beyond is given back too: the next pack may not come for long, and others wait for room.
        """
        with self._lock:
            self._reserved -= taken
            self._used -= taken
            spare = self._spare()
        if taken + spare != on_disk:
            self._space.settle(self._stream, taken + spare - on_disk)  # it is on disk, granted or not

    def give_back(self) -> None:
        """Give back what was granted and not needed."""
        with self._lock:
            spare = self._spare()
        if spare > 0:
            self._space.settle(self._stream, spare)

    def _spare(self) -> int:
        spare, self._reserved = self._reserved - self._used, self._used
        return spare
