"""Aligned memory that direct reads go through, used again and again."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from spool.stores.local import aligned_buffer

_MIN_BYTES = 128 << 10
_STEP_BYTES = 1 << 20


class BouncePool:
    """A thread-safe pool of aligned buffers.

    Memory that was given back is lent again only once nothing is built on it any more. Each loan is a view of an
    object of its own, which lives as long as any view, slice or array made from the loan; memoryviews do not tell.

    Args:
        max_idle_bytes: kept for re-use; what is lent out is not limited.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self.reset()

    def reset(self) -> None:
        """Forget every buffer, and the lock: what a forked child does before it reads."""
        self._lock = threading.Lock()
        self._idle: list[tuple[memoryview, weakref.ref[Any]]] = []
        self._idle_bytes = 0

    def clear(self) -> None:
        """Let go of every idle buffer."""
        with self._lock:
            self._idle.clear()
            self._idle_bytes = 0

    def take(self, n_bytes: int) -> memoryview:
        """Return a writable, page-aligned buffer of at least ``n_bytes``; its contents are arbitrary."""
        return np.frombuffer(self._memory(n_bytes), np.uint8).data

    def give(self, block: memoryview) -> None:
        """Take back what `take` returned; beyond the limit the oldest idle memory is let go."""
        memory: memoryview = block.obj.base  # type: ignore[attr-defined]
        loan = weakref.ref(block.obj)
        block.release()
        with self._lock:
            self._idle.append((memory, loan))
            self._idle_bytes += len(memory)
            while self._idle_bytes > self._max_idle_bytes:
                self._idle_bytes -= len(self._idle.pop(0)[0])

    def _memory(self, n_bytes: int) -> memoryview:
        with self._lock:
            for i, (memory, loan) in enumerate(self._idle):
                if n_bytes <= len(memory) <= max(4 * n_bytes, _STEP_BYTES) and loan() is None:
                    del self._idle[i]
                    self._idle_bytes -= len(memory)
                    return memory
        if n_bytes <= _STEP_BYTES:
            return aligned_buffer(max(_MIN_BYTES, 1 << (n_bytes - 1).bit_length()))
        return aligned_buffer(-(-n_bytes // _STEP_BYTES) * _STEP_BYTES)
