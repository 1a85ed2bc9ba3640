"""The room of a hot root, for its writers: the catalog's account, corrected by what is on disk where it is in doubt."""

from __future__ import annotations

import logging
import threading
import time

from spool.catalog import Catalog, Space
from spool.errors import SpoolError
from spool.logs.feeder import LogFeeder

log = logging.getLogger("spool.logs")

AGAIN_S = 1.0
"""Between two measurements of the whole root that refused reservations ask for."""


class Room:
    """Keeps a root's streams under a limit; see `spool.catalog.Space`.

    The root is measured before the first grant, in a new catalog, and when there seems to be no room: then grants of
    killed writers return.

    Args:
        catalog: keeps the sums of all processes.
        feeder: of the same root; measures it.
        limit: bytes that all streams may take together; None for no limit.
    """

    def __init__(self, catalog: Catalog, feeder: LogFeeder, limit: int | None) -> None:
        self._space = Space(catalog, limit)
        self._catalog = catalog
        self._feeder = feeder
        self._limit = limit
        self._lock = threading.Lock()
        self._epoch: tuple[int, ...] | None = None
        self._measured_at = 0.0

    def reserve(self, stream: str, n_bytes: int) -> bool:
        """Grant ``n_bytes`` more to a stream, or return False where the limit would be passed.

        Raises:
            StorageError: the catalog cannot be written.
            CapacityError: its disk is full.
        """
        if self._limit is None:
            return True
        if self._catalog.epoch != self._epoch:
            self._measure(after_s=0.0)
        return self._space.reserve(stream, n_bytes) or (
            self._measure(after_s=AGAIN_S) and self._space.reserve(stream, n_bytes)
        )

    def settle(self, stream: str, n_bytes: int) -> None:
        """Take back ``n_bytes`` that were granted to a stream and not needed; below 0 it took so much more.

        Where that cannot be written the account is too high until the root is measured again: no reason to fail.
        """
        try:
            self._space.settle(stream, n_bytes)
        except SpoolError as error:
            log.warning("%d bytes of stream %s are not returned until it is measured: %s", n_bytes, stream, error)

    def totals(self) -> tuple[int | None, int]:
        """Return the limit, and the bytes that all streams have reserved as far as the catalog can tell.

        Raises:
            StorageError: the catalog cannot be read.
        """
        return self._limit, sum(self._catalog.usage().values())

    def _measure(self, *, after_s: float) -> bool:
        """Measure the root, unless that was done less than ``after_s`` ago; return whether it was."""
        with self._lock:
            if after_s and time.monotonic() - self._measured_at < after_s:
                return False
            self._feeder.account()
            self._epoch, self._measured_at = self._catalog.epoch, time.monotonic()
            return True
