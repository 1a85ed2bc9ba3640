"""The room of a hot root, for its writers: the catalog's account, corrected by what is on disk where it is in doubt.

Who finds no room leaves word for the spiller in ``wanted``, a sparse file: its size says how much is wanted, its time
when. So it can be written on a full disk, too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from spool.catalog import Catalog, Space
from spool.errors import SpoolError
from spool.logs.feeder import LogFeeder

log = logging.getLogger("spool.logs")

AGAIN_S = 1.0
"""Between two measurements of the whole root that refused reservations ask for."""


SPARE_BYTES = 16 << 20
"""What is left free on the disk, so that packs can be sealed and the index be written."""
WANTED_S = 3.0
"""How long a want of room counts; who waits says it again and again."""


class Disk(NamedTuple):
    """The file system of a hot root: its size and what of it is free, in bytes."""

    total: int
    free: int

    @classmethod
    def of(cls, root: str) -> Disk:
        """Look at the file system.

        Raises:
            OSError: it cannot be looked at.
        """
        found = os.statvfs(root)
        return cls(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    @property
    def spare(self) -> int:
        """What is to be left free."""
        return min(SPARE_BYTES, self.total // 8)

    def has(self, n_bytes: int) -> bool:
        """Whether a grant of ``n_bytes`` fits; of a small disk a part of it will do."""
        return self.free >= self.spare + min(n_bytes, self.total // 4)


def want(root: str, n_bytes: int) -> None:
    """Say that somebody waits for room.

    Raises:
        OSError: it cannot be said.
    """
    fd = os.open(_wanted_path(root), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if wanted(root) < n_bytes or os.fstat(fd).st_size > n_bytes:
            os.ftruncate(fd, n_bytes)
        os.utime(fd)
    finally:
        os.close(fd)


def wanted(root: str) -> int:
    """Return how many bytes somebody waits for; 0 where nobody does."""
    with suppress(OSError):
        found = os.stat(_wanted_path(root))
        if time.time() - found.st_mtime <= WANTED_S:
            return found.st_size
    return 0


def _wanted_path(root: str) -> str:
    return f"{root}/wanted"


class Room:
    """Keeps a root's streams under a limit; see `spool.catalog.Space`.

    The root is measured before the first grant, in a new catalog, and when there seems to be no room: then grants of
    killed writers return.

    Args:
        catalog: keeps the sums of all processes.
        feeder: of the same root; measures it.
        limit: bytes that all streams may take together; None for what the disk has.
        root: the hot root, whose disk is looked at; None where there is none.
    """

    def __init__(self, catalog: Catalog, feeder: LogFeeder, limit: int | None, root: str | None = None) -> None:
        self._root = root
        self._space = Space(catalog, limit)
        self._catalog = catalog
        self._feeder = feeder
        self._limit = limit
        self._lock = threading.Lock()
        self._generation: object = None
        self._measured_at = 0.0

    def reserve(self, stream: str, n_bytes: int) -> bool:
        """Grant ``n_bytes`` more to a stream, or return False where the limit would be passed or the disk is full.

        Raises:
            StorageError: the catalog cannot be written.
            CapacityError: its disk is full.
        """
        disk = self._disk()
        if disk is not None and not disk.has(n_bytes):
            return False
        if self._limit is None:
            return True
        if self._catalog.generation != self._generation:
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

        Where the disk is what is short, they are its size and what of it is taken.

        Raises:
            StorageError: the catalog cannot be read.
        """
        taken, disk = sum(self._catalog.usage().values()), self._disk()
        if disk is not None and (self._limit is None or disk.free < self._limit - taken):
            return disk.total, disk.total - disk.free
        return self._limit, taken

    def _disk(self) -> Disk | None:
        with suppress(OSError):
            return Disk.of(self._root) if self._root is not None else None
        return None

    def _measure(self, *, after_s: float) -> bool:
        """Measure the root, unless that was done less than ``after_s`` ago; return whether it was."""
        with self._lock:
            if after_s and time.monotonic() - self._measured_at < after_s:
                return False
            self._feeder.account()
            self._generation, self._measured_at = self._catalog.generation, time.monotonic()
            return True
