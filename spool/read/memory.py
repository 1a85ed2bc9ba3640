"""Memory for large results, used again when nothing refers to it any more.

A trainer reads as much for every micro-batch, and fresh memory costs more than the rows: the kernel hands it out page
by page and zeroes it first. So the memory of large arrays that are gone is kept, up to a limit, for those to come.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spool.errors import CapacityError
from spool.sizes import format_size

SMALLEST_BYTES = 128 << 10
"""From here on malloc would map memory afresh, too."""

Dtype = np.dtype[Any]

_BYTE = np.dtype(np.uint8)


class _Owner(np.ndarray[Any, Any]):
    """What an array's memory belongs to. A type of its own: numpy passes over a base that is another plain array."""

    give: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.give is not None:
            self.give()


class Memory:
    """Makes arrays; safe from many threads.

    Args:
        idle_bytes: most memory that is kept without being in use.

    Attributes:
        idle_bytes: memory that is.
    """

    def __init__(self, idle_bytes: int) -> None:
        self._limit = idle_bytes
        self.forked()
        _memories.add(self)

    def forked(self) -> None:
        """Start with nothing kept, and a lock of this process: in a forked child, before any of its code runs."""
        self._lock = threading.Lock()
        self.idle_bytes = 0
        self._idle: list[tuple[int, int, mmap.mmap]] = []

    def empty(self, shape: tuple[int, ...], dtype: Dtype) -> NDArray[Any]:
        """Return an uninitialised, C-contiguous, writable array that shares memory with no other."""
        n_bytes = prod(shape) * dtype.itemsize
        if n_bytes < SMALLEST_BYTES:
            return np.empty(shape, dtype)
        block = self._take(n_bytes) or _map(n_bytes)
        owner = _Owner(n_bytes, _BYTE, buffer=block)
        owner.give = partial(self._give, block)
        return np.ndarray(shape, dtype, buffer=owner)

    def _take(self, n_bytes: int) -> mmap.mmap | None:
        """Return kept memory of that size, or up to a half more; None where another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            at = bisect_left(self._idle, (n_bytes,))
            if at == len(self._idle) or self._idle[at][0] > n_bytes * 3 // 2:
                return None
            size, _, block = self._idle.pop(at)
            self.idle_bytes -= size
            return block
        finally:
            self._lock.release()

    def _give(self, block: mmap.mmap) -> None:
        """Keep memory, or let go of it where there is enough; runs wherever an array dies, so it never waits."""
        if self._lock.acquire(blocking=False):
            try:
                if self.idle_bytes + len(block) <= self._limit:
                    insort(self._idle, (len(block), id(block), block))
                    self.idle_bytes += len(block)
            finally:
                self._lock.release()

    def clear(self) -> None:
        """Let go of all that is kept."""
        with self._lock:
            self._idle.clear()
            self.idle_bytes = 0


def _map(n_bytes: int) -> mmap.mmap:
    try:
        block = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"a result of {format_size(n_bytes)} does not fit into this process's memory: read fewer tokens, layers or "
            "references at a time",
            need=n_bytes,
        ) from error
    with contextlib.suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()


def _after_fork() -> None:
    for memory in _memories:
        memory.forked()


os.register_at_fork(after_in_child=_after_fork)
